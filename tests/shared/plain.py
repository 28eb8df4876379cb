"""The least that a record has, by its schema, for tests that write their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regimes.records import RecordWriter

NOTHING = {"mean": 0, "gather": 0}


def header(config: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """``run.json``; a single layer unless ``layers`` says otherwise."""
    plain = {
        "name": "low",
        "seed": 3,
        "epochs": 3,
        "workers": 4,
        "batch_size": 8,
        "signal": "update",
        "levels": {"low": 2, "high": 1},
        "compressor": {"name": "powersgd"},
        "policy": {"name": "static"},
        "data": {"name": "digits"},
        "model": {"name": "vgg7"},
        "optimizer": {"lr": 0.4},
    }
    return {
        "config": plain | (config or {}),
        "layers": [{"name": "a", "shape": [2, 2], "compressed": True}],
        "world": {"workers": 4, "processes": 1},
        "data": {"digest": "d", "train": 40, "test": 20},
        "metric": "accuracy",
        "steps_per_epoch": 2,
        "per_step": {"low": {"floats": 5, "bytes": 20}},
        **changes,
    }


def row(epoch: int, **changes: Any) -> dict[str, Any]:
    """A line of ``epochs.jsonl``."""
    return {
        "epoch": epoch,
        "lr": 0.1,
        "next_lr": 0.1,
        "batch_size": 8,
        "steps": 2,
        "train_loss": 1.0,
        "test_loss": 1.1,
        "metric": 0.5,
        "floats": 10.0,
        "bytes": 40,
        "collectives": {"calls": NOTHING, "bytes": NOTHING},
        "layers": {"level": ["low"], "floats": [10.0], "bytes": [40], "why": [{"rule": "start"}]},
        "statistics": {"norm:update": [1.5 + epoch]},
        **changes,
    }


HEADER = header()


def rising(epoch: int) -> dict[str, Any]:
    """A row whose metric rises by a tenth in each epoch."""
    return row(epoch, metric=0.5 + epoch / 10)


def record(folder: Path, epochs: int = 3) -> Path:
    """A record of so many epochs, in ``folder``."""
    writer = RecordWriter.create(folder, HEADER)
    for epoch in range(epochs):
        writer.epoch(rising(epoch), {"compute": 1.0, "evaluate": 0.5})
    writer.close()
    return folder
