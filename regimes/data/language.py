"""The language model's task: the next word of a text, by truncated backpropagation through time.

The training text is cut into W x b equal streams that are read side by side, ``data.sequence``
tokens a step, and the hidden state runs on, detached, from step to step of an epoch (Mikolov et
al., "Recurrent neural network based language model", 2010). Worker w reads the streams w, w + W,
w + 2 W, ... of them, so what is read at a step depends on the text, W x b and the window alone.
The order is that of the text in every epoch: ``data.reshuffle`` means nothing here.

The metric is the perplexity, exp of the mean loss per token, on the test file (the paper's 245k
tokens, section 5.1). The curves that the authors published are of the validation file and average
the perplexities of windows, which is 1 % more.

Stands on `regimes.data.wikitext`; `regimes.data.task` has the protocol that is kept here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from regimes.collectives.world import World
from regimes.config import RunConfig
from regimes.data import task, wikitext
from regimes.data.deficits import Deficit, deficit
from regimes.errors import DataError, require
from regimes.models.loss import Batch, Loss

TEST_STREAMS = 10  # side by side in the evaluation
Ids = Int64[Tensor, "streams time"]


def cut(ids: Int64[Tensor, " tokens"], streams: int) -> tuple[Ids, Ids]:
    """Inputs and targets of so many equal streams, which follow each other in the text.

    Views. Each token but the first and the last (n - 1) mod ``streams`` is a target once; a
    stream's last target is the next stream's first input.
    """
    length = (len(ids) - 1) // streams
    used = length * streams
    return ids[:used].view(streams, length), ids[1 : used + 1].view(streams, length)


class NextWord:
    """Mean cross-entropy of the next words, in nats; a `models.loss.CarryingLoss` loss."""

    def __call__(
        self, model: nn.Module, x: Int64[Tensor, "b time"], y: Int64[Tensor, "b time"]
    ) -> Float[Tensor, ""]:
        """From a hidden state of zeros."""
        return self.carry(model, x, y, None)[0]

    def carry(
        self, model: nn.Module, x: Int64[Tensor, "b time"], y: Int64[Tensor, "b time"], hidden: Any
    ) -> tuple[Float[Tensor, ""], Any]:
        """The loss and the state after it, detached; ``hidden`` None is a state of zeros."""
        logits, hidden = model(x, hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss, hidden and tuple(state.detach() for state in hidden)


class Streams(task.Rebatched):
    """The training batches: W x b streams of one text (see the module)."""

    def __init__(
        self, ids: Int64[Tensor, " tokens"], sequence: int, *, workers: int, batch_size: int,
        dtype: torch.dtype = torch.float32, drop_last: bool = False,
    ) -> None:  # fmt: skip
        self.ids, self.sequence, self.workers = ids, sequence, workers
        self.dtype, self.device, self.drop_last = dtype, ids.device, drop_last
        self._set(batch_size)

    def _set(self, batch_size: int) -> None:
        length = (len(self.ids) - 1) // (self.workers * batch_size)
        if length < self.sequence:
            raise DataError(
                f"{self.workers} workers x {batch_size} streams of {len(self.ids)} training tokens "
                f"have {length} tokens each, fewer than data.sequence = {self.sequence}: lower "
                "batch_size or data.sequence, or raise data.train_size"
            )
        self.batch_size = batch_size
        self.steps = length // self.sequence if self.drop_last else -(-length // self.sequence)

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Int64[Tensor, "L b time"], Int64[Tensor, "L b time"]]]:
        """The windows of the hosted `workers`' streams, from step `start` on; the last is short
        where ``sequence`` does not divide the streams.

        For ``workers=range(W)``, ``x.transpose(0, 1).flatten(0, 1)`` is all streams in the order of
        the text, and a view.
        """
        hosted = torch.tensor(list(workers), device=self.device)
        x, y = (
            part.unflatten(0, (self.batch_size, self.workers))[:, hosted]  # [b, L, length]
            for part in cut(self.ids, self.workers * self.batch_size)
        )
        for step in range(start, self.steps):
            now = slice(step * self.sequence, (step + 1) * self.sequence)
            yield x[..., now].transpose(0, 1), y[..., now].transpose(0, 1)


class TextTask:
    """Language modelling on WikiText-2; the metric is the perplexity on the test file. Samples are
    tokens."""

    metric = "perplexity"
    splits = False  # a micro-batch would take over the hidden state of another

    def __init__(self, config: RunConfig) -> None:
        check(config)
        self.corpus = wikitext.load(config.data)
        self.sequence = config.data.sequence
        self.digest, self.size = self.corpus.digest, len(self.corpus.train)
        self.loss: Loss = NextWord()

    @property
    def classes(self) -> int:
        return len(self.corpus.words)

    def header(self) -> dict[str, Any]:
        return {"digest": self.digest, "train": self.size, "test": len(self.corpus.test),
                "words": len(self.corpus.words)}  # fmt: skip

    def build(self, config: RunConfig) -> nn.Module:
        return task.build(config, classes=len(self.corpus.words))

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> Streams:
        return Streams(
            self.corpus.train.to(device), self.sequence, workers=config.workers,
            batch_size=config.batch_size, dtype=dtype, drop_last=config.data.drop_last,
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype
    ) -> tuple[float, float]:
        """(mean loss in nats, perplexity), over `TEST_STREAMS` streams with their state carried."""
        model.eval()
        ids = self.corpus.test.to(device)
        x, y = cut(ids, min(TEST_STREAMS, len(ids) - 1))
        total, hidden = 0.0, None
        for inputs, targets in zip(*(part.split(self.sequence, 1) for part in (x, y)), strict=True):
            loss, hidden = NextWord().carry(model, inputs, targets, hidden)
            total += loss.item() * targets.numel()
        mean = total / y.numel()
        return mean, math.exp(mean) if mean < 700 else math.inf

    def probe(self, batches: Streams, world: World, size: int, batch: int) -> list[Batch]:
        """Windows of ``data.sequence`` tokens at equal distances over the training text."""
        whole = self._windows()
        source = f"the training text in windows of {self.sequence} tokens"
        mine = task.probe_share(world, size, batch, whole, source)
        spread = torch.arange(size) * whole // size
        return self._take(spread[mine], batch, batches)

    def samples(
        self, batches: Streams, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        """Windows of ``data.sequence`` tokens, no two of them overlapping."""
        what = f"windows of {self.sequence} tokens"
        chosen = task.drawn(seed, epoch, count * batch, self._windows(), what)
        return self._take(chosen, batch, batches)

    def _windows(self) -> int:
        return (self.size - 1) // self.sequence

    def _take(self, windows: Int64[Tensor, " n"], batch: int, batches: Streams) -> list[Batch]:
        text = cut(batches.ids[: self._windows() * self.sequence + 1], 1)
        x, y = (t.unflatten(1, (-1, self.sequence))[0, windows.to(t.device)] for t in text)
        return task.pairs(x, y, batch)


def check(config: RunConfig) -> None:
    """Raise ConfigError if something is asked for that a text does not have."""
    data = config.data
    require(data.sequence >= 1, "data.sequence", data.sequence, "at least 1 token")
    of_images = {"data.augment": data.augment, "data.image_size": data.image_size,
                 "channels_last": config.channels_last}  # fmt: skip
    for name, value in of_images.items():
        require(not value, name, value, "none, the data are a text")
    worse = type(deficit(config.deficit))
    if worse.inputs is not Deficit.inputs or worse.labels is not Deficit.labels:
        name = (config.deficit or {})["name"]
        require(False, "deficit.name", name, '"gradient-noise", the only one for a text')
