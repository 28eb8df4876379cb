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

from regimes.config import Signal
from regimes.errors import ConfigError
from regimes.instruments.base import Memoryless, Reading, Scene
from regimes.world import mean_program

PER_WORKER = ("local-mean", "worker0")
ALL: tuple[Signal, ...] = ("update", "global", "local-mean", "worker0")


@dataclass(frozen=True)
class Norms:
    """Which readings to record, besides the one that the run's ``signal`` names."""

    readings: tuple[Signal, ...] = ALL
    every: int = field(default=1, init=False)

    def start(self, scene: Scene) -> GradientNorm:
        return GradientNorm(self.readings, scene)


class GradientNorm(Memoryless):
    """Accumulates during an epoch; ``read`` gives the norms and starts the next epoch.

    Raises:
        ConfigError: a per-worker reading is asked for in a union pass.
    """

    def __init__(self, readings: Iterable[Signal], scene: Scene) -> None:
        self.readings = sorted(set(readings), key=ALL.index)
        for reading in self.readings:
            if scene.union and reading in PER_WORKER:
                raise ConfigError(
                    f"the signal {reading!r} needs each worker's own gradient, which the union "
                    "pass does not compute: set union_pass = false"
                )
        self.layers, self.world = list(scene.layers), scene.world
        self.sums: dict[str, list[Tensor]] = {}

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        """Add one step's gradients and updates; both are left as they are."""
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
        norms = {f"norm:{reading}": self._norms(reading) for reading in self.readings}
        self.sums = {}
        return Reading(layers={name: values.tolist() for name, values in norms.items()})

    def _norms(self, reading: str) -> Float[Tensor, " layers"]:
        if reading == "update":
            return torch.stack(torch._foreach_norm(self.sums["update"]))
        sizes = [layer.size for layer in self.layers]
        if reading == "global":
            share = list(self.sums["global"][0].split(sizes))
            programs = [mean_program(s[None]) for s in share]
            total = self.world.drive(programs, range(len(programs)), signal=True)
            return torch.stack(torch._foreach_norm(total))
        if reading == "local-mean":
            squares = self._squares(self.sums["workers"][0], sizes)  # [L, layers]
            programs = [mean_program(s) for s in squares.T]
            mean = self.world.drive(programs, range(len(programs)), signal=True)
            return torch.stack(mean).sqrt()
        own = torch.zeros(len(sizes), dtype=self.world.meter.dtype, device=self._device())
        if 0 in self.world.hosted:
            own.copy_(self._squares(self.sums["workers"][0][:1], sizes)[0].sqrt())
        self.world.broadcast([own])
        return own

    @staticmethod
    def _squares(stack: Float[Tensor, "rows N"], sizes: list[int]) -> Float[Tensor, "rows layers"]:
        return torch.stack([part.square().sum(1) for part in stack.split(sizes, dim=1)], dim=1)

    def _device(self) -> torch.device:
        return getattr(self.world, "device", torch.device("cpu"))
