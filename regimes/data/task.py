"""The protocol of a task: a data set, the loss on its batches, the metric on its test set.

The trainer knows a task by this protocol only. `regimes.data.classification` keeps it for images,
`regimes.data.language` for texts; `regimes.data.registry` says which one a configuration names.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from regimes import models
from regimes.collectives.world import World
from regimes.config import RunConfig
from regimes.errors import ConfigError, DataError
from regimes.models.loss import Batch, Loss
from regimes.seeding import derive, stream


@runtime_checkable
class Batches(Protocol):
    """The training batches of a run at one batch size (see ``images.ImageBatches``)."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __len__(self) -> int:
        """Steps per epoch."""
        ...

    def rebatched(self, batch_size: int, workers: int | None = None) -> Batches:
        """The same samples in the same order, in batches of another size; copies no tensor."""
        ...

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[L, b, ...]`` of the given workers, from step ``start`` on."""
        ...


class Rebatched(ABC):
    """The part of ``Batches`` that all data sets share: a batch size, and steps that follow."""

    workers: int
    batch_size: int  # per worker
    steps: int  # per epoch

    @abstractmethod
    def _set(self, batch_size: int) -> None:
        """Set the batch size and the steps."""

    def __len__(self) -> int:
        return self.steps

    def rebatched(self, batch_size: int, workers: int | None = None) -> Any:  # of the same class
        other = copy.copy(self)
        other.workers = workers or self.workers
        other._set(batch_size)
        return other


class Shuffled(Rebatched):
    """Samples in an order of each epoch: step k takes the next W x b of them, and worker w those
    at positions w, w + W, w + 2 W, ... of these."""

    count: int  # samples of an epoch
    drop_last: bool
    unit: str  # what a sample is called

    def _set(self, batch_size: int) -> None:
        union = self.workers * batch_size
        self.batch_size = batch_size
        self.steps = self.count // union if self.drop_last else -(-self.count // union)
        if self.steps == 0:
            raise DataError(
                f"A global batch of {self.workers} x {batch_size} = {union} {self.unit} with "
                f"drop_last leaves no step: the training set has {self.count}. Lower batch_size or "
                "workers."
            )

    def _union(self, order: Int64[Tensor, " n"], step: int) -> Int64[Tensor, "b W"]:
        """The step's part of an epoch's order. A short last batch is filled up to a multiple of W
        from the order's start, so all workers always have equally many."""
        first = step * self.workers * self.batch_size
        rows = min(self.batch_size, -(-(len(order) - first) // self.workers))
        positions = torch.arange(first, first + rows * self.workers, device=order.device)
        return order[positions % len(order)].view(rows, self.workers)


ALONE = World(1)


@runtime_checkable
class Task(Protocol):
    """See the module's docstring."""

    metric: str  # "accuracy", "perplexity" or "bits per byte"
    digest: str  # SHA-256 of all samples; equal on all processes, or they hold different data
    size: int  # training samples
    loss: Loss  # of a batch, without any state carried over from the batch before
    splits: bool  # whether a batch may be cut into micro-batches that are accumulated

    @property
    def classes(self) -> int:
        """Outputs of the network."""
        ...

    def header(self) -> dict[str, Any]:
        """What the record's header says of the data."""
        ...

    def build(self, config: RunConfig) -> nn.Module:
        """The network, initialised from the run's seed alone."""
        ...

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> Batches:
        """The training batches at ``config.batch_size``."""
        ...

    def evaluate(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, world: World = ALONE
    ) -> tuple[float, float]:
        """(mean loss in nats, metric) on the test set, in evaluation mode: the same bits on every
        process of ``world`` and for any number of them, which all call this."""
        ...

    def validate(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, world: World = ALONE
    ) -> tuple[float, float]:
        """The same on the samples held out by ``data.validation_size``; DataError without any."""
        ...

    def extra_metrics(self, loss: float) -> dict[str, float]:
        """What the record says of a mean test loss, besides the metric: its name and value."""
        ...

    def probe(self, batches: Any, world: World, size: int, batch: int) -> list[Batch]:
        """See `regimes.instruments.base.MeasurementContext`."""
        ...

    def samples(self, batches: Any, seed: int, epoch: int, count: int, batch: int) -> list[Batch]:
        """See `regimes.instruments.base.MeasurementContext`."""
        ...


def turns(world: World) -> Iterator[int]:
    """Which batches of an evaluation are this process's: each P-th."""
    return itertools.count(world.rank, world.processes)


def summed(world: World, mine: Mapping[int, Float64[Tensor, " k"]]) -> list[float]:
    """The sums of ``k`` numbers over all batches of an evaluation, added in the order of the
    batches, so that they do not depend on who has which.

    Args:
        mine: this process's batches, by their number; they are waited for once.
    """
    numbers = torch.stack(list(mine.values())).tolist() if mine else []
    told = world.gather_object(list(zip(mine, numbers, strict=True)))
    (_, total), *rest = sorted(batch for one in told for batch in one)
    for _, numbers in rest:  # not by sum(), which rounds otherwise from Python 3.12 on
        total = [a + b for a, b in zip(total, numbers, strict=True)]
    return total


def probe_share(world: World, size: int, batch: int, whole: int, source: str) -> slice:
    """This process's equal part, in full batches, of a probe of `size` out of `whole` samples."""
    share = batch * world.processes
    if not 0 < size <= whole or size % share:
        raise ConfigError(
            f"a probe of {size} in batches of {batch}: expected a multiple of {share} "
            f"(batch x processes) of at most {whole}, {source}"
        )
    here = size // world.processes
    return slice(world.rank * here, (world.rank + 1) * here)


def drawn(seed: int, epoch: int, wanted: int, whole: int, what: str) -> Int64[Tensor, " wanted"]:
    """``wanted`` different numbers below ``whole``, seeded."""
    if wanted > whole:
        raise ConfigError(f"{what}: the training data hold {whole}, expected at least {wanted}")
    return torch.randperm(whole, generator=stream(seed, "samples", epoch))[:wanted]


def pairs(x: Tensor, y: Tensor, batch: int) -> list[Batch]:
    return list(zip(x.split(batch), y.split(batch), strict=True))


def build(config: RunConfig, **shape: Any) -> nn.Module:
    """The configured network for inputs of a shape, initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init"))
        return models.build(**vars(config.model), **shape)
