"""The study's grids and presets: TOML files (`regimes.presets.own`), offered to ``regimes ablate``.

They were fixed before their runs: a new question gets a new file. ``arms/`` has the schedules that
several grids include, ``presets/`` has configurations, ``names`` the arms that figures look for.
"""
