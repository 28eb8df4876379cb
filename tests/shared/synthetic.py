"""Runs made of random numbers, for tests of figures and tables: nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plain

from regimes.records import RecordWriter

EPOCHS, STEPS = 6, 5
LAYERS = [
    ("conv.weight", [4, 3, 3, 3], True),
    ("conv.bias", [4], False),
    ("head.weight", [2, 4], True),
]
PER_STEP = {"low": 40, "high": 12, "dense": 120}
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"name": "static", "level": name} for name in ("dense", "low", "high")},
    "low-in-critical": {"name": "windows", "windows": [[0, 2], [4, 5]]},
    "high-in-critical": {"name": "windows", "windows": [[0, 2], [4, 5]]},
    "accordion": {"name": "accordion", "interval": 2},
    "low-late": {"name": "windows", "windows": [[3, 6]]},
}


def make(
    root: Path,
    name: str,
    seed: int,
    epochs: int = EPOCHS,
    *,
    planned: int = EPOCHS,
    header: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: {},
    **changes: Any,
) -> Path:
    """A synthetic run; every number is a draw that name and seed decide.

    Args:
        epochs: that are written.
        planned: in the configuration.
        header: fields of ``run.json``.
        change: fields of a row, by the row.
        changes: fields of the configuration.
    """
    draw = np.random.default_rng([seed, *name.encode()])
    config = {
        "name": name,
        "seed": seed,
        "epochs": planned,
        "workers": 4,
        "batch_size": 8,
        "data": {"name": "digits"},
        "model": {"name": "vgg7"},
        "compressor": {"name": "powersgd"},
        "levels": {"low": 4, "high": 1},
        "policy": POLICIES.get(name, {"name": "static"}),
        "optimizer": {"lr": 0.4, "decay_epochs": [4], "decay_factor": 10.0},
        "signal": "update",
        **changes,
    }
    written = plain.header(
        config,
        steps_per_epoch=STEPS,
        per_step={level: {"floats": n, "bytes": 4 * n} for level, n in PER_STEP.items()},
        layers=[{"name": n, "shape": s, "compressed": c} for n, s, c in LAYERS],
    )
    folder = root / name / f"seed-{seed}"
    writer = RecordWriter.create(folder, {**written, **(header or {})})
    for epoch in range(epochs):
        chosen = [str(draw.choice(["low", "high"])) for _ in LAYERS]
        row = plain.row(epoch) | {
            "lr": 0.4,
            "next_lr": 0.4,
            "steps": STEPS,
            "train_loss": 1.0,
            "test_loss": 1.1,
            "metric": float(draw.uniform(0.5, 0.9)),
            "floats": float(draw.integers(100, 900)),
            "bytes": 7,
            "layers": {
                "level": [chosen[0], "dense", chosen[2]],
                "floats": [1, 2, 3],
                "bytes": [4, 5, 6],
                "why": [None, None, None],
            },
            "statistics": {"norm:update": draw.uniform(0.1, 2, 3).tolist()},
        }
        writer.epoch(row | change(row), {"compute": 0.1})
    writer.close()
    return folder
