"""A few timed steps of one worker at each level of a preset, for `regimes.cost.predict_seconds`."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regimes.collectives.world import World
from regimes.compression.reducer import Reducer
from regimes.config import DENSE, RunConfig
from regimes.exchange.exchange import Exchange
from regimes.network import Work
from regimes.training.build import Run, prepare_run

if TYPE_CHECKING:
    from regimes.collectives.requests import Layer
    from regimes.data.task import Task


class Timed(NamedTuple):
    """What was timed.

    Attributes:
        per_epoch: steps per epoch.
        works: one step's work per level: "dense" and the configured levels.
        layers: of the model.
    """

    per_epoch: int
    works: dict[str, Work]
    layers: tuple[Layer, ...]


def time_steps(config: RunConfig, workers: int, steps: int = 5, task: Task | None = None) -> Timed:
    """Train a few steps of one worker on this machine.

    Args:
        workers: W, among whom the epoch's samples are divided.
        steps: timed after one warm-up step; seconds are their medians.
        task: model and data in place of those that the configuration names.
    """
    dense = {"name": "static", "level": DENSE}
    alone = replace(config, workers=1, instruments={}, reporters=(), policy=dense)
    parts = prepare_run(alone, task)
    with contextlib.closing(parts), parts.numerics.training():
        full, rest = divmod(len(parts.batches), workers)
        per_epoch = max(1, full + (rest > 0 and not config.data.drop_last))
        unit = config.unit_steps or per_epoch
        return Timed(per_epoch, _time_levels(parts, workers, steps, unit), tuple(parts.layers))


def _time_levels(parts: Run, workers: int, steps: int, unit: int) -> dict[str, Work]:
    """One step's work at each level, in units of so many steps."""
    # the epoch again where it is shorter than ``steps``
    stream = itertools.chain.from_iterable(parts.batches.epoch(0, [0]) for _ in itertools.count())
    losses = torch.zeros(1)

    def step() -> None:
        nonlocal losses
        losses = parts.gradients.compute_gradients(*next(stream), 0, 0)
        parts.optimizer.step()

    compute = median_seconds(step, steps, parts.device)
    # of one worker, that gathers as many tensors as there will be, so that decoding takes as long
    world = World(workers, processes=workers)
    world.meter.dtype = parts.world.meter.dtype
    return {
        name: _measure_work(parts, world, name, compute, losses, steps, unit)
        for name in (DENSE, *parts.config.levels)
    }


def _measure_work(
    run: Run, world: World, level: str, compute: float, losses: Tensor, steps: int, unit: int
) -> Work:
    reducer = Reducer(run.plug_ins.compressor, run.layers, world, run.config.seed)
    exchange = Exchange(reducer, run.exchange.buckets)
    values = [run.level_value(level) if layer.compressed else DENSE for layer in run.layers]
    layers, stack = run.gradients.layers, run.gradients.stack
    compress = median_seconds(
        lambda: exchange.exchange_step(layers, values, losses, stack), steps, run.device
    )
    reduction = world.meter.take_counts()  # of all steps, the warm-up step included
    world.broadcast(list(run.model.buffers()))  # once per unit
    broadcast = world.meter.take_counts()

    def per_step(reduced: dict[str, int], sent: dict[str, int]) -> dict[str, float]:
        return {kind: n / (steps + 1) + sent.get(kind, 0) / unit for kind, n in reduced.items()}

    calls = per_step(reduction.calls, broadcast.calls)
    return Work(compute, compress, calls, per_step(reduction.sent, broadcast.sent))


def median_seconds(action: Callable[[], Any], times: int, device: torch.device) -> float:
    """Median seconds of an action, after one call that is not timed."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
