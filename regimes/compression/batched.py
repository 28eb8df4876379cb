"""Kernels that run for many layers at once on a GPU: the work that ``Batched`` asks for.

A kernel takes a list of arguments, one entry per layer, and returns a list of results. On a GPU,
where a launch costs more than the arithmetic of a small layer, layers of equal shape form one
batch. On a CPU each layer is computed alone, because a batch would not fit its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regimes.seeding import uniform

Entries = Sequence[tuple[Tensor, ...]]


def on_gpu(tensor: Tensor) -> bool:
    """Is it where each operation is a launch, and reading a value makes the host wait?"""
    return tensor.is_cuda


def batch_by_shape(one: Callable[..., Tensor]) -> Callable[[Entries], list[Tensor]]:
    """The kernel that computes ``one`` for many layers; ``one`` must accept a leading axis."""

    def kernel(entries: Entries) -> list[Tensor]:
        if not on_gpu(entries[0][0]):
            return [one(*entry) for entry in entries]
        groups: dict[Any, list[int]] = {}
        for i, entry in enumerate(entries):
            groups.setdefault(tuple((t.shape, t.dtype) for t in entry), []).append(i)
        results: dict[int, Tensor] = {}
        for ids in groups.values():
            columns = zip(*(entries[i] for i in ids), strict=True)
            results.update(zip(ids, one(*map(stacked, columns)), strict=True))
        return [results[i] for i in range(len(entries))]

    return kernel


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """``[k, *shape]``: a view where the tensors lie evenly in one piece of memory, else a copy."""
    first, offsets = tensors[0], [t.storage_offset() for t in tensors]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    layouts = {(t.untyped_storage().data_ptr(), t.stride()) for t in tensors}
    even = offsets == [offsets[0] + i * step for i in range(len(offsets))]
    if len(layouts) == 1 and even and step >= 0:
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))


clone = batch_by_shape(torch.clone)
_side_by_side = batch_by_shape(lambda tensor: tensor)  # in one piece of memory, for ``stacked``


def add_(entries: Sequence[tuple[Tensor, Tensor, float]]) -> list[Tensor]:
    """``decay * residual + grad``, in place of the residual on a CPU. On a GPU the residuals of
    equal shape move into one piece of memory, so that later kernels need not copy them."""
    if not on_gpu(entries[0][0]):
        return [(x if decay == 1 else x.mul_(decay)).add_(grad) for x, grad, decay in entries]
    residuals = _side_by_side([(residual,) for residual, _, _ in entries])
    decays = [decay for _, _, decay in entries]
    if any(decay != 1 for decay in decays):
        torch._foreach_mul_(residuals, decays)
    torch._foreach_add_(residuals, [grad for _, grad, _ in entries])
    return residuals


def sub_(entries: Entries) -> list[Tensor]:
    """``delta -= sent`` in place; ``sent`` is one for all rows of ``delta`` or has as many."""
    deltas, sent = [delta for delta, _ in entries], [sent for _, sent in entries]
    if on_gpu(deltas[0]):  # where foreach shares a launch only among equal shapes
        rows = [row for x, delta in zip(sent, deltas, strict=True) for row in x.expand_as(delta)]
        torch._foreach_sub_([row for delta in deltas for row in delta], rows)
    else:
        torch._foreach_sub_(deltas, sent)
    return deltas


def random_rows(entries: Sequence[tuple[Sequence[int], Tensor]]) -> list[Tensor]:
    """Random numbers in [0, 1), a row for each seed, of the size and on the device of a row."""
    wanted = [(seed, row.numel()) for seeds, row in entries for seed in seeds]
    rows = iter(uniform(wanted, entries[0][1].device))
    return [stacked([next(rows) for _ in seeds]) for seeds, _ in entries]
