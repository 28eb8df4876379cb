"""Completion of a matrix of low rank: some of its entries are trained on, all are tested on.

The setting of Kleinman, Achille & Soatto ("Critical Learning Periods Emerge Even in Deep Linear
Networks", 2024) after Arora et al. (2019): two normal factors, entries of root mean square 1, a
loss of half the mean squared error. The matrix and the places of the observed entries depend on
``data.rows``, ``data.rank`` and ``data.train_size`` alone; with the deficit `OtherMatrix` the
entries at the same places of another matrix are trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from regimes.collectives.world import Evaluators, World
from regimes.config import RunConfig
from regimes.data import task
from regimes.data.deficits import Deficit, GradientNoise, make_deficit
from regimes.data.task import Shuffled
from regimes.errors import DataError, require
from regimes.reduction import Batch, Loss
from regimes.seeding import make_generator

ROWS, RANK = 100, 5


def low_rank(rows: int, rank: int) -> Float64[Tensor, "rows rows"]:
    """The matrix of a rank, the same on every machine and for every seed of a run."""
    generator = make_generator("matrix", rows, rank)
    left, right = torch.randn(2, rows, rank, generator=generator, dtype=torch.float64)
    product = left @ right.T
    return product / product.square().mean().sqrt()


def half_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error of the entries."""
    return (model(x) - y).square().mean() / 2


@dataclass(frozen=True)
class OtherMatrix(Deficit):
    """The entries of another matrix, of ``rank``, in place of the task's (Kleinman, Achille &
    Soatto, 2024)."""

    only_for: ClassVar[str | None] = "matrix"
    rank: int = 10


class MatrixTask:
    """The metric is the mean squared error of all entries."""

    metric = "squared error"
    splits = True
    classes = 1

    def __init__(self, config: RunConfig) -> None:
        data = config.data
        self.rows = ROWS if data.rows is None else data.rows
        rank = RANK if data.rank is None else data.rank
        self.size = check(config, self.rows, rank)
        order = torch.randperm(self.rows**2, generator=make_generator("entries", self.rows))[
            : self.size
        ]
        self.places: Int64[Tensor, "n 2"] = torch.stack([order // self.rows, order % self.rows], 1)
        self.matrix = low_rank(self.rows, rank)
        self.loss: Loss = half_square
        digest = hashlib.sha256(self.places.numpy().tobytes())
        digest.update(self.matrix.numpy().round(9).tobytes())
        self.digest = digest.hexdigest()

    def header(self) -> dict[str, Any]:
        return {"digest": self.digest, "train": self.size, "test": self.rows**2}

    def build(self, config: RunConfig) -> nn.Module:
        return task.build_network(config, classes=self.classes, rows=self.rows)

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> Entries:
        change, targets = make_deficit(config.deficit), self.matrix
        if isinstance(change, OtherMatrix):
            targets = low_rank(self.rows, change.rank)
        right, wrong = (self.values(m).to(device, dtype) for m in (self.matrix, targets))
        return Entries(self.places.to(device), right, wrong, config, change)

    def values(self, matrix: Tensor) -> Tensor:
        """The observed entries of a matrix."""
        return matrix[self.places[:, 0], self.places[:, 1]]

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = task.ALONE,
    ) -> tuple[float, float]:
        model.eval()
        grid = torch.cartesian_prod(torch.arange(self.rows), torch.arange(self.rows)).to(device)
        residuals = model(grid).double() - self.matrix.flatten().to(device)
        error = float(residuals.square().mean())
        return error / 2, error

    def validate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = task.ALONE,
    ) -> tuple[float, float]:
        raise DataError("there are no entries for validation: all that are not observed are tested")

    def extra_metrics(self, loss: float) -> dict[str, float]:
        return {}

    def probe(self, batches: Entries, world: World, size: int, batch: int) -> list[Batch]:
        """The first observed entries."""
        mine = task.probe_share(world, size, batch, self.size, "the observed entries")
        return task.split_batches(batches.x[mine], batches.y[mine], batch)

    def samples(
        self, batches: Entries, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        chosen = task.draw_distinct(seed, epoch, count * batch, self.size, "observed entries")
        chosen = chosen.to(batches.x.device)
        return task.split_batches(batches.x[chosen], batches.y[chosen], batch)


class Entries(Shuffled):
    """The observed entries in batches; ``wrong`` are the values while a deficit acts."""

    def __init__(
        self, x: Tensor, y: Tensor, wrong: Tensor, config: RunConfig, deficit: Deficit
    ) -> None:
        self.x, self.y, self.wrong, self.deficit = x, y, wrong, deficit
        self.dtype, self.seed, self.workers = y.dtype, config.seed, config.workers
        self.reshuffle, self.drop_last = config.data.reshuffle, config.data.drop_last
        self.count, self.unit = len(y), "entries"
        self._set(config.batch_size)

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Int64[Tensor, "L b 2"], Tensor]]:
        order, values = self.order(epoch).to(self.x.device), self.y
        if self.deficit.active(epoch):
            values = self.wrong
        for step in range(start, self.steps):
            chosen = self._union(order, step)[:, list(workers)]
            yield self.x[chosen].transpose(0, 1), values[chosen].transpose(0, 1)


def check(config: RunConfig, rows: int, rank: int) -> int:
    """How many entries are observed.

    Raises:
        ConfigError: something is asked for that a matrix does not have.
    """
    data, size = config.data, config.data.train_size or rows**2
    unsupported = {
        "data.augment": data.augment,
        "data.image_size": data.image_size,
        "data.path": data.path,
        "data.test_size": data.test_size,
        "data.validation_size": data.validation_size,
        "channels_last": config.channels_last,
    }
    for name, value in unsupported.items():
        require(not value, name, value, "none, the data are a matrix")
    require(rows >= 2, "data.rows", rows, "at least 2")
    require(size <= rows**2, "data.train_size", size, f"at most all {rows**2} entries")
    ranks = {"data.rank": rank}
    change = make_deficit(config.deficit)
    if isinstance(change, OtherMatrix):
        ranks["deficit.rank"] = change.rank
    elif type(change) not in (Deficit, GradientNoise):
        expected = '"other-matrix" or "gradient-noise", those for a matrix'
        require(False, "deficit.name", (config.deficit or {})["name"], expected)
    for name, value in ranks.items():
        require(1 <= value <= rows, name, value, f"a rank from 1 to {rows}")
    return size
