"""The trainer: a configuration in, a record out."""
