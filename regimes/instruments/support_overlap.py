"""Support overlap: how many of their largest coordinates do two stochastic gradients share?

The paper's Figure 4a (section 4.3) says more than 90 % of the top 10 %, and takes from it that a
large batch and a highly compressed gradient pick up the same coordinates. Here, at the end of an
epoch and with the weights as they then are: a few of that epoch's training batches, drawn by seed;
the gradient of each; and for every pair of them |support intersection| / K, for the whole model's
gradient and for each layer's. Two independent random supports of K among N coordinates share K / N
of K on average (the hypergeometric mean K K / N, over K): "chance".

Each gradient is what the loop would compute for a worker that is handed that batch: the model in
train mode, BatchNorm with the statistics of the whole batch (one pass, so memory grows with it),
dropout from a stream of its own; in the model's dtype, without autocast. Running statistics stay.

Worker w computes draws w, w + W, ...; supports travel as bits, counted as signal bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regimes.base.config import Bounded, Bounds
from regimes.base.config.bounds import Count
from regimes.base.errors import ConfigError, TrainingError, require
from regimes.base.reduction import Batch
from regimes.base.seeding import derive_seed, seed_generators
from regimes.base.torch_compat import BatchNorm
from regimes.collectives.comm import signals
from regimes.compression.sparse import num_kept, top_indices
from regimes.instruments.base import EndOfEpochGauge, MeasurementContext, Reading
from regimes.instruments.hessian.probe import preserve_model

Pair = Annotated[int, Bounds("at least 2", low=2)]  # gradients to compare


@dataclass(frozen=True)
class Overlap(Bounded):
    """Measures how many of the largest coordinates two stochastic gradients have in common (the
    paper's Figure 4a).

    Attributes:
        every: Measure at the end of every this many units.
        percent: K, the percentage of the coordinates that are compared, in (0, 100].
        batches: The numbers of samples of a stochastic gradient. Each size is a measurement of its
            own.
        count: The number of gradients that are drawn for each size, at least 2, or as many as the
            training set has disjoint batches. All pairs of them are compared.
        layers: Also compare the top K percent of each layer by itself.
    """

    bounds_prefix = "instruments.overlap."

    every: Count = 1
    percent: Annotated[float, Bounds("a percentage in (0, 100]", above=0, high=100)] = 10.0
    batches: tuple[Count, ...] = (32, 128, 512)
    count: Pair = 8
    layers: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.batches), "instruments.overlap.batches", [], "one size or more")

    def start(self, context: MeasurementContext) -> OverlapGauge:
        return OverlapGauge(self, context)


class OverlapGauge(EndOfEpochGauge):
    def __init__(self, options: Overlap, context: MeasurementContext) -> None:
        self.options, self.context = options, context
        self.draws = {batch: drawable(context, options.count, batch) for batch in options.batches}
        self.sizes, self.size = context.sizes, sum(context.sizes)

    def read(self, epoch: int) -> Reading:
        """Return ``overlap:b<size>``, mean over pairs: one for the model, one per layer.

        Detail, per size: draws, pairs, mean, sd over pairs (which share draws, so they are not
        independent; None for one pair), min, max. ``chance`` K / N, and of each layer.
        """
        percent = self.options.percent
        chances = [num_kept(percent, n) / n for n in self.sizes]
        detail: dict[str, Any] = {
            "percent": percent,
            "chance": num_kept(percent, self.size) / self.size,
            "chance_layers": chances if self.options.layers else None,
            "sizes": {},
        }
        reading = Reading(detail=detail)
        for batch, count in self.draws.items():
            masks = self._supports(epoch, batch, count)
            overlaps = pair_overlaps(masks[:, 0], num_kept(percent, self.size)).tolist()
            reading.model[f"overlap:b{batch}"] = statistics.mean(overlaps)
            sd = statistics.stdev(overlaps) if len(overlaps) > 1 else None
            detail["sizes"][str(batch)] = {
                "draws": count,
                "pairs": len(overlaps),
                "mean": statistics.mean(overlaps),
                "sd": sd,
                "min": min(overlaps),
                "max": max(overlaps),
            }
            if self.options.layers:
                reading.layers[f"overlap:b{batch}"] = [
                    pair_overlaps(part, num_kept(percent, part.shape[1])).mean().item()
                    for part in masks[:, 1].split(self.sizes, dim=1)
                ]
        return reading

    def _supports(self, epoch: int, batch: int, count: int) -> Bool[Tensor, "draws kinds N"]:
        """Every draw's support, on every process. Kinds: the whole model's, the layers'."""
        world, kinds = self.context.world, 1 + self.options.layers
        rows, width = -(-count // world.workers), -(-kinds * self.size // 8)
        device = self.context.parameters[0].device
        packed = torch.zeros(world.hosted_count, rows, width, dtype=torch.uint8, device=device)
        with drawn_gradients(self.context, epoch, count, batch) as gradient:
            for row, worker in enumerate(world.hosted):
                for place, draw in enumerate(range(worker, count, world.workers)):
                    masks = self._masks(gradient(draw, "overlap", epoch, batch))
                    bits = np.packbits(masks.flatten().cpu().numpy())
                    packed[row, place] = torch.from_numpy(bits).to(masks.device)
        (everyone,) = signals(world).gather([packed])  # [W, rows, bytes]
        in_order = everyone.transpose(0, 1).flatten(0, 1)[:count]
        unpacked = np.unpackbits(in_order.cpu().numpy(), axis=1, count=kinds * self.size)
        masks = torch.from_numpy(unpacked).to(device).bool().view(count, kinds, self.size)
        if not masks.any(2).all():
            raise TrainingError(  # on every process
                f"the overlap instrument got a gradient that is not finite in epoch {epoch}, batch "
                f"size {batch}: lower optimizer.lr; the record up to the epoch before is intact"
            )
        return masks

    def _masks(self, gradient: Float[Tensor, " N"]) -> Bool[Tensor, "kinds N"]:
        """Empty for a gradient that is not finite."""
        if not gradient.isfinite().all():
            empty = torch.zeros_like(gradient, dtype=torch.bool)
            return empty.expand(1 + self.options.layers, -1)
        kinds = [support(gradient, self.options.percent)]
        if self.options.layers:
            parts = gradient.split(self.sizes)
            kinds.append(torch.cat([support(part, self.options.percent) for part in parts]))
        return torch.stack(kinds)


def support(values: Float[Tensor, " n"], percent: float) -> Bool[Tensor, " n"]:
    """Mark where the top ``percent`` by magnitude are; ties go to the smaller index, as in TopK."""
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask[top_indices(values, num_kept(percent, values.numel())).long()] = True
    return mask


def pair_overlaps(masks: Bool[Tensor, "draws n"], k: int) -> Float[Tensor, " pairs"]:
    """Compute |intersection| / k of every pair (a, b), a < b, of supports of ``k`` coordinates."""
    indicator = masks.float()  # counts stay exact below 2^24
    common = indicator @ indicator.T
    a, b = torch.triu_indices(len(masks), len(masks), 1, device=masks.device)
    return common[a, b].double() / k


def drawable(context: MeasurementContext, wanted: int, batch: int) -> int:
    """Count the disjoint batches of this size that an epoch has, up to ``wanted``; ConfigError for
    fewer than two."""
    for count in range(wanted, 1, -1):
        with suppress(ConfigError):
            context.samples(0, count, batch)
            return count
    raise ConfigError(
        f"overlap.batches has {batch}: the training set does not hold two batches of that size; "
        "take at most half of data.train_size"
    )


@contextmanager
def drawn_gradients(
    context: MeasurementContext, epoch: int, count: int, batch: int
) -> Iterator[Callable[..., Tensor]]:
    """Give ``gradient(draw, *key)``, which computes the gradient of one of ``count`` batches, [N],
    as the module has it.

    The key and the draw seed the random numbers (dropout).
    """
    batches = context.samples(epoch, count, batch)

    def gradient(draw: int, *key: str | int) -> Float[Tensor, " N"]:
        seed_generators(derive_seed(context.seed, *key, draw), context.parameters[0].device)
        return batch_gradient(context, batches[draw])

    with preserve_model(context.model):
        train_on_batch_statistics(context.model)
        yield gradient


def batch_gradient(context: MeasurementContext, batch: Batch) -> Float[Tensor, " N"]:
    """Compute the gradient of the loss on a batch; zero where the loss does not depend on a
    parameter."""
    loss = context.loss(context.model, *batch)
    parts = torch.autograd.grad(loss, context.parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def train_on_batch_statistics(model: nn.Module) -> None:
    """Set train mode, in which every BatchNorm normalises with the whole batch and keeps no
    statistics.

    A BatchNorm in eval mode without running statistics does so, whatever the loop has set up for
    its own passes. For use within ``preserve_model``, which puts all back.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval()
            module.running_mean = module.running_var = None
