"""How noisy gradients and updates are, and how far the workers' models lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.capabilities import (
    OWN_COLLECTIVES,
    SEVERAL_WORKERS,
    STEP_UPDATES,
    WHOLE_LAYERS,
    WORKER_GRADIENTS,
    WORKER_MODELS,
)
from regimes.base.config import Bounded
from regimes.base.config.bounds import Count
from regimes.base.torch_compat import foreach_add_
from regimes.collectives.comm import signals
from regimes.instruments.base import (
    MeasurementContext,
    Reading,
    StatelessGauge,
    StridedGauge,
    add_sums,
    divide_or_nan,
    squared_norms,
)

ROUNDING = 1e-6  # of the mean square: a variance of float32 sums below it is their rounding


@dataclass(frozen=True)
class Noise(Bounded):
    """Compares the gradient g_w of each worker (batch b) with their mean (batch W b), per layer and
    of the model. With s the mean of |g_w|^2 and m = |mean g|^2:

    - ``noise_scale``: tr(Sigma) / |G|^2, the simple noise scale (McCandlish et al. 2018, section
      2.2). It uses the unbiased estimators of appendix A.1, |G|^2 = (W m - s) / (W - 1) and
      tr(Sigma) / b = W (s - m) / (W - 1), both averaged over the epoch's steps before the ratio is
      taken. Its unit is worker batches: times ``batch_size`` it is in samples. Above W, the batch
      of all workers is still below the noise scale. A short last batch counts like the others. NaN
      means that the estimate of |G|^2 is not positive: the epoch does not resolve it.
    - ``diversity``: sum |g_w|^2 / |sum g_w|^2 = s / (W m), summed over the steps before the ratio
      is taken (the gradient diversity of Yin et al. 2018, with workers in place of samples). It is
      1 / W for equal gradients and 1 for orthogonal ones.

    Attributes:
        stride: Measure steps 0, stride, 2 stride, ... of an epoch. A measured step costs two passes
            over the gradients. On several processes it also costs one dense mean, which counts as
            signal bytes, because the run itself sends only the compressed mean.
    """

    bounds_prefix = "instruments.noise."
    requires = frozenset({WORKER_GRADIENTS, SEVERAL_WORKERS, WHOLE_LAYERS, OWN_COLLECTIVES})

    stride: Count = 1
    every: int = field(default=1, init=False)  # every epoch has a value

    def start(self, context: MeasurementContext) -> NoiseGauge:
        return NoiseGauge(self.stride, context)


class NoiseGauge(StridedGauge):
    """Sums up over an epoch's steps."""

    def __init__(self, stride: int, context: MeasurementContext) -> None:
        self.stride, self.world, self.sizes = stride, context.world, context.sizes
        self._reset()

    def _reset(self) -> None:
        self.seen = self.steps = (
            0  # ``seen``, of `StridedGauge`, counts all; ``steps`` the measured
        )
        # sums of s and of m, per layer; from the first step on where the gradients are
        self.small = torch.zeros(len(self.sizes), dtype=torch.float64)
        self.big = torch.zeros_like(self.small)

    def measure(self, stack: Float[Tensor, "rows N"]) -> None:
        mean, squares = signals(self.world).mean([stack, _layer_squares(stack, self.sizes)])
        small, big = squares.double(), _layer_squares(mean[None], self.sizes)[0].double()
        if self.steps:
            small, big = self.small + small, self.big + big
        self.small, self.big = small, big
        self.steps += 1

    def read(self, epoch: int) -> Reading:
        """Return ``noise_scale`` and ``diversity``; in detail, what they are ratios of, for
        pooling."""
        small, big = (self.small / self.steps).tolist(), (self.big / self.steps).tolist()
        steps, workers = self.steps, self.world.workers
        self._reset()
        # one pair (s, m) per layer; the last is the model's
        pairs = list(zip([*small, math.fsum(small)], [*big, math.fsum(big)], strict=True))
        traces = [workers * (s - m) / (workers - 1) for s, m in pairs]  # tr(Sigma) / b
        norms = [(workers * m - s) / (workers - 1) for s, m in pairs]  # |G|^2
        scale = [divide_or_nan(trace, norm) for trace, norm in zip(traces, norms, strict=True)]
        diversity = [divide_or_nan(s, workers * m) for s, m in pairs]
        return Reading(
            layers={"noise_scale": scale[:-1], "diversity": diversity[:-1]},
            model={"noise_scale": scale[-1], "diversity": diversity[-1]},
            detail={"steps": steps, "trace": traces, "signal": norms},
        )


def _layer_squares(
    stack: Float[Tensor, "rows N"], sizes: list[int]
) -> Float[Tensor, "rows layers"]:
    parts = stack.split(sizes, dim=1)
    return torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts], dim=1).square()


@dataclass(frozen=True)
class Msdr:
    """Measures ``msdr``, the mean to standard deviation ratio of the aggregated updates u_t of an
    epoch's T steps, per layer and of the model: |mean u| / sqrt(sum |u_t - mean u|^2 / (T - 1)).

    AdaQS (Guo et al. 2020) reads it; the ACCORDION paper, section 5.6, gives it in these words and
    no formula. Mean and spread are taken over steps and of whole vectors. A mean over a layer's
    *coordinates* would change with the sign convention of a neuron and sits near zero. Pure noise
    gives about 1 / sqrt(T), not 0. Updates carry the compressor's error: rank 1 raises the spread.
    """

    requires = frozenset({WHOLE_LAYERS, STEP_UPDATES})

    every: int = field(default=1, init=False)

    def start(self, context: MeasurementContext) -> MsdrGauge:
        return MsdrGauge()


class MsdrGauge(StatelessGauge):
    """Adds up an epoch's updates and their squared norms."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: list[Tensor] = []
        self.room: list[Tensor] = []  # the memory of the sums before the last step
        self.squares = torch.zeros(0, dtype=torch.float64)

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        squares = squared_norms(updates)
        if self.steps:
            before = self.sums
            if self.reversible:  # a hook may put back the sums before this step
                self.sums = add_sums(before, updates, self.room)
                self.room = before
            else:
                foreach_add_(self.sums, list(updates))
            self.squares = self.squares + squares
        else:
            self.sums, self.squares = [update.clone() for update in updates], squares
            self.room = []
        self.steps += 1

    def read(self, epoch: int) -> Reading:
        """Return ``msdr``; NaN after a single step, or where no update differs from another."""
        totals, squares = squared_norms(self.sums).tolist(), self.squares.tolist()
        steps = self.steps
        self.steps = 0
        totals, squares = [*totals, math.fsum(totals)], [*squares, math.fsum(squares)]
        ratios = [_msdr(t, s, steps) for t, s in zip(totals, squares, strict=True)]
        return Reading({"msdr": ratios[:-1]}, {"msdr": ratios[-1]}, {"steps": steps})


def _msdr(total: float, squares: float, steps: int) -> float:
    """The mean-to-standard-deviation ratio of ``steps`` vectors u.

    Args:
        total: |sum u|^2.
        squares: sum |u|^2.
    """
    if steps < 2:
        return math.nan
    variance = (squares - total / steps) / (steps - 1)
    if variance < ROUNDING * squares / steps:
        return math.nan
    return math.sqrt(divide_or_nan(total / steps**2, variance))


@dataclass(frozen=True)
class Spread:
    """Measures ``spread``: the root mean square distance of the workers' parameters from their
    mean, right before the first synchronisation of a unit, per layer and of the model. It is zero
    while the workers share each step. On several processes it sends one dense mean a unit (as
    signal bytes)."""

    requires = frozenset({WORKER_MODELS, WHOLE_LAYERS, OWN_COLLECTIVES})

    every: int = field(default=1, init=False)

    def start(self, context: MeasurementContext) -> SpreadGauge:
        assert context.is_local is not None  # WORKER_MODELS
        return SpreadGauge(context, context.is_local)


class SpreadGauge(StatelessGauge):
    """Measures once per unit."""

    def __init__(self, context: MeasurementContext, is_local: Callable[[], bool]) -> None:
        self.context, self.is_local = context, is_local
        self.distances: list[float] | None = None  # per layer, of this unit

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        """Measure the movements ``stack`` of the workers since the last synchronisation, once a
        unit."""
        if self.distances is not None:
            return
        layers = range(len(self.context.layers))
        if not self.is_local():
            self.distances = [0.0 for _ in layers]
            return
        world, parts = self.context.world, stack.split(self.context.sizes, dim=1)
        means = signals(world, layers).mean(parts)
        squares = [(p - m).square().sum(1) for p, m in zip(parts, means, strict=True)]
        (mean,) = signals(world).mean([torch.stack(squares, dim=1)])
        self.distances = mean.sqrt().tolist()

    def read(self, epoch: int) -> Reading:
        spread = self.distances or [math.nan] * len(self.context.layers)
        self.distances = None
        return Reading({"spread": spread}, {"spread": math.hypot(*spread)})
