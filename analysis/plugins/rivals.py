"""Rivals: what other compressors would have made of a run's gradients, whatever the run sends.

At every step each of them compresses the workers' gradients twice, apart from the run. *Once*:
without error feedback, so that the step stands for itself; its error is |g - u| / |g|, with the
mean gradient g and the update u, over an epoch the root of the ratio of the sums of squares.
*Summed*: with the error feedback that the compressor has; its error is over all updates since the
run began, |sum g - sum u| / |sum g|. Parameters that no compressor touches count in both, and
in floats and bytes, as they are sent: whole. Where what is sent depends on the gradient, floats and
bytes are the mean over the steps of the sum. A level in units of the weights is one of the gradient
here: the rate is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.capabilities import WORKER_GRADIENTS
from regimes.base.config import DENSE, Bounded, Level
from regimes.base.config.bounds import Count
from regimes.base.errors import ConfigError, require
from regimes.collectives.comm import signals
from regimes.collectives.layers import Traffic
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import traffic_table
from regimes.instruments.base import MeasurementContext, Reading, StatelessGauge, divide_or_nan
from regimes.instruments.needs import UNDECLARED

WHERE = "instruments.rivals"


@dataclass(frozen=True)
class Rivals(Bounded):
    """Which compressors.

    Attributes:
        tables: of compressors, each with a ``level``: ``[{name = "topk", level = 1}]``. Each keeps
            the workers' gradients and its own sums on every process, and a step of training costs
            two of each of them; on several processes all gradients are gathered (signal bytes).
    """

    bounds_prefix = "instruments.rivals."
    requires = UNDECLARED | {WORKER_GRADIENTS}

    every: Count = 1
    tables: tuple[dict[str, Any], ...] = ({"name": "powersgd", "level": 4},)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.tables), f"{WHERE}.tables", [], "one table or more")
        for table in self.tables:
            if "level" not in table:
                raise ConfigError(f"{WHERE}.tables: {table} has no level, which it compresses at")
            make_compressor(_plain(table)).check(table["level"])

    def start(self, context: MeasurementContext) -> RivalsGauge:
        return RivalsGauge(self, context)


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "level"}


class Rival:
    """One compressor at one level, its memories and its sums."""

    def __init__(self, table: dict[str, Any], context: MeasurementContext) -> None:
        chosen, layers = make_compressor(_plain(table)), list(context.layers)
        self.table, self.level = _plain(table), table["level"]
        self.levels: list[Level] = [self.level if x.compressed else DENSE for x in layers]
        workers = context.world.workers
        self.traffic = traffic_table(chosen, layers, self.level, workers)  # floats, bytes
        self.counted: list[float] | None = [0, 0, 0] if chosen.data_dependent else None  # and steps
        self.once, self.summed = (
            Reducer(chosen, layers, World(workers), context.seed) for _ in range(2)
        )
        for reducer in (self.once, self.summed):
            reducer.world.meter.dtype = context.world.meter.dtype
        self.sum = torch.zeros(sum(context.sizes), dtype=torch.float64)
        self.lost = 0.0

    def step(self, gradients: Sequence[Tensor], mean: Float[Tensor, " N"]) -> None:
        for state in self.once.states:
            state.residual = None  # a step that stands for itself
        self.lost += float((mean - self._sent(self.once, gradients)).square().sum())
        self.sum += self._sent(self.summed, gradients)

    def _sent(self, reducer: Reducer, gradients: Sequence[Tensor]) -> Float[Tensor, " N"]:
        updates = reducer.reduce(range(len(gradients)), gradients, self.levels)
        layers = reducer.world.meter.take_counts().layers
        if self.counted is not None and reducer is self.summed:
            sent = sum(layers.values(), Traffic(0, 0))
            self.counted = [
                self.counted[0] + sent.floats,
                self.counted[1] + sent.bytes,
                self.counted[2] + 1,
            ]
        return torch.cat([u.flatten() for u in updates.values()]).double().cpu()

    def state_dict(self) -> dict[str, Any]:
        memories = [reducer.state_dict() for reducer in (self.once, self.summed)]
        return {"memories": memories, "sum": self.sum, "met": self.counted}

    @property
    def sent(self) -> tuple[float, float]:
        """(floats, bytes) of a step."""
        if self.counted is None:
            return self.traffic
        floats, sent, steps = self.counted
        return floats / max(steps, 1), sent / max(steps, 1)

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        for reducer, memory in zip((self.once, self.summed), state["memories"], strict=True):
            reducer.load_state_dict(*memory)
            reducer.to(device)
        self.sum, self.counted = state["sum"].cpu(), state.get("met")


class RivalsGauge(StatelessGauge):
    """All of them, on the gradients of all workers."""

    def __init__(self, settings: Rivals, context: MeasurementContext) -> None:
        self.world, self.layers = context.world, list(context.layers)
        self.rivals = [Rival(table, context) for table in settings.tables]
        self.device = context.parameters[0].device
        self.sum = torch.zeros(sum(context.sizes), dtype=torch.float64)
        self.energy = 0.0

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        stacked = stack
        if self.world.processes > 1:
            (stacked,) = signals(self.world).gather([stack])
        parts = stacked.split([layer.size for layer in self.layers], dim=1)
        gradients = [p.view(-1, *x.shape) for p, x in zip(parts, self.layers, strict=True)]
        mean = stacked.double().mean(0).cpu()
        self.sum += mean
        self.energy += float(mean.square().sum())
        for rival in self.rivals:
            rival.step(gradients, mean)

    def read(self, epoch: int) -> Reading:
        """Detail ``rivals``: of each its table, level, floats and bytes of a step, and the errors
        ``once``, of the epoch, and ``summed``, of the run so far (None where all was zero)."""
        size = float(self.sum.norm())
        rivals = []
        for rival in self.rivals:
            once = divide_or_nan(rival.lost, self.energy) ** 0.5
            summed = divide_or_nan(float((self.sum - rival.sum).norm()), size)
            rivals.append(
                {
                    "compressor": rival.table,
                    "level": rival.level,
                    "floats": rival.sent[0],
                    "bytes": rival.sent[1],
                    "once": _known(once),
                    "summed": _known(summed),
                }
            )
        self.drop_epoch()
        return Reading(detail={"rivals": rivals})

    def drop_epoch(self) -> None:
        for rival in self.rivals:
            rival.lost = 0.0
        self.energy = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "rivals": [rival.state_dict() for rival in self.rivals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.sum = state["sum"].cpu()
            for rival, own in zip(self.rivals, state["rivals"], strict=True):
                rival.load_state_dict(own, self.device)


def _known(value: float) -> float | None:
    return value if value == value else None
