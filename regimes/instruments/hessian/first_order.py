"""Two measures of a probe that need no second derivative: Fisher trace and critical sharpness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import TrainingError, require
from regimes.base.seeding import make_generator
from regimes.instruments.hessian.differentiable import twice_differentiable, without_checkpoints
from regimes.instruments.hessian.probe import (
    Estimate,
    Mode,
    ProbeLoss,
    ProcessMean,
    batch_size,
    check_loss,
    check_probe,
    no_random_draws,
    preserve_model,
)
from regimes.instruments.hessian.weights import Weight, weights_of

LIMIT = 60  # doublings or halvings of the first guess of a critical rate


@dataclass(frozen=True)
class FisherTrace:
    """Holds the trace, whole and per layer; the layers' values add up to the total's."""

    total: Estimate
    layers: dict[str, Estimate]


@check_arguments()
def fisher_trace(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    kind: str = "model",
    draws: int = 1,
    seed: int = 0,
    first_sample: int = 0,
    mode: Mode | None = None,
    mean: ProcessMean | None = None,
    processes: int | None = None,
) -> FisherTrace:
    """Compute the trace of the Fisher information of a classifier over (inputs, class labels), the
    signal of Achille et al. (2019) for critical periods; parameters, buffers and ``.grad`` are
    restored afterwards.

    It is the mean over samples of the squared gradient of log p(y | x), exact over the probe set:
    the gradient of each sample is taken on its own, which costs up to four times as much as in a
    batch. The standard error is of this mean, as if the samples were drawn at random from a
    larger set.

    Args:
        kind: "model" draws labels from the model's own softmax: the Fisher matrix proper, for
            cross-entropy the Gauss-Newton matrix. "empirical" uses the batch's.
        draws: labels per sample ("model" only).
        first_sample: index, in the union over processes, of this process's first sample. Labels
            are keyed by (seed, index), so any split of the data draws the same ones.
        mode: "eval" as in `HessianProduct`; batch statistics mix samples and are not offered.
        mean: averages over processes, which must hold equally many samples.
        processes: how many processes ``mean`` averages over.

    Raises:
        ConfigError: empty probe set, no parameter with a gradient, a non-deterministic model,
            ``mean`` without ``processes``.
        TrainingError: a gradient is not finite.
    """
    require(kind in ("model", "empirical"), "kind", kind, "'model' or 'empirical'")
    require(mode in (None, "eval"), "mode", mode, "'eval' or None")
    require(draws == 1 or (draws > 1 and kind == "model"), "draws", draws, "1, or more for 'model'")
    known = mean is None or (processes is not None and processes > 0)
    require(known, "processes", processes, "the number of processes that mean averages over")
    samples = [pair for x, y in batches for pair in zip(x.split(1), y.split(1), strict=True)]
    named = check_probe(model, len(samples), mode)
    rows = []
    with preserve_model(model, mode), torch.enable_grad(), without_checkpoints():
        for index, (x, y) in enumerate(samples):
            with nullcontext() if index else no_random_draws():
                logits = model(x)
            if not bool(torch.isfinite(logits).all()):
                raise TrainingError("The model's output is not finite; training has diverged.")
            if kind == "model":
                p = logits.detach().double().softmax(-1).cpu()
                key = make_generator(seed, "fisher", first_sample + index)
                y = torch.multinomial(p[0], draws, replacement=True, generator=key).to(y)
            rows.append(_squared_norms(logits, y, list(named.values())))
    averaged = 1 if mean is None else processes or 1
    device = samples[0][0].device
    return _summarise_samples(torch.stack(rows), list(named), mean, averaged, device)


def _squared_norms(logits: Tensor, labels: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Squared gradient norms of one sample, per layer, averaged over its labels."""
    out = torch.zeros(len(parameters), dtype=torch.float64)
    for label in labels:
        loss = functional.cross_entropy(logits, label.view(1))
        gradient = torch.autograd.grad(
            loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        norms = torch.stack([g.detach().double().square().sum() for g in gradient])
        out += norms.cpu() / len(labels)
    return out


def _summarise_samples(
    squares: Tensor,
    names: list[str],
    mean: ProcessMean | None,
    processes: int,
    device: torch.device,
) -> FisherTrace:
    """Means and standard errors over samples [n, layers] and processes."""
    table = torch.cat([squares.sum(1, keepdim=True), squares], dim=1)
    moments = torch.cat([table.mean(0), table.square().mean(0)])
    if mean is not None:
        moments = mean(moments.to(device)).cpu()
    if not bool(torch.isfinite(moments).all()):
        raise TrainingError("A sample's gradient is not finite; training has diverged.")
    n = processes * len(table)
    estimates = [
        Estimate(float(m), float((s - m * m).clamp(min=0) / max(n - 1, 1)) ** 0.5, n)
        for m, s in zip(*moments.chunk(2), strict=True)
    ]
    return FisherTrace(estimates[0], dict(zip(names, estimates[1:], strict=True)))


@dataclass(frozen=True)
class CriticalSharpness:
    """Holds what `critical_sharpness` returns.

    Attributes:
        value: 2 / ``rate``; NaN if the direction is zero or leads uphill, or if the loss rises at
            every rate that was tried or at none.
        rate: the smallest measured rate that raises the loss.
        forwards: passes over the probe set, the one with the gradient included.
    """

    value: float
    rate: float
    forwards: int


@check_arguments("tolerance")
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
    weight: Weight = None,
) -> CriticalSharpness:
    """Compute 2 / eta_c, where eta_c is the smallest rate at which a step along a direction raises
    a probe loss (Kalra et al. 2026, arXiv 2601.16979); parameters, buffers and ``.grad`` are
    restored afterwards.

    Doubles or halves a first guess until eta_c lies between two rates, then bisects: a few forward
    passes. Along the gradient g of a quadratic it is the Rayleigh quotient g'Hg / g'g, which is at
    most the top eigenvalue.

    Args:
        loss, batches, mean, weight: as in `HessianProduct`.
        direction: what a step subtracts, times its rate, from each trainable parameter; None: the
            gradient of the probe loss, SGD's.
        start: the first guess, say the last eta_c; None: 1.
        tolerance: how far the returned rate may lie above eta_c, relatively.
        mode: "eval", or None for the model's flags as they stand.

    Raises:
        ConfigError: an empty probe set, no trainable parameter, a guess or tolerance out of range,
            a direction of other shapes than the parameters', a loss that is random or updates
            statistics, or where trying does not show how batches count.
        TrainingError: the loss or the direction is not finite.
    """
    require(mode in (None, "eval"), "mode", mode, "'eval' or None")
    require(0 < tolerance < 1, "tolerance", tolerance, "a number between 0 and 1")
    require(start is None or 0 < start < math.inf, "start", start, "a positive number")
    probe = list(batches)
    parameters = check_probe(model, sum(map(batch_size, probe)), mode)
    if direction is not None:
        shapes, expected = ([tuple(t.shape) for t in x] for x in (direction, parameters.values()))
        require(shapes == expected, "shapes of direction", shapes, str(expected))
    weights = weights_of(model, loss, probe, weight, mean)
    # the loss of a batch whose targets are all ignored is NaN, also times 0
    weighted = [pair for pair in zip(weights, probe, strict=True) if pair[0]]
    loss_along = _LossAlong(model, loss, weighted, list(parameters.values()), mean)
    with preserve_model(model, mode):
        here, gradient = loss_along.gradient()
        steps = gradient if direction is None else list(direction)
        size = sum(float(step.double().square().sum()) for step in steps)
        if not math.isfinite(here) or not math.isfinite(size):
            raise TrainingError("The loss or the direction is not finite; training has diverged.")
        pairs = zip(gradient, steps, strict=True)
        slope = sum(float((g.double() * step.double()).sum()) for g, step in pairs)
        # Uphill the answer would be the rate at which rounding hides that the loss rises.
        if size == 0 or slope < 0:
            return CriticalSharpness(math.nan, math.nan, loss_along.forwards)
        # `not <=`: a loss that is NaN has risen
        rate = _find_smallest(
            lambda rate: not loss_along(steps, rate) <= here, start or 1.0, tolerance
        )
    return CriticalSharpness(2 / rate, rate, loss_along.forwards)


def _find_smallest(rises: Callable[[float], bool], rate: float, tolerance: float) -> float:
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
        weighted: list[tuple[float, Any]],
        parameters: list[nn.Parameter],
        mean: ProcessMean | None,
    ) -> None:
        self.model, self.loss, self.parameters = model, loss, parameters
        self.mean: ProcessMean = mean or (lambda flat: flat)
        self.origin = [p.detach().clone() for p in parameters]
        self.forwards = 0
        self.weighted = weighted

    def gradient(self) -> tuple[float, list[Tensor]]:
        """Return the loss at the present parameters, and its gradient."""
        self.forwards += 1
        total = torch.zeros((), dtype=torch.float64)
        flat = torch.cat([torch.zeros_like(p).flatten() for p in self.parameters])
        # attention's kernel is that of a Hessian of the same probe
        with torch.enable_grad(), twice_differentiable():
            for weight, batch in self.weighted:
                value = self.loss(self.model, batch)
                check_loss(value)
                value = value * weight
                gradients = torch.autograd.grad(
                    value, self.parameters, allow_unused=True, materialize_grads=True
                )
                flat += torch.cat([g.flatten() for g in gradients])
                total += value.detach().double().cpu().reshape(())
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
            total += self.loss(self.model, batch).double().cpu().reshape(()) * weight
        return self._process_mean(total)

    def _process_mean(self, total: Tensor) -> float:
        return float(self.mean(total.to(self.parameters[0].device).view(1)))
