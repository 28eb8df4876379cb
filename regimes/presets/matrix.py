"""Ground truth: a deep linear network that completes a matrix, and deficits of its data.

Kleinman, Achille & Soatto ("Critical Learning Periods Emerge Even in Deep Linear Networks", ICLR
2024): while a deficit lasts, the entries are those of a matrix of rank 10 in place of rank 5; the
training after it is as long for all. There the dynamics are known in closed form, so that what a
detector calls critical can be held against when a deficit does harm. An epoch is one step, of all
entries; a unit is 500 of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets import families
from regimes.presets.registry import Grid, grid, preset

AFTER = 30_000  # steps on the right matrix, after every deficit
LENGTHS = (1_000, 5_000, 10_000, 20_000)  # of the paper's, which go on to 100,000
ONSETS = (0, 2_000, 5_000, 10_000, 20_000)  # of deficits that are
SHORT, LONG = 5_000, 20_000
UNIT = 500


@preset("deep-linear")
def deep_linear() -> RunConfig:
    """`regimes run deep-linear`: a 100 x 100 matrix of rank 5 from 2,000 entries by a product of
    three; 30,000 steps of SGD; 1 minute on one core."""
    return RunConfig(
        name="none",
        epochs=AFTER,
        unit_steps=UNIT,
        workers=1,
        batch_size=2000,
        data=DataConfig(name="matrix", train_size=2000, reshuffle=False),
        model=ModelConfig(name="deep-linear", depth=3),
        optimizer=OptimizerConfig(
            lr=0.2, schedule="constant", momentum=0.0, nesterov=False, weight_decay=0.0
        ),
        levels={},
        policy=families.static("dense"),
        checkpoint_every=20,
    )


def deficits(base: RunConfig) -> Grid:
    """Deficits from the start, of several lengths; and of two lengths, from several steps on. What
    is left to train after each is the same. Without one the training goes on until it has as many
    steps on the right matrix as that with the latest."""
    cells = {"none": replace(base, epochs=ONSETS[-1] + AFTER)}
    windows = [(0, length) for length in LENGTHS]
    windows += [(at, at + length) for length in (SHORT, LONG) for at in ONSETS]
    for first, stop in dict.fromkeys(windows):
        name = f"deficit {first}-{stop}"
        table = {"name": "other-matrix", "windows": [[first, stop]]}
        cells[name] = replace(base, name=name, epochs=stop + AFTER, deficit=table)
    return cells


@grid("deep-linear")
def deep_linear_grid() -> Grid:
    """`regimes ablate deep-linear --seeds 4 --jobs 2`: deficits of a network of depth 3, with the
    signals of the detectors; 11 minutes a seed on one core."""
    cells = deficits(deep_linear())
    tables: dict[str, dict[str, Any]] = {
        "sharpness": {"images": 2000, "batch": 2000},
        "curvature": {"images": 2000, "batch": 2000, "modes": ["eval"]},
    }
    return cells | {"none": replace(cells["none"], instruments=tables)}


@grid("deep-linear-depths")
def deep_linear_depths() -> Grid:
    """`regimes ablate deep-linear-depths --seeds 3`: no deficit and the longest, depths 1 to 4; 20
    minutes a seed on one core."""
    longest = f"deficit 0-{LENGTHS[-1]}"
    cells = {}
    for depth in (1, 2, 3, 4):
        base = replace(deep_linear(), model=ModelConfig(name="deep-linear", depth=depth))
        for name, cell in (("none", base), (longest, deficits(base)[longest])):
            cells[f"depth {depth}, {name}"] = replace(cell, name=f"depth {depth}, {name}")
    return cells
