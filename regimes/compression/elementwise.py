"""Compressors that send every number of a layer, as it is or in fewer bits.

Codes (1, 2, 4, 8 or 16 bits per coordinate) are gathered, because a collective cannot add integers
of different scales; the others use a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.base.config import DENSE, ByName, GivenLevel, Level
from regimes.base.errors import ConfigError, require
from regimes.base.precision import HALF
from regimes.base.torch_compat import foreach_div, foreach_norm
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket, State
from regimes.compression.codes import (
    decode_codes,
    largest_of_blocks,
    pack_signs,
    round_chunks,
    split_chunks,
    weighted_sums,
    write_packed,
)
from regimes.compression.kernel_layout import Layout, PlacedRows, UniformNoise, make_layout
from regimes.compression.kernels import on_gpu, random_rows

BLOCK = 256  # numbers for which a layer's scale is read once


@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Does not compress: its only level is "dense"."""

    replayable: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    propagates_nonfinite: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": DENSE}

    def check(self, level: Level) -> None:
        require(level == DENSE, "level of dense", level, '"dense", there is no other level')

    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        means = comm.mean(bucket.deltas)
        bucket.subtract(bucket.deltas)
        return means

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return what one step of a layer sends, in floats and bytes: all its numbers."""
        return Traffic(layer.size, layer.size * itemsize)


def _gather_codes(layer: Layer, bits: int, workers: int, itemsize: int) -> Traffic:
    """Packed codes and one scale of every worker."""
    size = math.ceil(layer.size * bits / 8)
    return Traffic(workers * (size / 4 + 1), size + itemsize)


def _mean_magnitudes(
    layers: Sequence[Float[Tensor, "hosted _"]],
) -> Float[Tensor, "hosted layers"]:
    if not on_gpu(layers[0]):
        return torch.stack([layer.abs().mean(1) for layer in layers], dim=1)
    rows = [row for layer in layers for row in layer]
    sums = foreach_norm(rows, 1)
    means = torch.stack(foreach_div(sums, [float(len(row)) for row in rows]))
    return means.view(len(layers), -1).T


@dataclass(frozen=True, kw_only=True)
class Sign(Compressor):
    """Sends one bit per coordinate and one scale, the mean magnitude (EF-SignSGD: Karimireddy et
    al., 2019). Its only level is 1 bit.
    """

    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": 1}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        good = level in (DENSE, 1) and not isinstance(level, bool)
        require(good, "level of sign", level, '1 (bit), or "dense"')

    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        flat = bucket.flat
        plan, dtype = make_layout(tuple(bucket.sizes), 1, BLOCK), flat[0].dtype
        exact = torch.promote_types(dtype, torch.float32)
        # first the numbers, then what their signs stand for
        values = torch.empty((len(flat[0]), plan.width), dtype=exact, device=flat[0].device)
        plan.spread(flat, values[:, None])
        scale = _mean_magnitudes(flat)  # [L, layers]
        (scales,) = comm.gather([scale], bucket.shares([1] * len(flat)))  # [W, layers]
        wire = pack_signs(values)
        received = _gather_wire(wire, plan, 1, bucket, comm)
        if bucket.feedback or len(received) == 1:
            by = plan.of_blocks(scale.to(exact))
            for first, stop in split_chunks(values, BLOCK, plan.width):
                ones = decode_codes(wire[:, first // 8 : stop // 8], 1, 0, exact)
                of_block = by[:, first // BLOCK : stop // BLOCK, None]
                into = values[:, first:stop].unflatten(1, (-1, BLOCK))
                torch.mul(ones.unflatten(1, (-1, BLOCK)), of_block, out=into)
        if bucket.feedback:
            plan.subtract_(flat, values[:, None])
        if len(received) > 1:
            by = plan.of_blocks(scales.to(exact))
            sums = weighted_sums(received, 1, by, BLOCK, len(received))
            return plan.joined(sums, flat[0])
        updates = plan.collect(values[:, None], values)
        return [update.to(dtype) for update in updates]

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return _gather_codes(layer, 1, workers, itemsize)


@dataclass(frozen=True, kw_only=True)
class Rounding(Compressor):
    """Is the base of the compressors that round to integers.

    Attributes:
        bits: The number of bits of an integer, or the number that each word of a policy stands for.
            In a configuration, ``levels`` has it.
        stochastic: Round up or down at random, so that the update is unbiased. It excludes error
            feedback: random rounding can err by more than the signal, so residuals would grow
            without bound.
    """

    error_feedback: bool | float = False
    stochastic: bool = True
    bits: int | ByName | None = field(default=None, hash=False)
    level: GivenLevel | ByName | None = field(default=None, init=False, repr=False, hash=False)
    level_word: ClassVar[str] = "bits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stochastic and self.error_feedback:
            raise ConfigError(
                "compressor.stochastic and compressor.error_feedback exclude each other for "
                f"{type(self).__name__} (residuals would grow without bound): set one of them to "
                "false"
            )

    def _noise_of(
        self, plan: Layout, states: Sequence[State], what: str, rows: int, like: Tensor
    ) -> UniformNoise | float:
        """What is added before rounding down: 0.5, or uniform in [0, 1) from a stream of its own
        for each worker and step, of ``rows`` owners' parts."""
        if not self.stochastic:
            return 0.5
        return UniformNoise(
            plan, [state.own_seeds(what, len(like)) for state in states], rows, like
        )

    def _noise(
        self, numbers: Float[Tensor, "hosted size"], state: State, what: str
    ) -> Tensor | float:
        """What is added before rounding down: 0.5, or uniform in [0, 1) from a stream of its own
        for each worker and step."""
        if not self.stochastic:
            return 0.5
        seeds = state.own_seeds(what, len(numbers))
        (drawn,) = random_rows([(seeds, numbers[0])])
        return drawn.to(numbers)


@dataclass(frozen=True, kw_only=True)
class Quantise(Rounding):
    """Sends integers scaled by the largest magnitude, like QSGD (Alistarh et al., 2017). The level
    is the number of bits, 2, 4, 8 or 16; two bits are TernGrad (Wen et al., 2017).
    """

    usual: ClassVar[Mapping[str, Level]] = {"low": 8, "high": 4}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        good = level in (DENSE, 2, 4, 8, 16)
        require(good, "level of quantise", level, '2, 4, 8 or 16 (bits), or "dense"')

    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        flat, bits = bucket.flat, int(bucket.level)
        dtype, steps = flat[0].dtype, 2 ** (bits - 1) - 1  # codes -steps .. steps
        exact = torch.promote_types(dtype, torch.float32)
        plan = make_layout(tuple(bucket.sizes), 1, BLOCK)
        rows, alone = PlacedRows(plan, flat, exact), len(flat[0]) == bucket.states[0].workers == 1
        scale = plan.largest(largest_of_blocks(rows, BLOCK))  # [L, layers]
        scale = scale.clamp_min_(torch.finfo(dtype).tiny).to(dtype)
        noise = self._noise_of(plan, bucket.states, "quantise", 1, flat[0][:, :0].to(exact))
        (scales,) = comm.gather([scale], bucket.shares([1] * len(flat)))  # [W, layers]
        of_blocks = plan.of_blocks(scale.to(exact))
        values = rows.new_empty(rows.shape) if bucket.feedback or alone else None
        wire = rows.new_empty((rows.shape[0], rows.shape[1] * bits // 8), dtype=torch.uint8)
        for first, _, _, codes in round_chunks(rows, BLOCK, steps, noise, values, of_blocks):
            write_packed(wire[:, first * bits // 8 :], codes, bits)
        del rows, noise  # and their memory
        received = _gather_wire(wire, plan, bits, bucket, comm)
        if bucket.feedback and values is not None:
            plan.subtract_(flat, values[:, None])
        if not alone or values is None:
            by = plan.of_blocks(scales.to(exact) / steps)
            sums = weighted_sums(received, bits, by, BLOCK, len(received))
            return plan.joined(sums, flat[0])
        updates = plan.collect(values[:, None], values)
        return [update.to(dtype) for update in updates]

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return _gather_codes(layer, int(level), workers, itemsize)


def _gather_wire(
    wire: UInt8[Tensor, "hosted packed"], plan: Layout, bits: int, bucket: Bucket, comm: Comm
) -> UInt8[Tensor, "workers packed"]:
    """All workers' codes; what lies in gaps does not travel."""
    shares = bucket.shares(plan.bytes_of_parts(bits, 0))
    (everyone,) = comm.gather([plan.without_gaps(wire, bits)], shares)
    return wire if len(everyone) == 1 else plan.with_gaps(everyone, bits, wire.shape[1])


@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Sends half precision in the collective. The level is "fp16" or "bf16". The processes add in
    this format, so simulated and real workers are equal only up to its rounding.
    """

    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": "bf16"}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        require(level in (DENSE, *HALF), "level of cast", level, '"fp16", "bf16" or "dense"')

    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        whole = bucket.whole
        half = whole.to(HALF[str(bucket.level)])
        (mean,) = comm.mean([half], bucket.shares(bucket.sizes))
        if bucket.feedback:
            whole.sub_(half)  # in the type of whole, without a copy of half in it
        return mean.to(whole.dtype).split(bucket.sizes)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return Traffic(layer.size / 2, layer.size * 2)
