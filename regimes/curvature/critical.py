"""Critical sharpness: how far along a direction the loss can go before it rises.

Kalra et al., "A Scalable Measure of Loss Landscape Curvature" (2026; arXiv 2601.16979): 2 / eta_c,
where eta_c is the smallest rate at which a step raises the loss. A few forward passes, no second
derivative. Along the gradient g of a quadratic it is the Rayleigh quotient g'Hg / g'g, so that it
is at most the top eigenvalue, and another signal than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regimes.curvature.isolation import preserved
from regimes.curvature.probe import (
    Mode,
    ProbeLoss,
    ProcessMean,
    batch_size,
    check_deterministic,
)
from regimes.errors import ConfigError, TrainingError, require

LIMIT = 60  # doublings or halvings of the first guess


@dataclass(frozen=True)
class CriticalSharpness:
    """Attributes:
    value: 2 / ``rate``; NaN where the direction is zero or no step raised the loss.
    rate: the smallest one found that raises the loss.
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
    """2 / eta_c of a probe loss along a direction.

    Doubles or halves a first guess until eta_c lies between two rates, then bisects.

    Args:
        loss, batches, mean: as in `HessianProduct`.
        direction: what a step subtracts, times its rate, from each trainable parameter; None: the
            gradient of the probe loss, SGD's.
        start: the first guess, say the last eta_c; None: 1.
        tolerance: how far the rate found may lie above eta_c, relatively.
        mode: "eval", or None for the model's flags as they stand.

    Leaves no trace on the model.

    Raises:
        ConfigError: an empty probe set, no trainable parameter, a guess or tolerance out of range,
            a loss that is random or moves statistics.
        TrainingError: the loss or the direction is not finite.
    """
    require(mode in (None, "eval"), "mode", mode, "'eval' or None")
    require(0 < tolerance < 1, "tolerance", tolerance, "a number between 0 and 1")
    require(start is None or 0 < start < math.inf, "start", start, "a positive number")
    probe = list(batches)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters or not sum(map(batch_size, probe)):
        what = "The probe set is empty" if parameters else "No parameter requires a gradient"
        raise ConfigError(f"{what}; there is no sharpness to measure.")
    if mode is None:
        check_deterministic(model)
    along = _Along(model, loss, probe, parameters, mean)
    with preserved(model):
        if mode == "eval":
            model.eval()
        here, gradient = along.gradient()
        steps = gradient if direction is None else list(direction)
        size = sum(float(step.double().square().sum()) for step in steps)
        if not math.isfinite(here) or not math.isfinite(size):
            raise TrainingError("The loss or the direction is not finite; training has diverged.")
        if size == 0:
            return CriticalSharpness(math.nan, math.nan, along.forwards)
        rate = _smallest(lambda rate: not along(steps, rate) <= here, start or 1.0, tolerance)
    return CriticalSharpness(2 / rate, rate, along.forwards)


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


class _Along:
    """The probe loss at a distance from where the parameters are."""

    def __init__(
        self,
        model: nn.Module,
        loss: ProbeLoss,
        batches: list[Any],
        parameters: list[nn.Parameter],
        mean: ProcessMean | None,
    ) -> None:
        self.model, self.loss, self.batches = model, loss, batches
        self.parameters, self.mean = parameters, mean or (lambda flat: flat)
        self.origin = [p.detach().clone() for p in parameters]
        self.forwards = 0
        count = sum(map(batch_size, batches))
        self.weights = [batch_size(batch) / count for batch in batches]

    def gradient(self) -> tuple[float, list[Tensor]]:
        """The loss where the parameters are, and its gradient."""
        self.forwards += 1
        total, flat = torch.zeros((), dtype=torch.float64), None
        with torch.enable_grad():
            for weight, batch in zip(self.weights, self.batches, strict=True):
                value = self.loss(self.model, batch) * weight
                found = torch.autograd.grad(
                    value, self.parameters, allow_unused=True, materialize_grads=True
                )
                part = torch.cat([g.flatten() for g in found])
                flat = part if flat is None else flat + part
                total += value.detach().double().cpu()
        assert flat is not None  # there is a batch
        pieces = self.mean(flat).split([p.numel() for p in self.parameters])
        steps = [x.view_as(p) for x, p in zip(pieces, self.parameters, strict=True)]
        return self._value(total), steps

    @torch.no_grad()
    def __call__(self, steps: Sequence[Tensor], rate: float) -> float:
        self.forwards += 1
        for p, origin, step in zip(self.parameters, self.origin, steps, strict=True):
            p.copy_(origin - rate * step)
        total = torch.zeros((), dtype=torch.float64)
        for weight, batch in zip(self.weights, self.batches, strict=True):
            total += self.loss(self.model, batch).double().cpu() * weight
        return self._value(total)

    def _value(self, total: Tensor) -> float:
        device = self.parameters[0].device
        return float(self.mean(total.to(device).view(1)))
