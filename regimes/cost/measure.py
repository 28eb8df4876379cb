"""A few timed steps of one worker at each level of a preset, for `regimes.cost.predict_seconds`."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regimes.base.config import DENSE, AnyLevel, RunConfig
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.cost.network import Work
from regimes.training.build import Run, prepare_run

if TYPE_CHECKING:
    from regimes.collectives.layers import Layer
    from regimes.compression.base import Compressor
    from regimes.data.task import Task


MOST, ENOUGH = 20, 2.0  # rounds of timed steps, and the seconds after which there are no more


class Timed(NamedTuple):
    """Holds what was timed.

    Attributes:
        per_epoch: steps per epoch.
        works: of each configuration, one step's work per level: "dense" and its levels.
        layers: of the model.
        unrest: how much longer than the fastest step of computing the median one took, as a share.
    """

    per_epoch: int
    works: list[dict[str, Work]]
    layers: tuple[Layer, ...]
    unrest: float


def time_steps(
    configs: Sequence[RunConfig], workers: int, steps: int = 5, task: Task | None = None
) -> Timed:
    """Train a few steps of one worker on this machine.

    The computing of the first configuration is timed, and each one's exchange at each of its
    levels, in turns: what else the machine does slows all of them, and the fastest of each counts.

    Args:
        configs: of one training; they differ in compressor and levels alone.
        workers: W, among whom the epoch's samples are divided.
        steps: of each that are timed, at least, after one that is not.
        task: model and data in place of those that the configurations name.
    """
    dense = {"name": "static", "level": DENSE}
    alone = [
        replace(config, workers=1, instruments={}, reporters=(), policy=dense) for config in configs
    ]
    chosen = []
    for config in alone:  # what a run of it refuses is refused
        with contextlib.closing(prepare_run(config, task)) as parts:
            chosen.append(parts.plug_ins.compressor)
    parts = prepare_run(alone[0], task)
    with contextlib.closing(parts), parts.numerics.training():
        full, rest = divmod(len(parts.batches), workers)
        per_epoch = max(1, full + (rest > 0 and not parts.config.data.drop_last))
        unit = parts.config.unit_steps or per_epoch
        by_config = [
            {
                name: _Exchanged(parts, compressor, workers, config.levels.get(name, DENSE))
                for name in (DENSE, *config.levels)
            }
            for config, compressor in zip(alone, chosen, strict=True)
        ]
        computing = _time_in_turns(parts, by_config, steps)
        works = [
            {name: exchanged.work(min(computing), unit) for name, exchanged in levels.items()}
            for levels in by_config
        ]
        unrest = statistics.median(computing) / min(computing) - 1
        return Timed(per_epoch, works, tuple(parts.layers), unrest)


def _time_in_turns(
    parts: Run, by_config: Sequence[Mapping[str, _Exchanged]], steps: int
) -> list[float]:
    """Time each exchange once a round, after a step that computes.

    Returns:
        The seconds of these steps.
    """
    # the epoch again where it is shorter than ``steps``
    stream = itertools.chain.from_iterable(parts.batches.epoch(0, [0]) for _ in itertools.count())
    losses = torch.zeros(1)

    def step() -> None:
        nonlocal losses
        losses = parts.gradients.compute_gradients(*next(stream), 0, 0)
        parts.optimizer.step()

    computing: list[float] = []
    start, stack = time.perf_counter(), parts.gradients.stack
    for count in range(max(steps, MOST) + 1):
        if count > steps and time.perf_counter() - start > ENOUGH:
            break
        computing.append(_seconds(step, parts.device))
        gradient = stack.clone()
        for exchanged in itertools.chain.from_iterable(each.values() for each in by_config):
            stack.copy_(gradient)  # an exchange leaves its mean there
            exchanged.time(losses)
    return computing[1:]


class _Exchanged:
    """The exchange of one worker's gradients at one level, which is timed."""

    def __init__(self, parts: Run, compressor: Compressor, workers: int, level: AnyLevel) -> None:
        self.parts, self.phases = parts, compressor.phases
        # of one worker, that gathers as many tensors as there will be, so that decoding takes as
        # long
        self.world = World(workers, processes=workers)
        self.world.meter.dtype = parts.world.meter.dtype
        reducer = Reducer(compressor, parts.layers, self.world, parts.config.seed)
        self.exchange = Exchange(reducer, parts.exchange.buckets)
        self.values = [level if layer.compressed else DENSE for layer in parts.layers]
        self.taken: list[float] = []

    def time(self, losses: Tensor) -> None:
        """Exchange once; of a compressor whose kinds of steps differ, once of each kind."""
        layers, stack = self.parts.gradients.layers, self.parts.gradients.stack

        def exchange() -> None:
            for _ in range(self.phases):
                self.exchange.exchange_step(layers, self.values, losses, stack)

        self.taken.append(_seconds(exchange, self.parts.device) / self.phases)

    def work(self, compute: float, unit: int) -> Work:
        """Return one step's work, in units of so many steps."""
        reduction = self.world.meter.take_counts()  # of all steps, the warm-up step included
        self.world.broadcast(list(self.parts.model.buffers()))  # once per unit
        broadcast = self.world.meter.take_counts()
        steps = self.phases * len(self.taken)

        def per_step(reduced: dict[str, int], sent: dict[str, int]) -> dict[str, float]:
            return {kind: n / steps + sent.get(kind, 0) / unit for kind, n in reduced.items()}

        calls = per_step(reduction.calls, broadcast.calls)
        sizes = per_step(reduction.sent, broadcast.sent)
        return Work(compute, min(self.taken[1:]), calls, sizes)


def median_seconds(action: Callable[[], Any], times: int, device: torch.device) -> float:
    """Time an action: the median seconds of several calls, after one that is not timed."""
    return statistics.median([_seconds(action, device) for _ in range(times + 1)][1:])


def _seconds(action: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
