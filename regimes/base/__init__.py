"""What every room uses, and what itself uses no room: configuration, console, errors, seeds.

``config`` is the configuration of a run, ``console`` writes to a terminal, ``capabilities`` says
what does not work together, and the modules beside them are errors, checks of input, seeds, number
formats, reductions and intervals.
"""
