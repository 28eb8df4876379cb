"""Where presets and grids are kept by name."""

from __future__ import annotations

from regimes.config import Registry, RunConfig

Grid = dict[str, RunConfig]
PRESETS, GRIDS = Registry("preset"), Registry("grid")  # functions that make a RunConfig, a Grid
preset, grid = PRESETS.register, GRIDS.register
