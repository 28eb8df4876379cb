"""What is trained: a data set, the loss on its batches and the metric on its test set.

The loop knows a `Task` by this protocol only. `ImageTask` classifies images (`regimes.data`);
`regimes.text` has the language model on a token stream. Used by `regimes.setup` and the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regimes import data, models
from regimes.config import RunConfig
from regimes.deficits import deficit
from regimes.errors import ConfigError
from regimes.gradients import Loss
from regimes.instruments.base import Batch
from regimes.seeding import derive, stream
from regimes.world import World


@runtime_checkable
class Batches(Protocol):
    """The training batches of a run at one batch size (see ``regimes.data.Batches``)."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __len__(self) -> int:
        """Steps per epoch."""
        ...

    def rebatched(self, batch_size: int, workers: int | None = None) -> Batches:
        """The same samples in the same order, in batches of another size."""
        ...

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[L, b, ...]`` of the given workers, from step ``start`` on."""
        ...


@runtime_checkable
class Task(Protocol):
    """See the module's docstring.

    Attributes:
        metric: its name, "accuracy" or "perplexity".
        digest: SHA-256 of all samples; equal on all processes, or they hold different data.
        size: training samples.
        loss: of a batch, without any state carried over from the batch before.
        splits: whether a batch may be cut into micro-batches that are accumulated.
    """

    metric: str
    digest: str
    size: int
    loss: Loss
    splits: bool

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
        self, model: nn.Module, device: torch.device, dtype: torch.dtype
    ) -> tuple[float, float]:
        """(mean loss in nats, metric) on the test set, in evaluation mode."""
        ...

    def probe(self, batches: Any, world: World, size: int, batch: int) -> list[Batch]:
        """See `regimes.instruments.base.Scene`."""
        ...

    def samples(self, batches: Any, seed: int, epoch: int, count: int, batch: int) -> list[Batch]:
        """See `regimes.instruments.base.Scene`."""
        ...


def load(config: RunConfig) -> Task:
    """The task that a configuration names.

    Raises:
        ConfigError, DataError: one sentence.
    """
    if config.data.name == "wikitext-2":
        from regimes.text import TextTask

        return TextTask(config)
    return ImageTask(config)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(model(x), y)


class ImageTask:
    """Classification of images; the metric is the accuracy on the test set."""

    metric = "accuracy"
    splits = True

    def __init__(self, config: RunConfig) -> None:
        self.images = data.load(config.data)
        self.digest, self.size = self.images.digest, len(self.images.train_y)
        self.loss: Loss = cross_entropy

    def header(self) -> dict[str, Any]:
        return {"digest": self.digest, "train": self.size, "test": len(self.images.test_y),
                "classes": list(self.images.classes)}  # fmt: skip

    def build(self, config: RunConfig) -> nn.Module:
        _, channels, size, _ = self.images.train_x.shape
        return build(config, classes=len(self.images.classes), channels=channels, image_size=size)

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> data.Batches:
        return data.Batches(
            self.images, config.data, seed=config.seed, workers=config.workers,
            batch_size=config.batch_size, device=device, dtype=dtype,
            channels_last=config.channels_last, deficit=deficit(config.deficit),
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype
    ) -> tuple[float, float]:
        model.eval()
        loss = correct = count = 0.0
        for x, y in data.evaluation_batches(self.images, "test", 500, device, dtype):
            logits = model(x)
            loss += F.cross_entropy(logits, y, reduction="sum").item()
            correct += (logits.argmax(1) == y).sum().item()
            count += len(y)
        return loss / count, correct / count

    def probe(self, batches: data.Batches, world: World, size: int, batch: int) -> list[Batch]:
        mine = probe_share(world, size, batch, self.size, "images", "the training set")
        x = batches.normalise(self.images.train_x[mine].to(batches.device))
        y = self.images.train_y[mine].to(batches.device)
        return list(zip(x.split(batch), y.split(batch), strict=True))

    def samples(
        self, batches: data.Batches, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        whole = self.size // batch
        if count > whole:
            raise ConfigError(
                f"{count} batches of {batch} images: the training set has {whole} such batches"
            )
        seen = batches.rebatched(batch, workers=1)
        order = torch.randperm(whole, generator=stream(seed, "samples", epoch))
        drawn = (next(seen.epoch(epoch, [0], start)) for start in order[:count].tolist())
        return [(x[0], y[0]) for x, y in drawn]


def probe_share(
    world: World, size: int, batch: int, whole: int, samples: str, source: str
) -> slice:
    """This process's equal part, in full batches, of a probe of `size` out of `whole` samples.

    Raises:
        ConfigError: too many samples, or no equal parts; says what `samples` and `source` are.
    """
    share = batch * world.processes
    if not 0 < size <= whole or size % share:
        raise ConfigError(
            f"a probe of {size} {samples} in batches of {batch}: expected a multiple of {share} "
            f"(batch x processes) of at most {whole}, {source}"
        )
    here = size // world.processes
    return slice(world.rank * here, (world.rank + 1) * here)


def build(config: RunConfig, **shape: Any) -> nn.Module:
    """The configured network for inputs of a shape, initialised from the run's seed alone."""
    m = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init"))
        choices: dict[str, Any] = {"width": m.width, "depth": m.depth, "dropout": m.dropout}
        return models.build(m.name, **choices, **shape)
