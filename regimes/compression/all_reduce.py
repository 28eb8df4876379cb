"""Quantised all-reduce: the bytes per worker hardly depend on the number of workers; with an
all-gather of codes they grow with it.

Each worker owns a part of the layer. All send their quantised numbers of a part to its owner
(reduce-scatter), which decodes them, adds them in float32 at least, and sends the quantised mean to
all (all-gather): the two phases of 1-bit Adam's compressed all-reduce (Tang et al., ICML 2021); the
first is ZeRO++'s qgZ (Wang et al., 2023) without its hierarchy of nodes. A mean is thus rounded
twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.collectives.requests import Exchange, Gather, Layer, Traffic
from regimes.compression.base import Sending, State
from regimes.compression.elementwise import Rounding, pack, unpack
from regimes.config import DENSE, Bounds, Level
from regimes.errors import require


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
        mean = in_order_mean(dequantise(received, bits, self.block, part, exact.dtype))  # [L, part]
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
        size = max(4, itemsize) * -(-part // self.block) + -(-part * int(level) // 8)
        return Traffic(workers * size / 4, workers * size)


def quantise(
    numbers: Float[Tensor, "*rows size"], bits: int, block: int, noise: Tensor | float
) -> tuple[UInt8[Tensor, "*rows packed"], Float[Tensor, "*rows size"]]:
    """(scales and packed codes of each row, the dequantised values).

    Args:
        noise: added before rounding down: 0.5 rounds to the nearest, a uniform number in [0, 1)
            stochastically.
    """
    steps = 2 ** (bits - 1) - 1  # codes -steps .. steps
    blocks = _in_blocks(numbers, block)
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(numbers.dtype).tiny)
    given = _in_blocks(noise.view(numbers.shape), block) if isinstance(noise, Tensor) else noise
    codes = (blocks / scale * steps).add_(given).floor_().clamp_(-steps, steps)
    dequantised = (codes * (scale / steps)).flatten(-2)[..., : numbers.shape[-1]]
    plain = codes.flatten(-2)[..., : numbers.shape[-1]]
    scales = scale.squeeze(-1).contiguous().view(torch.uint8)
    wire = torch.cat([scales, pack((plain + steps).to(torch.uint8), bits)], -1)
    return wire, dequantised.contiguous()


def dequantise(
    wire: UInt8[Tensor, "*rows packed"], bits: int, block: int, size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows size"]:
    """The inverse of `quantise`: the same bits as the values that it returned."""
    steps, blocks = 2 ** (bits - 1) - 1, -(-size // block)
    end = blocks * dtype.itemsize
    # a copy, because a view as another dtype needs aligned storage
    scale = wire[..., :end].clone(memory_format=torch.contiguous_format).view(dtype)
    codes = (unpack(wire[..., end:], bits, size) - steps).to(dtype)
    return (_in_blocks(codes, block) * (scale / steps).unsqueeze(-1)).flatten(-2)[..., :size]


def in_order_mean(rows: Float[Tensor, "hosted workers size"]) -> Float[Tensor, "hosted size"]:
    """The mean over workers, added one after the other: the bits do not depend on how many
    workers a process hosts, as those of a reduction might."""
    total = rows[:, 0].clone()
    for worker in range(1, rows.shape[1]):
        total += rows[:, worker]
    return total / rows.shape[1]


def _in_blocks(numbers: Tensor, block: int) -> Tensor:
    """``[..., size]`` to ``[..., blocks, block]``, the last one padded with zeros."""
    block = min(block, max(1, numbers.shape[-1]))
    return _padded(numbers, -numbers.shape[-1] % block).unflatten(-1, (-1, block))


def _padded(numbers: Tensor, zeros: int) -> Tensor:
    """With zeros at the end; without any the tensor itself, which torch would copy."""
    return torch.nn.functional.pad(numbers, (0, zeros)) if zeros else numbers
