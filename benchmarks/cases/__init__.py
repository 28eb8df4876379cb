"""One module per case: ``measure(limits, quick)``, and in its docstring what it does."""
