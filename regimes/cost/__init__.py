"""Seconds of a step on a network, predicted from records or measured work, and measured clocks.

This room uses data, training and plotting; search and cli use it.
"""
