"""What the exchange of some layers asks of the other workers, and counts.

A compressor calls ``comm.mean``, ``comm.gather`` or ``comm.all_to_all`` with a list that has a part
of each layer, and gets the list of answers. What one call is given travels together: as one
collective for each type of numbers. In a world of one process nothing travels; the answers, and
the counts, are those of as many processes as there are workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.layers import NO_LAYER
from regimes.collectives.world import World

Shares = Sequence[Mapping[int, int]]  # of each part: how many of a worker's numbers a layer has


@dataclass
class Riders:
    """Holds numbers that travel with the first mean of a bucket, whoever asks for it: layers that
    are not compressed, and the flag of a finite step.

    Attributes:
        waiting: by layer, ``[L, ...]``, in the order in which they travel, behind the parts.
        unjoined: where several processes hold a worker together, each a shard of it: the mean over
            workers of the numbers of no layer, such as the loss. It still differs from shard to
            shard. The next ``join_shards`` carries it, and makes it the mean over shards, too.
        means: by layer, of the riders that have travelled.
    """

    waiting: dict[int, Tensor] = field(default_factory=dict)
    unjoined: Float[Tensor, " k"] | None = None
    means: dict[int, Tensor] = field(default_factory=dict)


class Comm:
    """Reaches the other workers of some layers, by collectives.

    A part has a leading axis of the L workers that this process hosts. All processes make the same
    calls in the same order.

    Collectives are counted as if each worker had a process of its own, however many there are. For
    example, layers 0 and 1 of a bucket ask for a mean of their parts, and layer 2, which is not
    compressed, rides along:

    - Between processes one `Comm` has ``layers=[0, 1]`` and is asked once, ``mean([part 0, part
      1])``. One collective carries part 0, part 1 and the rider, in this order.
    - In a world of one process nothing travels; on a CPU the layers are exchanged one after the
      other. The rider is sent first, ``mean([part 0])`` is asked of a `Comm` for layer 0, and
      ``mean([part 1])`` of another one for layer 1. All share one set ``calls``: the rider enters
      (turn 0, "mean", type of the numbers) there, and the others, which find it, add their numbers
      but no collective. So one collective is counted here, too.

    Attributes:
        layers: The layers for which parts are counted, one after the other. None: no layer.
        turn: The number of calls so far.
        protected: Tensors that the caller changes afterwards, such as the deltas of a bucket.
            Within one process an answer may be the very tensor that was passed; for these tensors
            it is a copy.
    """

    def __init__(
        self,
        world: World,
        layers: Sequence[int] | None = None,
        *,
        signal: bool = False,
        riders: Riders | None = None,
        calls: set[Any] | None = None,
        turn: int = 0,
    ) -> None:
        """
        Args:
            signal: these are a detector's statistics: bytes, but no floats of the paper's count.
            riders: what travels with the first mean.
            calls: the collectives that count as made already, (turn, kind, type of the numbers);
                those of this `Comm` are added. None: none.
            turn: the number of calls that count as made already.
        """
        self.world, self.layers, self.signal = world, layers, signal
        self.riders = riders or Riders()
        self.calls, self.turn = set[Any]() if calls is None else calls, turn
        self.protected: Sequence[Tensor] = ()

    def mean(self, parts: Sequence[Tensor], shares: Shares = ()) -> list[Tensor]:
        """Return the mean of each part over all W workers: ``[L, ...] -> [...]``.

        Args:
            parts: tensors, whose rows belong to the L workers that this process hosts.
            shares: for each part how many of its numbers belong to each layer, if a part has the
                numbers of several layers. The other methods have this argument, too.
        """
        self._count("mean", parts, shares)
        if not self.riders.waiting:
            means = self.world.mean_over_workers([*parts])
        else:
            means = self._mean_with_riders(parts)
        self.turn += 1
        one_row = len(parts) > 0 and len(parts[0]) == 1  # the mean of several is new memory
        return self._copy_protected(means) if one_row else means

    def gather(self, parts: Sequence[Tensor], shares: Shares = ()) -> list[Tensor]:
        """Return every worker's part, in the order of the workers: ``[L, ...] -> [W, ...]``."""
        self._before_others()
        self._count("gather", parts, shares)
        self.turn += 1
        return self._copy_protected(self.world.all_gather([*parts]))

    def all_to_all(
        self, parts: Sequence[Tensor], shares: Shares = (), *, owner_keeps: bool = False
    ) -> list[Tensor]:
        """Exchange the parts that workers have for each other. Entry w of ``[L, W, ...]`` is the
        part for worker w before the exchange, and the part from worker w after it.

        Args:
            owner_keeps: count a reduce-scatter: the owner of a part keeps the sum, and no gather
                follows.
        """
        self._before_others()
        self._count("scatter" if owner_keeps else "exchange", parts, shares)
        self.turn += 1
        return self._copy_protected(self.world.all_to_all([*parts]))

    def protect(self, tensors: Sequence[Tensor]) -> None:
        """Let no later answer share memory with these tensors. They take the place of those that
        were protected before."""
        self.protected = () if self.world.lockstep else tensors  # what has travelled is new memory

    def _copy_protected(self, answers: list[Tensor]) -> list[Tensor]:
        """Copy those answers that share memory with a ``protected`` tensor."""
        if not self.protected:
            return answers
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.protected}
        return [
            answer.clone() if answer.untyped_storage().data_ptr() in memory else answer
            for answer in answers
        ]

    # -- among the shards of a worker ----------------------------------------------------------

    def sum_shards(
        self, parts: Sequence[Float[Tensor, "hosted _"]], chunks: Sequence[int] = ()
    ) -> list[Tensor]:
        """Add parts up over the shards of a worker, and return the share of each sum that belongs
        to this shard: ``[L, k] -> [L, share]``.

        Args:
            chunks: for each part, how many numbers the first shard gets. By default a sum is
                divided as the rows of a layer are.
        """
        self._count_within("sum", parts)
        self.turn += 1
        return self.world.sum_shards([*parts], chunks)

    def join_shards(
        self, parts: Sequence[Float[Tensor, " _"]], chunks: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Join the parts of all shards of a worker, end to end: ``[part] -> [size]``.

        Args:
            parts: of each tensor, the part of this shard.
            chunks: of each tensor, how many numbers the first shard has; the last shards may have
                fewer.
            sizes: of each tensor, how many numbers all shards have together.
        """
        own, self.riders.unjoined = self.riders.unjoined, None
        if own is None:
            self._count_within("join", parts)
            self.turn += 1
            return self.world.join_shards([*parts], chunks, sizes)
        shards, count = self.world.shards, len(own)
        *joined, everyone = self.join_shards(
            [*parts, own], [*chunks, count], [*sizes, shards * count]
        )
        self.riders.means[NO_LAYER] = everyone.view(shards, -1).mean(0)
        return joined

    def mean_of_sums(self, sums: Sequence[Float[Tensor, "hosted _"]]) -> list[Tensor]:
        """Add numbers up over the shards of each worker, and return the mean over the workers:
        ``[L, k] -> [k]``. Each shard exchanges only its share of a sum, so that a worker sends the
        sum once."""
        if self.world.shards == 1:
            return self.mean(sums)
        sizes = [own.shape[1] for own in sums]
        chunks = [-(-size // self.world.shards) for size in sizes]
        return self.join_shards(self.mean(self.sum_shards(sums)), chunks, sizes)

    # -- riders ----------------------------------------------------------------------------------

    def send_riders(self) -> None:
        """Send the riders that have not travelled yet. A rider is a tensor of another layer, or of
        none, that travels with the first mean."""
        if self.riders.waiting:
            self._mean_with_riders([])
        if self.riders.unjoined is not None:
            self.join_shards([], [], [])

    def _before_others(self) -> None:
        """Send the riders by a mean of their own if the first collective is of another kind, which
        cannot carry them."""
        if self.turn == 0 and self.riders.waiting:
            self._mean_with_riders([])

    def _mean_with_riders(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The means of the parts, by a collective that carries the riders behind them."""
        waiting, self.riders.waiting = self.riders.waiting, {}
        own = {layer: part for layer, part in waiting.items() if layer >= 0}
        self._count_parts("mean", [*own], [*own.values()])
        if NO_LAYER in waiting:
            self._count_parts("mean", [NO_LAYER], [waiting[NO_LAYER]])
        # The same order on all processes. It is a part of the numbers: between three or more
        # processes the order of additions depends on the place.
        means = self.world.mean_over_workers([*parts, *waiting.values()])
        self.riders.means.update(zip(waiting, means[len(parts) :], strict=True))
        if self.world.shards > 1:  # so far the mean over workers of this process's shard
            self.riders.unjoined = self.riders.means.pop(NO_LAYER, None)
        return means[: len(parts)]

    # -- counts ------------------------------------------------------------------------------------

    def _count(self, kind: str, parts: Sequence[Tensor], shares: Shares) -> None:
        """Count a request of all parts: one of a layer each, or with the ``shares`` of several."""
        if not shares:
            layers = [NO_LAYER] * len(parts) if self.layers is None else self.layers
            self._count_parts(kind, layers[: len(parts)], parts)
            return
        for dtype in {part.dtype for part in parts}:
            own = [(x, n) for x, n in zip(parts, shares, strict=True) if x.dtype == dtype]
            layers = [i for _, share in own for i in share]
            sizes = [n for _, share in own for n in share.values()]
            numbers = sum(part.numel() // part.shape[0] for part, _ in own)
            assert sum(sizes) == numbers, f"{numbers} numbers, of layers {sum(sizes)}"
            self._count_numbers(kind, layers, sizes, dtype)

    def _count_parts(self, kind: str, layers: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Count one part of each layer."""
        for dtype in {part.dtype for part in parts}:
            own = [(i, x) for i, x in zip(layers, parts, strict=True) if x.dtype == dtype]
            # an instrument's parts may differ in rows: one of all workers, one of each
            sizes = [part.numel() // part.shape[0] for _, part in own]
            self._count_numbers(kind, [i for i, _ in own], sizes, dtype)

    def _count_numbers(
        self, kind: str, layers: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Count so many numbers of each layer, which travel together."""
        convention = not self.signal and NO_LAYER not in layers  # counted in the paper's floats
        self.world.meter.count_requests(tuple(layers), kind, tuple(sizes), dtype, convention)
        self._count_call(kind, torch.uint8 if kind != "mean" else dtype)

    def _count_within(self, kind: str, parts: Iterable[Tensor]) -> None:
        for part in parts:
            self.world.meter.count_within(kind, part)
            self._count_call(kind, part.dtype)

    def _count_call(self, kind: str, travels_as: torch.dtype) -> None:
        """Count a collective of this turn, unless an earlier part travels with it."""
        call = self.turn, kind, travels_as
        if call not in self.calls:
            self.calls.add(call)
            made = self.world.meter.calls
            made[kind] = made.get(kind, 0) + 1


def signals(world: World, layers: Sequence[int] | None = None) -> Comm:
    """Make the collectives of an instrument or a detector.

    Args:
        layers: of the parts; None: they belong to none.
    """
    return Comm(world, layers, signal=True)


def mean_apart(world: World, flat: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the mean over all processes, also over those that hold one worker together. An
    instrument that only watches asks for it: a job without the instrument would send none of this,
    so it is counted apart."""
    with world.counting_apart():
        (total,) = signals(world).mean_of_sums([flat[None]])
    return total / world.shards
