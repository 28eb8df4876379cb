"""The study: the figures and tables of the paper, and what goes beyond it, from records only.

A room holds the modules of one subject: `paper`, `lasso`, `rates`, `detection`, `criticality`,
`tournament`, `cost`, `notebook`, `campaign`; `common` is what they share. `findings` judges the
claims and writes the pages of docs/findings/, `plugins` has the study's instruments. ``grids/``
holds its grids, TOML files alone. A module with a ``main`` is a command::

    regimes ablate smoke --seeds 5    # train: leaves records in runs/smoke
    regimes figure 2 runs/smoke       # draw: PNG, SVG and the plotted numbers as CSV
    regimes figure                    # all figures and tables, by room

Also ``python -m analysis figure2 runs/smoke``. ``data/`` has the authors' published curves and
tables.

Only `campaign` starts trainings, and only `plugins`, which training calls, imports torch. A missing
schedule or an unfinished run is an error. Every mean comes with its n and its spread.
"""
