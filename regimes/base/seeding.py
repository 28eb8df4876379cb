"""Random numbers keyed by their purpose, so that they are neither saved nor synchronised.

A stream is a function of its key alone, e.g. ``(seed, "order", epoch)`` or
``(seed, "dropout", epoch, step, worker)``. Any process can make any stream, and a resumed run
makes the same ones again. ``draw_uniform`` makes them where they are needed, the same on any
device.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt32
from torch import Tensor

from regimes.base.torch_compat import foreach_add

Key = str | int
Seed = int | Tensor
# SplitMix64's constants, as signed integers: what a counter grows by, and of each round of the hash
# (bits that a word is shifted by, what it is multiplied by)
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
BLOCK = 1 << 15  # words that fit into a CPU's cache


def derive_seed(*key: Key) -> int:
    """Derive a 63-bit seed that depends on the key alone (BLAKE2b of its text)."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def make_generator(*key: Key) -> torch.Generator:
    """Make a CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive_seed(*key))


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


def seed_streams(seed: int) -> None:
    """Seed the streams that code on the CPU draws from without saying so: torch's, numpy's and
    Python's."""
    seed_generators(seed, torch.device("cpu"))
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def read_streams() -> tuple[Tensor, Any, Any]:
    """Return where these three streams are."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def write_streams(streams: tuple[Tensor, Any, Any]) -> None:
    """Set these three streams to where `read_streams` found them."""
    by_torch, by_numpy, by_python = streams
    torch.set_rng_state(by_torch)
    np.random.set_state(by_numpy)  # noqa: NPY002
    random.setstate(by_python)


@contextmanager
def preserve_streams() -> Iterator[None]:
    """Restore these three streams on exit, also after an error."""
    streams = read_streams()
    try:
        yield
    finally:
        write_streams(streams)


def draw_uniform(wanted: Sequence[tuple[Seed, int, int]], device: torch.device) -> list[Tensor]:
    """Draw multiples of 2^-24 in [0, 1) for each (seed by `derive_seed`, how many, from which of
    its stream on), made on the device. On a GPU a seed may be an int64 scalar there.

    SplitMix64 (Steele, Lea & Flood, 2014): the i-th word is a hash of seed + i * GOLDEN, so that
    all are made at once. Each word gives two numbers, its lower half the first.
    """
    if device.type == "cpu":
        flat = torch.empty(sum(size for _, size, _ in wanted))
        parts = flat.split([size for _, size, _ in wanted])
        for (seed, _, first), part in zip(wanted, parts, strict=True):
            fill_uniform(part.numpy(), int(seed), first)
        return [*parts]
    words = [(first // 2, -(-(first + size) // 2)) for _, size, first in wanted]
    counts = [stop - start for start, stop in words]
    flat = torch.empty(2 * sum(counts), device=device)
    counters = torch.arange(1, max(stop for _, stop in words) + 1, device=device).mul_(GOLDEN)
    # a seed by `derive_seed` has 63 bits, so that one on a device needs no conversion
    seeds: Any = [x if isinstance(x, Tensor) else _signed(x) for x, *_ in wanted]
    state = torch.cat(foreach_add([counters[a:b] for a, b in words], seeds))
    _mix_words(state, lambda z, bits: (z >> bits) & (2 ** (64 - bits) - 1))
    torch.mul((state.view(torch.int32) >> 8) & (2**24 - 1), 2.0**-24, out=flat)
    pieces = zip(flat.split([2 * count for count in counts]), wanted, strict=True)
    return [piece[first % 2 :][:size] for piece, (_, size, first) in pieces]


class SeedTable:
    """Keeps seeds in fixed places of a device, for a step that is captured and replayed with
    others.

    Args:
        room: the most seeds of a step.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.there = torch.zeros(room, dtype=torch.int64, device=device)
        self.makers: list[Callable[[], int]] = []

    def places(self, makers: Sequence[Callable[[], int]]) -> list[Tensor]:
        """Reserve places, scalars, for seeds that are made anew before each replay.

        Raises:
            RuntimeError: there is no more room.
        """
        first = len(self.makers)
        self.makers += makers
        if len(self.makers) > len(self.there):
            raise RuntimeError(f"a step asks for more than {len(self.there)} seeds")
        return list(self.there[first : len(self.makers)].unbind())

    def fill(self) -> None:
        """Make the seeds of the step to come. The copy does not wait, so its source is new each
        time: torch leaves pinned memory alone until a copy from it has ended."""
        if self.makers:
            seeds = torch.tensor([make() for make in self.makers]).pin_memory()
            self.there[: len(seeds)].copy_(seeds, non_blocking=True)


def fill_uniform(row: Float[np.ndarray, " numbers"], seed: int, first: int = 0) -> None:
    """Fill a row of a CPU with `draw_uniform` numbers, from the ``first`` of the stream on, block
    by block in the cache: half the time of ``torch.rand``."""
    skipped, (start, stop) = first % 2, (first // 2, -(-(first + len(row)) // 2))
    for word in range(start, stop, BLOCK):
        count = min(BLOCK, stop - word)
        halves = halves_of_words(seed, word, count)
        np.right_shift(halves, np.uint32(8), out=halves)
        place = max(0, 2 * (word - start) - skipped)
        begin = skipped if word == start else 0
        part = row[place : place + 2 * count - begin]
        here = halves.view(np.int32)[begin : begin + len(part)]
        np.copyto(part, here, casting="unsafe")  # exact: 24 bits
        np.multiply(part, np.float32(2**-24), out=part)


def halves_of_words(seed: int, word: int, count: int) -> UInt32[np.ndarray, " numbers"]:
    """Compute the halves of at most ``BLOCK`` words of a stream, in memory that the next call
    takes: the upper 24 bits of each are a number of `draw_uniform`."""
    if not hasattr(_own, "room"):
        _own.room = np.empty((2, BLOCK), np.int64)
    state, other = _own.room[:, :count]
    np.add(_counters()[:count], _signed(seed + word * GOLDEN), out=state)
    _mix_words(state, partial(_shifted, out=other))
    halves: UInt32[np.ndarray, " numbers"] = state.view(np.uint32)
    return halves


_own = threading.local()  # of each thread: fresh memory costs as much as a pass over it


@lru_cache(maxsize=1)
def _counters() -> Int64[np.ndarray, " words"]:
    return np.arange(1, BLOCK + 1) * GOLDEN


def _shifted(words: Any, bits: int, out: Any) -> Any:
    np.right_shift(words.view(np.uint64), np.uint64(bits), out=out.view(np.uint64))
    return out


def _mix_words(state: Any, shifted: Callable[[Any, int], Any]) -> None:
    """SplitMix64's hash of 64-bit words, in place; ``shifted`` is the unsigned right shift."""
    for bits, factor in FACTORS:
        state ^= shifted(state, bits)
        state *= factor
    state ^= shifted(state, 31)


def _signed(number: int) -> int:
    """The number modulo 2^64, as a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63
