"""Batches of a text: W x b streams read side by side, or windows that stand for themselves.

Either way what is read at a step depends on the text, the seed, the epoch, W x b and the window
alone, never on the number of processes. Stands under `regimes.data.language`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Int64, Integer
from torch import Tensor

from regimes.data import task
from regimes.errors import DataError
from regimes.seeding import stream

Layout = Literal["streams", "contiguous", "sampled"]
Ids = Integer[Tensor, "streams time"]


def cut(ids: Integer[Tensor, " tokens"], streams: int) -> tuple[Ids, Ids]:
    """Inputs and targets of so many equal streams, which follow each other in the text.

    Views. Each token but the first and the last (n - 1) mod ``streams`` is a target once; a
    stream's last target is the next stream's first input.
    """
    length = (len(ids) - 1) // streams
    used = length * streams
    return ids[:used].view(streams, length), ids[1 : used + 1].view(streams, length)


class Streams(task.Rebatched):
    """Truncated backpropagation through time: W x b equal streams of one text, ``sequence`` tokens
    a step.

    Worker w reads the streams w, w + W, w + 2 W, ... of them, in the order of the text in every
    epoch.
    """

    def __init__(
        self,
        ids: Int64[Tensor, " tokens"],
        sequence: int,
        *,
        workers: int,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        drop_last: bool = False,
    ) -> None:
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


class Windows(task.Shuffled):
    """Windows of ``sequence`` tokens, each read from an empty context, n = (tokens - 1) //
    ``sequence`` of them in an epoch.

    - "contiguous": the text cut into n windows; the order of epoch e is one permutation,
      ``stream(seed, "order", e)``, as for images. Each token but the first and the (tokens - 1) mod
      ``sequence`` last is a target once per epoch.
    - "sampled": n windows at offsets drawn uniformly and independently for the whole epoch,
      ``stream(seed, "offsets", e)``. Drawn at once, they do not depend on the batch size either.
    """

    unit = "windows"

    def __init__(
        self,
        ids: Integer[Tensor, " tokens"],
        sequence: int,
        layout: Layout,
        *,
        seed: int,
        workers: int,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        drop_last: bool = False,
        reshuffle: bool = True,
    ) -> None:
        self.ids, self.sequence, self.layout, self.seed = ids, sequence, layout, seed
        self.workers, self.dtype, self.device = workers, dtype, ids.device
        self.drop_last, self.reshuffle = drop_last, reshuffle
        self.count = number(ids, sequence)
        self._set(batch_size)

    def offsets(self, epoch: int) -> Int64[Tensor, " n"]:
        """Where each window of an epoch begins, on the CPU."""
        key = epoch if self.reshuffle else 0
        if self.layout == "contiguous":
            order = torch.randperm(self.count, generator=stream(self.seed, "order", key))
            return order * self.sequence
        generator, last = stream(self.seed, "offsets", key), len(self.ids) - self.sequence
        return torch.randint(0, last, (self.count,), generator=generator)

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Int64[Tensor, "L b time"], Int64[Tensor, "L b time"]]]:
        """The windows of the hosted `workers`, from step `start` on, in union order as for images
        (``data.images.ImageBatches.epoch``)."""
        firsts = self.offsets(epoch).to(self.device)
        hosted = torch.tensor(list(workers), device=self.device)
        for step in range(start, self.steps):
            mine = self._union(firsts, step)[:, hosted]  # [b, L]
            x, y = take(self.ids, mine.flatten(), self.sequence)
            yield tuple(t.unflatten(0, mine.shape).transpose(0, 1) for t in (x, y))


def number(ids: Integer[Tensor, " tokens"], sequence: int) -> int:
    """How many windows side by side a training text has; DataError if none."""
    if len(ids) <= sequence:
        raise DataError(
            f"the training text of {len(ids)} tokens has no window of data.sequence = {sequence} "
            "and the token after it: lower it, or raise data.train_size"
        )
    return (len(ids) - 1) // sequence


def take(
    ids: Integer[Tensor, " tokens"], firsts: Int64[Tensor, " n"], sequence: int
) -> tuple[Int64[Tensor, "n sequence"], Int64[Tensor, "n sequence"]]:
    """Inputs and targets of windows that begin at the given places; no views of one another."""
    place = firsts[:, None] + torch.arange(sequence, device=firsts.device)
    return ids[place].long(), ids[place + 1].long()


def covering(
    ids: Integer[Tensor, " tokens"], sequence: int, batch: int
) -> Iterator[tuple[Int64[Tensor, "b time"], Int64[Tensor, "b time"]]]:
    """Inputs and targets of windows that cover a text, in batches: each token but the first is a
    target once. The last window is short where ``sequence`` does not divide the text."""
    whole = (len(ids) - 1) // sequence
    firsts = torch.arange(whole, device=ids.device) * sequence
    for part in firsts.split(batch) if whole else ():
        yield take(ids, part, sequence)
    rest = ids[whole * sequence :].long()[None]
    if rest.shape[1] > 1:
        yield rest[:, :-1], rest[:, 1:]
