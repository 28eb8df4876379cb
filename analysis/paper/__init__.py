"""The paper: its figures and tables, from records."""
