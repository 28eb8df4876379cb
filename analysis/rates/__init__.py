"""Learning rates: which are usable at each level of compression, and why."""
