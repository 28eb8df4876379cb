"""The study: one module per figure or table of the paper, drawn from records only.

Each module says what to run and how to draw it, and is a command::

    regimes ablate smoke --seeds 5    # train: leaves records in runs/smoke
    regimes figure 2 runs/smoke       # draw: PNG, SVG and the plotted numbers as CSV

In a checkout also ``python -m analysis.figure2 runs/smoke``. In the wheel this package is called
`regimes_study`, so that it takes no common name; modules here import each other by relative names.

Nothing here trains or imports torch, but for `plugins`, which training calls. A missing schedule or
an unfinished run is an error: a figure refuses to guess. Every mean comes with its n and its
spread.
"""
