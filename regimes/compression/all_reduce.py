"""Quantised all-reduce: the bytes per worker hardly depend on the number of workers; with an
all-gather of codes they grow with it.

Each worker owns a part of the layer. All send their quantised numbers of a part to its owner
(reduce-scatter), which decodes them, adds them in float32 at least, and sends the quantised mean to
all (all-gather): the two phases of 1-bit Adam's compressed all-reduce (Tang et al., ICML 2021); the
first is ZeRO++'s qgZ (Wang et al., 2023) without its hierarchy of nodes. So each number is rounded
twice, by the workers and by the owner of its part. With one worker it is rounded once: the mean is
what this worker has sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.base.config import DENSE, Bounds, Level
from regimes.base.errors import require
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.bucket import Bucket
from regimes.compression.codes import (
    Added,
    Rows,
    decode_codes,
    in_blocks,
    round_chunks,
    split_chunks,
    write_packed,
)
from regimes.compression.elementwise import Rounding
from regimes.compression.kernel_layout import PlacedRows, UniformNoise, draw_noise, make_layout


@dataclass(frozen=True, kw_only=True)
class QuantisedAllReduce(Rounding):
    """Sends integers of 8 or 4 bits, scaled by the largest magnitude of each block, in an
    all-reduce. The level is the number of bits.

    With s the scale of a block and n = 2^(bits - 1) - 1, a number is sent as a multiple of s / n.
    Nearest rounding errs by at most s / (2 n). Stochastic rounding errs by less than s / n, and by
    zero in the mean. With error feedback both rounding errors go into residuals: each worker's own,
    and at the owner of a part the error of the rounded mean, multiplied by W because the next mean
    divides by W.

    Attributes:
        block: The number of numbers that share a scale.
    """

    block: Annotated[int, Bounds("a whole number from 1", low=1)] = 256
    usual: ClassVar[Mapping[str, Level]] = {"low": 8, "high": 4}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        good = level in (DENSE, 4, 8) and not isinstance(level, bool)
        require(good, "level of quantised-all-reduce", level, '4 or 8 (bits), or "dense"')

    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        """Send the parts to their owners, and the owners' means to all.

        What is read back from the bytes depends on how many of the W workers are hosted here (L):

        - one worker (W = 1): nothing. There is no mean to add up or round, and the worker's own
          rounded values are the update.
        - all workers (L = W > 1): nothing. Each worker's rounded values, and the rounded means of
          all owners, are here, and are what the bytes would give.
        - some of the workers (L < W): what the others have sent, in both phases.
        """
        flat, states, bits = bucket.flat, bucket.states, int(bucket.level)
        hosted, count = len(flat[0]), states[0].workers
        # the deltas may be of 16 bits; scales and sums are not
        exact = torch.promote_types(flat[0].dtype, torch.float32)
        plan = make_layout(tuple(bucket.sizes), count, self.block)
        # [L, W, width], by worker and owner: the numbers, which `encode_chunks` rounds in place
        values = torch.empty((hosted, count, plan.width), dtype=exact, device=flat[0].device)
        rows: Rows = PlacedRows(plan, flat, exact)
        if count > 1:
            plan.spread(flat, values)
            rows = values.flatten(0, 1)
        noise = self._noise_of(plan, states, "numbers", count, values)
        of_means = self._noise_of(plan, states, "means", 1, values) if count > 1 else 0.5
        draw_noise([x for x in (noise, of_means) if isinstance(x, UniformNoise)])
        wire = encode_chunks(rows, bits, self.block, noise, values.flatten(0, 1))
        packed = wire.shape[1]
        sizes = plan.bytes_of_parts(bits, exact.itemsize)
        to_owners = plan.without_gaps(wire, bits).unflatten(0, (hosted, count))
        del wire  # and its memory
        all_parts = bucket.shares([count * size for size in sizes])
        (received,) = comm.all_to_all([to_owners], all_parts)  # [L, W, bytes]

        # [L, width]: the means of the parts that hosted workers own, and these means rounded
        if count == 1:
            rounded, to_all = values[0], to_owners[:, 0]
        else:
            del to_owners  # and its memory
            if hosted == count:
                mean = _mean_of_hosted(values, in_place=not bucket.feedback)
            else:
                received = plan.with_gaps(received, bits, packed)
                mean = in_order_sum(received, bits, self.block, plan.width, exact, count)
            rounded = torch.empty_like(mean) if bucket.feedback else mean
            wire = quantise_rows(mean, bits, self.block, of_means, rounded)
            to_all = plan.without_gaps(wire, bits)
            del wire
            if bucket.feedback:
                _charge_owners(values, mean.sub_(rounded), states[0].first_worker)
        (gathered,) = comm.gather([to_all], bucket.shares(sizes))  # [W, bytes]
        if bucket.feedback:
            plan.subtract_(flat, values)

        if hosted == count:
            update = rounded
        else:
            gathered = plan.with_gaps(gathered, bits, packed)
            update = dequantise_rows(gathered, bits, self.block, plan.width, exact)
        # room to join the parts in: a lone hosted worker's values have been used
        room = values[0] if hosted == 1 else torch.empty_like(update)
        room = room.view(1, -1)[:, : sum(plan.sizes)]
        return [part.to(flat[0].dtype) for part in plan.collect(update[None], room)]

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return what a worker sends of one layer in one step: the parts of the other owners to
        them, and the mean of its own part to all. In bytes both count. In floats only the gather of
        the means counts, at 32 bits a float.
        """
        part = -(-layer.size // workers)
        size = wire_bytes(part, int(level), self.block, itemsize)
        return Traffic(workers * size / 4, workers * size)


def _mean_of_hosted(
    values: Float[Tensor, "workers owners width"], *, in_place: bool
) -> Float[Tensor, "owners width"]:
    """The mean over workers, added one after the other; in place it is written over the first."""
    mean = values[0] if in_place else values[0].clone()
    for worker in range(1, len(values)):
        mean += values[worker]
    return mean.div_(len(values))


def _charge_owners(
    values: Float[Tensor, "hosted owners width"],
    lost: Float[Tensor, "hosted width"],
    first_worker: int,
) -> None:
    """Let each hosted worker's residual take what rounding the mean of its own part has lost, as if
    it had sent so much less; the next mean divides by the number of workers."""
    count = values.shape[1]
    for row in range(len(values)):
        values[row, first_worker + row] -= count * lost[row]


def quantise_rows(
    numbers: Float[Tensor, "*rows size"],
    bits: int,
    block: int,
    noise: Added,
    values: Float[Tensor, "*rows size"] | None = None,
) -> UInt8[Tensor, "*rows packed"]:
    """Round each row to integers of so many bits; return its scales and packed codes as bytes.

    Args:
        noise: added before rounding down: 0.5 rounds to the nearest, a uniform number in [0, 1)
            stochastically. Or what gives those of some columns, ``[all rows, columns]``.
        values: overwritten with what `dequantise_rows` makes of the answer; without gaps in memory.
            It may be ``numbers``.
    """
    rows = numbers.flatten(0, -2)
    noise = noise.reshape(rows.shape) if isinstance(noise, Tensor) else noise
    kept = None if values is None else values.view(rows.shape)
    return encode_chunks(rows, bits, block, noise, kept).view(*numbers.shape[:-1], -1)


def encode_chunks(
    rows: Rows, bits: int, block: int, noise: Added, values: Float[Tensor, "rows size"] | None
) -> UInt8[Tensor, "rows packed"]:
    """Do the work of ``quantise_rows``, for rows that need not lie in one piece of memory."""
    size, steps = rows.shape[1], 2 ** (bits - 1) - 1  # codes -steps .. steps
    block, width = min(block, max(1, size)), rows.dtype.itemsize
    end = -(-size // block) * width
    wire = rows.new_empty((rows.shape[0], end + -(-size * bits // 8)), dtype=torch.uint8)
    for first, _, scales, codes in round_chunks(rows, block, steps, noise, values):
        begin, scales = first // block * width, scales.contiguous().view(torch.uint8)
        wire[:, begin : begin + scales.shape[1]] = scales
        write_packed(wire[:, end + first * bits // 8 :], codes, bits)
    return wire


def dequantise_rows(
    wire: UInt8[Tensor, "*rows packed"], bits: int, block: int, size: int, dtype: torch.dtype
) -> Float[Tensor, "*rows size"]:
    """Return the numbers that ``quantise_rows`` has packed: the same bits as its ``values``."""
    rows = wire.flatten(0, -2)
    values = torch.empty((len(rows), size), dtype=dtype, device=wire.device)
    for first, stop, value in _decode_chunks(rows, bits, block, size, dtype):
        values[:, first:stop] = value
    return values.view(*wire.shape[:-1], size)


def wire_bytes(size: int, bits: int, block: int, itemsize: int = 4) -> int:
    """Return the bytes of the answer of ``quantise_rows`` for so many numbers: scales and packed
    codes."""
    return max(4, itemsize) * -(-size // block) + -(-size * bits // 8)


def in_order_sum(
    wire: UInt8[Tensor, "hosted workers packed"],
    bits: int,
    block: int,
    size: int,
    dtype: torch.dtype,
    divisor: int = 1,
) -> Float[Tensor, "hosted size"]:
    """Add what all workers have quantised, one worker after the other, and divide the sum. So the
    bits do not depend on how many workers a process hosts; those of a reduction might."""
    hosted, workers, _ = wire.shape
    result = torch.empty((hosted, size), dtype=dtype, device=wire.device)
    for first, stop, value in _decode_chunks(wire.flatten(0, 1), bits, block, size, dtype):
        rows = value.unflatten(0, (hosted, workers))
        total = rows[:, 0]
        for worker in range(1, workers):
            total += rows[:, worker]
        torch.div(total, divisor, out=result[:, first:stop])
    return result


def _decode_chunks(
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
    for first, stop in split_chunks(rows, block, size):
        packed = rows[:, end + first * bits // 8 : end - (-stop * bits // 8)]
        code = decode_codes(packed, bits, steps, dtype)
        blocks = in_blocks(code[:, : stop - first], block)
        scale = scales[:, first // block : first // block + blocks.shape[1], None]
        yield first, stop, blocks.mul_(scale).flatten(1)[:, : stop - first]
