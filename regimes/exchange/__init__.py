"""Rows of the hosted workers' layers become shared updates: ``exchange.exchange``."""
