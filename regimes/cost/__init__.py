"""Seconds of a step on a network, predicted from records or measured work."""
