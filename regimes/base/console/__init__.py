"""Output for the terminal: standard output, tables, numbers as text. No torch."""
