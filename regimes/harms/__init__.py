"""Where in a training may more be compressed? Pulses within a budget, their harm, a schedule."""
