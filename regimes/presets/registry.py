"""Where presets and grids are kept by name."""

from __future__ import annotations

from regimes.config import Registry, RunConfig

Grid = dict[str, RunConfig]
PRESETS = Registry("preset", listed="regimes presets")  # functions that make a RunConfig
GRIDS = Registry("grid", listed="regimes presets")  # functions that make a Grid
preset, grid = PRESETS.register, GRIDS.register
