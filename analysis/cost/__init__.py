"""Cost: predicted seconds of runs, levels and policies on other networks."""
