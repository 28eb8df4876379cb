"""Policies and detectors replayed over recorded runs, and how well they agree. No torch."""
