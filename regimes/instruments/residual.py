"""What the workers owe: the norm of each layer's residual, which error feedback has yet to send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import Bounded
from regimes.base.config.bounds import Count
from regimes.base.errors import ConfigError
from regimes.collectives.comm import signals
from regimes.instruments.base import EndOfEpochGauge, MeasurementContext, Reading


@dataclass(frozen=True)
class Residual(Bounded):
    """Measures the norms of residuals at the end of a unit: ``residual``, per layer and of the
    model.

    It is the root mean square over workers of the norm of their residuals, and zero where nothing
    is left to send. If all workers are computed in one pass, it is the norm of their mean residual.
    During local steps it is of movements of the weights; in a run that has shared steps, too, it is
    of the kind of exchange with which the unit ends. On several processes it sends a number for
    each layer, which counts as signal bytes.

    Attributes:
        every: Measure at the end of every this many units.
    """

    bounds_prefix = "instruments.residual."
    requires = frozenset[str]()

    every: Count = 1

    def start(self, context: MeasurementContext) -> ResidualGauge:
        return ResidualGauge(context)


class ResidualGauge(EndOfEpochGauge):
    """Reads the compressors' memories."""

    def __init__(self, context: MeasurementContext) -> None:
        if context.residuals is None:
            raise ConfigError("the instrument 'residual' needs a run with a compressor")
        self.context, self.residuals = context, context.residuals

    def read(self, epoch: int) -> Reading:
        world = self.context.world
        (mean,) = signals(world).mean([self._squares()])
        norms = mean.sqrt()
        if self.context.owned is None:  # there each process has whole residuals of its own
            norms = world.whole_norms(norms)
        found = norms.tolist()
        return Reading({"residual": found}, {"residual": math.hypot(*found)})

    def _squares(self) -> Float[Tensor, "hosted layers"]:
        world, columns = self.context.world, list[Tensor]()
        device = getattr(world, "device", torch.device("cpu"))
        for residual in self.residuals():
            if residual is None:
                columns.append(torch.zeros(world.hosted_count, dtype=torch.float64, device=device))
            else:  # one row stands for all workers of a joint pass
                squares = residual.flatten(1).double().square().sum(1)
                columns.append(squares.expand(world.hosted_count).to(device))
        return torch.stack(columns, dim=1)
