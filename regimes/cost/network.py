"""The cost model: seconds of a collective, and of a step, on a given network. No torch.

A collective of n bytes among W workers is a chain of ``hops(W)`` messages that wait for each other,
each of ``copies(W) n / hops(W)`` bytes; it takes

    hops x (latency + message / bandwidth)                      plain
    hops x max(message / bandwidth, latency + message / (2 bandwidth))  two segments in flight

(plain: Thakur, Rabenseifner & Gropp, 2005, without the term for the arithmetic, which is part of
the measured seconds). Every worker has one full-duplex link, the only bottleneck. Bandwidths and
workers may be arrays and broadcast. `regimes.cost.make_cases` has the `Work` of recorded steps.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

from regimes.base.config import Registry
from regimes.base.errors import ConfigError, require

Values = float | np.ndarray
RANGE, LONGEST = (1.0, 1e18), 3600.0  # bits/s of a link; seconds of its latency
BACKWARD = 2 / 3  # of the compute seconds; the backward pass is two of three equal products
_BANDWIDTHS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # bits/s, by prefix
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_PATTERN = re.compile(
    r"\s*([0-9.e+]+)\s*([kMGT]?)(?:bit/s|bps)\s*(?:,\s*([0-9.e+-]+)\s*([nuµμm]?s)\s*)?"
)


@dataclass(frozen=True)
class Network:
    """Describes the links between workers.

    >>> Network.parse("100Mbit/s,50us").bandwidth
    100000000.0

    Attributes:
        bandwidth: The bits per second of each worker's link, in each direction.
        latency: The seconds from one worker to the next, for an empty message.
    """

    bandwidth: Values
    latency: Values = 0.0

    @classmethod
    def parse(cls, text: str) -> Network:
        """Read ``10Gbit/s,50us``; the default latency is zero.

        >>> Network.parse("10Gbit/s")
        Network(bandwidth=10000000000.0, latency=0.0)
        >>> str(Network.parse("0.1Gbit/s,50us"))
        '100 Mbit/s, 50 µs'

        Raises:
            ConfigError: another form, or a number that is no positive bandwidth.
        """
        match = _PATTERN.fullmatch(text)
        if match is not None:
            number, prefix, delay, unit = match.groups()
            with contextlib.suppress(ValueError):  # of float, e.g. "1.2.3"
                latency = float(delay) * SECONDS[unit] if delay else 0.0
                bandwidth = float(number) * _BANDWIDTHS[prefix]
                return cls(bandwidth, latency).checked()
        raise ConfigError(
            f"network {text!r} is no bandwidth and latency: expected the form 10Gbit/s,50us "
            "(units bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s; ns, us, ms, s)"
        )

    def checked(self) -> Network:
        """Return itself, if it is a link that there may be.

        Raises:
            ConfigError: a bandwidth or a latency out of `RANGE` and `LONGEST`.
        """
        low, high = RANGE
        bandwidth, latency = float(self.bandwidth), float(self.latency)
        good = low <= bandwidth <= high
        require(good, "bandwidth", f"{bandwidth:g} bit/s", f"{low:g} to {high:g} bit/s")
        good = 0 <= latency <= LONGEST
        require(good, "latency", f"{latency:g} s", f"0 to {LONGEST:g} s")
        return self

    def __str__(self) -> str:
        return f"{format_bandwidth(float(self.bandwidth))}, {float(self.latency) * 1e6:.4g} µs"


def format_bandwidth(bandwidth: float) -> str:
    """Write a bandwidth in three digits: ``100 Mbit/s``; "any" for infinity, "none" for zero."""
    if bandwidth in (0.0, math.inf):
        return "any" if bandwidth else "none"
    bandwidth = float(f"{bandwidth:.3g}")  # first: 999.9 Mbit/s is 1 Gbit/s in three digits
    power = max(0, min(4, math.floor(math.log10(bandwidth) / 3 + 1e-9)))
    return f"{bandwidth / 1000**power:.3g} {list(_BANDWIDTHS)[power]}bit/s"


# -- a collective ----------------------------------------------------------------------------


def _doublings(workers: Values) -> Values:
    return np.ceil(np.log2(workers))


@dataclass(frozen=True)
class Pattern:
    """Describes the messages of one kind of collective among W workers.

    Attributes:
        hops: of W, the number of messages that wait for each other.
        copies: of W, how often the bytes cross the busiest link. The bytes are one worker's input:
            the tensor of a mean (all-reduce), one worker's part of a gather (all-gather), the
            parts for other workers of an exchange (all-to-all) or of a scatter (reduce-scatter),
            the root's tensor of a broadcast.
        segments: parts of a message in flight, so that latency and transfer overlap.
        between_two: seconds of the transfer between two workers, of those that its bytes need.
    """

    hops: Callable[[Any], Any]
    copies: Callable[[Any], Any]
    segments: int = 1
    between_two: float = 1.0


# Each worker sends its part to each other one, and waits for all (gloo/alltoall.cc; NCCL's grouped
# sends), so the messages do not wait for each other.
ALL_AT_ONCE = Pattern(lambda w: 1.0 * (w > 1), lambda w: 1.0 * (w > 1))


def _ring(segments: int, times: int = 1, gathers: float = 1.0, exchanges: float = 1.0) -> Registry:
    """
    Args:
        times: what a reduce-scatter sends, of what it needs to send.
        gathers, exchanges: ``between_two`` of these collectives.
    """
    return Registry(
        "collective",
        {
            "mean": Pattern(lambda w: 2 * (w - 1), lambda w: 2 * (w - 1) / w, segments),
            "gather": Pattern(lambda w: w - 1, lambda w: w - 1, segments, gathers),
            "exchange": replace(ALL_AT_ONCE, between_two=exchanges),
            # torch's gloo reduces all of it, and keeps a part (ProcessGroupGloo.cpp)
            "scatter": Pattern(
                lambda w: times * (w - 1), lambda w: 1.0 * times * (w > 1), segments
            ),
            "broadcast": Pattern(_doublings, _doublings),  # binomial tree over the root's one link
        },
    )


# "gloo" cuts each message of a ring in two (gloo/allreduce.cc, gloo/allgather.cc). A sender waits
# until it hears that the receiver is ready (gloo/transport/tcp/pair.cc). Gathers and exchanges post
# a message before they say so, and between two workers both use one connection: the worker that
# comes a moment later says it behind its own message, half of a gather's bytes or all of an
# exchange's, and the other's link stands idle meanwhile. Measured over links of 20 and 50 Mbit/s:
# gathers one after the other take 1.4 to 1.5 times the seconds of their bytes, exchanges 1.9, and
# means, which post first what they receive, 1.0. "tree" is the double binary tree (Sanders, Speck &
# Träff, 2009), NCCL's choice for many nodes, with recursive doubling for gathers.
ALGORITHMS = Registry(
    "algorithm",
    {
        "ring": _ring(1),
        "gloo": _ring(2, times=2, gathers=1.5, exchanges=2.0),
        "tree": Registry(
            "collective",
            {
                "mean": Pattern(lambda w: 2 * _doublings(w), lambda w: 2.0 * (w > 1)),
                "gather": Pattern(_doublings, lambda w: w - 1),
                "exchange": ALL_AT_ONCE,
                "scatter": Pattern(_doublings, lambda w: 1.0 * (w > 1)),
                "broadcast": Pattern(_doublings, lambda w: 1.0 * (w > 1)),
            },
        ),
    },
)


FASTEST = "fastest"  # of ring and tree for each collective, as NCCL chooses by size


def collective_seconds(
    kind: str, size: Values, network: Network, workers: Values, algorithm: str = "ring"
) -> Values:
    """Predict the seconds of one collective.

    A ring of 4 workers sends 2 (4 - 1) / 4 = 1.5 times the bytes over each link, in 6 messages. A
    gradient of 10 MB on 100 Mbit/s, without latency:

    >>> float(collective_seconds("mean", 10e6, Network(100e6), workers=4))
    1.2

    Args:
        kind: "mean" (all-reduce), "gather" (all-gather), "exchange" (all-to-all), "scatter"
            (reduce-scatter) or "broadcast".
        size: bytes of one worker's input.
        algorithm: one of `ALGORITHMS`, or `FASTEST`.
    """
    if algorithm == FASTEST:
        ring, tree = (collective_seconds(kind, size, network, workers, x) for x in ("ring", "tree"))
        return np.minimum(ring, tree)
    pattern = ALGORITHMS.find(algorithm).find(kind)
    require(bool(np.all(np.asarray(workers) >= 1)), "workers", workers, "at least 1")
    latency = pattern.hops(workers) * network.latency
    moving = pattern.copies(workers) * 8 * size / network.bandwidth
    moving = moving * np.where(np.equal(workers, 2), pattern.between_two, 1.0)
    return np.maximum(moving, latency + moving / pattern.segments)


# -- a step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Holds what one worker does in one step (or the mean over many).

    Attributes:
        compute, compress: seconds.
        calls, bytes: collectives, and one worker's bytes in them, per kind; calls of one kind
            count as equal in size.
        overlaps: may collectives run while gradients are computed? Not with local steps, which
            exchange parameters after a step.
        inside: what the devices of a node send each other before and after, one device's work,
            where a node is the worker; None: each device is a worker.
    """

    compute: float
    compress: float
    calls: Mapping[str, float]
    bytes: Mapping[str, float]
    overlaps: bool = True
    inside: Work | None = None

    def every(self, period: float) -> Work:
        """Return the mean step of a round of ``period`` local steps, with one exchange."""
        once = self * (1 / period)
        return self if period == 1 else replace(once, compute=self.compute, overlaps=False)

    def __mul__(self, steps: float) -> Work:
        calls = {kind: steps * n for kind, n in self.calls.items()}
        size = {kind: steps * n for kind, n in self.bytes.items()}
        seconds = steps * self.compute, steps * self.compress
        inside = None if self.inside is None else self.inside * steps
        return Work(*seconds, calls, size, self.overlaps, inside)

    def communicate(
        self, network: Network, workers: Values, algorithm: str = "ring", buckets: int = 1
    ) -> Values:
        """Predict the seconds in collectives; the gradient's are cut into ``buckets``."""
        total: Values = 0.0
        for kind, calls in self.calls.items():
            parts = calls * (1 if kind == "broadcast" else buckets)
            if parts > 0:
                size = self.bytes[kind] / parts
                one = collective_seconds(kind, size, network, workers, algorithm)
                total = total + parts * one
        return total

    def crossing(self, workers: int, algorithm: str = "ring") -> float:
        """Count the bytes that the busiest link carries in each direction; with `FASTEST` the bytes
        of a ring."""
        patterns = ALGORITHMS.find("ring" if algorithm == FASTEST else algorithm)
        return sum(
            float(patterns.find(kind).copies(workers)) * size for kind, size in self.bytes.items()
        )

    def seconds(
        self, network: Network, workers: Values, algorithm: str = "ring", buckets: int = 1
    ) -> Values:
        """Predict the seconds of one step.

        Args:
            buckets: parts in which the gradient is reduced while the backward pass goes on, as
                DistributedDataParallel does; 1 = the collectives wait for the whole gradient. A
                pipeline of two stages and B equal parts takes max + min / B of the stages.
        """
        require(buckets >= 1, "buckets", buckets, "at least 1")
        parts = buckets if self.overlaps else 1
        return self.seconds_with(self.communicate(network, workers, algorithm, parts), buckets)

    def seconds_with(self, waiting: Values, buckets: int = 1) -> Values:
        """Predict the seconds of one step in which the collectives take ``waiting`` seconds."""
        if not self.overlaps:
            return self.compute + self.compress + waiting
        first, second = BACKWARD * self.compute + self.compress, waiting
        piped = np.maximum(first, second) + np.minimum(first, second) / buckets
        return (1 - BACKWARD) * self.compute + piped


def mean_step(works: Iterable[tuple[float, Work]]) -> Work:
    """Average (count, step) pairs."""
    pairs = list(works)
    total = sum(weight for weight, _ in pairs)
    parts = [work * (weight / total) for weight, work in pairs]
    kinds = dict.fromkeys(kind for work in parts for kind in work.calls)
    return Work(
        sum(work.compute for work in parts),
        sum(work.compress for work in parts),
        {kind: sum(work.calls.get(kind, 0.0) for work in parts) for kind in kinds},
        {kind: sum(work.bytes.get(kind, 0.0) for work in parts) for kind in kinds},
        all(work.overlaps for work in parts),
    )


def break_even(
    work: Work, dense: Work, latency: float, workers: int, algorithm: str = "ring", buckets: int = 1
) -> float:
    """Find the bandwidth, bits/s, below which ``work`` is always faster than ``dense``.

    As `crossing_bandwidth`.
    """

    def on(step: Work) -> Callable[[Any], Any]:
        return lambda bandwidth: step.seconds(
            Network(bandwidth, latency), workers, algorithm, buckets
        )

    return crossing_bandwidth(on(work), on(dense))


def crossing_bandwidth(fast: Callable[[Any], Any], slow: Callable[[Any], Any]) -> float:
    """Find the bandwidth, bits/s, below which ``fast`` always takes fewer seconds than ``slow``.

    Infinity where it does at any bandwidth, zero where at none (searched up to 1e18). "Fewer" means
    by more than rounding.

    Args:
        fast, slow: seconds as a function of bandwidth, for arrays too.
    """

    def gain(bandwidth: Any) -> Any:
        return (1 - 1e-12) * slow(bandwidth) - fast(bandwidth)

    grid = np.logspace(0, 18, 721)
    loses = np.flatnonzero(gain(grid) <= 0)
    if not loses.size or loses[0] == 0:
        return 0.0 if loses.size else math.inf
    return float(brentq(gain, *grid[loses[0] - 1 : loses[0] + 1], rtol=1e-14))
