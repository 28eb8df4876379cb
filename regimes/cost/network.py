"""The cost model: seconds of a collective on a given network. No torch.

A collective of n bytes among W workers is a chain of ``hops(W)`` messages that wait for each other,
each of ``copies(W) n / hops(W)`` bytes; it takes

    hops x (latency + message / bandwidth)                      plain
    hops x max(message / bandwidth, latency + message / (2 bandwidth))  two segments in flight

(plain: Thakur, Rabenseifner & Gropp, 2005, without the term for the arithmetic, which is part of
the measured seconds). Every worker has one full-duplex link, the only bottleneck. Bandwidths and
workers may be arrays and broadcast. `regimes.cost.work` has the seconds of a step.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regimes.config import Registry
from regimes.errors import ConfigError, require

Values = float | np.ndarray

_BANDWIDTHS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_PATTERN = re.compile(
    r"\s*([0-9.e+]+)\s*([kMGT]?)(?:bit/s|bps)\s*(?:,\s*([0-9.e+-]+)\s*([nuµμm]?s)\s*)?"
)


@dataclass(frozen=True)
class Network:
    """The links between workers.

    Attributes:
        bandwidth: bits per second of each worker's link, in each direction.
        latency: seconds from one worker to the next, for an empty message.
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
                latency = float(delay) * _SECONDS[unit] if delay else 0.0
                bandwidth = float(number) * _BANDWIDTHS[prefix]
                if 0 < bandwidth < math.inf and 0 <= latency < math.inf:
                    return cls(bandwidth, latency)
        raise ConfigError(
            f"network {text!r} is no bandwidth and latency: expected the form 10Gbit/s,50us "
            "(units bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s; ns, us, ms, s)"
        )

    def __str__(self) -> str:
        return f"{spell(float(self.bandwidth))}, {float(self.latency) * 1e6:g} µs"


def spell(bandwidth: float) -> str:
    """A bandwidth in three digits: ``100 Mbit/s``; "any" for infinity, "none" for zero."""
    if bandwidth in (0.0, math.inf):
        return "any" if bandwidth else "none"
    power = max(0, min(4, math.floor(math.log10(bandwidth) / 3 + 1e-9)))
    return f"{bandwidth / 1000**power:.3g} {list(_BANDWIDTHS)[power]}bit/s"


def _doublings(workers: Values) -> Values:
    return np.ceil(np.log2(workers))


@dataclass(frozen=True)
class Pattern:
    """The messages of one kind of collective among W workers.

    Attributes:
        hops: of W, the number of messages that wait for each other.
        copies: of W, how often the bytes cross the busiest link. The bytes are one worker's input:
            the tensor of a mean (all-reduce), one worker's part of a gather (all-gather), the
            parts for all workers of an exchange (all-to-all), the root's tensor of a broadcast.
        segments: parts of a message in flight, so that latency and transfer overlap.
    """

    hops: Callable[[Any], Any]
    copies: Callable[[Any], Any]
    segments: int = 1


def _ring(segments: int) -> Registry:
    return Registry(
        "collective",
        {
            "mean": Pattern(lambda w: 2 * (w - 1), lambda w: 2 * (w - 1) / w, segments),
            "gather": Pattern(lambda w: w - 1, lambda w: w - 1, segments),
            "exchange": Pattern(lambda w: w - 1, lambda w: (w - 1) / w, segments),
            "broadcast": Pattern(_doublings, _doublings),  # binomial tree over the root's one link
        },
    )


# "gloo" cuts each message of its rings in two (gloo/allreduce.cc, gloo/allgather.cc); "tree" is the
# double binary tree (Sanders, Speck & Träff, 2009), NCCL's choice for many nodes, with recursive
# doubling for gathers.
ALGORITHMS = Registry(
    "algorithm",
    {
        "ring": _ring(1),
        "gloo": _ring(2),
        "tree": Registry(
            "collective",
            {
                "mean": Pattern(lambda w: 2 * _doublings(w), lambda w: 2.0 * (w > 1)),
                "gather": Pattern(_doublings, lambda w: w - 1),
                "exchange": Pattern(lambda w: w - 1, lambda w: (w - 1) / w),  # all pairs
                "broadcast": Pattern(_doublings, lambda w: 1.0 * (w > 1)),
            },
        ),
    },
)


def collective_seconds(
    kind: str, size: Values, network: Network, workers: Values, algorithm: str = "ring"
) -> Values:
    """Predicted seconds of one collective.

    A ring of 4 workers sends 2 (4 - 1) / 4 = 1.5 times the bytes over each link, in 6 messages. A
    gradient of 10 MB on 100 Mbit/s, without latency:

    >>> float(collective_seconds("mean", 10e6, Network(100e6), workers=4))
    1.2

    Args:
        kind: "mean" (all-reduce), "gather" (all-gather), "exchange" (all-to-all) or "broadcast".
        size: bytes of one worker's input.
    """
    pattern = ALGORITHMS.find(algorithm).find(kind)
    require(bool(np.all(np.asarray(workers) >= 1)), "workers", workers, "at least 1")
    latency = pattern.hops(workers) * network.latency
    moving = pattern.copies(workers) * 8 * size / network.bandwidth
    return np.maximum(moving, latency + moving / pattern.segments)
