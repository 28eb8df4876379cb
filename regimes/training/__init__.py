"""The trainer: a configuration in, a record out. ``loop`` contains its step.

This room uses job, data, instruments and compression; hook, cost, search and cli use it.
"""
