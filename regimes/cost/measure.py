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


MOST_ROUNDS = 20  # of timed steps
ENOUGH_SECONDS = 2.0  # after which no round begins, if each step was timed often enough


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
    compressors = []
    for config in alone:  # prepared as runs, so that what a run refuses is refused
        with contextlib.closing(prepare_run(config, task)) as parts:
            compressors.append(parts.plug_ins.compressor)
    parts = prepare_run(alone[0], task)
    with contextlib.closing(parts), parts.numerics.training():
        full, rest = divmod(len(parts.batches), workers)
        per_epoch = max(1, full + (rest > 0 and not parts.config.data.drop_last))
        unit_steps = parts.config.unit_steps or per_epoch
        by_config = [
            {
                name: _TimedExchange(parts, compressor, workers, config.levels.get(name, DENSE))
                for name in (DENSE, *config.levels)
            }
            for config, compressor in zip(alone, compressors, strict=True)
        ]
        computing = _time_in_turns(parts, by_config, steps)
        works = [
            {name: exchange.work(min(computing), unit_steps) for name, exchange in levels.items()}
            for levels in by_config
        ]
        unrest = statistics.median(computing) / min(computing) - 1
        return Timed(per_epoch, works, tuple(parts.layers), unrest)


def _time_in_turns(
    parts: Run, by_config: Sequence[Mapping[str, _TimedExchange]], steps: int
) -> list[float]:
    """Time each exchange once in each round, after a step that computes: at least ``steps`` rounds
    after a first one that does not count.

    Returns:
        The seconds of the steps that compute.
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
    for count in range(max(steps, MOST_ROUNDS) + 1):
        if count > steps and time.perf_counter() - start > ENOUGH_SECONDS:
            break
        computing.append(_seconds(step, parts.device))
        gradient = stack.clone()
        for exchange in itertools.chain.from_iterable(each.values() for each in by_config):
            stack.copy_(gradient)  # an exchange leaves its mean there
            exchange.time(losses)
    return computing[1:]


class _TimedExchange:
    """The exchange of one worker's gradients with one compressor at one level. Nothing travels.
    The time is what compressing and decoding take, and traffic is counted."""

    def __init__(self, parts: Run, compressor: Compressor, workers: int, level: AnyLevel) -> None:
        self.parts, self.phases = parts, compressor.phases
        # The first of W workers: a gather gives W times its own tensor, which takes as long to
        # decode as those of all workers will.
        self.world = World(workers, processes=workers)
        self.world.meter.dtype = parts.world.meter.dtype
        reducer = Reducer(compressor, parts.layers, self.world, parts.config.seed)
        self.exchange = Exchange(reducer, parts.exchange.buckets)
        self.values = [level if layer.compressed else DENSE for layer in parts.layers]
        self.seconds: list[float] = []  # of an exchange, by round; the first warms up

    def time(self, losses: Tensor) -> None:
        """Exchange once; of a compressor whose kinds of steps differ, once of each kind."""
        layers, stack = self.parts.gradients.layers, self.parts.gradients.stack

        def exchange() -> None:
            for _ in range(self.phases):
                self.exchange.exchange_step(layers, self.values, losses, stack)

        self.seconds.append(_seconds(exchange, self.parts.device) / self.phases)

    def work(self, compute: float, unit_steps: int) -> Work:
        """Return the mean work of a step: ``compute`` seconds, the fastest exchange that was timed,
        and its traffic, with a step's share of what is sent once per unit."""
        reduction = self.world.meter.take_counts()  # of all steps, the warm-up step included
        self.world.broadcast(list(self.parts.model.buffers()))  # as at the end of a unit
        broadcast = self.world.meter.take_counts()
        steps = self.phases * len(self.seconds)

        def per_step(reduced: dict[str, int], sent: dict[str, int]) -> dict[str, float]:
            return {kind: n / steps + sent.get(kind, 0) / unit_steps for kind, n in reduced.items()}

        calls = per_step(reduction.calls, broadcast.calls)
        sizes = per_step(reduction.sent, broadcast.sent)
        return Work(compute, min(self.seconds[1:]), calls, sizes)


def median_seconds(action: Callable[[], Any], times: int, device: torch.device) -> float:
    """Time an action: the median seconds of several calls, after one that is not timed."""
    return statistics.median([_seconds(action, device) for _ in range(times + 1)][1:])


def _seconds(action: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
