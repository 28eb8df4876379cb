"""Critical sharpness: how far along a direction the loss can go before it rises.

Kalra et al., "A Scalable Measure of Loss Landscape Curvature" (2026; arXiv 2601.16979). It takes a
few forward passes and no second derivative. Along the gradient g of a quadratic it is the Rayleigh
quotient g'Hg / g'g, which is at most the top eigenvalue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regimes.curvature.probe import (
    Mode,
    ProbeLoss,
    ProcessMean,
    batch_size,
    check_probe,
    preserved,
)
from regimes.errors import TrainingError, require

LIMIT = 60  # doublings or halvings of the first guess


@dataclass(frozen=True)
class CriticalSharpness:
    """Attributes:
    value: 2 / ``rate``; NaN where the direction is zero or no step raised the loss.
    rate: the smallest measured rate that raises the loss.
    forwards: passes over the probe set, the one with the gradient included.
    """

    value: float
    rate: float
    forwards: int


def critical_sharpness(
    model: nn.Module,
    loss: ProbeLoss,
    batches: Iterable[Any],
    *,
    direction: Sequence[Tensor] | None = None,
    start: float | None = None,
    tolerance: float = 1 / 16,
    mode: Mode | None = None,
    mean: ProcessMean | None = None,
) -> CriticalSharpness:
    """2 / eta_c, where eta_c is the smallest rate at which a step along a direction raises a probe
    loss; leaves no trace on the model.

    Doubles or halves a first guess until eta_c lies between two rates, then bisects.

    Args:
        loss, batches, mean: as in `HessianProduct`.
        direction: what a step subtracts, times its rate, from each trainable parameter; None: the
            gradient of the probe loss, SGD's.
        start: the first guess, say the last eta_c; None: 1.
        tolerance: how far the returned rate may lie above eta_c, relatively.
        mode: "eval", or None for the model's flags as they stand.

    Raises:
        ConfigError: an empty probe set, no trainable parameter, a guess or tolerance out of range,
            a loss that is random or updates statistics.
        TrainingError: the loss or the direction is not finite.
    """
    require(mode in (None, "eval"), "mode", mode, "'eval' or None")
    require(0 < tolerance < 1, "tolerance", tolerance, "a number between 0 and 1")
    require(start is None or 0 < start < math.inf, "start", start, "a positive number")
    probe = list(batches)
    parameters = check_probe(model, sum(map(batch_size, probe)), mode)
    line = _LossAlong(model, loss, probe, list(parameters.values()), mean)
    with preserved(model, mode):
        here, gradient = line.gradient()
        steps = gradient if direction is None else list(direction)
        size = sum(float(step.double().square().sum()) for step in steps)
        if not math.isfinite(here) or not math.isfinite(size):
            raise TrainingError("The loss or the direction is not finite; training has diverged.")
        if size == 0:
            return CriticalSharpness(math.nan, math.nan, line.forwards)
        # `not <=`: a loss that is NaN has risen
        rate = _smallest(lambda rate: not line(steps, rate) <= here, start or 1.0, tolerance)
    return CriticalSharpness(2 / rate, rate, line.forwards)


def _smallest(rises: Callable[[float], bool], rate: float, tolerance: float) -> float:
    """A rate at which the loss rises, at most ``tolerance`` above one at which it does not."""
    above = rises(rate)
    factor = 0.5 if above else 2.0
    for _ in range(LIMIT):
        before, rate = rate, rate * factor
        if rises(rate) != above:
            break
    else:
        return math.nan
    low, high = sorted((before, rate))
    while high - low > tolerance * low:
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) else (middle, high)
    return high


class _LossAlong:
    """The probe loss along a line through the present parameters."""

    def __init__(
        self,
        model: nn.Module,
        loss: ProbeLoss,
        batches: list[Any],
        parameters: list[nn.Parameter],
        mean: ProcessMean | None,
    ) -> None:
        self.model, self.loss, self.parameters = model, loss, parameters
        self.mean: ProcessMean = mean or (lambda flat: flat)
        self.origin = [p.detach().clone() for p in parameters]
        self.forwards = 0
        count = sum(map(batch_size, batches))
        self.weighted = [(batch_size(batch) / count, batch) for batch in batches]

    def gradient(self) -> tuple[float, list[Tensor]]:
        """The loss at the present parameters, and its gradient."""
        self.forwards += 1
        total, flat = torch.zeros((), dtype=torch.float64), torch.zeros(())
        with torch.enable_grad():
            for index, (weight, batch) in enumerate(self.weighted):
                value = self.loss(self.model, batch) * weight
                gradients = torch.autograd.grad(
                    value, self.parameters, allow_unused=True, materialize_grads=True
                )
                part = torch.cat([g.flatten() for g in gradients])
                flat = flat + part if index else part
                total += value.detach().double().cpu()
        pieces = self.mean(flat).split([p.numel() for p in self.parameters])
        steps = [x.view_as(p) for x, p in zip(pieces, self.parameters, strict=True)]
        return self._process_mean(total), steps

    @torch.no_grad()
    def __call__(self, steps: Sequence[Tensor], rate: float) -> float:
        self.forwards += 1
        for p, origin, step in zip(self.parameters, self.origin, steps, strict=True):
            p.copy_(origin - rate * step)
        total = torch.zeros((), dtype=torch.float64)
        for weight, batch in self.weighted:
            total += self.loss(self.model, batch).double().cpu() * weight
        return self._process_mean(total)

    def _process_mean(self, total: Tensor) -> float:
        return float(self.mean(total.to(self.parameters[0].device).view(1)))
