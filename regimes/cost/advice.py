"""Which method to try: of those whose clock was measured, one that comes to a loss soon.

A method takes its seconds of a step over its clock for what a dense step is worth. The methods
stand in the order of the bits that they keep of a gradient, most first. The advice goes from one to
the next at a bandwidth of the slow link, its threshold: below it the next method is faster to a
loss than each before, and it or a later one by the factor `NEAR`. Thresholds are at least `APART`
apart, so that a small change of the link changes the advice by one neighbour at most; a method
behind may then be faster than the one that is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.console.units import format_quantity
from regimes.cost.methods import Method, methods_work, seconds_by_bandwidth
from regimes.cost.network import Network, Work, crossing_bandwidth
from regimes.cost.nodes import USUAL, DataParallelJob

NEAR = 1.1  # times the fewest seconds: a difference that a prediction cannot decide
APART = 1.2  # least ratio of two bandwidths that thresholds name
NAMES = {"adamw": "AdamW", "sgd": "SGD"}
SURELY = 1 - 1e-9  # more than rounding
BANDWIDTHS = np.logspace(4, 13, 361)  # bits/s, at which methods are compared
Steps = Sequence[tuple[Method, Work]]


def recommend_method(steps: Steps, limits: Sequence[float], bandwidth: float) -> Method:
    """Choose the method to try on a slow link of that bandwidth.

    Args:
        steps, limits: `list_candidates`, and their `find_thresholds`.
    """
    return steps[sum(bandwidth < limit for limit in limits)][0]


def list_candidates(job: DataParallelJob, methods: Iterable[Method]) -> Steps:
    """List the methods with a clock, in the order of what they keep, without those that no
    bandwidth makes faster to a loss than all before them. Whatever the link: they are judged
    without its latency."""
    known = methods_work(job, methods)
    steps = [(method, step) for method, step in known if method.clock_number is not None]
    steps.sort(key=lambda pair: -sum(pair[1].bytes.values()))
    free = replace(
        job, within=Network(job.within.bandwidth), between=Network(job.between.bandwidth)
    )
    seconds = np.array([seconds_to_a_loss(free, *pair)(BANDWIDTHS) for pair in steps])
    fewest = np.minimum.accumulate(seconds, axis=0)
    return [
        pair
        for i, pair in enumerate(steps)
        if i == 0 or (seconds[i] < SURELY * fewest[i - 1]).any()
    ]


def seconds_to_a_loss(job: DataParallelJob, method: Method, step: Work) -> Any:
    """Return the seconds for what a dense step is worth, as a function of the slow link's
    bandwidth."""
    curve, clock = seconds_by_bandwidth(job, step), method.clock_number or 1.0
    return lambda bandwidth: curve(bandwidth) / clock


def find_thresholds(job: DataParallelJob, steps: Steps) -> list[float]:
    """Find the bandwidths below which the advice goes on from each method but the last, falling."""
    curves = [seconds_to_a_loss(job, *pair) for pair in steps]
    limits: list[float] = []
    for i in range(1, len(curves)):

        def before(bandwidth: Any, i: int = i) -> Any:
            return reduce(np.minimum, (curve(bandwidth) for curve in curves[:i]))

        def behind(bandwidth: Any, i: int = i) -> Any:
            seconds = [curve(bandwidth) for curve in curves[i:]]
            return np.maximum(seconds[0], NEAR * reduce(np.minimum, seconds))

        apart = limits[-1] / APART if limits else np.inf
        limits.append(min(crossing_bandwidth(behind, before), apart))
    return limits


def write_advice(job: DataParallelJob, methods: Sequence[Method], frame: pd.DataFrame) -> str:
    """Write what to try, why, where its clock was measured, and what is faster, with what is known
    of it.

    Args:
        frame: `methods.tabulate_methods` of the same job and methods.
    """
    rows: list[Any] = frame.to_dict("records")
    steps = list_candidates(job, methods)
    method = recommend_method(steps, find_thresholds(job, steps), float(job.link.bandwidth))
    chosen = next(row for row in rows if row["method"] == method.label)
    dense, where = rows[0], f"on {job.link}"
    waits = f"a dense step of {_format_seconds(dense['seconds'])} waits "
    waits += f"{_format_seconds(dense['seconds'] - dense['compute'])} for the network"
    if chosen["method"] == dense["method"]:
        sentence = (
            f"Stay dense: {where} {waits}, and the methods whose clock was measured save too "
            "little of it to be sure of."
        )
    else:
        sentence = (
            f"Try {chosen['method']}: {where} {waits}; a step of this one takes "
            f"{_format_seconds(chosen['seconds'])} and is worth {method.clock_number:.2f} of it, "
            f"so it comes to a loss {_format_factor(chosen['speed'])} times as fast. Its clock was "
            f"measured on {chosen['data']} with {format_quantity(chosen['parameters'])} parameters "
            f"and {NAMES.get(chosen['optimizer'], chosen['optimizer'])} (n = {chosen['n']:.0f}); "
            "your model is "
            f"{_format_factor(chosen['times'])} times as large."
        )
    faster = [row["method"] for row in rows if row["speed"] > NEAR * chosen["speed"]]
    unknown = [
        row["method"]
        for row in rows
        if math.isnan(row["speed"]) and row["speed_up"] > NEAR * chosen["speed"]
    ]
    if faster:
        sentence += f" More than {100 * (NEAR - 1):.0f} % faster: {', '.join(faster)}."
    if unknown:
        sentence += f" Perhaps faster, of unknown clock: {', '.join(unknown)}."
    if job.priced == "assumed":
        sentence += f" The device is assumed to be an {USUAL}: name yours with --device."
    return sentence


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _format_factor(times: float) -> str:
    return f"{times:.2g}" if times < 10 else f"{times:,.0f}"


def tabulate_clocks(job: DataParallelJob, methods: Sequence[Method]) -> Table:
    """Make a table of the clock of each method, where it was measured, and how far that is from the
    job."""
    lines: list[Sequence[str]] = []
    for method, _ in methods_work(job, methods)[1:]:
        clock, where = method.clock, ["-"] * 4
        if clock is not None:
            of = clock.setting
            model = f"{format_quantity(of.parameters)}, {of.name}, {NAMES[of.optimizer]}"
            times = f"× {_format_factor(job.model.size / of.parameters)}"
            where = [str(clock), model, str(of.n), times]
        lines.append((method.label, *where))
    note = (
        "clock: how many dense steps one step of the method is worth, each at its own learning "
        "rate; n seeds. It hardly depends on the model's size, but on the optimiser "
        "(docs/how-to/start.md has all)"
    )
    return Table(("", "clock [95 %]", "measured on", "n", "your model"), lines, note)
