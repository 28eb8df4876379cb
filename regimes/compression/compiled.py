"""Rounding as one function, which `torch.compile` makes a kernel of: C++ on a CPU, Triton on a GPU.

The random numbers are made in it, from a seed and a place for each block; they are those of
`seeding.draw_uniform`. The answers are those of `codes.round_chunks`, which stays the reference;
where a GPU divides or adds in another order, a code next to a tie may be its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regimes.compression import codes
from regimes.compression.codes import Added, Rows, split_chunks
from regimes.compression.layout import Noise
from regimes.errors import ConfigError
from regimes.seeding import FACTORS, GOLDEN

CHUNK = 1 << 18  # numbers that a CPU computes in one call, which costs more than an operator's
UNIT = 16  # a block has whole vectors of a CPU


def require_compiler() -> None:
    """Raise ConfigError unless this machine can compile kernels."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    try:
        found = has_triton() if torch.cuda.is_available() else bool(get_cpp_compiler())
    except RuntimeError:  # torch has none that works
        found = False
    if not found:
        raise ConfigError(
            'compressor.kernels = "compiled" needs a C++ compiler (on a GPU Triton), which this '
            "machine lacks: install one, or leave the field out"
        )


def round_compiled(
    rows: Rows,
    block: int,
    steps: int,
    noise: Added,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """`codes.round_chunks`, compiled; that itself for blocks of other sizes than multiples of 16,
    codes of 16 bits, and noise that is already there."""
    size, known = rows.shape[1], isinstance(noise, float | Noise)
    if block % UNIT or size % block or steps > 127 or not known:
        yield from codes.round_chunks(rows, block, steps, noise, values, scales)
        return
    drawn, odd = (noise.places() if isinstance(noise, Noise) else None), False
    if isinstance(noise, Noise):
        odd = noise.rows > 1 and any(part % 2 for part in noise.plan.parts)
    for first, stop in split_chunks(rows, block, size, CHUNK):
        here, numbers = slice(first // block, stop // block), rows[:, first:stop]
        if len(numbers) == 1:  # with the strides of a whole one, for which there is a kernel
            numbers = numbers[0].unsqueeze(0)
        into = None if values is None else values[:, first:stop]
        if into is not None and len(into) == 1:
            into = into[0].unsqueeze(0)
        if into is not None and into.data_ptr() == numbers.data_ptr():
            into = numbers  # one argument: torch would take two that overlap for any
        at = None if scales is None else scales[:, here]
        where = None if drawn is None else (drawn[0][:, here], drawn[1][:, here])
        given = numbers, at, where, None if into is numbers else into
        kernel = kernel_of(block, steps, odd, into is numbers, tuple(x is None for x in given))
        scale, code = kernel(*given)
        yield first, stop, scale, code


@cache
def kernel_of(
    block: int, steps: int, odd: bool, in_place: bool, left_out: tuple[bool, ...]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`round_blocks`, compiled. Each has a code object of its own, of which torch keeps at most
    eight variants (of shapes and strides); what is beyond them is not compiled."""

    def kernel(*given: Any) -> tuple[Tensor, Tensor]:
        return round_blocks(block, steps, odd, in_place, *given)

    key = "".join(str(int(x)) for x in (odd, in_place, *left_out))
    code = kernel.__code__.replace(co_name=f"round_{block}_{steps}_{key}")
    # sizes become variables where they change; the numbers above stay constants, for whole vectors
    own = FunctionType(code, globals(), code.co_name, None, kernel.__closure__)
    made: Callable[..., tuple[Tensor, Tensor]] = torch.compile(own)
    return made


def round_blocks(
    block: int,
    steps: int,
    odd: bool,
    in_place: bool,
    numbers: Tensor,
    scales: Tensor | None,
    drawn: tuple[Tensor, Tensor] | None,
    into: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(scales ``[rows, blocks]``, codes from 0 on, uint8 ``[rows, size]``) of ``numbers [rows,
    size]``, whole blocks.

    Args:
        odd: a stream may be read from the second half of a word on.
        in_place: ``numbers`` gets what the codes stand for.
        scales: of blocks; None: the largest magnitude of each.
        drawn: of each block the seed and the place in its stream, ``[rows, blocks]`` each; None:
            nothing is drawn, numbers are rounded to the nearest.
        into: gets what the codes stand for, too.
    """
    blocks = numbers.unflatten(1, (-1, block))
    if scales is None:
        tiny = torch.finfo(numbers.dtype).tiny
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(tiny)
    else:
        scale = scales.unsqueeze(-1)
    noise = 0.5 if drawn is None else uniform_of_blocks(*drawn, block, odd).to(numbers.dtype)
    code = (blocks / scale * steps + noise).floor().clamp(-steps, steps)
    place = numbers if in_place else into
    narrow = (code + steps).to(torch.uint8).flatten(1)
    if place is not None:
        place.copy_((code * (scale / steps)).flatten(1))
    return scale.squeeze(-1), narrow


def uniform_of_blocks(seeds: Tensor, places: Tensor, block: int, odd: bool) -> Tensor:
    """`seeding.draw_uniform` numbers of each block, ``[rows, blocks, block]``, from its place on. A
    CPU makes each word once, and reads both halves; a GPU makes it for either half."""
    if seeds.is_cuda:
        at = places.unsqueeze(-1) + torch.arange(block, device=seeds.device)
        return half_of(mix_words(seeds.unsqueeze(-1), at // 2), at)
    ahead = torch.arange(block // 2 + odd)
    halves = mix_words(seeds.unsqueeze(-1), places.unsqueeze(-1) // 2 + ahead).view(torch.int32)
    if odd:
        second = places.unsqueeze(-1) % 2 == 1
        halves = torch.where(second, halves[..., 1 : block + 1], halves[..., :block])
    return ((halves >> 8) & (2**24 - 1)).to(torch.float32) * 2.0**-24


def half_of(word: Tensor, at: Tensor) -> Tensor:
    """The number at places of a stream, from the words that hold them."""
    half = torch.where(at % 2 == 1, word >> 40, word >> 8) & (2**24 - 1)
    return half.to(torch.int32).to(torch.float32) * 2.0**-24


def mix_words(seeds: Tensor, at: Tensor) -> Tensor:
    """The words of streams: SplitMix64's hash, see `seeding.draw_uniform`."""
    state = seeds + (at + 1) * GOLDEN
    for bits, factor in FACTORS:
        state = (state ^ ((state >> bits) & (2 ** (64 - bits) - 1))) * factor
    return state ^ ((state >> 31) & (2**33 - 1))
