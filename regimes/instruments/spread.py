"""The distance of the workers' models from each other under local steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Mean
from regimes.errors import ConfigError
from regimes.instruments.base import MeasurementContext, Reading, StatelessGauge


@dataclass(frozen=True)
class Spread:
    """``spread``: the root mean square distance of the workers' parameters from their mean, right
    before the first synchronisation of a unit, per layer and of the model. Zero while the workers
    share each step. On several processes it sends one dense mean a unit (as signal bytes)."""

    every: int = field(default=1, init=False)

    def start(self, context: MeasurementContext) -> SpreadGauge:
        if context.is_local is None:
            raise ConfigError(
                "instruments.spread: workers that share each step have one model: set sync_policy"
            )
        return SpreadGauge(context, context.is_local)


class SpreadGauge(StatelessGauge):
    """Measures once per unit."""

    def __init__(self, context: MeasurementContext, is_local: Callable[[], bool]) -> None:
        self.context, self.is_local = context, is_local
        self.distances: list[float] | None = None  # per layer, of this unit

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        """``stack``: each worker's movement since the last synchronisation."""
        if self.distances is not None:
            return
        layers = range(len(self.context.layers))
        if not self.is_local():
            self.distances = [0.0 for _ in layers]
            return
        world, parts = self.context.world, stack.split(self.context.sizes, dim=1)
        means = world.ask(*(Mean(part) for part in parts), layers=layers)
        squares = [(p - m).square().sum(1) for p, m in zip(parts, means, strict=True)]
        (mean,) = world.ask(Mean(torch.stack(squares, dim=1)))
        self.distances = mean.sqrt().tolist()

    def read(self, epoch: int) -> Reading:
        spread = self.distances or [math.nan] * len(self.context.layers)
        self.distances = None
        return Reading({"spread": spread}, {"spread": math.hypot(*spread)})
