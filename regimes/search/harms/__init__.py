"""Where in a training may more be compressed? Pulses within a budget, and their harm."""
