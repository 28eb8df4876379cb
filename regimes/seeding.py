"""Random numbers keyed by their purpose, so that they are neither saved nor synchronised.

A stream is a function of its key alone, e.g. ``(seed, "order", epoch)`` or
``(seed, "dropout", epoch, step, worker)``. Any process can make any stream, and a resumed run
makes the same ones again. ``uniform`` makes them where they are needed, the same on any device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Key = str | int
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants, as signed integers
FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
BLOCK = 1 << 14  # words that fit into a CPU's cache


def derive(*key: Key) -> int:
    """A 63-bit seed that depends on the key alone (BLAKE2b of its text)."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def stream(*key: Key) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive(*key))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and those of the device.

    ``torch.manual_seed`` costs half a millisecond or more, which it spends on formatting the stack
    for each kind of device that the machine lacks.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":  # all GPUs, as torch.manual_seed does
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def uniform(wanted: Sequence[tuple[int, int]], device: torch.device) -> list[Tensor]:
    """Multiples of 2^-24 in [0, 1) for each (seed by `derive`, how many), made on the device.

    SplitMix64 (Steele, Lea & Flood, 2014): the i-th word is a hash of seed + i * GOLDEN, so that
    all are made at once. Each word gives two numbers, its lower half the first.
    """
    counts = [-(-size // 2) for _, size in wanted]
    flat = torch.empty(2 * sum(counts), device=device)
    pieces = flat.split([2 * count for count in counts])
    if device.type == "cpu":
        for (seed, _), piece in zip(wanted, pieces, strict=True):
            _fill(piece.numpy(), seed)
    else:
        counters = torch.arange(1, max(counts) + 1, device=device).mul_(GOLDEN)
        pairs = zip(wanted, counts, strict=True)
        state = torch.cat([counters[:count] + _signed(seed) for (seed, _), count in pairs])
        _mix(state, lambda z, bits: (z >> bits) & (2 ** (64 - bits) - 1))
        torch.mul((state.view(torch.int32) >> 8) & (2**24 - 1), 2.0**-24, out=flat)
    return [piece[:size] for piece, (_, size) in zip(pieces, wanted, strict=True)]


def _fill(row: Float[np.ndarray, " numbers"], seed: int) -> None:
    """Fill a row by numpy, block by block in the cache: half the time of ``torch.rand``."""
    count = len(row) // 2
    counters = np.arange(1, min(BLOCK, count) + 1) * GOLDEN
    for start in range(0, count, BLOCK):
        state = counters[: count - start] + _signed(seed + start * GOLDEN)
        _mix(state, lambda z, bits: (z.view(np.uint64) >> np.uint64(bits)).view(np.int64))
        halves = (state.view(np.uint32) >> np.uint32(8)).view(np.int32)
        part = row[2 * start : 2 * (start + len(state))]
        np.multiply(halves, np.float32(2**-24), out=part, dtype=np.float32, casting="unsafe")


def _mix(state: Any, shifted: Callable[[Any, int], Any]) -> None:
    """SplitMix64's hash of 64-bit words, in place; ``shifted`` is the unsigned right shift."""
    for bits, factor in FACTORS:
        state ^= shifted(state, bits)
        state *= factor
    state ^= shifted(state, 31)


def _signed(number: int) -> int:
    """The number modulo 2^64, as a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63
