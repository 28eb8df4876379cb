"""What a job's step would take by each method, from the shapes alone, for `regimes cost --model`.

Bytes come from the compressors' own formulas. Their collectives come from one step of a small layer
here. The seconds of compression are for reading and writing its arrays at the speed of the
device's memory, `TRANSFERS` times the gradient in float32: a lower bound, of an implementation that
waits for nothing else. What a step by a method is worth, its *clock*, was measured (`cost.clocks`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.config import DENSE, Level
from regimes.base.config.toml import read_value
from regimes.base.errors import ConfigError, require
from regimes.compression import make_compressor
from regimes.compression.calls import WIDE, collectives_of, sends_apart
from regimes.compression.traffic import name_uncompressed_layers
from regimes.cost import clocks
from regimes.cost.network import Work, crossing_bandwidth
from regimes.cost.nodes import DataParallelJob

USUAL = (
    *("dense", "cast:fp16", "quantised-all-reduce:8", "quantised-all-reduce:4", "powersgd:32"),
    *("powersgd:4", "powersgd:1", "topk:1", "sign:1", "dense/32", "quantised-all-reduce:4/8"),
)
# How often arrays as large as the gradient are read or written. Error feedback reads gradient and
# residual, writes the residual, and corrects it (5); the update is written (1). PowerSGD reads
# twice for its products; TopK reads three times to select; rounding reads twice and writes codes.
TRANSFERS = {"dense": 0, "cast": 3, "powersgd": 8, "acp-sgd": 7, "sign": 8, "randomk": 6}
OTHERS = 9  # of a compressor that is not listed: one more than the most
DAY = 86400  # seconds
_METHOD = re.compile(r"([\w.:-]+?)(?::([\w.+-]+))?(?:/(\d+))?")


@dataclass(frozen=True)
class Method:
    """Holds one line of the table.

    Attributes:
        table: of the compressor's configuration.
        period: steps between synchronisations.
    """

    table: dict[str, Any]
    level: Level = DENSE
    period: int = 1

    @property
    def label(self) -> str:
        """Name the method: "powersgd 4, every 32 steps"."""
        local = f", every {self.period} steps" if self.period > 1 else ""
        return f"{self.table['name']}{'' if self.level == DENSE else f' {self.level}'}{local}"

    @property
    def clock(self) -> clocks.MeasuredClock | None:
        """Return the measurement of its clock, as `clocks.find_clock` does."""
        return clocks.find_clock(self._spelt)

    @property
    def clock_number(self) -> float | None:
        """Return the clock that a speed is computed with; of dense 1; None if not measured."""
        return clocks.reckon_clock(self._spelt)

    @property
    def _spelt(self) -> str:
        """As `parse_method` reads it, e.g. "powersgd:4/32"; "" with options of the compressor,
        which were not measured."""
        if len(self.table) > 1:
            return ""
        local = f"/{self.period}" if self.period > 1 else ""
        return f"{self.table['name']}{'' if self.level == DENSE else f':{self.level}'}{local}"


def parse_method(text: str) -> Method:
    """Read ``powersgd:4``, ``dense/32`` (every 32 steps) or ``topk:1/8``.

    Raises:
        ConfigError: another form, an unknown compressor, or a level that is none of its own.
    """
    match = _METHOD.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--methods {text}: expected COMPRESSOR:LEVEL, and /PERIOD for local steps, e.g. "
            "powersgd:4, dense/32, topk:1/8"
        )
    name, level, period = match.groups()
    method = Method({"name": name}, read_value(level or DENSE), int(period or 1))
    require(method.period >= 1, f"--methods {text}: period", method.period, "at least 1")
    chosen = make_compressor(method.table)
    if method.level == DENSE and name != DENSE:
        raise ConfigError(f"--methods {text}: a level is missing, e.g. {name}:1")
    chosen.check(method.level)
    return method


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Read a list of methods.

    Raises:
        ConfigError: an empty list, one method twice, or what is none.
    """
    require(len(texts) > 0, "methods", list(texts), "one or more, e.g. powersgd:4 dense/32")
    methods: dict[str, Method] = {}
    for text in texts:
        method = parse_method(text)
        require(method.label not in methods, "methods", " ".join(texts), f"{method.label} once")
        methods[method.label] = method
    return [*methods.values()]


# -- the work of a step ----------------------------------------------------------------------


def method_work(job: DataParallelJob, method: Method) -> Work:
    """Compute the mean step of one worker; its seconds are those of one device."""
    layers, itemsize, level = job.model.layers, job.itemsize, method.level
    compressor, by_node = make_compressor(method.table), node_is_worker(job, method)
    workers = job.nodes if by_node else job.replicas

    # what workers send each other: compressed layers by the compressor's own formula, others dense
    compressed = [
        layer
        for layer in layers
        if layer.compressed and level != DENSE and not compressor.exceeds(layer, level, workers)
    ]
    numbers = sum(layer.size for layer in compressed)
    sent = sum(compressor.traffic(layer, level, workers, WIDE).bytes for layer in compressed)
    calls, shares = collectives_of(compressor, level, workers) if compressed else ({}, {})
    size = {kind: share * sent for kind, share in shares.items()}
    dense = job.model.size - numbers
    size["mean"] = size.get("mean", 0.0) + dense * itemsize
    calls = {"mean": 1.0, **calls} if dense else calls

    # seconds of compression, by what it reads and writes in memory
    transfers = TRANSFERS.get(method.table["name"], OTHERS) if compressed else 0
    moved = transfers * WIDE * numbers
    if not by_node:
        once = Work(job.compute, moved / job.memory, calls, size)
        return once.every(method.period)

    # What a node's devices send each other: they reduce gradients before, in the gradients' type,
    # and gather shared updates afterwards. Each compresses its shard.
    whole, each = job.model.size * itemsize, job.gpus
    inside = {"scatter": whole * (each - 1) / each, "gather": whole / each}
    times = {"scatter": 1.0, "gather": 1.0}
    if compressed and compressor.joins_shards:  # the factors, which are joined as well
        inside["scatter"] += sent * (each - 1) / each
        inside["gather"] += sent / each
        times = {"scatter": 2.0, "gather": 3.0}
    within = Work(0.0, 0.0, times, inside)
    return Work(job.compute, moved / each / job.memory, calls, size, inside=within)


def node_is_worker(job: DataParallelJob, method: Method) -> bool:
    """Answer whether a node is the worker, whose devices average their gradients first. Local steps
    have none."""
    if 1 in (job.nodes, job.gpus) or method.period > 1 or job.worker == "device":
        return False
    return job.worker == "node" or sends_apart(make_compressor(method.table), [method.level])


def describe_workers(frame: pd.DataFrame) -> list[str]:
    """Say in a sentence of which methods a node is the worker."""
    names = frame["method"][frame["worker"] == "node"]
    if names.empty:
        return []
    return [
        f"a worker is a node, whose devices average their gradients first: {', '.join(names)} "
        "(--worker device: each device compresses its own)"
    ]


def describe_uncompressed_layers(job: DataParallelJob, methods: Iterable[Method]) -> list[str]:
    """Write a sentence for each method that sends layers whole."""
    sentences = []
    for method in methods:
        compressor, layers = make_compressor(method.table), job.model.layers
        if names := name_uncompressed_layers(compressor, layers, method.level, job.replicas):
            why = "because it would not send less of them"
            sentences.append(f"layers sent whole by {method.label}: {len(names)}, {why}")
    return sentences


# -- tables ----------------------------------------------------------------------------------


def tabulate_methods(job: DataParallelJob, methods: Iterable[Method]) -> pd.DataFrame:
    """Make a table with one row per method, the dense one first.

    Columns: method; worker, "node" or "device"; seconds of a step; its parts compute, compress and
    communicate; ``hidden``, the share of the communication that runs during the backward pass;
    bytes that a slow link carries in a step and ``bytes_per_day``; ``speed_up`` over dense, and
    ``break_even``, the bandwidth in bits/s below which the method is faster than dense (as
    `network.crossing_bandwidth`), nan where the device is assumed; ``clock`` with
    ``clock_ci_low`` and ``clock_ci_high``, and ``speed``, how many times as fast as dense it comes
    to a loss; where it was measured: ``optimizer``, ``data``, ``parameters``, ``steps``, ``n``,
    and ``times``, how many times as large the job's model is; empty where nothing was.
    """
    rows = []
    dense, assumed = method_work(job, parse_method(DENSE)), job.priced == "assumed"
    base = seconds_by_bandwidth(job, dense)
    for method, step in methods_work(job, methods):
        seconds, waiting = float(job.seconds(step)), float(job.waiting(step))
        sent = job.bytes(step)
        hidden = step.compute + step.compress + waiting - seconds
        rows.append(
            {
                "method": method.label,
                "worker": "device" if step.inside is None else "node",
                "seconds": seconds,
                "compute": step.compute,
                "compress": step.compress,
                "communicate": waiting,
                "hidden": min(1.0, max(0.0, hidden / waiting)) if waiting else 1.0,
                "bytes": sent,
                "bytes_per_day": sent * DAY / seconds,
                "speed_up": float(job.seconds(dense)) / seconds,
                "break_even": math.nan
                if assumed
                else crossing_bandwidth(seconds_by_bandwidth(job, step), base),
                **_measured(job, method, float(job.seconds(dense)) / seconds),
            }
        )
    return pd.DataFrame(rows)


def _measured(job: DataParallelJob, method: Method, speed_up: float) -> dict[str, Any]:
    """What is known of a method's clock."""
    number, clock = method.clock_number, method.clock
    known = {"speed": math.nan if number is None else number * speed_up}
    if clock is None:
        return known
    setting = clock.setting
    return {
        "clock": clock.mean,
        "clock_ci_low": clock.low,
        "clock_ci_high": clock.high,
        **known,
        "optimizer": setting.optimizer,
        "data": setting.name,
        "parameters": setting.parameters,
        "steps": setting.steps,
        "n": setting.n,
        "times": job.model.size / setting.parameters,
    }


def methods_work(job: DataParallelJob, methods: Iterable[Method]) -> list[tuple[Method, Work]]:
    """Compute the step of each method, the dense one first; of several with one label, the
    first."""
    every: dict[str, Method] = {}
    for method in (parse_method(DENSE), *methods):
        every.setdefault(method.label, method)
    return [(method, method_work(job, method)) for method in every.values()]


def seconds_by_bandwidth(job: DataParallelJob, step: Work) -> Any:
    """Return the seconds as a function of the slow link's bandwidth."""
    return lambda bandwidth: job.at(bandwidth).seconds(step)


def tabulate_seconds(
    job: DataParallelJob, methods: Iterable[Method], bandwidths: np.ndarray
) -> pd.DataFrame:
    """Compute the seconds of a step over the slow link's bandwidth: method, bandwidth (bits/s),
    seconds."""
    frames = []
    for method, step in methods_work(job, methods):
        seconds = seconds_by_bandwidth(job, step)(bandwidths)
        rows = {"method": method.label, "bandwidth": bandwidths, "seconds": seconds}
        frames.append(pd.DataFrame(rows))
    return pd.concat(frames, ignore_index=True)


def usual_methods(job: DataParallelJob) -> Sequence[Method]:
    """List the methods of a table by default. With a gradient in half precision a cast is left
    out."""
    return [
        parse_method(text)
        for text in USUAL
        if not (job.itemsize < WIDE and text.startswith("cast"))
    ]
