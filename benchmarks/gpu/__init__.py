"""One GPU in half an hour: is it right, how fast is it, and then a study. See ``__main__``."""
