"""A training job in units: its clock, its rows and header, what its policies decide."""
