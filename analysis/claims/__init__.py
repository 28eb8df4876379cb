"""Claims: every sentence with its effect, interval and verdict, and the code behind its records."""
