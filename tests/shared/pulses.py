"""A tiny tree of pulses that is trained in some seconds: the study's grids of them, in small."""

from __future__ import annotations

from pathlib import Path

from regimes.presets import get_grid
from regimes.search import sweep

ONSETS = (0, 1, 2, 3, 4)
GRID = """
base = "smoke"
seeds = 3
set = ["epochs=6", "data.train_size=100", "data.test_size=400", "optimizer.decay_epochs=[4]",
       "optimizer.lr=0.1",
       "levels={low=4, same=4, high=1}", "policy={name='static', level='low'}"]

[schedules.trunk]

[schedules."trunk, measured"]
instruments = { curvature = { images = 50 } }

[schedules.pulse]
branch = { of = "trunk", at = [0, 1, 2, 3, 4], length = 1 }
policy.level = "high"

[schedules.same]
branch = { of = "trunk", at = [1, 3], length = 1 }
policy.level = "same"
"""


def tree(folder: Path) -> Path:
    """Its records, in a new folder."""
    folder.mkdir(parents=True)
    grid = folder.with_suffix(".toml")
    grid.write_text(GRID)
    todo = sweep.list_cells(get_grid(str(grid)), [0, 1, 2], folder)
    failed = sweep.ablate(todo, 1, lambda place, error: None)
    assert not failed, failed
    return folder
