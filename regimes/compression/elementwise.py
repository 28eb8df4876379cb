"""Compressors that send every number of a layer, as it is or in fewer bits.

Codes (1, 2, 4, 8 or 16 bits per coordinate) are gathered, because a collective cannot add integers
of different scales; the others use a mean.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.collectives.requests import Batched, Gather, Layer, Mean, Request, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.kernels import on_gpu, random_rows
from regimes.config import DENSE, Level
from regimes.errors import ConfigError, require
from regimes.precision import HALF


@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """No compression: the one level is "dense", which ``Compressor.reduce`` sends."""

    entrywise: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    propagates_nonfinite: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": DENSE}

    @property
    def holds_back(self) -> bool:
        return type(self) is not Dense and super().holds_back

    def check(self, level: Level) -> None:
        require(level == DENSE, "level of dense", level, '"dense", there is no other level')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        return (yield Mean(delta)), delta

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return Traffic(layer.size, layer.size * itemsize)


def pack(codes: UInt8[Tensor, "*batch size"], bits: int) -> UInt8[Tensor, "*batch packed"]:
    """Codes of 1, 2, 4 or 8 bits, ``8 / bits`` to the byte, low bits first, padded with zeros."""
    if bits == 1 and not on_gpu(codes):
        return torch.from_numpy(np.packbits(codes.numpy(), axis=-1, bitorder="little"))
    if padding := -codes.shape[-1] % (8 // bits):
        codes = torch.nn.functional.pad(codes, (0, padding))
    while bits < 8:  # of each pair the second to the left of the first
        codes = codes[..., 0::2] | (codes[..., 1::2] << bits)
        bits *= 2
    return codes


def unpack(
    packed: UInt8[Tensor, "*batch packed"], bits: int, size: int
) -> UInt8[Tensor, "*batch size"]:
    """The inverse of ``pack``."""
    if bits == 8:
        return packed[..., :size]
    if bits == 1 and not on_gpu(packed):
        codes = np.unpackbits(packed.numpy(), axis=-1, count=size, bitorder="little")
        return torch.from_numpy(codes)
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :size]


def _packed(layer: Layer, bits: int, workers: int, itemsize: int) -> Traffic:
    """Packed codes and one scale of every worker."""
    size = math.ceil(layer.size * bits / 8)
    return Traffic(workers * (size / 4 + 1), size + itemsize)


@dataclass(frozen=True, kw_only=True)
class Sign(Compressor):
    """One bit per coordinate and one scale, the mean magnitude (Karimireddy et al., 2019,
    EF-SignSGD). Its one level is 1 (bit)."""

    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": 1}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        good = level in (DENSE, 1) and not isinstance(level, bool)
        require(good, "level of sign", level, '1 (bit), or "dense"')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        positive = flat >= 0
        scale = flat.abs().mean(1)  # [L]
        scales = yield Gather(scale)  # [W]
        codes = yield Gather(pack(positive.to(torch.uint8), 1))
        signs = unpack(codes, 1, flat.shape[1]).to(flat.dtype).mul_(2).sub_(1)  # [W, n * m]
        update = scales @ signs / len(scales)
        sent = torch.where(positive, scale[:, None], -scale[:, None])
        return update.view(delta.shape[1:]), sent.view(delta.shape)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return _packed(layer, 1, workers, itemsize)


@dataclass(frozen=True, kw_only=True)
class Rounding(Compressor):
    """Base of compressors that round to integers.

    Attributes:
        stochastic: round up or down at random, so that the update is unbiased. Not with error
            feedback: random rounding can err by more than the signal, so residuals would grow
            without bound.
    """

    error_feedback: bool | float = False
    stochastic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stochastic and self.error_feedback:
            raise ConfigError(
                "compressor.stochastic and compressor.error_feedback exclude each other for "
                f"{type(self).__name__} (residuals would grow without bound): set one of them to "
                "false"
            )

    def _noise(
        self, numbers: Float[Tensor, "hosted size"], state: State, what: str
    ) -> Generator[Request, Any, Tensor | float]:
        """What is added before rounding down: 0.5, or uniform in [0, 1) from a stream of its own
        for each worker and step."""
        if not self.stochastic:
            return 0.5
        first = state.first_worker
        workers = state.hosted or range(first, first + len(numbers))
        seeds = state.seeds(what, workers)
        return (yield Batched(random_rows, seeds, numbers[0])).to(numbers)


@dataclass(frozen=True, kw_only=True)
class Quantise(Rounding):
    """QSGD-style integers (Alistarh et al., 2017) scaled by the largest magnitude: the level is
    the number of bits, 2, 4, 8 or 16; two bits are TernGrad (Wen et al., 2017)."""

    usual: ClassVar[Mapping[str, Level]] = {"low": 8, "high": 4}
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        good = level in (DENSE, 2, 4, 8, 16)
        require(good, "level of quantise", level, '2, 4, 8 or 16 (bits), or "dense"')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat, bits = delta.flatten(1), int(level)
        steps = 2 ** (bits - 1) - 1  # codes -steps .. steps
        scale = flat.abs().amax(1).clamp_min(torch.finfo(flat.dtype).tiny)  # [L]
        scaled = flat / scale[:, None] * steps
        noise = yield from self._noise(scaled, state, "quantise")
        code = scaled.add_(noise).floor_().clamp_(-steps, steps)
        scales = yield Gather(scale)  # [W]
        wire = code.to(torch.int16) if bits == 16 else pack((code + steps).to(torch.uint8), bits)
        received = yield Gather(wire)
        if bits == 16:
            codes = received.to(flat.dtype)
        else:
            codes = unpack(received, bits, flat.shape[1]).to(flat.dtype).sub_(steps)
        update = (scales / steps) @ codes / len(scales)
        sent = code * (scale / steps)[:, None]
        return update.view(delta.shape[1:]), sent.view(delta.shape)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return _packed(layer, int(level), workers, itemsize)


@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Half precision in the collective; the level is "fp16" or "bf16". Simulated and real workers
    are equal up to the rounding of that format, in which the processes add."""

    usual: ClassVar[Mapping[str, Level]] = {"low": DENSE, "high": "bf16"}
    entrywise: ClassVar[bool] = True
    takes_bucket: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        require(level in (DENSE, *HALF), "level of cast", level, '"fp16", "bf16" or "dense"')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        half = delta.to(HALF[str(level)])
        mean = yield Mean(half)
        if not self.error_feedback:
            return mean.to(delta.dtype), half.to(delta.dtype)
        delta.sub_(half)  # in the type of delta, without a copy of half in it
        return mean.to(delta.dtype), None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return Traffic(layer.size / 2, layer.size * 2)
