"""Live tables, log lines and checks of a run, a group of processes or a machine."""
