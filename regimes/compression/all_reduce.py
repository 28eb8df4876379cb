"""Quantised all-reduce: the bytes per worker hardly depend on the number of workers; with an
all-gather of codes they grow with it.

Each worker owns a part of the layer. All send their quantised numbers of a part to its owner
(reduce-scatter), which decodes them, adds them in float32 at least, and sends the quantised mean to
all (all-gather): the two phases of 1-bit Adam's compressed all-reduce (Tang et al., ICML 2021); the
first is ZeRO++'s qgZ (Wang et al., 2023) without its hierarchy of nodes. A mean is thus rounded
twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.collectives.requests import Exchange, Gather, Layer, Traffic
from regimes.compression.base import Sending, State
from regimes.compression.elementwise import Rounding
from regimes.compression.kernels import on_gpu
from regimes.config import DENSE, Bounds, Level
from regimes.errors import require

CHUNK = 1 << 18  # numbers that a CPU computes at once


@dataclass(frozen=True, kw_only=True)
class QuantisedAllReduce(Rounding):
    """Integers of 8 or 4 bits, scaled by the largest magnitude of each block; the level is the
    number of bits.

    With s the scale of a block and n = 2^(bits - 1) - 1, a number is sent as a multiple of s / n:
    nearest rounding errs by at most s / (2 n), stochastic rounding by less than s / n and by zero
    in the mean. Both rounding errors go into residuals: each worker's own, and, at the owner of a
    part, that of the rounded mean, multiplied by W because the next mean divides by W.

    Attributes:
        block: how many numbers share a scale.
    """

    block: Annotated[int, Bounds("a whole number from 1", low=1)] = 256
    usual: ClassVar[Mapping[str, Level]] = {"low": 8, "high": 4}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        good = level in (DENSE, 4, 8) and not isinstance(level, bool)
        require(good, "level of quantised-all-reduce", level, '4 or 8 (bits), or "dense"')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat, bits, hosted = delta.flatten(1), int(level), len(delta)
        # ``delta`` may be of 16 bits; scales and sums are not
        exact = flat.to(torch.promote_types(flat.dtype, torch.float32))
        count, size = state.workers, flat.shape[1]
        part = -(-size // count)  # numbers of each owner, the last one's padded with zeros
        padded = _padded(exact, count * part - size)
        noise = yield from self._noise(padded, state, "numbers")
        wire, own = quantise(padded.view(hosted, count, part), bits, self.block, noise)
        received = yield Exchange(wire)  # [L, W, bytes]: of all workers, this one's part
        mean = in_order_sum(received, bits, self.block, part, exact.dtype, count)  # [L, part]
        noise = yield from self._noise(mean, state, "means")
        wire, rounded = quantise(mean, bits, self.block, noise)
        parts = yield Gather(wire)  # [W, bytes]
        update = dequantise(parts, bits, self.block, part, exact.dtype).flatten()[:size]
        first = state.first_worker
        if self.error_feedback:  # the owner of a part keeps what rounding its mean has lost
            for row in range(hosted):
                own[row, first + row] -= count * (mean[row] - rounded[row])
        sent = own.flatten(1)[:, :size].to(delta.dtype)
        return update.to(delta.dtype).view(delta.shape[1:]), sent.view(delta.shape)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The parts of other owners to them, and the mean of one part to all. In floats only the
        all-gather of the means is counted (``workers * size / 4``), not the exchange (see
        `Meter.count`)."""
        part = -(-layer.size // workers)
        size = wire_bytes(part, int(level), self.block, itemsize)
        return Traffic(workers * size / 4, workers * size)


def quantise(
    numbers: Float[Tensor, "*rows size"], bits: int, block: int, noise: Tensor | float
) -> tuple[UInt8[Tensor, "*rows packed"], Float[Tensor, "*rows size"]]:
    """(scales and packed codes of each row, the dequantised values).

    Args:
        noise: added before rounding down: 0.5 rounds to the nearest, a uniform number in [0, 1)
            stochastically.
    """
    size, steps = numbers.shape[-1], 2 ** (bits - 1) - 1  # codes -steps .. steps
    rows = numbers.flatten(0, -2)
    given = noise.reshape(rows.shape) if isinstance(noise, Tensor) else noise
    block, width = min(block, max(1, size)), rows.element_size()
    end = -(-size // block) * width
    wire = rows.new_empty((len(rows), end + -(-size * bits // 8)), dtype=torch.uint8)
    values = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for first, stop in _chunks(rows, block, size):
        blocks = _in_blocks(rows[:, first:stop], block)
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
        begin = first // block * width
        wire[:, begin : begin + blocks.shape[1] * width] = scale.squeeze(-1).view(torch.uint8)
        code = (blocks / scale).mul_(steps)
        if isinstance(given, Tensor):
            code.add_(_in_blocks(given[:, first:stop], block))
        else:
            code.add_(given)
        code.floor_().clamp_(-steps, steps)
        here = values[:, first:stop]
        if (stop - first) % block:
            here.copy_((code * scale.div_(steps)).flatten(1)[:, : stop - first])
        else:
            torch.mul(code, scale.div_(steps), out=here.unflatten(1, (-1, block)))
        plain = code.add_(steps).flatten(1)[:, : stop - first]
        begin = end + first * bits // 8
        packed = plain if bits == 8 else _in_pairs(plain)
        wire[:, begin : begin + packed.shape[1]] = packed
    return wire.view(*numbers.shape[:-1], -1), values.view(numbers.shape)


def _in_pairs(codes: Float[Tensor, "rows size"]) -> Float[Tensor, "rows bytes"]:
    """Codes of 4 bits two to a byte, the first in the low bits; floats still, which pack faster
    than integers."""
    codes = _padded(codes, codes.shape[1] % 2)
    return torch.add(codes[:, 0::2], codes[:, 1::2], alpha=16)


def dequantise(
    wire: UInt8[Tensor, "*rows packed"], bits: int, block: int, size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows size"]:
    """The inverse of `quantise`: the same bits as the values that it returned."""
    rows = wire.flatten(0, -2)
    values = torch.empty((len(rows), size), dtype=dtype, device=wire.device)
    for first, stop, value in _decoded(rows, bits, block, size, dtype):
        values[:, first:stop] = value
    return values.view(*wire.shape[:-1], size)


def wire_bytes(size: int, bits: int, block: int, itemsize: int = 4) -> int:
    """Bytes of ``quantise``'s answer for so many numbers: scales, and packed codes."""
    return max(4, itemsize) * -(-size // block) + -(-size * bits // 8)


def in_order_sum(
    wire: UInt8[Tensor, "hosted workers packed"],
    bits: int,
    block: int,
    size: int,
    dtype: torch.dtype,
    divisor: int = 1,
) -> Float[Tensor, "hosted size"]:
    """The sum over workers of what they have quantised, added one after the other, and divided: the
    bits do not depend on how many workers a process hosts, as those of a reduction might."""
    hosted, workers, _ = wire.shape
    result = torch.empty((hosted, size), dtype=dtype, device=wire.device)
    for first, stop, value in _decoded(wire.flatten(0, 1), bits, block, size, dtype):
        rows = value.unflatten(0, (hosted, workers))
        total = rows[:, 0]
        for worker in range(1, workers):
            total += rows[:, worker]
        torch.div(total, divisor, out=result[:, first:stop])
    return result


def _decoded(
    rows: UInt8[Tensor, "rows packed"], bits: int, block: int, size: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, Float[Tensor, "rows chunk"]]]:
    """(first number, stop, values) of each chunk of what was quantised."""
    steps, block = 2 ** (bits - 1) - 1, min(block, max(1, size))
    end = -(-size // block) * dtype.itemsize
    if not size:
        return
    # a copy, because a view as another dtype needs aligned storage
    copied = torch.empty((len(rows), end), dtype=torch.uint8, device=rows.device)
    scales = copied.copy_(rows[:, :end]).view(dtype).div_(steps)
    for first, stop in _chunks(rows, block, size):
        packed = rows[:, end + first * bits // 8 : end - (-stop * bits // 8)]
        if bits == 8:
            code = packed.to(dtype)
        else:
            code = torch.empty((len(rows), 2 * packed.shape[1]), dtype=dtype, device=rows.device)
            code[:, 0::2] = packed & 15
            code[:, 1::2] = packed >> 4
        blocks = _in_blocks(code[:, : stop - first].sub_(steps), block)
        scale = scales[:, first // block : first // block + blocks.shape[1], None]
        yield first, stop, blocks.mul_(scale).flatten(1)[:, : stop - first]


def _chunks(rows: Tensor, block: int, size: int) -> Iterator[tuple[int, int]]:
    """(first number, stop) of the parts of all rows that are computed at once: on a CPU as many as
    its cache holds with what is computed from them, on a GPU all, with one launch each."""
    pair = 2 * block  # whole bytes of 4-bit codes
    width = size if on_gpu(rows) else max(1, CHUNK // max(1, len(rows) * pair)) * pair
    for first in range(0, size, max(1, width)):
        yield first, min(first + width, size)


def _in_blocks(numbers: Tensor, block: int) -> Tensor:
    """``[..., size]`` to ``[..., blocks, block]``, the last one padded with zeros."""
    block = min(block, max(1, numbers.shape[-1]))
    return _padded(numbers, -numbers.shape[-1] % block).unflatten(-1, (-1, block))


def _padded(numbers: Tensor, zeros: int) -> Tensor:
    """With zeros at the end; without any the tensor itself, which torch would copy."""
    return torch.nn.functional.pad(numbers, (0, zeros)) if zeros else numbers
