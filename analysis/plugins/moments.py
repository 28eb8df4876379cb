"""Is a stochastic gradient "a sparse mean and a dense noise"? Mean and variance per coordinate.

The paper (section 4.3, equation 1) assumes it and proves it for a LASSO (appendix B, Lemma 1); for
networks it is a conjecture. Of each of N coordinates, the mean m and the variance v of a gradient:

- ``Moments``, of what the loop computes in an epoch. Weights move, so m is the mean along the way,
  and small where the gradient swings to and fro. v is the variance of worker gradients around their
  step's mean, at equal weights; 1 / (W - 1), averaged over the steps. In a union pass (or with one
  worker) there is one gradient per step: v is the variance of *union* batches over steps, and
  includes the drift of the mean. A short last batch counts like the others.
- ``FrozenMoments``, of extra batches at the weights at the end of the epoch: equation 1 as it is
  written. Train mode, BatchNorm with each batch's statistics, as in the overlap instrument.

Statistics, each within a layer, and of the whole model's vector (of ``FrozenMoments``,
``moments-frozen:*``):

- ``moments:mean-top1``, ``mean-top10``: the share of |m|^2 in its 1 % and 10 % largest
  coordinates. Also the share in *single* stochastic gradients, averaged (along the way:
  the workers' of the last measured step; frozen: all), and of one Gaussian draw of the variances v
  (``null-*``): what m would look like were there nothing but noise. Equal Gaussian coordinates have
  8 % and 44 %.
- ``mean-density``, ``single-density``, ``null-density``: |m|_1^2 / (N |m|_2^2): k / N for k equal
  coordinates, 2 / pi for equal Gaussian ones.
- ``noise-density``: (sum v)^2 / (N sum v^2), the participation ratio of the variance over N; of
  Gaussian noise and f degrees of freedom, too low by a factor of about 1 + 2 / f.
- ``noise-in-top10``: the share of sum v in the mean's top 10 % coordinates. A noise that is dense
  and knows nothing of the mean has 10 % there; where noise makes up m, it has more by selection.
- ``resolved``: 1 - (sum v / n) / |m|^2 for n gradients, the share of |m|^2 that is not expected
  from noise alone; low or negative, m is not resolved, and its ``mean-*`` are as ``null-*``.
- ``noise-to-mean``: sum v / (|m|^2 - sum v / n); NaN where that is not positive.

Both corrections take the n gradients for independent draws. An epoch draws without replacement:
around the *training set's* mean, m has less noise than that, and they correct too much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import Bounded
from regimes.base.config.bounds import Count
from regimes.base.seeding import make_generator
from regimes.collectives.comm import signals
from regimes.compression.sparse import num_kept, top_indices
from regimes.instruments.base import (
    EndOfEpochGauge,
    MeasurementContext,
    Reading,
    StridedGauge,
    divide_or_nan,
)
from regimes.instruments.support_overlap import Pair, drawn_gradients

PERCENTS = (1, 10)  # the largest coordinates, whose share of the squares is read
SHAPES = ("top1", "top10", "density")


@dataclass(frozen=True)
class Moments(Bounded):
    """Mean and variance of the stochastic gradient along an epoch.

    Attributes:
        stride: measure steps 0, stride, 2 stride, ... of an epoch. A measured step costs a few
            passes over the gradients in float64, and one dense mean on several processes (counted
            as signal bytes in every mode). The gauge holds 2 N numbers and the last gradients.
    """

    bounds_prefix = "instruments.moments."

    stride: Count = 1
    every: int = field(default=1, init=False)

    def start(self, context: MeasurementContext) -> MomentsGauge:
        return MomentsGauge(self.stride, context)


@dataclass(frozen=True)
class FrozenMoments(Bounded):
    """Mean and variance of the stochastic gradient at the weights at the end of an epoch.

    Attributes:
        batch: samples per stochastic gradient.
        count: disjoint batches; a forward and backward pass and partial sorts for each.
    """

    bounds_prefix = "instruments.moments-frozen."

    every: Count = 1
    batch: Count = 8
    count: Pair = 48

    def start(self, context: MeasurementContext) -> FrozenMomentsGauge:
        context.samples(0, self.count, self.batch)  # ConfigError if the training set has fewer
        return FrozenMomentsGauge(self, context)


class MomentsGauge(StridedGauge):
    """Running mean and squares over an epoch's measured steps."""

    def __init__(self, stride: int, context: MeasurementContext) -> None:
        self.stride, self.context, self.world = stride, context, context.world
        self.paired = not context.union and context.world.workers > 1  # workers at equal weights
        self._reset()

    def _reset(self) -> None:
        self.seen = self.steps = 0
        self.mean = self.squares = self.last = torch.zeros(0)

    def measure(self, stack: Float[Tensor, "rows N"]) -> None:
        (mean,) = signals(self.world).mean([stack])
        mean = mean.double()
        if not self.steps:
            self.mean, self.squares = torch.zeros_like(mean), torch.zeros_like(mean)
        self.steps += 1
        before = mean - self.mean
        self.mean += before / self.steps
        if self.paired:
            self.squares += (stack.double() - mean).square().mean(0)
        else:
            self.squares += before * (mean - self.mean)  # Welford (1962)
        self.last = (stack if self.paired else mean[None]).clone()

    def read(self, epoch: int) -> Reading:
        workers, steps, sizes = self.world.workers, self.steps, self.context.sizes
        samples = steps * workers if self.paired else steps
        free = steps * (workers - 1) / workers if self.paired else steps - 1
        shapes = torch.stack([shapes_of(row, sizes) for row in self.last.double()])
        squares, single = signals(self.world).mean([self.squares[None], shapes])
        variance = squares / free if free else torch.full_like(squares, math.nan)
        kind = f"{'worker' if self.paired else 'union'} batch along an epoch"
        mean = self.mean
        self._reset()
        return reading(self.context, epoch, mean, variance, single, samples, kind, "moments")


class FrozenMomentsGauge(EndOfEpochGauge):
    """Sums over batches drawn by seed; worker w computes draws w, w + W, ..."""

    def __init__(self, options: FrozenMoments, context: MeasurementContext) -> None:
        self.options, self.context = options, context

    def read(self, epoch: int) -> Reading:
        context, count, batch = self.context, self.options.count, self.options.batch
        world, sizes, like = context.world, context.sizes, context.parameters[0]
        sums = like.new_zeros(1, 2, sum(sizes), dtype=torch.float64)  # of this process's draws
        shapes = sums.new_zeros(1, len(SHAPES), len(sizes) + 1)
        with drawn_gradients(context, epoch, count, batch) as gradient:
            for draw in range(count):
                if draw % world.workers in world.hosted:
                    flat = gradient(draw, "moments", epoch).double()
                    sums += torch.stack([flat, flat.square()])
                    shapes += shapes_of(flat, sizes)
        found = signals(world).mean([sums, shapes])
        (mean, squares), single = (total * (world.processes / count) for total in found)
        variance = ((squares - mean.square()) * (count / (count - 1))).clamp_min(0)
        kind = f"batch of {batch} at the end of an epoch"
        return reading(context, epoch, mean, variance, single, count, kind, "moments-frozen")


def reading(
    context: MeasurementContext,
    epoch: int,
    mean: Float[Tensor, " N"],
    variance: Float[Tensor, " N"],
    single: Float[Tensor, "shapes parts"],
    samples: int,
    kind: str,
    family: str,
) -> Reading:
    """The statistics, from the moments of ``samples`` gradients and shapes of ``single`` ones."""
    sizes, draws = context.sizes, make_generator(context.seed, "moments", epoch)
    normal = torch.randn(len(variance), generator=draws, dtype=torch.float64)
    null = normal.to(variance.device) * variance.sqrt()
    tables = {"mean": shapes_of(mean, sizes), "single": single, "null": shapes_of(null, sizes)}
    found = {
        f"{family}:{vector}-{name}": values
        for vector, table in tables.items()
        for name, values in zip(SHAPES, table.tolist(), strict=True)
    }
    pairs = zip(_parts(mean, sizes), _parts(variance, sizes), strict=True)
    rows = [compared(m, v, samples) for m, v in pairs]
    found |= {f"{family}:{name}": [row[name] for row in rows] for name in rows[0]}
    return Reading(
        layers={name: values[:-1] for name, values in found.items()},
        model={name: values[-1] for name, values in found.items()},
        detail={"family": family, "gradient": kind, "gradients": samples},
    )


def compared(
    mean: Float[Tensor, " n"], variance: Float[Tensor, " n"], samples: int
) -> dict[str, float]:
    """Noise against mean, of one layer; see the module's list."""
    noise, energy = float(variance.sum()), float(mean.square().sum())
    top = top_indices(mean, num_kept(10, len(mean))).long()
    return {
        "noise-density": density(variance),
        "noise-in-top10": divide_or_nan(float(variance[top].sum()), noise),
        "resolved": 1 - divide_or_nan(noise / samples, energy),
        "noise-to-mean": divide_or_nan(noise, energy - noise / samples),
    }


def shapes_of(vector: Float[Tensor, " N"], sizes: list[int]) -> Float[Tensor, "shapes parts"]:
    """``SHAPES`` of every layer's part and of the whole: how concentrated they are."""
    parts = _parts(vector, sizes)
    table = [[top_share(part, percent) for part in parts] for percent in PERCENTS]
    return vector.new_tensor([*table, [density(part) for part in parts]])


def top_share(vector: Float[Tensor, " n"], percent: float) -> float:
    """The share of |v|^2 in its ``percent`` largest coordinates (at least one); NaN for zero."""
    top = top_indices(vector, num_kept(percent, len(vector))).long()
    return divide_or_nan(float(vector[top].square().sum()), float(vector.square().sum()))


def density(vector: Float[Tensor, " n"]) -> float:
    """|v|_1^2 / (n |v|_2^2), in [1 / n, 1]; NaN for zero."""
    return divide_or_nan(float(vector.abs().sum()) ** 2, len(vector) * float(vector.square().sum()))


def _parts(vector: Float[Tensor, " N"], sizes: list[int]) -> list[Tensor]:
    return [*vector.split(sizes), vector]
