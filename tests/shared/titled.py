"""Records as far as a title reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd

LEVELS = {"levels": {"low": 4, "high": 1}, "compressor": {"name": "powersgd"}}


def run(name: str, seed: int, value: float, floats: float, metric: str = "accuracy") -> Any:
    """A record of three units, whose metric is the same in all."""
    own = {"own": [value] * 3}
    epochs = pd.DataFrame({"metric": [value] * 3, "total_floats": [1.0, 2.0, floats], **own})
    header = {"metric": metric, "config": LEVELS, "data": {}}
    return SimpleNamespace(
        name=name,
        seed=seed,
        epochs=epochs,
        column=epochs.get,
        header=header,
        config=LEVELS,
        hooked=False,
        folder="",
        rows=[],
        tested_rows=lambda: [{"metric": value, "epoch": epoch} for epoch in range(3)],
    )


def groups(table: dict[str, tuple[list[float], float]], metric: str = "accuracy") -> Any:
    """The runs of each schedule, by the metric of each seed and the floats of a run."""
    return {
        name: [run(name, seed, value, sent, metric) for seed, value in enumerate(values)]
        for name, (values, sent) in table.items()
    }
