"""The language model's task: the next token of a text, in batches of `regimes.data.windows`.

WikiText-2 is read in "streams" by default. The hidden state is passed on, detached, from step to
step of an epoch: truncated backpropagation through time (Mikolov et al., "Recurrent neural network
based language model", 2010). Every epoch has the order of the text: ``data.reshuffle`` has no
effect. Of other texts the default is "contiguous": no state is passed on, and a batch may be cut
into micro-batches.

The metric of words is the perplexity, exp of the mean loss per token, on the test file (the paper's
245k tokens, section 5.1). The authors' published curves are of the validation file and average the
perplexities of windows, which is 1 % more. The metric of bytes and of byte pairs is bits per byte,
the loss of all targets in bits over their bytes; the record also has the perplexity per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from regimes.base.config import RunConfig
from regimes.base.errors import DataError, require
from regimes.base.precision import full_precision
from regimes.base.reduction import Batch, Loss, SampleMean, declare_reduction
from regimes.collectives.world import Evaluators, World
from regimes.data import task, tokens, wikitext
from regimes.data.deficits import Deficit, make_deficit
from regimes.data.tokens import Split
from regimes.data.windows import (
    Layout,
    Streams,
    TokenWindows,
    count_windows,
    cover_text,
    cut_streams,
    take_windows,
)

TEST_STREAMS = 10  # side by side in the evaluation
MAX_LOGITS = 2**22  # of an evaluation batch of windows
BITS = "bits per byte"


class NextWord:
    """Computes the mean cross-entropy of the next words, in nats; a `reduction.CarryingLoss`
    loss."""

    reduction = SampleMean()  # samples of a batch are equally long

    def __call__(
        self, model: nn.Module, x: Int64[Tensor, "b time"], y: Int64[Tensor, "b time"]
    ) -> Float[Tensor, ""]:
        return self.carry(model, x, y, None)[0]

    def carry(
        self, model: nn.Module, x: Int64[Tensor, "b time"], y: Int64[Tensor, "b time"], hidden: Any
    ) -> tuple[Float[Tensor, ""], Any]:
        """Return the loss and the next state, detached; ``hidden`` None is a state of zeros."""
        logits, hidden = model(x, hidden)
        loss = F.cross_entropy(full_precision(logits).flatten(0, 1), y.flatten())
        return loss, hidden and tuple(state.detach() for state in hidden)


@declare_reduction(SampleMean())
def _window_loss(model: nn.Module, x: Tensor, y: Tensor) -> Float[Tensor, ""]:
    """`NextWord` without ``carry``: the loss of independent windows."""
    return NextWord()(model, x, y)


def _perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)


class TextTask:
    """Models language; the metric is the bits per byte, or the perplexity of words."""

    def __init__(self, config: RunConfig) -> None:
        _check_options(config)
        data = config.data
        of_words = data.name == "wikitext-2"
        self.corpus = wikitext.load_wikitext(data) if of_words else tokens.load_tokens(data)
        self.sequence = data.sequence
        self.layout: Layout = data.windows or ("streams" if of_words else "contiguous")
        self.digest, self.size = self.corpus.digest, len(self.corpus.train)
        self.metric = "perplexity" if self.corpus.lengths is None else BITS
        self.splits = self.layout != "streams"  # else micro-batches would pass on hidden states
        self.loss: Loss = NextWord()
        if self.layout != "streams":
            self.size, self.loss = self._windows(), _window_loss

    @property
    def classes(self) -> int:
        return len(self.corpus.words)

    def header(self) -> dict[str, Any]:
        corpus = self.corpus
        sizes = {"train": len(corpus.train), "test": len(corpus.test)}
        if corpus.validation is not None:
            sizes["validation"] = len(corpus.validation)
        return {"digest": self.digest, **sizes, "words": len(corpus.words), **corpus.facts}

    def build(self, config: RunConfig) -> nn.Module:
        shape = {"classes": len(self.corpus.words), "sequence": self.sequence}
        return task.build_network(config.model, config.seed, **shape)

    def batches(
        self, config: RunConfig, device: torch.device, dtype: torch.dtype
    ) -> Streams | TokenWindows:
        ids, data = self.corpus.train.to(device), config.data
        sizes = {"workers": config.workers, "batch_size": config.batch_size}
        common: dict[str, Any] = {**sizes, "dtype": dtype, "drop_last": data.drop_last}
        if self.layout == "streams":
            return Streams(ids.long(), self.sequence, **common)
        order: dict[str, Any] = {"seed": config.seed, "reshuffle": data.reshuffle}
        return TokenWindows(ids, self.sequence, self.layout, **order, **common)

    def extra_metrics(self, loss: float) -> dict[str, float]:
        return {"perplexity": _perplexity(loss)} if self.metric == BITS else {}

    @torch.no_grad()
    def _evaluate(
        self,
        split: Split,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = task.ALONE,
    ) -> tuple[float, float]:
        """(mean loss in nats, metric) over `TEST_STREAMS` streams, by process 0 alone, or over
        windows that cover the text, each from an empty context."""
        model.eval()
        self.corpus = self.corpus.with_test_on(device)
        ids = self.corpus.test if split == "test" else self.corpus.validation
        if ids is None:
            raise DataError("there is no text for validation: set data.validation_size")
        sums, lengths, hidden = {}, self.corpus.lengths, None
        for number, (inputs, targets) in self._own_batches(ids, evaluators):
            state: Any = hidden if self.layout == "streams" else None
            loss, hidden = NextWord().carry(model, inputs, targets, state)
            count = torch.full_like(loss, targets.numel(), dtype=torch.float64)
            size = torch.zeros_like(count) if lengths is None else lengths[targets].sum()
            sums[number] = torch.stack([loss.double() * count, count, size])
        total, targets_in_all, bytes_in_all = task.sum_over_processes(evaluators, sums)
        mean = total / targets_in_all
        return mean, _perplexity(mean) if lengths is None else total / math.log(2) / bytes_in_all

    evaluate = partialmethod(_evaluate, "test")
    validate = partialmethod(_evaluate, "validation")

    def _own_batches(
        self, ids: Integer[Tensor, " tokens"], evaluators: Evaluators
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """This process's numbered batches: inputs and targets ``[b, time]``."""
        if self.layout == "streams":
            # Process 0 alone: each batch needs the hidden state after the one before.
            parts = cut_streams(ids.long(), min(TEST_STREAMS, len(ids) - 1))
            steps = zip(*(part.split(self.sequence, 1) for part in parts), strict=True)
            yield from enumerate(steps) if evaluators.rank == 0 else ()
            return
        batches = cover_text(
            ids, self.sequence, max(1, MAX_LOGITS // (self.sequence * self.classes))
        )
        own = itertools.islice(batches, evaluators.rank, None, evaluators.processes)
        yield from zip(task.own_batches(evaluators), own, strict=False)

    def probe(
        self, batches: Streams | TokenWindows, world: World, size: int, batch: int
    ) -> list[Batch]:
        """Return windows of ``data.sequence`` tokens at equal distances over the training text."""
        count, source = self._windows(), f"the training text in windows of {self.sequence} tokens"
        own = task.probe_share(world, size, batch, count, source)
        return self._take((torch.arange(size) * count // size)[own], batch, batches)

    def samples(
        self, batches: Streams | TokenWindows, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        """Draw windows of ``data.sequence`` tokens that do not overlap."""
        what = f"windows of {self.sequence} tokens"
        windows = task.draw_distinct(seed, epoch, count * batch, self._windows(), what)
        return self._take(windows, batch, batches)

    def _windows(self) -> int:
        return count_windows(self.corpus.train, self.sequence)

    def _take(
        self, windows: Int64[Tensor, " n"], batch: int, batches: Streams | TokenWindows
    ) -> list[Batch]:
        firsts = (windows * self.sequence).to(batches.device)
        return task.split_batches(*take_windows(batches.ids, firsts, self.sequence), batch)


def _check_options(config: RunConfig) -> None:
    """Raise ConfigError for options that do not fit a text."""
    data = config.data
    require(data.sequence >= 1, "data.sequence", data.sequence, "at least 1 token")
    others = ("augment", "image_size", "resize", "test_share", "split_seed")
    values = {f"data.{name}": getattr(data, name) for name in others}
    values |= {name: getattr(config, name) for name in ("channels_last", "label_smoothing")}
    for name, value in values.items():
        require(not value, name, value, "none, the data are a text")
    if data.name == "wikitext-2":
        require(data.tokenizer is None, "data.tokenizer", data.tokenizer, "none, there are words")
    else:
        sized = data.tokenizer == "bpe" or data.vocabulary is None
        require(sized, "data.vocabulary", data.vocabulary, 'none, or data.tokenizer = "bpe"')
    if data.name == "stdlib":
        require(data.path is None, "data.path", data.path, "none for stdlib")
    kind = type(make_deficit(config.deficit))
    if kind.inputs is not Deficit.inputs or kind.labels is not Deficit.labels:
        name = (config.deficit or {})["name"]
        require(False, "deficit.name", name, '"gradient-noise", the only one for a text')
