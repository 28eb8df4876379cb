"""The relative error of compression: the share of the gradient's energy that each level loses.

At measured steps the mean gradient g is compressed at every level, outside the run and without
error feedback: ``error:<level>`` is sum |g - C(g)|^2 / sum |g|^2 over the epoch's measured steps,
0 for dense and near 1 where hardly anything of g is sent. PowerSGD's Q is warm-started per level,
as in the run. The policy ``ErrorLadder`` reads these values.
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
    """Which levels are measured, and how often.

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
    """Sums over an epoch's measured steps, and the compressor's state per level."""

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
        self.compressor, self.own_world = context.compressor, World(1)  # sends nothing
        self.own_world.meter.dtype = context.world.meter.dtype
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
        self.energy = torch.zeros(len(self.layers)).double()

    def measure(self, stack: Float[Tensor, "rows N"]) -> None:
        (mean,) = self.world.ask(Mean(stack))
        sizes = [layer.size for layer in self.layers]
        parts = [p.view(x.shape) for p, x in zip(mean.split(sizes), self.layers, strict=True)]
        self.energy += squared_norms(parts).cpu()
        for name, level in self.levels.items():
            self.lost[name] += squared_norms(self._errors(parts, name, level)).cpu()

    def _errors(self, parts: list[Tensor], name: str, level: Level) -> list[Tensor]:
        """Each layer's gradient minus its compression at a level; 0 where never compressed."""
        chosen = [i for i, layer in enumerate(self.layers) if layer.compressed]
        states = [self.states[name][i] for i in chosen]
        for state in states:
            state.residual = None  # error feedback would add the error of the last measurement
        programs = [
            self.compressor.reduce(parts[i][None], state, level)
            for i, state in zip(chosen, states, strict=True)
        ]
        compressed = dict(zip(chosen, self.own_world.drive(programs, chosen), strict=True))
        self.own_world.meter.take()
        return [
            p - compressed[i] if i in compressed else torch.zeros_like(p)
            for i, p in enumerate(parts)
        ]

    def read(self, epoch: int) -> Reading:
        """``error:<level>`` per layer and for the model; NaN where the gradient is zero."""
        lost, energy = self.lost, self.energy
        self._reset()
        return Reading(
            layers={f"error:{n}": (x / energy).tolist() for n, x in lost.items()},
            model={f"error:{n}": float(x.sum() / energy.sum()) for n, x in lost.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        """The compressors' states that are the same on all processes."""
        return {name: [s.shared_state() for s in states] for name, states in self.states.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, states in state.items():
            for ours, theirs in zip(self.states[name], states, strict=True):
                ours.load_shared_state(theirs, self.device)
