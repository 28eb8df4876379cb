"""Work that layers do together where each launch costs, and one after another where caches count.

What is here answers ``Together``: it takes one entry of arguments per layer. On a GPU layers of
equal shapes are one batch. On a CPU every layer is by itself, with the numbers of a layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regimes.seeding import uniform

Entries = Sequence[tuple[Tensor, ...]]


def launches(tensor: Tensor) -> bool:
    """Is it where each operation is launched, at a price?"""
    return tensor.device.type == "cuda"


def by_shape(one: Callable[..., Tensor]) -> Callable[[Entries], list[Tensor]]:
    """The work of ``one`` for many layers; it must take further leading axes as they come."""

    def work(entries: Entries) -> list[Tensor]:
        if not launches(entries[0][0]):
            return [one(*entry) for entry in entries]
        groups: dict[Any, list[int]] = {}
        for i, entry in enumerate(entries):
            groups.setdefault(tuple((t.shape, t.dtype) for t in entry), []).append(i)
        found: dict[int, Tensor] = {}
        for ids in groups.values():
            columns = zip(*(entries[i] for i in ids), strict=True)
            found.update(zip(ids, one(*map(stacked, columns)), strict=True))
        return [found[i] for i in range(len(entries))]

    return work


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """``[k, *shape]``: a view where the tensors lie evenly in one piece of memory, else a copy."""
    first, places = tensors[0], [t.storage_offset() for t in tensors]
    step = places[1] - places[0] if len(places) > 1 else 0
    one = {(t.untyped_storage().data_ptr(), t.stride()) for t in tensors}
    even = places == [places[0] + i * step for i in range(len(places))]
    if len(one) == 1 and even and step >= 0:
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))


def added(entries: Sequence[tuple[Tensor, Tensor, float]]) -> list[Tensor]:
    """``share * owed + grad`` in place of ``owed``; layers of equal shape come to lie evenly."""
    owed, shares = _evenly([(owed,) for owed, _, _ in entries]), [x for _, _, x in entries]
    if any(share != 1 for share in shares):
        torch._foreach_mul_(owed, shares)
    torch._foreach_add_(owed, [grad for _, grad, _ in entries])
    return owed


def subtracted(entries: Entries) -> list[Tensor]:
    """``delta -= sent`` in place; ``sent`` is one for all rows of ``delta`` or has as many."""
    less, by = [delta for delta, _ in entries], [sent for _, sent in entries]
    if launches(less[0]):  # where only equal shapes share a launch
        by = [row for sent, delta in zip(by, less, strict=True) for row in sent.expand_as(delta)]
        less = [row for delta in less for row in delta]
    torch._foreach_sub_(less, by)
    return [delta for delta, _ in entries]


def drawn(entries: Sequence[tuple[Sequence[int], Tensor]]) -> list[Tensor]:
    """Random numbers in [0, 1), a row for each seed, of the size and on the device of a row."""
    wanted = [(seed, row.numel()) for seeds, row in entries for seed in seeds]
    rows = iter(uniform(wanted, entries[0][1].device))
    return [stacked([next(rows) for _ in seeds]) for seeds, _ in entries]


copied = by_shape(torch.clone)
_evenly = by_shape(lambda tensor: tensor)
