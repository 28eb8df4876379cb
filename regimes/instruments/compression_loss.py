"""What compression would lose: the share of the gradient's energy beyond each level's reach.

At measured steps the mean gradient g is compressed at every level, apart from the run and without
error feedback: ``error:<level>`` is sum |g - C(g)|^2 / sum |g|^2 over the epoch's measured steps,
0 for dense and near 1 where nothing of g gets through. PowerSGD's Q is carried along per level, as
the run carries its own. Read by ``ErrorLadder``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Mean
from regimes.collectives.world import World
from regimes.config import Level
from regimes.errors import ConfigError, require
from regimes.instruments.base import (
    MeasurementContext,
    Reading,
    StridedGauge,
    require_at_least,
    squared_norms,
)


@dataclass(frozen=True)
class CompressionLoss:
    """Which levels, and how often.

    Attributes:
        levels: names of the configuration's levels; none: all of them.
        stride: measure steps 0, stride, 2 stride, ... of an epoch. A measured step compresses once
            per level, and on several processes costs one dense mean (counted as signal bytes).
    """

    levels: tuple[str, ...] = ()
    stride: int = 8
    every: int = 1

    def __post_init__(self) -> None:
        require_at_least(self, "error", stride=1, every=1)

    def start(self, context: MeasurementContext) -> CompressionLossGauge:
        return CompressionLossGauge(self, context)


class CompressionLossGauge(StridedGauge):
    """Sums over an epoch's measured steps, and the compressor's memory per level."""

    def __init__(self, settings: CompressionLoss, context: MeasurementContext) -> None:
        if context.compressor is None:
            raise ConfigError("the instrument 'error' needs a run with a compressor")
        known = context.levels.keys()
        require(
            known >= set(settings.levels),
            "instruments.error.levels",
            settings.levels,
            f"some of {', '.join(known)}",
        )
        self.stride, self.world, self.layers = settings.stride, context.world, list(context.layers)
        self.compressor, self.alone = context.compressor, World(1)
        self.alone.meter.dtype = context.world.meter.dtype
        self.levels = {name: context.levels[name] for name in settings.levels or known}
        self.states = {
            name: [self.compressor.init(layer, context.seed, 0) for layer in self.layers]
            for name in self.levels
        }
        self.device = context.parameters[0].device
        self._reset()

    def _reset(self) -> None:
        self.seen = 0
        self.lost = {name: torch.zeros(len(self.layers)).double() for name in self.levels}
        self.whole = torch.zeros(len(self.layers)).double()

    def measure(self, stack: Float[Tensor, "rows N"]) -> None:
        (mean,) = self.world.ask(Mean(stack))
        sizes = [layer.size for layer in self.layers]
        parts = [p.view(x.shape) for p, x in zip(mean.split(sizes), self.layers, strict=True)]
        self.whole += squared_norms(parts).cpu()
        for name, level in self.levels.items():
            self.lost[name] += squared_norms(self._left(parts, name, level)).cpu()

    def _left(self, parts: list[Tensor], name: str, level: Level) -> list[Tensor]:
        """What a level misses of each layer; nothing of what is never compressed."""
        chosen = [i for i, layer in enumerate(self.layers) if layer.compressed]
        states = [self.states[name][i] for i in chosen]
        for state in states:
            state.residual = None  # else error feedback would add what the last measurement missed
        programs = [
            self.compressor.reduce(parts[i][None], state, level)
            for i, state in zip(chosen, states, strict=True)
        ]
        found = dict(zip(chosen, self.alone.drive(programs, chosen), strict=True))
        self.alone.meter.take()
        return [p - found[i] if i in found else torch.zeros_like(p) for i, p in enumerate(parts)]

    def read(self, epoch: int) -> Reading:
        """``error:<level>`` per layer and for the model; NaN where the gradient is zero."""
        lost, whole = self.lost, self.whole
        self._reset()
        return Reading(
            layers={f"error:{n}": (x / whole).tolist() for n, x in lost.items()},
            model={f"error:{n}": float(x.sum() / whole.sum()) for n, x in lost.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        """The memories that all processes have alike."""
        return {name: [s.shared_state() for s in states] for name, states in self.states.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, states in state.items():
            for ours, theirs in zip(self.states[name], states, strict=True):
                ours.load_shared_state(theirs, self.device)
