"""Criticality: harm of pulses by the unit where they start, and signals that say it."""
