"""Batches of a text: W x b parallel streams, or independent windows.

The tokens of a step depend on the text, the seed, the epoch, W x b and the window size, never on
the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from regimes.base.errors import DataError
from regimes.base.seeding import make_generator
from regimes.data import task

Layout = Literal["streams", "contiguous", "sampled"]
Ids = Integer[Tensor, "streams time"]


def cut_streams(ids: Integer[Tensor, " tokens"], streams: int) -> tuple[Ids, Ids]:
    """Cut a text into equal consecutive streams; returns inputs and targets, as views.

    Each token but the first and the last (n - 1) mod ``streams`` is a target once; a stream's last
    target is the next stream's first input.
    """
    length = (len(ids) - 1) // streams
    used = length * streams
    return ids[:used].view(streams, length), ids[1 : used + 1].view(streams, length)


@dataclass(eq=False)
class Streams(task.Batches):
    """Gives batches for truncated backpropagation through time: W x b equal streams of one text,
    ``sequence`` tokens a step. Worker w reads the streams w, w + W, w + 2 W, ..., from the start in
    every epoch."""

    ids: Int64[Tensor, " tokens"]
    sequence: int
    _: KW_ONLY
    workers: int
    batch_size: int
    dtype: torch.dtype = torch.float32
    drop_last: bool = False

    def __post_init__(self) -> None:
        self.device = self.ids.device
        self._set(self.batch_size)

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
        """Yield the windows of the hosted `workers`, from step `start` on; the last may be short.

        For ``workers=range(W)``, ``x.transpose(0, 1).flatten(0, 1)`` is all streams in the order of
        the text, and a view.
        """
        hosted = torch.tensor(list(workers), device=self.device)
        x, y = (
            part.unflatten(0, (self.batch_size, self.workers))[:, hosted]  # [b, L, length]
            for part in cut_streams(self.ids, self.workers * self.batch_size)
        )
        for step in range(start, self.steps):
            window = slice(step * self.sequence, (step + 1) * self.sequence)
            yield x[..., window].transpose(0, 1), y[..., window].transpose(0, 1)


@dataclass(eq=False)
class TokenWindows(task.Shuffled):
    """Gives windows of ``sequence`` tokens, each read from an empty context, n = (tokens - 1) //
    ``sequence`` of them in an epoch.

    - "contiguous": the text cut into n windows; the order of epoch e is one permutation, from the
      random stream ``(seed, "order", e)``, as for images. Each token but the first and the
      (tokens - 1) mod ``sequence`` last is a target once per epoch.
    - "sampled": n windows at offsets drawn uniformly and independently from the random stream
      ``(seed, "offsets", e)``, all at the start of the epoch, so that they do not depend on the
      batch size.
    """

    ids: Integer[Tensor, " tokens"]
    sequence: int
    layout: Layout
    _: KW_ONLY
    seed: int
    workers: int
    batch_size: int
    dtype: torch.dtype = torch.float32
    drop_last: bool = False
    reshuffle: bool = True
    unit: ClassVar[str] = "windows"

    def __post_init__(self) -> None:
        self.device, self.count = self.ids.device, count_windows(self.ids, self.sequence)
        self._set(self.batch_size)

    def offsets(self, epoch: int) -> Int64[Tensor, " n"]:
        """Return the first token of each window of an epoch, on the CPU."""
        if self.layout == "contiguous":
            return self.order(epoch) * self.sequence
        key = epoch if self.reshuffle else 0
        generator, last = make_generator(self.seed, "offsets", key), len(self.ids) - self.sequence
        return torch.randint(0, last, (self.count,), generator=generator)

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Int64[Tensor, "L b time"], Int64[Tensor, "L b time"]]]:
        """Yield the windows of the hosted `workers`, as ``data.images.ImageBatches.epoch`` does."""
        firsts = self.offsets(epoch).to(self.device)
        hosted = torch.tensor(list(workers), device=self.device)
        for step in range(start, self.steps):
            own = self._union(firsts, step)[:, hosted]  # [b, L]
            x, y = take_windows(self.ids, own.flatten(), self.sequence)
            yield tuple(t.unflatten(0, own.shape).transpose(0, 1) for t in (x, y))


def count_windows(ids: Integer[Tensor, " tokens"], sequence: int) -> int:
    """Count the consecutive windows of a training text; DataError if there is none."""
    if len(ids) <= sequence:
        raise DataError(
            f"the training text of {len(ids)} tokens has no window of data.sequence = {sequence} "
            "and the token after it: lower it, or raise data.train_size"
        )
    return (len(ids) - 1) // sequence


def take_windows(
    ids: Integer[Tensor, " tokens"], firsts: Int64[Tensor, " n"], sequence: int
) -> tuple[Int64[Tensor, "n sequence"], Int64[Tensor, "n sequence"]]:
    """Copy inputs and targets of the windows that start at ``firsts``."""
    index = firsts[:, None] + torch.arange(sequence, device=firsts.device)
    return ids[index].long(), ids[index + 1].long()


def cover_text(
    ids: Integer[Tensor, " tokens"], sequence: int, batch: int
) -> Iterator[tuple[Int64[Tensor, "b time"], Int64[Tensor, "b time"]]]:
    """Yield inputs and targets of windows that cover a text, in batches: each token but the first
    is a target once. The last window may be short."""
    full = (len(ids) - 1) // sequence
    firsts = torch.arange(full, device=ids.device) * sequence
    for part in firsts.split(batch) if full else ():
        yield take_windows(ids, part, sequence)
    rest = ids[full * sequence :].long()[None]
    if rest.shape[1] > 1:
        yield rest[:, :-1], rest[:, 1:]
