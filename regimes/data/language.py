"""The language model's task: the next token of a text.

``data.windows`` says how the text is read (`regimes.data.windows`):

- "streams", the default of WikiText-2: W x b equal streams side by side, ``data.sequence`` tokens a
  step, the hidden state carried on, detached, from step to step of an epoch: truncated
  backpropagation through time (Mikolov et al., "Recurrent neural network based language model",
  2010). The order is that of the text in every epoch: ``data.reshuffle`` means nothing here.
- "contiguous" (the default elsewhere), "sampled": windows of ``data.sequence`` tokens that stand
  for themselves. No state is carried, and a batch may be cut into micro-batches.

The metric of words is the perplexity, exp of the mean loss per token, on the test file (the paper's
245k tokens, section 5.1). The curves that the authors published are of the validation file and
average the perplexities of windows, which is 1 % more. The metric of bytes and of byte pairs is the
bits per byte, the loss of all targets in bits over their bytes, which does not depend on how the
text is cut into tokens; the perplexity of a token is in the record beside it.

Stands on `regimes.data.wikitext` and `regimes.data.tokens`; `regimes.data.task` has the protocol
that is kept here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from regimes.collectives.world import World
from regimes.config import RunConfig
from regimes.data import task, tokens, wikitext
from regimes.data.deficits import Deficit, deficit
from regimes.data.windows import Layout, Streams, Windows, covering, cut, number, take
from regimes.errors import DataError, require
from regimes.models.loss import Batch, Loss

TEST_STREAMS = 10  # side by side in the evaluation
LOGITS = 2**22  # of a batch of the evaluation of windows
BITS = "bits per byte"


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


def from_nothing(model: nn.Module, x: Tensor, y: Tensor) -> Float[Tensor, ""]:
    """`NextWord` without a state to carry: the loss of windows that stand for themselves."""
    return NextWord()(model, x, y)


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is no number any more."""
    return math.inf if loss >= 700 else math.exp(loss)


class TextTask:
    """Language modelling; the metric is the bits per byte, or the perplexity of words."""

    def __init__(self, config: RunConfig) -> None:
        check(config)
        data = config.data
        words = data.name == "wikitext-2"
        self.corpus = (wikitext if words else tokens).load(data)
        self.sequence = data.sequence
        self.layout: Layout = data.windows or ("streams" if words else "contiguous")
        self.digest, self.size = self.corpus.digest, len(self.corpus.train)
        self.metric = "perplexity" if self.corpus.lengths is None else BITS
        self.splits = self.layout != "streams"  # or a micro-batch takes over another's hidden state
        self.loss: Loss = NextWord()
        if self.layout != "streams":
            self.size, self.loss = self._windows(), from_nothing

    @property
    def classes(self) -> int:
        return len(self.corpus.words)

    def header(self) -> dict[str, Any]:
        c = self.corpus
        held = {} if c.validation is None else {"validation": len(c.validation)}
        return {
            "digest": self.digest,
            "train": len(c.train),
            "test": len(c.test),
            **held,
            "words": len(c.words),
            **c.facts,
        }

    def build(self, config: RunConfig) -> nn.Module:
        return task.build(config, classes=len(self.corpus.words), sequence=self.sequence)

    def batches(
        self, config: RunConfig, device: torch.device, dtype: torch.dtype
    ) -> Streams | Windows:
        ids, sizes = self.corpus.train.to(device), (config.workers, config.batch_size)
        options: dict[str, Any] = dict(zip(("workers", "batch_size"), sizes, strict=True))
        options |= {"dtype": dtype, "drop_last": config.data.drop_last}
        if self.layout == "streams":
            return Streams(ids.long(), self.sequence, **options)
        options |= {"seed": config.seed, "reshuffle": config.data.reshuffle}
        return Windows(ids, self.sequence, self.layout, **options)

    def evaluate(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, world: World = task.ALONE
    ) -> tuple[float, float]:
        """(mean loss in nats, metric): over `TEST_STREAMS` streams with their state carried, by
        process 0 alone, or over windows that cover the text, each from an empty context."""
        self.corpus = self.corpus.tested_on(device)
        return self._evaluated(model, self.corpus.test, world)

    def validate(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, world: World = task.ALONE
    ) -> tuple[float, float]:
        self.corpus = self.corpus.tested_on(device)
        if self.corpus.validation is None:
            raise DataError("there is no text for validation: set data.validation_size")
        return self._evaluated(model, self.corpus.validation, world)

    def extra_metrics(self, loss: float) -> dict[str, float]:
        """The perplexity of a token, where it is not the metric."""
        return {"perplexity": perplexity(loss)} if self.metric == BITS else {}

    @torch.no_grad()
    def _evaluated(
        self, model: nn.Module, ids: Integer[Tensor, " tokens"], world: World
    ) -> tuple[float, float]:
        model.eval()
        mine, lengths, hidden = {}, self.corpus.lengths, None
        for place, (inputs, targets) in self._shared(ids, world):
            carried: Any = hidden if self.layout == "streams" else None
            loss, hidden = NextWord().carry(model, inputs, targets, carried)
            tokens = torch.full_like(loss, targets.numel(), dtype=torch.float64)
            bytes_ = torch.zeros_like(tokens) if lengths is None else lengths[targets].sum()
            mine[place] = torch.stack([loss.double() * tokens, tokens, bytes_])
        total, count, size = task.summed(world, mine)
        mean = total / count
        return mean, perplexity(mean) if lengths is None else total / math.log(2) / size

    def _shared(
        self, ids: Integer[Tensor, " tokens"], world: World
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """This process's pieces, with their places. A state that is carried keeps them together."""
        pieces = self._pieces(ids)
        if self.layout == "streams":
            yield from enumerate(pieces) if world.rank == 0 else ()
            return
        own = itertools.islice(pieces, world.rank, None, world.processes)
        yield from zip(task.turns(world), own, strict=False)

    def _pieces(self, ids: Integer[Tensor, " tokens"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[b, time]`` in the order of their evaluation."""
        if self.layout != "streams":
            batch = max(1, LOGITS // (self.sequence * len(self.corpus.words)))
            yield from covering(ids, self.sequence, batch)
            return
        parts = cut(ids.long(), min(TEST_STREAMS, len(ids) - 1))
        yield from zip(*(part.split(self.sequence, 1) for part in parts), strict=True)

    def probe(self, batches: Streams | Windows, world: World, size: int, batch: int) -> list[Batch]:
        """Windows of ``data.sequence`` tokens at equal distances over the training text."""
        whole = self._windows()
        source = f"the training text in windows of {self.sequence} tokens"
        mine = task.probe_share(world, size, batch, whole, source)
        spread = torch.arange(size) * whole // size
        return self._take(spread[mine], batch, batches)

    def samples(
        self, batches: Streams | Windows, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        """Windows of ``data.sequence`` tokens, no two of them overlapping."""
        what = f"windows of {self.sequence} tokens"
        chosen = task.drawn(seed, epoch, count * batch, self._windows(), what)
        return self._take(chosen, batch, batches)

    def _windows(self) -> int:
        return number(self.corpus.train, self.sequence)

    def _take(
        self, windows: Int64[Tensor, " n"], batch: int, batches: Streams | Windows
    ) -> list[Batch]:
        firsts = (windows * self.sequence).to(batches.device)
        return task.pairs(*take(batches.ids, firsts, self.sequence), batch)


def check(config: RunConfig) -> None:
    """Raise ConfigError if something is asked for that a text does not have."""
    data = config.data
    require(data.sequence >= 1, "data.sequence", data.sequence, "at least 1 token")
    of_images = {
        "data.augment": data.augment,
        "data.image_size": data.image_size,
        "data.resize": data.resize,
        "data.test_share": data.test_share,
        "data.split_seed": data.split_seed,
        "channels_last": config.channels_last,
    }
    for name, value in of_images.items():
        require(not value, name, value, "none, the data are a text")
    if data.name == "wikitext-2":
        require(data.tokenizer is None, "data.tokenizer", data.tokenizer, "none, there are words")
    else:
        sized = data.tokenizer == "bpe" or data.vocabulary is None
        require(sized, "data.vocabulary", data.vocabulary, 'none, or data.tokenizer = "bpe"')
    if data.name in ("stdlib", "synthetic-text"):
        require(data.path is None, "data.path", data.path, f"none for {data.name}")
    worse = type(deficit(config.deficit))
    if worse.inputs is not Deficit.inputs or worse.labels is not Deficit.labels:
        name = (config.deficit or {})["name"]
        require(False, "deficit.name", name, '"gradient-noise", the only one for a text')
