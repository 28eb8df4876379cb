"""Where several layers lie for kernels that take them at once: end to end, each from the beginning
of a block on, and divided among the workers that own parts of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from regimes.base.seeding import Seed, draw_uniform, fill_uniform
from regimes.base.torch_compat import foreach_copy_, foreach_sub_, foreach_zero_
from regimes.compression.kernels import cache_tensors, on_gpu

Wanted = tuple[Seed, int, int]  # see `draw_uniform`
Span = tuple[int, int]  # the first of some places, and the one after the last


class Layout:
    """Places the parts of several layers in one matrix ``[owners, width]``.

    An owner is a worker that adds up a part of each layer; its row has its parts of all layers, one
    after the other. Zeros fill the last owner's part where a layer has fewer numbers, and the gaps
    between parts, because each part begins a new block.

    Args:
        sizes: the number of elements of each layer.
        owners: the number of workers among which each layer is divided.
        block: the number of elements that share a scale. Each part also begins a whole byte of
            packed codes.

    Attributes:
        parts: the number of elements that an owner has of each layer.
        starts: the column where each layer's part begins.
        width: the number of columns, gaps included.
    """

    def __init__(self, sizes: Sequence[int], owners: int, block: int) -> None:
        unit = block + block % 2 * block  # whole bytes of 4-bit codes
        self.sizes, self.owners, self.block = sizes, owners, block
        self.parts = [-(-size // owners) for size in sizes]
        self.starts = [*accumulate((-(-part // unit) * unit for part in self.parts), initial=0)]
        self.width = self.starts.pop()

    def bytes_of_parts(self, bits: int, itemsize: int) -> list[int]:
        """Return the bytes of each layer's part: scales and packed codes."""
        return [-(-part // self.block) * itemsize - (-part * bits // 8) for part in self.parts]

    def spread(
        self,
        layers: Sequence[Float[Tensor, "hosted _"]],
        into: Float[Tensor, "hosted owners width"],
    ) -> None:
        """Copy layers to their places, with zeros between them."""
        if gaps := [*self._gaps(into)]:
            foreach_zero_(gaps)
        theirs, ours = zip(*self._pairs(layers, into), strict=True)
        foreach_copy_(ours, theirs)

    def collect(
        self, values: Float[Tensor, "1 owners width"], into: Float[Tensor, "1 N"]
    ) -> list[Float[Tensor, " _"]]:
        """Return each layer of one row, whole: views where there is one owner, else copies in
        ``into``."""
        if self.owners == 1:
            parts = zip(self.starts, self.sizes, strict=True)
            return [values[0, 0, start : start + size] for start, size in parts]
        layers = into.split([*self.sizes], dim=1)
        theirs, ours = zip(*self._pairs(layers, values), strict=True)
        foreach_copy_(theirs, ours)
        return [layer[0] for layer in layers]

    def joined(
        self, columns: Iterable[tuple[int, int, Float[Tensor, " columns"]]], like: Tensor
    ) -> list[Float[Tensor, " _"]]:
        """Join columns: return each layer of one owner, side by side without gaps, in the type of
        ``like``.

        Args:
            columns: (first, stop, numbers) of successive ones.
        """
        layers = like.new_empty(sum(self.sizes)).split([*self.sizes])
        for first, stop, numbers in columns:
            if not (here := [*self.segments(first, stop)]):
                continue
            starts = [self.starts[i] - first for i, _ in here]
            foreach_copy_(
                [layers[i][a:b] for i, (a, b) in here],
                [numbers[s + a : s + b] for s, (_, (a, b)) in zip(starts, here, strict=True)],
            )
        return [*layers]

    def subtract_(
        self,
        layers: Sequence[Float[Tensor, "hosted _"]],
        values: Float[Tensor, "hosted owners width"],
    ) -> None:
        """Subtract from layers what lies at their places."""
        theirs, ours = zip(*self._pairs(layers, values), strict=True)
        foreach_sub_(theirs, ours)

    def segments(self, first: int, stop: int) -> Iterator[tuple[int, Span]]:
        """Yield the layers that have numbers in these columns, and which of a part's numbers they
        are."""
        for i in range(max(0, bisect_right(self.starts, first) - 1), len(self.parts)):
            start = self.starts[i]
            if start >= stop:
                return
            span = max(first, start) - start, min(stop - start, self.parts[i])
            if span[0] < span[1]:
                yield i, span

    def _pairs(self, layers: Sequence[Tensor], values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same numbers of a layer and of its place."""
        for layer, size, part, start in zip(
            layers, self.sizes, self.parts, self.starts, strict=True
        ):
            full, rest = divmod(size, part)
            if full:
                rows = layer[:, : full * part].unflatten(1, (full, part))
                yield rows, values[:, :full, start : start + part]
            if rest:
                yield layer[:, full * part :], values[:, full, start : start + rest]

    def _gaps(self, values: Tensor) -> Iterator[Tensor]:
        """What no layer fills."""
        ends = [*self.starts[1:], self.width]
        for size, part, start, end in zip(self.sizes, self.parts, self.starts, ends, strict=True):
            if start + part < end:
                yield values[:, :, start + part : end]
            full, rest = divmod(size, part)
            for owner in range(full, self.owners):
                yield values[:, owner, start + (rest if owner == full else 0) : start + part]

    # -- one scale for each layer ----------------------------------------------------------------

    def largest(self, blocks: Float[Tensor, "hosted blocks"]) -> Float[Tensor, "hosted layers"]:
        """Return the largest of each layer's blocks; NaN where a block is NaN."""
        found = blocks.new_zeros((len(blocks), len(self.sizes)))
        index = _layer_of_block(self, blocks.device).expand(blocks.shape)
        return found.scatter_reduce_(1, index, blocks, "amax")

    def of_blocks(self, scales: Float[Tensor, "rows layers"]) -> Float[Tensor, "rows blocks"]:
        """Return the scale of each block."""
        return scales.index_select(1, _layer_of_block(self, scales.device))

    # -- scales and codes of ``width`` numbers ---------------------------------------------------

    def without_gaps(
        self, wire: UInt8[Tensor, "*rows packed"], bits: int
    ) -> UInt8[Tensor, "*rows kept"]:
        """Return what has to travel of a row's scales and packed codes."""
        spans = self._spans(bits, wire.shape[-1])
        if spans == [(0, wire.shape[-1])]:
            return wire
        return torch.cat([wire[..., a:b] for a, b in spans], dim=-1)

    def with_gaps(
        self, kept: UInt8[Tensor, "*rows kept"], bits: int, packed: int
    ) -> UInt8[Tensor, "*rows packed"]:
        """Undo ``without_gaps`` for rows of ``packed`` bytes; zeros fill the gaps."""
        spans = self._spans(bits, packed)
        if spans == [(0, packed)]:
            return kept
        # The all-reduce (4 or 8 bits) gives the means of whole blocks new scales, which a gap must
        # not raise: so its gaps have the code of zero. Other codes are gathered, and of these
        # nobody reads a gap.
        filler = {4: 7 + 16 * 7, 8: 127}.get(bits, 0)  # a byte
        wire = kept.new_full((*kept.shape[:-1], packed), filler)
        pieces = kept.split([b - a for a, b in spans], dim=-1)
        foreach_copy_([wire[..., a:b] for a, b in spans], pieces)
        return wire

    def _spans(self, bits: int, packed: int) -> list[Span]:
        """The bytes of a row that belong to a layer, those that touch joined."""
        scales = packed - self.width * bits // 8
        width = scales * self.block // self.width  # of a scale
        bounds = [
            (start // self.block * width, -(-(start + part) // self.block) * width)
            for start, part in zip(self.starts, self.parts, strict=True)
        ]
        bounds += [
            (scales + start * bits // 8, scales - (-(start + part) * bits // 8))
            for start, part in zip(self.starts, self.parts, strict=True)
        ]
        joined: list[Span] = []
        for first, stop in bounds:
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((first, stop))
        return joined


class PlacedRows:
    """Reads layers of one owner in their places, as `codes.Rows`: on a CPU some columns at a time,
    which then need no memory for all.

    Args:
        layers: of any floating dtype.
        dtype: of the columns.
    """

    def __init__(
        self, plan: Layout, layers: Sequence[Float[Tensor, "hosted _"]], dtype: torch.dtype
    ) -> None:
        self.plan, self.layers, self.dtype = plan, layers, dtype
        self.shape, self.is_cuda = torch.Size((len(layers[0]), plan.width)), layers[0].is_cuda
        self.room: Tensor | None = None

    def new_empty(self, size: Any, /, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.layers[0].new_empty(size, dtype=dtype or self.dtype)

    def __getitem__(self, key: Any) -> Float[Tensor, "hosted columns"]:
        _, columns = key
        first, stop, _ = columns.indices(self.plan.width)
        rows, width = self.shape[0], stop - first
        here = [*self.plan.segments(first, stop)]
        if len(here) == 1 and self.layers[0].dtype == self.dtype:
            i, (a, b) = here[0]
            if b - a == width:
                return self.layers[i][:, a:b]
        if self.room is None or self.room.numel() < rows * width:
            self.room = self.new_empty(rows * width)
        into = self.room[: rows * width].view(rows, width)
        if sum(b - a for _, (a, b) in here) < width:
            into.zero_()
        if not here:
            return into
        starts = [self.plan.starts[i] - first for i, _ in here]
        foreach_copy_(
            [into[:, s + a : s + b] for s, (_, (a, b)) in zip(starts, here, strict=True)],
            [self.layers[i][:, a:b] for i, (a, b) in here],
        )
        return into


@lru_cache(maxsize=64)
def make_layout(sizes: tuple[int, ...], owners: int, block: int) -> Layout:
    """Make the layout of a bucket's layers, once."""
    return Layout(sizes, owners, block)


@cache_tensors(64)
def _layer_of_block(plan: Layout, device: torch.device) -> Int64[Tensor, " blocks"]:
    """Which layer each block belongs to."""
    ends = [*plan.starts[1:], plan.width]
    counts = [(end - start) // plan.block for start, end in zip(plan.starts, ends, strict=True)]
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device)


class UniformNoise:
    """Draws uniform numbers in [0, 1) for a layout, when and where a kernel asks for them.

    Args:
        seeds: of each layer, one for each hosted worker.
        rows: how many follow each other in a worker's stream: all owners' parts, or one.
    """

    def __init__(
        self, plan: Layout, seeds: Sequence[Sequence[Seed]], rows: int, like: Tensor
    ) -> None:
        self.plan, self.seeds, self.rows, self.like = plan, seeds, rows, like
        self.drawn: Tensor | None = None  # on a GPU
        self.room: np.ndarray | None = None  # on a CPU, of the columns asked for last

    def __call__(self, first: int, stop: int) -> Float[Tensor, "all columns"]:
        """Those of some columns, of all workers' rows, until the next call; any in gaps."""
        if on_gpu(self.like):
            if self.drawn is None:
                draw_noise([self])
            assert self.drawn is not None
            return self.drawn[:, first:stop]
        rows = len(self.seeds[0]) * self.rows
        if self.room is None or self.room.size < rows * (stop - first):
            self.room = np.zeros(rows * (stop - first), np.float32)
        drawn = self.room[: rows * (stop - first)].reshape(rows, -1)
        for (seed, _, begin), place in self.wanted(first, stop):
            fill_uniform(drawn[place], int(seed), begin)
        return torch.from_numpy(drawn).to(self.like.dtype)

    def wanted(self, first: int, stop: int) -> Iterator[tuple[Wanted, tuple[int, slice]]]:
        """Yield for some columns what `draw_uniform` is asked, and where its numbers go."""
        for i, (a, b) in self.plan.segments(first, stop):
            start, part = self.plan.starts[i] - first, self.plan.parts[i]
            for row in range(len(self.seeds[i]) * self.rows):
                worker, owner = divmod(row, self.rows)
                asked = self.seeds[i][worker], b - a, owner * part + a
                yield asked, (row, slice(start + a, start + b))


def draw_noise(noises: Sequence[UniformNoise]) -> None:
    """On a GPU draw all numbers of several at once, with the launches of one."""
    if not noises or not on_gpu(noises[0].like):
        return
    asked, places = [], []
    for noise in noises:
        noise.drawn = noise.like.new_zeros((len(noise.seeds[0]) * noise.rows, noise.plan.width))
        for wanted, place in noise.wanted(0, noise.plan.width):
            asked.append(wanted)
            places.append(noise.drawn[place])
    foreach_copy_(places, draw_uniform(asked, noises[0].like.device))
