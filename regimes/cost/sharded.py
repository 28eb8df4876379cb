"""Seconds of a step of plain FSDP2: one model divided among all devices, without replicas.

Each call of ``fully_shard`` makes a group: its weights are gathered before its forward pass and
again before its backward pass, and its gradients are reduced and scattered after that. With W
devices and n numbers of a group, a device sends (W - 1) / W n numbers in each of the three. A ring
over devices that are numbered node by node carries as much over a node's link; of an all-to-all, as
which quantised gradients travel, each of a node's p devices sends W - p of its W - 1 parts over it.

Where they overlap, a device computes one group while its link has another's: weights are gathered
one group ahead, in the order of the passes, and gradients are reduced behind. A link does one thing
at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from regimes.collectives.requests import Layer
from regimes.compression.all_reduce import wire_bytes
from regimes.config import DENSE, Level
from regimes.config.toml import read_value
from regimes.console.tables import Table
from regimes.console.units import format_quantity
from regimes.cost import evidence
from regimes.cost.advice import NEAR
from regimes.cost.job import Job
from regimes.errors import ConfigError
from regimes.network import ALGORITHMS, BACKWARD, FASTEST, Network, collective_seconds

ROOT = "(root)"
BLOCK, SCALE = 64, 4  # numbers that share a scale, and its bytes
USUAL = ("scatter:8", "scatter:4", "scatter:8+gather:8", "scatter:4+gather:8")
HSDP = "HSDP"  # of torch: replicas of a node, whose dense gradients are averaged between nodes
# Arrays as large as the gradient that are read or written: a sender rounds (2 and the codes), the
# owner decodes as much and adds it up (2). Of weights, a device rounds its part, and decodes all.
SENT, GATHERED = 5, 2
WIDE, DAY = 4, 86400
ROUND_TWICE = "quantised-all-reduce"  # rounds what is reduced once, and its mean once more
_METHOD = re.compile(r"(scatter|gather):(\w+)")
HEADS = ("", "compress", "network", "hidden", "step", "a day", "× dense")


@dataclass(frozen=True)
class Group:
    """What one call of ``fully_shard`` divides.

    Attributes:
        layers: of shape ``[rows, ...]``; the rows are divided.
        stays: its weights are not gathered again before the backward pass, as the root's.
    """

    name: str
    layers: tuple[Layer, ...]
    stays: bool = False

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    def part(self, devices: int) -> int:
        """Numbers of one device, padded to whole rows."""
        rows = [(layer.shape or (1,))[0] for layer in self.layers]
        sizes = zip(self.layers, rows, strict=True)
        return sum(-(-n // devices) * (layer.size // n) for layer, n in sizes)


def groups_of(layers: Iterable[Layer]) -> list[Group]:
    """A group for each block, as ``fully_shard`` is called on the members of a list of modules, in
    the order of the layers; and all else, which the call on the whole model divides, first.

    >>> layers = [Layer(name, (2, 2)) for name in ("embed", "h.0.a", "h.0.b.1", "h.1.a", "head")]
    >>> [(group.name, len(group.layers)) for group in groups_of(layers)]
    [('(root)', 2), ('h.0', 2), ('h.1', 1)]
    """
    found: dict[str, list[Layer]] = {ROOT: []}
    for layer in layers:
        words = layer.name.split(".")
        number = next((i for i, word in enumerate(words) if word.isdecimal()), None)
        name = ROOT if number is None else ".".join(words[: number + 1])
        found.setdefault(name, []).append(layer)
    return [Group(name, tuple(x), name == ROOT) for name, x in found.items() if x]


@dataclass(frozen=True)
class Sharded:
    """One line of the table: the bits of reduced gradients and of gathered weights.

    Attributes:
        hsdp: of torch's HSDP; then both are dense.
    """

    scatter: Level = DENSE
    gather: Level = DENSE
    hsdp: bool = False

    @property
    def label(self) -> str:
        if self.hsdp:
            return HSDP
        both = {"scatter": self.scatter, "gather": self.gather}
        return "+".join(f"{k}:{x}" for k, x in both.items() if x != DENSE) or DENSE

    @property
    def verdict(self) -> str:
        """What was measured of the loss; of gradients with as many bits that were rounded twice."""
        if self.gather != DENSE:
            return evidence.UNKNOWN
        return evidence.worst_verdict(
            DENSE if self.scatter == DENSE else f"{ROUND_TWICE}:{self.scatter}"
        )


def parse_sharded(text: str) -> Sharded:
    """Read ``scatter:4``, ``scatter:4+gather:8``, ``dense`` or ``HSDP``.

    Raises:
        ConfigError: another form, or a level that is none of the quantiser's.
    """
    if text in (DENSE, HSDP):
        return Sharded(hsdp=text == HSDP)
    found: dict[str, Any] = {}
    for part in text.split("+"):
        match = _METHOD.fullmatch(part)
        level = None if match is None else read_value(match[2])
        if match is None or level not in (4, 8) or match[1] in found:
            raise ConfigError(
                f"--methods {text}: expected scatter:BITS, gather:BITS or both of them, with 4 or "
                "8 bits, as scatter:4+gather:8; dense; or HSDP: with as many --shards as devices "
                "there is no replica whose gradients another method could average"
            )
        found[match[1]] = level
    return Sharded(**found)


# -- seconds -------------------------------------------------------------------------------------


def pipeline_seconds(
    compute: Sequence[float],
    gather: Sequence[float],
    again: Sequence[float],
    scatter: Sequence[float],
) -> float:
    """Seconds of a step in which one group is computed while the link has another's.

    Args:
        compute: of each group's forward and backward pass, in the order of the forward pass.
        gather, again, scatter: of its link, before the forward pass, before the backward pass, and
            after it.

    Without a network it is the time of the products, and without products the time of the link:

    >>> pipeline_seconds([3, 3], [0, 0], [0, 0], [0, 0])
    6.0
    >>> pipeline_seconds([0, 0], [1, 2], [0, 2], [1, 2])
    8.0
    """
    device = link = began = 0.0
    for seconds, wait in zip(compute, gather, strict=True):
        link = max(link, began) + wait  # one group ahead
        began = max(device, link)
        device = began + (1 - BACKWARD) * seconds
    began, behind = device, 0.0
    for i in reversed(range(len(compute))):
        link = max(link, began) + again[i]
        began = max(device, link)
        if behind:  # of the group before, which is complete by now
            link = max(link, device) + behind
        device, behind = began + BACKWARD * compute[i], scatter[i]
    return max(link, device) + behind


@dataclass(frozen=True)
class Prediction:
    """A step of one method, in seconds, and the bytes that a node's link carries."""

    seconds: float
    compute: float
    compress: float
    communicate: float
    bytes: float


def predict_step(
    job: Job, groups: Sequence[Group], method: Sharded, *, width: int = 2, overlaps: bool = True
) -> Prediction:
    """A step of FSDP2 on the slow link of a job.

    Args:
        job: of one replica on all devices; ``itemsize`` is the bytes of a number of a reduced
            gradient.
        width: bytes of a number of dense weights.
        overlaps: collectives run beside products, as on a GPU; gloo's do not.
    """
    if method.hsdp:
        return _predict_hsdp(job, groups, width, overlaps)
    devices, size = job.nodes * job.gpus, sum(group.size for group in groups)
    parts = [group.part(devices) for group in groups]
    compute = [job.compute * group.size / size for group in groups]
    dense = method.gather == DENSE
    wires = [p * width if dense else wire_bytes(p, int(method.gather), BLOCK) for p in parts]
    gathers = [_seconds(job, "gather", wire, devices) for wire in wires]
    again = [0.0 if g.stays else x for g, x in zip(groups, gathers, strict=True)]
    scatters = [_scatter_seconds(job, method.scatter, part, devices) for part in parts]
    rounds = [0 if dense else 1 if group.stays else 2 for group in groups]
    pressed = [
        WIDE * g.size * (n * GATHERED + (SENT if method.scatter != DENSE else 0)) / job.memory
        for g, n in zip(groups, rounds, strict=True)
    ]
    busy = [x + y for x, y in zip(compute, pressed, strict=True)]
    waiting = sum(gathers) + sum(again) + sum(scatters)
    seconds = pipeline_seconds(busy, gathers, again, scatters) if overlaps else sum(busy) + waiting
    passes = [1 if group.stays else 2 for group in groups]
    carried = float((devices - 1) * sum(n * x for n, x in zip(passes, wires, strict=True)))
    times = _times(job, devices) if method.scatter == DENSE else 1.0
    carried += times * sum(_carried_bytes(job, method.scatter, part, devices) for part in parts)
    return Prediction(seconds, job.compute, sum(pressed), waiting, carried)


def _seconds(job: Job, kind: str, size: float, devices: int, link: Network | None = None) -> float:
    return float(collective_seconds(kind, size, link or job.link, devices, job.algorithm))


def _times(job: Job, devices: int) -> float:
    """What a dense reduce-scatter sends, of what it needs to send."""
    name = "ring" if job.algorithm == FASTEST else job.algorithm
    return float(ALGORITHMS.find(name).find("scatter").copies(devices))


def _carried_bytes(job: Job, level: Level, part: int, devices: int) -> float:
    """Bytes over a node's link of one reduce-scatter."""
    if level == DENSE:
        return (devices - 1) * part * job.itemsize
    here = job.gpus if job.nodes > 1 else 1  # devices that share the link
    return here * (devices - here) * wire_bytes(part, int(level), BLOCK)


def _scatter_seconds(job: Job, level: Level, part: int, devices: int) -> float:
    """Seconds of one reduce-scatter; each device keeps so many numbers."""
    size = _carried_bytes(job, level, part, devices)
    return _seconds(job, "scatter" if level == DENSE else "exchange", size, devices)


def _hsdp_layout(job: Job) -> tuple[int, int]:
    """Replicas, and devices of each: a node is one, or where there is one node, a half of it.

    Raises:
        ConfigError: the node's devices have no half.
    """
    replicas = job.nodes if job.nodes > 1 else 2
    devices, rest = divmod(job.nodes * job.gpus, replicas)
    if rest:
        raise ConfigError(f"--methods {HSDP}: {job.gpus} devices of one node are no two replicas")
    return replicas, devices


def _predict_hsdp(job: Job, groups: Sequence[Group], width: int, overlaps: bool) -> Prediction:
    """torch's HSDP: the reduced gradients of a replica's devices, which together hold the model,
    are averaged with those of the other replicas."""
    replicas, devices = _hsdp_layout(job)
    size = sum(group.size for group in groups)
    parts = [group.part(devices) for group in groups]
    compute = [job.compute * group.size / size for group in groups]
    gathers = [_seconds(job, "gather", p * width, devices, job.within) for p in parts]
    again = [0.0 if g.stays else x for g, x in zip(groups, gathers, strict=True)]
    # the devices of a node share its link, over which each averages its part
    sharing = devices if job.nodes > 1 else 1
    means = [_seconds(job, "mean", sharing * p * job.itemsize, replicas) for p in parts]
    scatters = [
        mean + _seconds(job, "scatter", (devices - 1) * p * job.itemsize, devices, job.within)
        for mean, p in zip(means, parts, strict=True)
    ]
    waiting = sum(gathers) + sum(again) + sum(scatters)
    seconds = (
        pipeline_seconds(compute, gathers, again, scatters) if overlaps else job.compute + waiting
    )
    carried = 2 * (replicas - 1) / replicas * sharing * sum(parts) * job.itemsize
    if job.nodes == 1:  # the link of a device has all of it
        passes = [1 if group.stays else 2 for group in groups]
        gathered = sum(n * p for n, p in zip(passes, parts, strict=True)) * width
        reduced = _times(job, devices) * sum(parts) * job.itemsize
        carried += (devices - 1) * (gathered + reduced)
    return Prediction(seconds, job.compute, 0.0, waiting, carried)


# -- the table -------------------------------------------------------------------------------------


def tabulate_sharded(
    job: Job, methods: Iterable[Sharded], *, width: int = 2, overlaps: bool = True
) -> pd.DataFrame:
    """One row per method, the dense one first, then HSDP where the devices are whole replicas.

    Columns: method, seconds and its parts compute, compress and communicate, ``hidden`` (the share
    of the network's time beside products), bytes that a node's link carries in a step and
    ``bytes_per_day``, ``speed_up`` over dense, and ``loss``, the verdict of `evidence`.

    Raises:
        ConfigError: HSDP is among the methods, and there are no such replicas.
    """
    groups, rows, usual = groups_of(job.model.layers), [], [Sharded()]
    with contextlib.suppress(ConfigError):
        _hsdp_layout(job)
        usual.append(Sharded(hsdp=True))
    every = {x.label: x for x in (*usual, *methods)}
    for method in every.values():
        step = predict_step(job, groups, method, width=width, overlaps=overlaps)
        alone = step.compute + step.compress + step.communicate
        share = (alone - step.seconds) / step.communicate if step.communicate else 1.0
        rows.append(
            {
                "method": method.label,
                **vars(step),
                "hidden": min(1.0, max(0.0, share)),
                "bytes_per_day": step.bytes * DAY / step.seconds,
                "loss": method.verdict,
            }
        )
    frame = pd.DataFrame(rows)
    frame["speed_up"] = frame.seconds[0] / frame.seconds
    return frame


def format_sharded(frame: pd.DataFrame) -> Table:
    """A table of 80 columns."""
    lines = [
        (
            row["method"],
            *(f"{1e3 * row[name]:.3g}" for name in ("compress", "communicate")),
            f"{100 * row['hidden']:.0f} %",
            f"{1e3 * row['seconds']:.4g}",
            format_quantity(row["bytes_per_day"], "B"),
            f"{row['speed_up']:.2f}",
        )
        for row in frame.to_dict("records")
    ]
    note = (
        "ms of a step; network: both all-gathers and the reduce-scatter; hidden: the share of its "
        "time beside products; a day: over the link of a node, or of a device where there is one "
        "node"
    )
    if (frame["method"] == HSDP).any():
        note += ". HSDP: torch's, dense, with a replica of each node, or of each half of one"
    return Table(HEADS, lines, note)


def advise_sharded(job: Job, frame: pd.DataFrame) -> str:
    """What to try: of methods with gradients that are not known to harm, the first that none is
    much faster than; weights in fewer bits are named beside it, where they would be."""
    dense, *others = frame.to_dict("records")
    own = [row for row in others if row["method"] != HSDP]
    known = [dense, *(row for row in own if row["loss"] == evidence.HARMLESS)]
    fewest = min(row["seconds"] for row in known)
    chosen = next(row for row in known if row["seconds"] <= NEAR * fewest)
    where = f"on {job.link}"
    waits = _text(dense["seconds"] - dense["compute"])
    text = f"{where} a dense step of {_text(dense['seconds'])} waits {waits} for the network"
    if chosen is dense:
        said = f"Stay dense: {text}, and no method whose loss was measured saves enough of it."
    else:
        bits = chosen["method"].partition(":")[2]
        said = (
            f'Try attach(model, shards=mesh, scatter={{"level": {bits}}}): {text}, this one takes '
            f"{_text(chosen['seconds'])}. As many bits that round twice ({ROUND_TWICE} {bits}) "
            "were measured as harmless, on small models."
        )
    if faster := [
        f"{row['method']} ({row['loss']})"
        for row in others
        if row["seconds"] * NEAR < chosen["seconds"]
    ]:
        said += f" More than {100 * (NEAR - 1):.0f} % faster: {', '.join(faster)}."
    return said


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
