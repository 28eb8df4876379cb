"""Several processes, and many runs in one go. No torch at import."""
