"""Kernels that run for many layers at once on a GPU.

A kernel takes a list of arguments, one entry per layer, and returns a list of results. On a GPU,
where a launch costs more than the arithmetic of a small layer, layers of equal shape form one
batch. On a CPU each layer is computed alone, because a batch would not fit its caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from regimes.seeding import Seed, SeedTable, draw_uniform

T = TypeVar("T")
Entries = Sequence[tuple[Tensor, ...]]
TINY = 1e-10  # of a matrix's norm: what completes a basis, far below the rounding of float32
FEW = 1 << 18  # numbers of a batch whose padding costs less than another batch's launches
PLANS = 8  # of padding that stay in memory, one for each vector of levels and bucket
SHIFTS = (1e-10, 0.0, 0.0)  # of the Gram matrix, pass by pass


_held: list[Any] | None = None  # see ``hold_cached_tensors``


@contextmanager
def hold_cached_tensors() -> Iterator[list[Any]]:
    """A list of what the caches of ``cache_tensors`` give inside. While it lives those tensors do,
    which a captured graph reads at their addresses long after a cache has dropped them."""
    global _held
    held: list[Any] = []
    _held = held
    try:
        yield held
    finally:
        _held = None


def cache_tensors(most: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """``functools.lru_cache`` for tensors on a device, see ``hold_cached_tensors``."""

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        remembered = lru_cache(maxsize=most)(make)

        @wraps(make)
        def get(*args: Any) -> T:
            value = remembered(*args)
            if _held is not None:
                _held.append(value)
            return value

        get.most = most  # type: ignore[attr-defined]
        return get

    return decorate


def on_gpu(tensor: Tensor) -> bool:
    """Does each operation on it cost a launch, and reading a value a wait of the host?"""
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
            results.update(zip(ids, one(*map(stack_tensors, columns)), strict=True))
        return [results[i] for i in range(len(entries))]

    return kernel


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """``[k, *shape]``: a view where the tensors lie evenly in one piece of memory, else a copy."""
    if len(tensors) == 1:
        return tensors[0][None]
    first, offsets = tensors[0], [t.storage_offset() for t in tensors]
    step = offsets[1] - offsets[0]
    layouts = {(t.untyped_storage().data_ptr(), t.stride()) for t in tensors}
    even = offsets == [offsets[0] + i * step for i in range(len(offsets))]
    if len(layouts) == 1 and even and step >= 0:
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))


# Without gaps whatever the order in memory of a gradient: a residual is written to as one vector.
clone = batch_by_shape(partial(torch.clone, memory_format=torch.contiguous_format))
_side_by_side = batch_by_shape(lambda tensor: tensor)  # in one piece, for ``stack_tensors``


Owed = tuple[Tensor, Tensor, float, Tensor | None]  # residual, gradient, decay, room


def add_(entries: Sequence[Owed]) -> list[Tensor]:
    """``decay * residual + grad``, in the last tensor, or without one in place of the residual. On
    a GPU the results of equal shape move into one piece of memory, so that later kernels need not
    copy them."""
    if not on_gpu(entries[0][0]):
        return [_add(*entry) for entry in entries]
    return _add_all(entries, _side_by_side([(_target(entry),) for entry in entries]))


def add_apart(entries: Sequence[Owed]) -> list[Tensor]:
    """`add_`, which leaves each result where it is: it may be a part of a whole bucket's."""
    if not on_gpu(entries[0][0]):
        return add_(entries)
    return _add_all(entries, [_target(entry) for entry in entries])


def _target(entry: Owed) -> Tensor:
    residual, _, _, room = entry
    return residual if room is None else room


def _add_all(entries: Sequence[Owed], into: list[Tensor]) -> list[Tensor]:
    """`add_` in a few launches for all entries."""
    apart = [i for i, entry in enumerate(entries) if entry[3] is not None]
    if apart:
        torch._foreach_copy_([into[i] for i in apart], [entries[i][0] for i in apart])
    decays = [decay for _, _, decay, _ in entries]
    if any(decay != 1 for decay in decays):
        torch._foreach_mul_(into, decays)
    torch._foreach_add_(into, [grad for _, grad, _, _ in entries])
    return into


def _add(residual: Tensor, grad: Tensor, decay: float, room: Tensor | None) -> Tensor:
    into = residual if room is None else room
    if decay != 1:
        residual = torch.mul(residual, decay, out=into)
    return torch.add(residual, grad, out=into)


def sub_(entries: Entries) -> list[Tensor]:
    """``delta -= sent`` in place; ``sent`` is one for all rows of ``delta`` or has as many."""
    deltas, sent = [delta for delta, _ in entries], [sent for _, sent in entries]
    if on_gpu(deltas[0]):  # where foreach shares a launch only among equal shapes
        rows = [row for x, delta in zip(sent, deltas, strict=True) for row in x.expand_as(delta)]
        torch._foreach_sub_([row for delta in deltas for row in delta], rows)
    else:
        torch._foreach_sub_(deltas, sent)
    return deltas


def random_rows(entries: Sequence[tuple[Sequence[Seed], Tensor]]) -> list[Tensor]:
    """Random numbers in [0, 1), a row for each seed, of the size and on the device of a row."""
    wanted = [(seed, row.numel(), 0) for seeds, row in entries for seed in seeds]
    rows = iter(draw_uniform(wanted, entries[0][1].device))
    return [stack_tensors([next(rows) for _ in seeds]) for seeds, _ in entries]


class Workspace:
    """The part of a layer's memory that checkpoints leave out: a buffer that is reused, because
    fresh pages cost as much as a pass over them.

    Slots, not fields: ``vars`` leaves them out, ``copy.copy`` shares them, ``copy.deepcopy``
    copies them.
    """

    __slots__ = ("_buffer", "_room", "_table")

    def write_to(self, residual: Tensor, update: Tensor | None) -> None:
        """The next step leaves the present residual as it is.

        Args:
            residual: where the next one goes.
            update: what the step may use as its buffer, which may be the memory of the gradient:
                that is not needed once it is added to the residual.
        """
        self._room = residual
        if update is not None:
            self._buffer = update

    @property
    def room(self) -> Tensor | None:
        """Where the next residual goes; None: in place of the present one."""
        room: Tensor | None = getattr(self, "_room", None)
        return room

    def use_seeds_of(self, table: SeedTable | None) -> None:
        """Seeds come from there while a step is captured; None: from the host."""
        self._table = table

    def _seeds(self, makers: Sequence[Callable[[], int]]) -> list[Seed]:
        table: SeedTable | None = getattr(self, "_table", None)
        if table is None:
            return [make() for make in makers]
        return [*table.places(makers)]

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The layer's buffer in the type and on the device of ``like``. Its contents are undefined
        at first and overwritten in the next step."""
        buffer: Tensor | None = getattr(self, "_buffer", None)
        wanted = (tuple(shape), like.dtype, like.device)
        if buffer is None or (tuple(buffer.shape), buffer.dtype, buffer.device) != wanted:
            buffer = self._buffer = like.new_empty(shape)
        return buffer


# -- low-rank factors of layers of one shape, ``P [layers, r, n]`` and ``Q [layers, r, m]`` --------
# On a GPU these layers are one batch, on a CPU each layer is a batch of its own. There a product
# whose *last* dimension is a rank of two to four is several times slower than one whose first is,
# and a product of one worker's matrix faster than a batch of one.
@dataclass(slots=True)
class Stack:
    """Layers of one shape that are computed together.

    Attributes:
        places: where they are in the list that was stacked.
        matrices: ``[layers, L, n, m]``.
        parts: what was stacked, ``[L, n, m]`` each.
    """

    places: Sequence[int]
    matrices: Float[Tensor, "layers hosted n m"]
    parts: Sequence[Float[Tensor, "hosted n m"]]

    @property
    def is_view(self) -> bool:
        """Are ``matrices`` the memory of the parts themselves?"""
        return self.matrices.data_ptr() == self.parts[0].data_ptr()


def subtract_from_(stacks: Sequence[Stack], products: Sequence[Float[Tensor, "_ _ _ _"]]) -> None:
    """Subtract a product of each layer, ``[layers, L, n, m]``, from the parts, on a GPU in a few
    launches for all; of one that all workers share, L is 1."""
    if all(len(stack.parts[0]) == 1 and stack.is_view for stack in stacks):
        torch._foreach_sub_([stack.matrices for stack in stacks], [*products])
        return
    pairs = zip(stacks, products, strict=True)
    sub_([each for stack, x in pairs for each in zip(stack.parts, x.unbind(), strict=True)])


def stack_alike(
    matrices: Sequence[Float[Tensor, "hosted _ _"]], keys: Sequence[Any]
) -> list[Stack]:
    """Stacks of the matrices that have the same shape and key, such as a rank."""
    if not on_gpu(matrices[0]):
        return [Stack([i], matrix[None], [matrix]) for i, matrix in enumerate(matrices)]
    shapes = tuple((matrix.shape, key) for matrix, key in zip(matrices, keys, strict=True))
    stacks = []
    for places in _group_alike(shapes):
        parts = [matrices[i] for i in places]
        stacks.append(Stack(places, stack_tensors(parts), parts))
    return stacks


@lru_cache(maxsize=256)
def _group_alike(keys: tuple[Hashable, ...]) -> list[list[int]]:
    """The places of equal keys, in the order of their first ones."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def unstack(stacks: Sequence[Stack], values: Sequence[Float[Tensor, "_ ..."]]) -> list[Tensor]:
    """What belongs to each matrix, in the order in which they were stacked."""
    if all(len(stack.places) == 1 for stack in stacks):
        return [value[0] for value in values]
    found: dict[int, Tensor] = {}
    for stack, value in zip(stacks, values, strict=True):
        found.update(zip(stack.places, value.unbind(), strict=True))
    return [found[i] for i in range(len(found))]


def left_product(
    q: Float[Tensor, "layers r m"], stack: Stack
) -> Float[Tensor, "hosted layers r n"]:
    """Each worker's ``D Q`` of each layer, transposed."""
    if on_gpu(q):
        return (q[:, None] @ stack.matrices.mT).transpose(0, 1)
    return _by_worker([q[0] @ matrix.mT for matrix in stack.matrices[0].unbind()])


def right_product(
    p: Float[Tensor, "layers r n"], stack: Stack
) -> Float[Tensor, "hosted layers r m"]:
    """Each worker's ``P^T D`` of each layer."""
    if on_gpu(p):
        return (p[:, None] @ stack.matrices).transpose(0, 1)
    return _by_worker([p[0] @ matrix for matrix in stack.matrices[0].unbind()])


def _by_worker(products: list[Tensor]) -> Tensor:
    return products[0][None, None] if len(products) == 1 else torch.stack(products)[:, None]


def reconstruct(
    p: Float[Tensor, "layers r n"], q: Float[Tensor, "layers r m"], workspace: Workspace
) -> Float[Tensor, "layers n m"]:
    """``P Q^T``; on a CPU in the workspace's buffer."""
    if on_gpu(p):
        return p.mT @ q
    room = workspace.buffer((p.shape[2], q.shape[2]), q)
    return torch.mm(p[0].mT, q[0], out=room)[None]


def subtract_products_(stacks: Sequence[Stack], factors: Sequence[tuple[Tensor, Tensor]]) -> None:
    """``D -= P Q^T`` in place, with factors (P, Q) of each worker, ``[layers, L, r, ...]``."""
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
    """`reconstruct`; the product is subtracted from each worker's row of the parts, in place. On a
    CPU it is computed again for each row, which costs less than reading it."""
    updates = []
    for stack, p, q, workspace in zip(stacks, left, right, workspaces, strict=True):
        updates.append(reconstruct(p, q, workspace))
        if not on_gpu(p):
            for matrix in stack.parts[0].unbind():
                matrix.addmm_(p[0].mT, q[0], alpha=-1)
    if on_gpu(left[0]):
        subtract_from_(stacks, [update[:, None] for update in updates])
    return updates


def orthonormalise(stacks: Sequence[Float[Tensor, "_ _ _"]]) -> list[Tensor]:
    """An orthonormal basis ``[rank, n]`` of each matrix's row space, rank <= n, of stacks
    ``[layers, rank, n]``: by Householder QR, or on a GPU by ``in_batches``. It is completed where
    rows are dependent: power iteration never leaves a zero factor, which a zero gradient would
    give."""
    if on_gpu(stacks[0]):
        return in_batches(stacks)
    return [torch.linalg.qr(rows.mT)[0].mT for rows in stacks]


def in_batches(stacks: Sequence[Float[Tensor, "_ _ _"]]) -> list[Tensor]:
    """In few batches without a wait of the host: shifted CholeskyQR3 (Fukaya et al., 2020) in
    float64. Each matrix is scaled to norm 1, and a tiny identity completes its basis. The shift
    keeps the first Cholesky factor real; two more passes orthogonalise to the last bits.
    """
    results: dict[int, Tensor] = {}
    for ids in choose_batches(tuple(tuple(rows.shape) for rows in stacks)):
        results.update(zip(ids, _one_batch([stacks[i] for i in ids]), strict=True))
    return [results[i] for i in range(len(stacks))]


@lru_cache(maxsize=PLANS)
def choose_batches(shapes: tuple[tuple[int, int, int], ...]) -> list[list[int]]:
    """Which stacks ``[layers, rank, n]`` are padded to the size of the largest of their batch.
    Zeros are at most as many as numbers, except in a batch of few numbers: a batch costs launches.

    >>> choose_batches(((2, 4, 768), (1, 4, 50257), (1, 4, 2304)))
    [[1, 2], [0]]
    >>> choose_batches(((1, 1, 64), (1, 4, 512), (1, 2, 10)))
    [[1, 0, 2]]
    """
    found: list[list[int]] = []
    numbers = layers = rank = width = 0
    for i in sorted(range(len(shapes)), key=lambda i: -shapes[i][2]):
        count, rows, columns = shapes[i]
        numbers += count * rows * columns
        padded = (layers + count) * max(rank, rows) * width if found else 0
        if not found or padded > max(FEW, 2 * numbers):
            found.append([])
            numbers, layers, rank, width = count * rows * columns, 0, 0, columns
        found[-1].append(i)
        rank, layers = max(rank, rows), layers + count
    return found


def _one_batch(stacks: Sequence[Tensor]) -> list[Tensor]:
    shapes = tuple(tuple(rows.shape) for rows in stacks)
    gather, inverse, tiny, one = _index_padding(shapes, stacks[0].device)
    flat = torch.cat([*(rows.flatten() for rows in stacks), stacks[0].new_zeros(1)])
    a = flat.index_select(0, gather.flatten()).view(gather.shape).double()  # [layers, ranks, n]
    a /= torch.linalg.matrix_norm(a, keepdim=True).clamp_min(1e-300)
    a.diagonal(dim1=1, dim2=2).add_(tiny)
    if one is not None:
        a[:, :, -a.shape[1] :].diagonal(dim1=1, dim2=2).add_(one)
    for shift in SHIFTS:
        gram = a @ a.mT
        if shift:
            gram.diagonal(dim1=1, dim2=2).add_(shift)
        factor, _ = torch.linalg.cholesky_ex(gram)
        a = torch.linalg.solve_triangular(factor, a, upper=False)
    kept = a.flatten().index_select(0, inverse).to(stacks[0].dtype)
    pieces = kept.split([rows.numel() for rows in stacks])
    return [piece.view(rows.shape) for piece, rows in zip(pieces, stacks, strict=True)]


@cache_tensors(PLANS)
def _index_padding(
    stacks: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[
    Int32[Tensor, "layers ranks n"],
    Int32[Tensor, " numbers"],
    Float[Tensor, "layers ranks"],
    Float[Tensor, "layers ranks"] | None,
]:
    """For matrices laid end to end, with a zero at the end: the index of each number of the padded
    batch, the inverse, and what is added to the first and to the last diagonal. A padding row has a
    1 in a column of its own, where it is orthogonal to all others; None without padding rows."""
    shapes = [(rank, columns) for layers, rank, columns in stacks for _ in range(layers)]
    ranks, n = (max(sizes) for sizes in zip(*shapes, strict=True))
    end = sum(rank * columns for rank, columns in shapes)
    gather = torch.full((len(shapes), ranks, n + ranks), end, dtype=torch.int32)
    at = 0
    for i, (rank, columns) in enumerate(shapes):
        own = torch.arange(at, at + rank * columns, dtype=torch.int32)
        gather[i, :rank, :columns] = own.view(rank, columns)
        at += rank * columns
    inside = gather.flatten() < end
    inverse = torch.empty(end, dtype=torch.int32)
    inverse[gather.flatten()[inside].long()] = inside.nonzero().flatten().int()
    real = torch.tensor([[row < rank for row in range(ranks)] for rank, _ in shapes])
    tiny = (TINY * real.double()).to(device)
    one = None if bool(real.all()) else (~real).double().to(device)
    return gather.to(device), inverse.to(device), tiny, one
