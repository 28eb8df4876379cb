"""Kernels that run for many layers at once on a GPU.

A kernel takes a list of arguments, one entry per layer, and returns a list of results. On a GPU,
where a launch costs more than the arithmetic of a small layer, layers of equal shape form one
batch. On a CPU each layer is computed alone, because a batch would not fit its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.seeding import Seed, SeedTable, draw_uniform
from regimes.base.torch_compat import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub_

T = TypeVar("T")
Entries = Sequence[tuple[Tensor, ...]]


_held: list[Any] | None = None  # see ``hold_cached_tensors``


@contextmanager
def hold_cached_tensors() -> Iterator[list[Any]]:
    """Collect inside all that the caches of ``cache_tensors`` give, in the list that is yielded.
    The tensors live as long as the list: a captured graph reads them at their addresses long after
    a cache has dropped them."""
    global _held
    held: list[Any] = []
    _held = held
    try:
        yield held
    finally:
        _held = None


def cache_tensors(most: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache tensors on a device like ``functools.lru_cache``, with ``hold_cached_tensors``."""

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        remembered = lru_cache(maxsize=most)(make)

        @wraps(make)
        def get(*args: Any) -> T:
            value = remembered(*args)
            if _held is not None:
                _held.append(value)
            return value

        get.forget = remembered.cache_clear  # type: ignore[attr-defined]
        return get

    return decorate


def on_gpu(tensor: Tensor) -> bool:
    """Return whether each operation on the tensor costs a launch, and reading a value a wait of the
    host."""
    return tensor.is_cuda


def make_once(made: dict[Hashable, T], what: Hashable, make: Callable[[], T]) -> T:
    """Return what ``made`` has under this key; make it if there is none. While a graph is captured
    nothing is stored: what is made then has no contents before a replay."""
    if _held is not None:
        _held.append(value := make())
        return value
    if what not in made:
        made[what] = make()
    return made[what]


def batch_by_shape(one: Callable[..., Tensor]) -> Callable[[Entries], list[Tensor]]:
    """Make a kernel that computes ``one`` for many layers; ``one`` must accept a leading axis."""

    def kernel(entries: Entries) -> list[Tensor]:
        if not on_gpu(entries[0][0]):
            return [one(*entry) for entry in entries]
        groups: dict[Any, list[int]] = {}
        for i, entry in enumerate(entries):
            groups.setdefault(tuple((t.shape, t.dtype) for t in entry), []).append(i)
        results: dict[int, Tensor] = {}
        for ids in groups.values():
            columns = zip(*(entries[i] for i in ids), strict=True)
            results.update(zip(ids, one(*map(stack_tensors, columns)), strict=True))
        return [results[i] for i in range(len(entries))]

    return kernel


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors as ``[k, *shape]``: a view where they lie evenly in one piece of memory, else a
    copy."""
    if len(tensors) == 1:
        return tensors[0][None]
    first, offsets = tensors[0], [t.storage_offset() for t in tensors]
    step = offsets[1] - offsets[0]
    layouts = {(t.untyped_storage().data_ptr(), t.stride()) for t in tensors}
    even = offsets == [offsets[0] + i * step for i in range(len(offsets))]
    if len(layouts) == 1 and even and step >= 0:
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))


Owed = tuple[Tensor, Tensor, float, Tensor]  # residual, gradient, factor, room


def add_(entries: Sequence[Owed]) -> None:
    """Compute ``factor * residual + gradient`` in the last tensor, which may be the residual."""
    if not on_gpu(entries[0][0]):
        for residual, gradient, factor, room in entries:
            scaled = residual if factor == 1 else torch.mul(residual, factor, out=room)
            torch.add(scaled, gradient, out=room)
        return
    moved = [(room, residual) for residual, _, _, room in entries if room is not residual]
    if moved:
        foreach_copy_([room for room, _ in moved], [residual for _, residual in moved])
    _, gradients, factors, rooms = zip(*entries, strict=True)
    if any(factor != 1 for factor in factors):
        foreach_mul_(rooms, factors)
    foreach_add_(rooms, gradients)


def sub_(entries: Entries) -> list[Tensor]:
    """Compute ``delta -= sent`` in place; ``sent`` is one for all rows of ``delta`` or has as
    many."""
    deltas, sent = [delta for delta, _ in entries], [sent for _, sent in entries]
    if on_gpu(deltas[0]):  # where foreach shares a launch only among equal shapes
        rows = [row for x, delta in zip(sent, deltas, strict=True) for row in x.expand_as(delta)]
        foreach_sub_([row for delta in deltas for row in delta], rows)
    else:
        foreach_sub_(deltas, sent)
    return deltas


def random_rows(entries: Sequence[tuple[Sequence[Seed], Tensor]]) -> list[Tensor]:
    """Draw random numbers in [0, 1), a row for each seed, of the size and on the device of a
    row."""
    wanted = [(seed, row.numel(), 0) for seeds, row in entries for seed in seeds]
    rows = iter(draw_uniform(wanted, entries[0][1].device))
    return [stack_tensors([next(rows) for _ in seeds]) for seeds, _ in entries]


class Workspace:
    """Holds the part of a layer's memory that checkpoints leave out: a buffer that is reused,
    because fresh pages cost as much as a pass over them.

    Slots, not fields: ``vars`` leaves them out, ``copy.copy`` shares them, ``copy.deepcopy``
    copies them.
    """

    __slots__ = ("_buffer", "_table")

    def lend(self, buffer: Tensor | None) -> None:
        """Offer a tensor whose memory the next step may overwrite as its buffer. A gradient is such
        a tensor, once it is added to the residual.

        Args:
            buffer: the tensor, or None for none.
        """
        self._buffer = buffer

    def use_seeds_of(self, table: SeedTable | None) -> None:
        """Take seeds from a table on the device, while a CUDA graph captures a step.

        Args:
            table: the table. None: seeds are computed on the host again.
        """
        self._table = table

    def _seeds(self, makers: Sequence[Callable[[], int]]) -> list[Seed]:
        table: SeedTable | None = getattr(self, "_table", None)
        if table is None:
            return [make() for make in makers]
        return [*table.places(makers)]

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the buffer of the layer, in this shape, and in the type and on the device of
        ``like``. It has any content, and the next step overwrites it."""
        buffer: Tensor | None = getattr(self, "_buffer", None)
        wanted = (tuple(shape), like.dtype, like.device)
        if buffer is None or (tuple(buffer.shape), buffer.dtype, buffer.device) != wanted:
            buffer = self._buffer = like.new_empty(shape)
        return buffer


# -- low-rank factors of layers of one shape, ``P [layers, r, n]`` and ``Q [layers, r, m]`` --------
# On a GPU these layers are one batch, on a CPU each layer is a batch of its own. There a product
# whose *last* dimension is a rank of two to four is several times slower than one whose first is,
# and a product of one worker's matrix faster than a batch of one.
class Stack:
    """Holds layers of one shape that are computed together.

    Attributes:
        places: where they are in the list that was stacked.
        parts: what was stacked, ``[L, n, m]`` each.
        matrices: ``[layers, L, n, m]``.
        alone: ``[layers, n, m]``, where there is one worker.
        is_view: ``matrices`` are the memory of the parts themselves.
    """

    def __init__(self, places: Sequence[int], parts: Sequence[Float[Tensor, "hosted n m"]]) -> None:
        self.places, self.parts, self.matrices = places, parts, stack_tensors(parts)
        self.alone = self.matrices[:, 0] if len(parts[0]) == 1 else None
        self.is_view = self.matrices.data_ptr() == parts[0].data_ptr()

    def at_present(self) -> Stack:
        """Return a stack of what the parts are now."""
        return self if self.is_view else Stack(self.places, self.parts)


def subtract_from_(stacks: Sequence[Stack], products: Sequence[Float[Tensor, "_ _ _ _"]]) -> None:
    """Subtract a product of each layer, ``[layers, L, n, m]``, from the parts, on a GPU in a few
    launches for all; of one that all workers share, L is 1."""
    if all(stack.alone is not None and stack.is_view for stack in stacks):
        matrices = [stack.alone for stack in stacks if stack.alone is not None]
        foreach_sub_(matrices, [x[:, 0] for x in products])
        return
    pairs = zip(stacks, products, strict=True)
    sub_([each for stack, x in pairs for each in zip(stack.parts, x.unbind(), strict=True)])


def stack_alike(
    matrices: Sequence[Float[Tensor, "hosted _ _"]], keys: Sequence[Any]
) -> list[Stack]:
    """Stack the matrices that have the same shape and key, such as a rank."""
    if not on_gpu(matrices[0]):
        return [Stack([i], [matrix]) for i, matrix in enumerate(matrices)]
    shapes = tuple((matrix.shape, key) for matrix, key in zip(matrices, keys, strict=True))
    return [Stack(places, [matrices[i] for i in places]) for places in group_alike(shapes)]


@lru_cache(maxsize=256)
def group_alike(keys: tuple[Hashable, ...]) -> list[list[int]]:
    """Group the places of equal keys, in the order of their first ones."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def unstack(stacks: Sequence[Stack], values: Sequence[Float[Tensor, "_ ..."]]) -> list[Tensor]:
    """Return what belongs to each matrix, in the order in which the matrices were stacked."""
    if all(len(stack.places) == 1 for stack in stacks):
        return [value[0] for value in values]
    found: dict[int, Tensor] = {}
    for stack, value in zip(stacks, values, strict=True):
        found.update(zip(stack.places, value.unbind(), strict=True))
    return [found[i] for i in range(len(found))]


def left_product(
    q: Float[Tensor, "layers r m"], stack: Stack
) -> Float[Tensor, "hosted layers r n"]:
    """Compute each worker's ``D Q`` of each layer, transposed."""
    if on_gpu(q):
        if stack.alone is not None:  # a batch of three dimensions costs the host less
            return torch.bmm(q, stack.alone.mT)[None]
        return (q[:, None] @ stack.matrices.mT).transpose(0, 1)
    return _by_worker([q[0] @ matrix.mT for matrix in stack.matrices[0].unbind()])


def right_product(
    p: Float[Tensor, "layers r n"], stack: Stack
) -> Float[Tensor, "hosted layers r m"]:
    """Compute each worker's ``P^T D`` of each layer."""
    if on_gpu(p):
        if stack.alone is not None:
            return torch.bmm(p, stack.alone)[None]
        return (p[:, None] @ stack.matrices).transpose(0, 1)
    return _by_worker([p[0] @ matrix for matrix in stack.matrices[0].unbind()])


def _by_worker(products: list[Tensor]) -> Tensor:
    return products[0][None, None] if len(products) == 1 else torch.stack(products)[:, None]


def reconstruct(
    p: Float[Tensor, "layers r n"], q: Float[Tensor, "layers r m"], workspace: Workspace
) -> Float[Tensor, "layers n m"]:
    """Compute ``P Q^T``; on a CPU in the workspace's buffer."""
    if on_gpu(p):
        return torch.bmm(p.mT, q)
    room = workspace.buffer((p.shape[2], q.shape[2]), q)
    return torch.mm(p[0].mT, q[0], out=room)[None]


def subtract_products_(stacks: Sequence[Stack], factors: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compute ``D -= P Q^T`` in place, with factors (P, Q) of each worker, ``[layers, L, r,
    ...]``."""
    if on_gpu(stacks[0].matrices):
        subtract_from_(stacks, [p.mT @ q for p, q in factors])
        return
    for stack, (p, q) in zip(stacks, factors, strict=True):
        stack.parts[0].baddbmm_(p[0].mT, q[0], alpha=-1)


def reconstruct_and_subtract_(
    stacks: Sequence[Stack],
    left: Sequence[Float[Tensor, "_ _ _"]],
    right: Sequence[Float[Tensor, "_ _ _"]],
    workspaces: Sequence[Workspace],
) -> list[Tensor]:
    """Compute ``P Q^T`` as ``reconstruct`` does, and subtract the product from each worker's row of
    the parts, in place. On a CPU it is computed again for each row, which costs less than reading
    it."""
    updates = []
    for stack, p, q, workspace in zip(stacks, left, right, workspaces, strict=True):
        updates.append(reconstruct(p, q, workspace))
        if not on_gpu(p):
            for matrix in stack.parts[0].unbind():
                matrix.addmm_(p[0].mT, q[0], alpha=-1)
    if on_gpu(left[0]):
        subtract_from_(stacks, [update[:, None] for update in updates])
    return updates
