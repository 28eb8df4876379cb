"""Seconds of a step on nodes of several devices, with two levels of links.

``nodes`` machines have ``gpus`` devices each, and each device is a replica. The replicas' mean
crosses the link between nodes, and where there is one node the link within. A ring over replicas
that are numbered node by node enters and leaves each node once, so that a node's link carries what
one replica's link would. Or a node is the worker (``Work.inside``): its devices divide the mean of
their gradients, and each exchanges its rows; together they send what one worker sends.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from regimes.base import inputs
from regimes.base.errors import ConfigError, require, suggest_nearest
from regimes.cost.models import Model
from regimes.cost.network import FASTEST, SECONDS, Network, Values, Work

MOST = 10**6  # nodes of a job, and GPUs of a node: more is a slip
LONGEST = 1e6  # seconds of a step
_UNITS = {**SECONDS, "min": 60.0, "h": 3600.0}
LARGEST = 10**5  # bytes of a file of links
WITHIN, BETWEEN = Network(400e9, 5e-6), Network(10e9, 50e-6)
Priced = Literal["device", "step", "assumed"]
Worker = Literal["node", "device"]


@dataclass(frozen=True)
class Device:
    """Holds what a step and a compressor are limited by.

    Attributes:
        flops: operations per second in 16 bits, dense, as the vendor prints them.
        memory: bytes per second of the device's memory.
    """

    flops: float
    memory: float


DEVICES = {  # from the vendors' data sheets
    "v100": Device(125e12, 0.9e12),  # FP16: it has no bfloat16
    "a100": Device(312e12, 2.039e12),
    "h100": Device(989e12, 3.35e12),
    "h200": Device(989e12, 4.8e12),
    "b200": Device(2250e12, 8e12),
    "l4": Device(121e12, 0.3e12),
    "rtx4090": Device(165e12, 1.008e12),
    "mi300x": Device(1307e12, 5.3e12),
}
USUAL = "a100"
# Arrays as large as the model, in float32, that a step moves at least: weights twice, gradient
# twice, and momentum and weights that the optimiser reads and writes.
STEP = 8
_SPEED = re.compile(r"\s*([0-9.e+]+)\s*([MGTP]?)(FLOP/s|B/s)\s*")
_PREFIXES = {"": 1.0, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}  # of FLOP/s and B/s
_RANGE = {"FLOP/s": (1e6, 1e20), "B/s": (1e6, 1e17)}  # a number outside is a slip of the unit


def read_device(text: str) -> Device:
    """Read a device by name, or ``312TFLOP/s,2039GB/s``.

    >>> read_device("312TFLOP/s,2039GB/s") == read_device("a100")
    True

    Raises:
        ConfigError: no such device, or a speed that is none; the reason is said.
    """
    if text in DEVICES:
        return DEVICES[text]
    form = "as 312TFLOP/s,2039GB/s: operations and bytes of memory per second"
    if not re.match(r"\s*[0-9.]", text):
        raise ConfigError(
            f"--device {text}: no such device, {suggest_nearest(text, DEVICES)} Or give its "
            f"speed, {form}"
        )
    parts = text.split(",")
    if len(parts) != 2:
        lacks = "lacks the memory's" if len(parts) == 1 else "has more than two"
        raise ConfigError(f"--device {text} {lacks} speed: give both, {form}")
    return Device(*(_parse_speed(text, *pair) for pair in zip(parts, _RANGE, strict=True)))


def _parse_speed(text: str, part: str, unit: str) -> float:
    """``312TFLOP/s`` or ``2039GB/s``, the part of ``text`` with that unit."""
    low, high = _RANGE[unit]
    match = _SPEED.fullmatch(part)
    value = math.nan
    if match is not None and match[3] == unit:
        with contextlib.suppress(ValueError):  # of float, e.g. "1.2.3"
            value = float(match[1]) * _PREFIXES[match[2]]
    if not low <= value <= high:
        raise ConfigError(
            f"--device {text}: {part.strip()!r} is no speed in {unit}, from {low:.0e} to "
            f"{high:.0e}, e.g. {'312TFLOP/s' if unit == 'FLOP/s' else '2039GB/s'}"
        )
    return value


def memory_of_step(size: float, compute: float) -> float:
    """Compute the bytes per second that a device's memory has at least, if a step over ``size``
    numbers takes ``compute`` seconds: a step moves `STEP` arrays of that size. Where products take
    most of the time, as in large batches, the truth may be many times as much."""
    return STEP * 4 * size / compute


def parse_seconds(duration: str | float, name: str = "--step", longest: float = LONGEST) -> float:
    """Read a duration: ``0.4s``, ``400ms``, ``20min``, or a number of seconds; a text has a unit.
    ConfigError for another form, or a duration that is 0 or too long.

    >>> parse_seconds("400ms"), parse_seconds("20min"), parse_seconds(3)
    (0.4, 1200.0, 3.0)
    """
    text = duration if isinstance(duration, str) else f"{duration} s"
    match = re.fullmatch(r"\s*([0-9.e+-]+)\s*([nuµμm]?s|min|h)\s*", text)
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value <= longest:
        raise ConfigError(
            f"{name} {duration}: expected a duration above 0 and up to {longest:.0e} s, e.g. 0.4s, "
            "400ms or 20min"
        )
    return value


@dataclass(frozen=True)
class DataParallelJob:
    """Describes a data-parallel job.

    Attributes:
        compute: seconds of one device's forward and backward pass and optimiser step.
        memory: bytes per second at which a compressor reads and writes its arrays.
        within: a device's link to the others of its node.
        between: a node's link to the others, which its devices share.
        itemsize: bytes of a number of a dense gradient.
        bucket: bytes of the gradient that are reduced together, while the backward pass goes on.
        priced: whose speed of the memory that is: of the "device" that was named, as the "step"
            implies, or of the "assumed" one, where nothing says it.
        worker: what compresses a gradient of its own; None: for each method what `regimes.attach`
            takes for a worker (``nodes``).
    """

    model: Model
    compute: float
    memory: float
    nodes: int = 2
    gpus: int = 8
    within: Network = WITHIN
    between: Network = BETWEEN
    itemsize: int = 4
    bucket: float = 25 * 2**20
    algorithm: str = FASTEST
    priced: Priced = "device"
    worker: Worker | None = None

    def __post_init__(self) -> None:
        check_counts(self)
        if self.replicas == 1:
            raise ConfigError(
                "there is one device, which exchanges nothing: raise --nodes or --gpus"
            )

    @property
    def replicas(self) -> int:
        """Return W: how many gradients are averaged."""
        return self.nodes * self.gpus

    @property
    def link(self) -> Network:
        """Return the slow link, which the mean of the replicas crosses."""
        return self.between if self.nodes > 1 else self.within

    @property
    def buckets(self) -> int:
        """Return the number of parts of the gradient that are reduced during the backward pass."""
        return max(1, round(self.model.size * self.itemsize / self.bucket))

    def at(self, bandwidth: Values) -> DataParallelJob:
        """Return the same job with another slow link."""
        link = Network(bandwidth, self.link.latency)
        return replace(self, between=link) if self.nodes > 1 else replace(self, within=link)

    def seconds(self, work: Work) -> Values:
        """Predict the seconds of one step; an array where the slow link's bandwidth is one."""
        how = (self.replicas, self.algorithm, self.buckets)
        slow = work.seconds_with(self.waiting(work), self.buckets)
        # The ring then crosses the links within nodes, too.
        if self.nodes > 1 and self.gpus > 1 and work.inside is None:
            slow = np.maximum(slow, work.seconds(self.within, *how))
        return slow

    def waiting(self, work: Work) -> Values:
        """Predict the seconds of one step in collectives."""
        parts = self.buckets if work.overlaps else 1
        if work.inside is None:
            how = (self.link, self.replicas, self.algorithm, parts)
            return self.on_link(work).communicate(*how)
        inside = work.inside.communicate(self.within, self.gpus, self.algorithm, parts)
        return inside + work.communicate(self.link, self.nodes, self.algorithm, parts)

    def bytes(self, work: Work) -> float:
        """Count the bytes that a slow link carries in each direction in one step."""
        if work.inside is not None:
            return work.crossing(self.nodes, self.algorithm)
        return self.on_link(work).crossing(self.replicas, self.algorithm)

    def on_link(self, work: Work) -> Work:
        """Return the work with the bytes of an all-to-all as a node's link carries them: of p
        replicas in a node each sends W - p of its W - 1 parts for others to other nodes."""
        if self.nodes == 1 or self.gpus == 1 or "exchange" not in work.bytes:
            return work
        times = self.gpus * (self.replicas - self.gpus) / (self.replicas - 1)
        size = {**work.bytes, "exchange": times * work.bytes["exchange"]}
        return replace(work, bytes=size)


def check_counts(of: Any) -> None:
    """Raise ConfigError unless there are nodes and GPUs, of a job or of its options."""
    for name in ("nodes", "gpus"):
        value = getattr(of, name)
        require(1 <= value <= MOST, f"--{name}", value, f"at least 1, at most {MOST}")


# -- measured links --------------------------------------------------------------------------


def read_links(path: Path) -> dict[str, Network]:
    """Read ``within`` and ``between`` of a file that `regimes doctor --links` has written; one that
    it could not measure is missing.

    Raises:
        ConfigError: no such file, or another content.
    """
    inputs.add_input(path)
    write = "write it with torchrun ... -m regimes doctor --links FILE"
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError("it is larger than a file of links")
        table = json.loads(content.decode("utf-8"))
        links = {name: table[name] for name in ("within", "between") if table.get(name)}
        return {
            name: Network(float(link["bandwidth"]), float(link["latency"])).checked()
            for name, link in links.items()
        }
    except UnicodeDecodeError:
        raise ConfigError(f"--links {path} is no text: {write}") from None
    except (
        *(OSError, ValueError, OverflowError, KeyError, TypeError),
        *(AttributeError, RecursionError),
        ConfigError,
    ) as error:
        what = repr(error) if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"--links {path} cannot be read ({what[:200]}): {write}") from None


def require_link(name: str, links: Mapping[str, Network], path: Path, remedy: str) -> None:
    """Raise ConfigError if a file of links lacks one that the job needs.

    Args:
        name: ``within`` or ``between``.
        remedy: what to write instead.
    """
    if name not in links:
        where = "on one machine" if name == "within" else "on different machines"
        raise ConfigError(
            f"--links {path} has no {name!r}, because no two of the processes that wrote it were "
            f"{where}: {remedy}"
        )
