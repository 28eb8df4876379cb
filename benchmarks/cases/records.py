"""The record's overhead

Wall time of writing an epoch's row and of a checkpoint, each of them forced to the disk, in whole
runs through `regimes.run` on digits; against 1 % of an epoch's wall time. `smoke`: its 12 steps.
`small`: its network and batch, 46 steps as on CIFAR-10. ResNet-18: its row and checkpoint, against
an epoch of 50,000 images at the time that a step of `simulated` takes.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import NETS, Limits, Loop, Row, interleaved
from regimes import presets
from regimes.base.config import ModelConfig, RunConfig
from regimes.compression.powersgd import PowerSGD
from regimes.records import RecordWriter
from regimes.training import loop

SHARE = 0.01
WHY = (
    "A forced write takes the disk milliseconds whatever its size; an epoch shorter than a second "
    "has fewer in its 1 %. `checkpoint_every` makes checkpoints rarer."
)


class Stopwatch:
    """Wraps functions and keeps the wall seconds of each call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        taken = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken.append(time.perf_counter() - began)

        return timed


@contextlib.contextmanager
def timed_run(config: RunConfig) -> Iterator[dict[str, list[float]]]:
    """Train; gives seconds per epoch of the whole, of the row and of the checkpoint."""
    watch = Stopwatch()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(loop, "_advance_unit", watch("epoch", loop._advance_unit)),
        patch.object(RecordWriter, "epoch", watch("row", RecordWriter.epoch)),
        patch.object(loop, "save_run", watch("checkpoint", loop.save_run)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        loop.run(config, Path(folder, "run"))
        yield watch.seconds


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    smoke = replace(presets.get_preset("smoke"), epochs=4 if quick else 16)
    wide = replace(smoke, batch_size=16, model=replace(smoke.model, width=16))
    small = replace(wide, data=replace(smoke.data, train_size=1340), epochs=4 if quick else 10)
    large = replace(
        smoke,
        model=ModelConfig(name="resnet18-cifar10"),
        epochs=3 if quick else 6,
        data=replace(smoke.data, train_size=32),
    )
    rows = _rows("smoke", smoke) + _rows("small", small)
    net = NETS["ResNet-18"]
    step = interleaved({"": Loop(net, PowerSGD(), 2, union=True)}, 3, clock=time.perf_counter)
    epoch = 1e3 * statistics.median(step[""]) * 50_000 / (4 * net.batch)
    return rows + _rows("ResNet-18", large, epoch)


def _rows(name: str, config: RunConfig, epoch: float | None = None) -> list[Row]:
    """The row's and the checkpoint's share of ``epoch`` ms, by default of the run's own."""
    with timed_run(config) as seconds:
        median = {k: 1e3 * statistics.median(v[1:]) for k, v in seconds.items()}
    epoch = epoch or median["epoch"] - median["row"] - median["checkpoint"]
    return [
        Row(
            f"{name}: {what}",
            "1 % of an epoch",
            median[what],
            SHARE * epoch,
            1,
            rounds=len(seconds[what]) - 1,
            note=WHY,
        )
        for what in ("row", "checkpoint")
    ]
