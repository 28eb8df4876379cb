"""What is written for people: standard output, tables, numbers as text. No torch."""
