"""The protocol of a task: a data set, the loss on its batches, the metric on its test set.

The trainer knows a task by this protocol only. `regimes.data.classification` implements it for
images, `regimes.data.language` for texts; `regimes.data.load_task` chooses one. Another task is a
class that takes the configuration; ``data.name`` is its ``package.module:Class``.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from regimes.base.config import ModelConfig, RunConfig
from regimes.base.errors import ConfigError, DataError
from regimes.base.reduction import Batch, Loss
from regimes.base.seeding import derive_seed, make_generator
from regimes.collectives.world import Evaluators, World
from regimes.data import models


class Batches(ABC):
    """Gives the training batches of a run at one batch size (see ``images.ImageBatches``)."""

    dtype: torch.dtype
    workers: int
    batch_size: int  # per worker
    steps: int  # per epoch

    @abstractmethod
    def _set(self, batch_size: int) -> None:
        """Set ``batch_size`` and ``steps``."""

    @abstractmethod
    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets ``[L, b, ...]`` of some workers, from step ``start`` on."""

    def __len__(self) -> int:
        return self.steps

    def rebatched(self, batch_size: int, workers: int | None = None) -> Any:  # of the same class
        """Return the same samples in the same order, in batches of another size; copies no
        tensor."""
        other = copy.copy(self)
        other.workers = workers or self.workers
        other._set(batch_size)
        return other


class Shuffled(Batches):
    """Gives samples in a new order each epoch: step k takes the next W x b, and of these worker w
    takes the positions w, w + W, w + 2 W, ..."""

    seed: int
    count: int  # samples per epoch
    drop_last: bool
    reshuffle: bool  # False: one order for all epochs
    unit: ClassVar[str]  # of a sample, in errors

    def order(self, epoch: int) -> Int64[Tensor, " n"]:
        """Draw the permutation of one epoch, on the CPU."""
        key = epoch if self.reshuffle else 0
        return torch.randperm(self.count, generator=make_generator(self.seed, "order", key))

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
        """The samples of a step. A short last batch is filled up from the start of the order to a
        multiple of W, because gradients are averaged over workers with equally many samples."""
        first = step * self.workers * self.batch_size
        rows = min(self.batch_size, -(-(len(order) - first) // self.workers))
        positions = torch.arange(first, first + rows * self.workers, device=order.device)
        return order[positions % len(order)].view(rows, self.workers)


ALONE = World(1).evaluators


@runtime_checkable
class Task(Protocol):
    """Says what a run trains on: a data set, the network for it, the loss and the metric."""

    metric: str  # "accuracy", "perplexity" or "bits per byte"
    digest: str  # SHA-256 of all samples, compared between processes
    size: int  # training samples
    loss: Loss  # of a batch, without any state carried over from the batch before (`reduction`)
    splits: bool  # whether a batch may be cut into micro-batches that are accumulated

    @property
    def classes(self) -> int:
        """Return the number of outputs of the network."""

    def header(self) -> dict[str, Any]:
        """Return the data's entry in the record's header."""

    def build(self, config: RunConfig) -> nn.Module:
        """Build the network, initialised from the run's seed alone."""

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> Batches:
        """Make the training batches at ``config.batch_size``."""

    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = ALONE,
    ) -> tuple[float, float]:
        """Return (mean loss in nats, metric) on the test set, in evaluation mode. A collective
        call: the same bits on every process, whatever their number."""

    def validate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = ALONE,
    ) -> tuple[float, float]:
        """Do the same on the ``data.validation_size`` held-out samples; DataError without any."""

    def extra_metrics(self, loss: float) -> dict[str, float]:
        """Compute further metrics that follow from a mean test loss, by their names in the
        record."""

    def probe(self, batches: Any, world: World, size: int, batch: int) -> list[Batch]:
        """Return this process's part of ``size`` fixed training samples, in batches of ``batch``,
        on which instruments measure."""

    def samples(self, batches: Any, seed: int, epoch: int, count: int, batch: int) -> list[Batch]:
        """Draw ``count`` batches of ``batch`` training samples of an epoch, for instruments; the
        seed and the epoch decide which."""


def own_batches(evaluators: Evaluators) -> Iterator[int]:
    """Count the indices of this process's evaluation batches: every P-th, for P processes."""
    return itertools.count(evaluators.rank, evaluators.processes)


def sum_over_processes(
    evaluators: Evaluators, own: Mapping[int, Float64[Tensor, " k"]]
) -> list[float]:
    """Sum ``k`` numbers over all batches of an evaluation, on every process.

    Args:
        own: of this process's batches, by batch number.
    """
    # One transfer from the device for all batches, in place of one per batch.
    numbers = torch.stack(list(own.values())).tolist() if own else []
    gathered = evaluators.gather_object(list(zip(own, numbers, strict=True)))
    # Added in batch order, so the rounding does not depend on the number of processes; without
    # sum(), which rounds differently from Python 3.12 on.
    (_, sums), *rest = sorted(batch for batches in gathered for batch in batches)
    for _, numbers in rest:
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
    return sums


def probe_share(world: World, size: int, batch: int, available: int, source: str) -> slice:
    """Return this process's equal part, in full batches, of a probe of ``size`` samples;
    ConfigError if there is none."""
    share = batch * world.processes
    if not 0 < size <= available or size % share:
        raise ConfigError(
            f"a probe of {size} in batches of {batch}: expected a multiple of {share} "
            f"(batch x processes) of at most {available}, {source}: set images and batch of the "
            "instrument that takes it, e.g. instruments.curvature.images"
        )
    part = size // world.processes
    return slice(world.rank * part, (world.rank + 1) * part)


def draw_distinct(
    seed: int, epoch: int, count: int, below: int, what: str
) -> Int64[Tensor, " count"]:
    """Draw distinct random integers from 0 to ``below`` - 1; ConfigError if there are too few."""
    if count > below:
        raise ConfigError(f"{what}: the training data hold {below}, expected at least {count}")
    return torch.randperm(below, generator=make_generator(seed, "samples", epoch))[:count]


def training_batches(
    batches: Shuffled, seed: int, epoch: int, count: int, batch: int
) -> list[Batch]:
    """Draw ``count`` random batches of an epoch as one worker trains on them, augmentation
    included."""
    below = batches.count // batch
    steps = draw_distinct(seed, epoch, count, below, f"batches of {batch} {batches.unit}")
    alone = batches.rebatched(batch, workers=1)
    stacked = (next(alone.epoch(epoch, [0], step)) for step in steps.tolist())
    return [(x[0], y[0]) for x, y in stacked]


def split_batches(x: Tensor, y: Tensor, batch: int) -> list[Batch]:
    """Split samples ``[n, ...]`` and targets into batches of a size; the last may be short."""
    return list(zip(x.split(batch), y.split(batch), strict=True))


def build_network(model: ModelConfig, seed: int, **shape: Any) -> nn.Module:
    """Build the configured network for inputs of a shape, initialised from the run's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return models.build_model(**vars(model), **shape)
