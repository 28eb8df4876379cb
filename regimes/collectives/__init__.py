"""Communication between workers, simulated or in real processes, and its cost."""
