"""What crosses workers, and what it costs: the only room that knows of other processes."""
