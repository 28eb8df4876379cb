"""Rounding to integers of few bits, and their bytes: kernels that work in place.

On a CPU they work in chunks that stay in its cache, on a GPU on all numbers with one launch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.compression.kernels import on_gpu

CHUNK = 1 << 18  # numbers that a CPU computes at once: each call of torch costs microseconds
Added = Tensor | float | Callable[[int, int], Tensor]  # what gives it for some columns of all rows


@runtime_checkable
class Rows(Protocol):
    """Gives rows of numbers that need not lie in one piece of memory; a tensor gives such rows,
    too."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_cuda(self) -> bool: ...

    def new_empty(self, size: Any, /, *, dtype: Any = None) -> Tensor: ...

    def __getitem__(self, key: Any, /) -> Tensor:
        """Some columns, of all rows; they may be overwritten when others are asked for."""


def split_chunks(rows: Rows, block: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first number, stop) of each part of all rows that is computed at once: on a CPU as
    many numbers as its cache holds with what is computed from them, on a GPU all."""
    pair = 2 * block  # whole bytes of codes
    width = size if rows.is_cuda else max(1, CHUNK // max(1, rows.shape[0] * pair)) * pair
    for first in range(0, size, max(1, width)):
        yield first, min(first + width, size)


def in_blocks(numbers: Tensor, block: int) -> Tensor:
    """Reshape ``[..., size]`` to ``[..., blocks, block]``; zeros fill the last block."""
    block = min(block, max(1, numbers.shape[-1]))
    return _pad_end(numbers, -numbers.shape[-1] % block).unflatten(-1, (-1, block))


def _pad_end(numbers: Tensor, zeros: int) -> Tensor:
    """The tensor with so many zeros at the end; with none itself, where torch would copy it."""
    return torch.nn.functional.pad(numbers, (0, zeros)) if zeros else numbers


def largest_of_blocks(rows: Rows, block: int) -> Float[Tensor, "rows blocks"]:
    """Return the largest magnitude of each block."""
    parts, room = [], None
    for first, stop in split_chunks(rows, block, rows.shape[1]):
        blocks = in_blocks(rows[:, first:stop], block)
        room = rows.new_empty(blocks.numel()) if room is None else room
        magnitudes = torch.abs(blocks, out=room[: blocks.numel()].view(blocks.shape))
        parts.append(magnitudes.amax(-1))
    return torch.cat(parts, dim=1)


def round_chunks(
    rows: Rows,
    block: int,
    steps: int,
    noise: Added,
    values: Float[Tensor, "rows size"] | None = None,
    scales: Float[Tensor, "rows blocks"] | None = None,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Round rows to integers, chunk by chunk: yield (first number, stop, scales ``[rows, blocks]``,
    codes from 0 on ``[rows, numbers]``) of each chunk, in memory that the next chunk overwrites.
    Codes are whole floats. ``values``, if given, gets the numbers that the codes stand for.

    Args:
        steps: codes stand for ``-steps .. steps`` times ``scale / steps``.
        noise: see `all_reduce.quantise_rows`.
        values: may be ``rows`` itself.
        scales: of blocks; None: the largest magnitude of each.
    """
    block, room = min(block, max(1, rows.shape[1])), None
    for first, stop in split_chunks(rows, block, rows.shape[1]):
        blocks, here = (
            in_blocks(rows[:, first:stop], block),
            slice(first // block, -(-stop // block)),
        )
        if room is None:  # of the first chunk, which is the largest: fresh pages cost a pass
            room = rows.new_empty(blocks.numel())
        code = room[: blocks.numel()].view(blocks.shape)
        if scales is None:
            scale = torch.abs(blocks, out=code).amax(-1, keepdim=True)
            scale.clamp_min_(torch.finfo(rows.dtype).tiny)
        else:
            scale = scales[:, here, None]
        torch.div(blocks, scale, out=code).mul_(steps)
        if isinstance(noise, float):
            code.add_(noise)
        else:
            added = noise[:, first:stop] if isinstance(noise, Tensor) else noise(first, stop)
            code.add_(in_blocks(added, block))
        code.floor_().clamp_(-steps, steps)
        if values is not None:
            into = values[:, first:stop]
            if (stop - first) % block:
                into.copy_((code * (scale / steps)).flatten(1)[:, : stop - first])
            else:
                torch.mul(code, scale / steps, out=into.unflatten(1, (-1, block)))
        yield first, stop, scale.squeeze(-1), code.add_(steps).flatten(1)[:, : stop - first]


def write_packed(
    wire: UInt8[Tensor, "rows _"], codes: Float[Tensor, "rows size"], bits: int
) -> None:
    """Write codes of 1, 2, 4 or 8 bits to the beginning of rows, ``8 / bits`` to a byte, low bits
    first; or of 16 bits, as signed integers."""
    if bits == 16:
        signed = wire[:, : 2 * codes.shape[1]]
        signed.copy_(codes.sub(2**15 - 1).to(torch.int16).view(torch.uint8))
        return
    codes = _pad_end(codes, -codes.shape[1] % (8 // bits))
    if on_gpu(codes):
        while bits < 8:  # floats still, which pack faster than integers
            codes = torch.add(codes[:, 0::2], codes[:, 1::2], alpha=2**bits)
            bits *= 2
        wire[:, : codes.shape[1]] = codes
        return
    into = wire.numpy()[:, : codes.shape[1] * bits // 8]
    narrow = into if bits == 8 else np.empty(codes.shape, np.uint8)
    with np.errstate(invalid="ignore"):  # of a block that is not finite the scale tells, not codes
        np.copyto(narrow, codes.numpy(), casting="unsafe")
    while bits < 8:  # of each pair of bytes the second to the left of the first, into one byte
        pairs, bits = narrow.view(np.dtype("<u2")), 2 * bits
        narrow = into if bits == 8 else np.empty(pairs.shape, np.uint8)
        np.copyto(narrow, pairs | pairs >> (8 - bits // 2), casting="unsafe")


def decode_codes(
    wire: UInt8[Tensor, "rows packed"], bits: int, steps: int, dtype: torch.dtype
) -> Float[Tensor, "rows codes"]:
    """Turn codes into numbers: each code minus ``steps``; for codes of 1 bit -1 and 1."""
    if bits == 16:
        return wire.clone().view(torch.int16).to(dtype)
    if bits == 8:
        return wire.to(dtype).sub_(steps)
    if on_gpu(wire):
        shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=wire.device)
        codes = ((wire.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1).to(dtype)
        return codes.mul_(2).sub_(1) if bits == 1 else codes.sub_(steps)
    return torch.from_numpy(np.take(_make_table(bits, steps, dtype), wire.numpy(), axis=0)).flatten(
        1
    )


@lru_cache(maxsize=16)
def _make_table(bits: int, steps: int, dtype: torch.dtype) -> Float[np.ndarray, "256 codes"]:
    """The numbers that each byte holds."""
    codes = np.arange(256)[:, None] >> bits * np.arange(8 // bits) & 2**bits - 1
    codes = 2 * codes - 1 if bits == 1 else codes - steps
    return codes.astype(torch.empty(0, dtype=dtype).numpy().dtype)


def pack_codes(codes: UInt8[Tensor, "*batch size"], bits: int) -> UInt8[Tensor, "*batch packed"]:
    """Pack codes of 1, 2, 4 or 8 bits, ``8 / bits`` to the byte, low bits first, padded with
    zeros."""
    if bits == 1 and not on_gpu(codes):
        return torch.from_numpy(np.packbits(codes.numpy(), axis=-1, bitorder="little"))
    if padding := -codes.shape[-1] % (8 // bits):
        codes = torch.nn.functional.pad(codes, (0, padding))
    while bits < 8:  # of each pair the second to the left of the first
        codes = codes[..., 0::2] | (codes[..., 1::2] << bits)
        bits *= 2
    return codes


def unpack_codes(
    packed: UInt8[Tensor, "*batch packed"], bits: int, size: int
) -> UInt8[Tensor, "*batch size"]:
    """Undo ``pack_codes``."""
    if bits == 8:
        return packed[..., :size]
    if bits == 1 and not on_gpu(packed):
        codes = np.unpackbits(packed.numpy(), axis=-1, count=size, bitorder="little")
        return torch.from_numpy(codes)
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :size]


def pack_signs(rows: Float[Tensor, "rows size"]) -> UInt8[Tensor, "rows packed"]:
    """Pack a bit for each number: 1 unless the number is negative or NaN. ``size`` is a multiple of
    8."""
    if on_gpu(rows):
        wire = rows.new_empty((len(rows), rows.shape[1] // 8), dtype=torch.uint8)
        write_packed(wire, (rows >= 0).to(torch.float32), 1)
        return wire
    array = rows.numpy()
    packed = [
        np.packbits(array[:, a:b] >= 0, axis=1, bitorder="little")
        for a, b in split_chunks(rows, 8, rows.shape[1])
    ]
    return torch.from_numpy(np.concatenate(packed, axis=1))


def weighted_sums(
    wires: UInt8[Tensor, "workers packed"],
    bits: int,
    scales: Float[Tensor, "workers blocks"],
    block: int,
    divisor: int,
) -> Iterator[tuple[int, int, Float[Tensor, " columns"]]]:
    """Add workers' codes times their scales, one worker after the other, and divide the sums: yield
    (first number, stop, sum) of each chunk."""
    size, steps = scales.shape[1] * block, 2 ** (bits - 1) - 1
    for first, stop in split_chunks(wires, block, size):
        packed = wires[:, first * bits // 8 : stop * bits // 8]
        codes = in_blocks(decode_codes(packed, bits, steps, scales.dtype), block)
        by = scales[:, first // block : stop // block, None]
        total = codes[0].mul_(by[0])
        for code, scale in zip(codes[1:], by[1:], strict=True):
            total.addcmul_(code, scale)
        yield first, stop, total.div_(divisor).flatten()
