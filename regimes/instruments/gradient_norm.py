"""Per-layer norm of the gradient accumulated over an epoch: ACCORDION's signal (section 4.2).

Four readings of "the accumulated gradient", all from tensors that a step has at hand, one
addition per step and reading:

- ``update``: the aggregated updates. Every worker has them already; nothing to send.
- ``global``: the worker-mean gradients before compression; one dense mean per epoch.
- ``local-mean``: root mean square over workers of their own accumulated gradients' norms.
- ``worker0``: worker 0's own (the authors' code).

The last two need each worker's gradient and so exclude the union pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Mean
from regimes.config import Signal
from regimes.errors import ConfigError
from regimes.instruments.base import MeasurementContext, Reading, StatelessGauge

PER_WORKER = ("local-mean", "worker0")
ALL: tuple[Signal, ...] = ("update", "global", "local-mean", "worker0")


@dataclass(frozen=True)
class Norms:
    """Which readings to record, besides the one that the run's ``signal`` names."""

    readings: tuple[Signal, ...] = ALL
    every: int = field(default=1, init=False)

    def start(self, context: MeasurementContext) -> NormsGauge:
        return NormsGauge(self.readings, context)


class NormsGauge(StatelessGauge):
    """Accumulates during an epoch; ConfigError for a per-worker reading in a union pass."""

    def __init__(self, readings: Iterable[Signal], context: MeasurementContext) -> None:
        self.readings = sorted(set(readings), key=ALL.index)
        for reading in self.readings:
            if context.union and reading in PER_WORKER:
                raise ConfigError(
                    f"the signal {reading!r} needs each worker's own gradient: set "
                    "union_pass = false"
                )
        self.sizes, self.world = context.sizes, context.world
        self.sums: dict[str, list[Tensor]] = {}

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        if "update" in self.readings:
            self._add("update", list(updates))
        if "global" in self.readings:
            self._add("global", [stack[0] if len(stack) == 1 else stack.mean(0)])
        if "local-mean" in self.readings:
            self._add("workers", [stack])
        elif "worker0" in self.readings and 0 in self.world.hosted:
            self._add("workers", [stack[:1]])

    def _add(self, name: str, tensors: list[Tensor]) -> None:
        if name in self.sums:
            torch._foreach_add_(self.sums[name], tensors)
        else:
            self.sums[name] = [t.clone() for t in tensors]

    def read(self, epoch: int) -> Reading:
        """``norm:<reading>`` per layer."""
        norms = {f"norm:{name}": self._norms(name).tolist() for name in self.readings}
        self.sums = {}
        return Reading(layers=norms)

    def _norms(self, reading: str) -> Float[Tensor, " layers"]:
        if reading == "update":
            return torch.stack(torch._foreach_norm(self.sums["update"]))
        if reading == "global":
            (total,) = self.sums["global"]
            return torch.stack(torch._foreach_norm(self._means(total[None].split(self.sizes, 1))))
        if reading == "local-mean":
            return torch.stack(self._means(self._squares().T)).sqrt()
        device = getattr(self.world, "device", torch.device("cpu"))
        own = torch.zeros(len(self.sizes), dtype=self.world.meter.dtype, device=device)
        if 0 in self.world.hosted:
            own.copy_(self._squares()[0].sqrt())
        self.world.broadcast([own])
        return own

    def _means(self, parts: Iterable[Float[Tensor, "rows ..."]]) -> list[Tensor]:
        """Over all workers, of one part per layer, on whose account it goes."""
        requests = [Mean(part) for part in parts]
        return self.world.ask(*requests, layers=range(len(requests)))

    def _squares(self) -> Float[Tensor, "rows layers"]:
        (stack,) = self.sums["workers"]
        return torch.stack([x.square().sum(1) for x in stack.split(self.sizes, dim=1)], dim=1)
