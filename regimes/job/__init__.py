"""A training job in units: its clock, rows and header, decisions and saved state.

The trainer, the hook and local steps are its clients. This room uses instruments, compression,
policies and records; training, hook, plotting and what stands above them use it.
"""
