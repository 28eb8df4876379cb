"""Which method reaches a loss first on a link: short trainings, a fitted curve, and prices."""
