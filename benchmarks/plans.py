"""Trainings by all methods, and situations in which plans were asked for, for `clocks`.

A text model of three sizes (`lm-small`, which has 115 k parameters, and two wider ones with 427 k
and 1.64 M) was trained by each method at several lengths, with three learning rates each and more
where the best was at an end, and with two more seeds at the two best rates. The losses are the
lines of ``plans_losses.jsonl``. The loss of a method in T seconds on a link is that at the steps
for which its predicted seconds leave time, between the lengths on a line over the logarithm, at the
rate of the lowest mean over seeds.

The plans of ``plans.jsonl`` were asked for in each of `SITUATIONS`, of the search that `regimes
plan` had up to commit fd0251ea. Plans of the larger sizes train the smallest alone (``probe``);
those named *own* train the size itself. ``plans.md`` holds them against the trainings. What has
trained, and what has written this page, is in commit 607b16c6.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regimes.base.config import RunConfig, override_fields
from regimes.presets import get_preset
from regimes.search.plans.clock import Probe

HERE = Path(__file__).parent
LOSSES, PLANS = HERE / "plans_losses.jsonl", HERE / "plans.jsonl"

WIDTHS = {"115k": 64, "460k": 128, "1800k": 256}
PARAMETERS = {"115k": "115 k", "260k": "246 k", "460k": "427 k", "1800k": "1.64 M"}  # of a size
SCALED = {"115k": 1.0, "460k": 0.5, "1800k": 0.25}  # the lengths, of those of the smallest model
SHORT, MIDDLE, LONG = (150, 300, 600, 1200), (300, 600, 1200), (600, 1200, 2400)
METHODS = {
    "dense": SHORT,
    "quantised-all-reduce:8": SHORT,
    "quantised-all-reduce:4": MIDDLE,
    "powersgd:4": (*MIDDLE, 2400),
    "dense/8": LONG,
    "quantised-all-reduce:4/8": LONG,
    "dense/32": LONG,
}
SEEDS = (21000, 21001, 21002)


@dataclass(frozen=True)
class Situation:
    """A training that a plan is asked for.

    Attributes:
        step: seconds of a worker's step without communication, on a device that is not this one.
        own: do the probes of a larger size train it, and not the smallest?
    """

    size: str
    link: str
    seconds: float
    step: float
    own: bool = False

    @property
    def name(self) -> str:
        return f"{self.size} {self.link} {self.seconds:g} s" + ", own probes" * self.own

    @property
    def words(self) -> str:
        """The name as pages have it: with the number of parameters in place of the size."""
        return self.name.replace(self.size, f"{PARAMETERS[self.size]},", 1)

    @property
    def smaller(self) -> bool:
        """Do its probes train the smallest size in place of its own?"""
        return self.size != "115k" and not self.own


SITUATIONS = (
    Situation("115k", "100Mbit/s,100us", 15.0, 0.02),
    Situation("115k", "100Mbit/s,100us", 40.0, 0.02),
    Situation("115k", "20Mbit/s,1ms", 60.0, 0.02),
    Situation("115k", "20Mbit/s,1ms", 120.0, 0.05),
    Situation("115k", "1Gbit/s,50us", 15.0, 0.02),
    Situation("115k", "300Mbit/s,5ms", 40.0, 0.02),
    Situation("460k", "100Mbit/s,100us", 60.0, 0.06),
    Situation("460k", "20Mbit/s,1ms", 100.0, 0.06),
    Situation("460k", "1Gbit/s,50us", 40.0, 0.06),
    Situation("460k", "100Mbit/s,100us", 60.0, 0.06, own=True),
    Situation("460k", "20Mbit/s,1ms", 100.0, 0.06, own=True),
    Situation("460k", "1Gbit/s,50us", 40.0, 0.06, own=True),
    Situation("1800k", "100Mbit/s,100us", 90.0, 0.2),
    Situation("1800k", "20Mbit/s,1ms", 160.0, 0.2),
    Situation("1800k", "1Gbit/s,50us", 60.0, 0.2),
)
AT_ITS_RATE = "plan, at its rate"
FIXED = ("dense", "quantised-all-reduce:4", "dense/8", "quantised-all-reduce:4/8")


def training(size: str) -> RunConfig:
    """`lm-small` of a size, 600 steps."""
    return override_fields(get_preset("lm-small"), {"model.width": WIDTHS[size]})


def lengths(size: str, method: str) -> list[int]:
    return [round(SCALED[size] * steps) for steps in METHODS[method]]


# -- losses of all methods -------------------------------------------------------------------

Losses = dict[tuple[str, Probe], float]  # by size and training, bits per byte


def known(*files: Path) -> Losses:
    """The losses in these files, or in that of the plans."""
    found: Losses = {}
    for line in (line for file in files or (LOSSES,) for line in _lines(file)):
        probe = Probe(line["method"], line["steps"], line["rate"], line["seed"])
        found[line["size"], probe] = math.inf if line["loss"] is None else line["loss"]
    return found


# -- what they are worth ---------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The losses of a size over seeds."""

    size: str
    losses: Losses

    def at(self, method: str, steps: float) -> tuple[float, float] | None:
        """Mean loss at the best rate of each length, and its standard error, on lines over the
        logarithm of the steps; None beyond the lengths by more than a tenth."""
        by_length = {n: self._best(method, n) for n in lengths(self.size, method)}
        points = {n: values for n, values in by_length.items() if values}
        if not points or not 0.9 * min(points) <= steps <= 1.1 * max(points):
            return None
        grid = sorted(points)
        at = math.log(min(max(steps, grid[0]), grid[-1]))
        logs = np.log(grid)
        mean = np.interp(at, logs, [statistics.fmean(points[n]) for n in grid])
        errors = [statistics.stdev(points[n]) / len(points[n]) ** 0.5 for n in grid]
        return float(mean), float(np.interp(at, logs, errors))

    def at_rate(self, method: str, steps: float, rate: float) -> float:
        """Mean loss at one rate, on lines over the logarithm of the steps, of the lengths that were
        trained with it; many of these have one seed.

        Args:
            rate: log2 of the rate over the preset's, as in the file of losses.
        """
        points: dict[int, list[float]] = {}
        for (size, p), loss in self.losses.items():
            if (size, p.method, p.rate) == (self.size, method, rate):
                points.setdefault(p.steps, []).append(loss)
        grid = sorted(points)
        means = [statistics.fmean(points[n]) for n in grid]
        return float(np.interp(math.log(steps), np.log(grid), means))

    def _best(self, method: str, steps: int) -> list[float]:
        """The losses of the rate that has all seeds."""
        by_rate: dict[float, list[float]] = {}
        for (size, p), loss in self.losses.items():
            if (size, p.method, p.steps) == (self.size, method, steps):
                by_rate.setdefault(p.rate, []).append(loss)
        whole = [values for values in by_rate.values() if len(values) == len(SEEDS)]
        return min(whole, key=statistics.fmean, default=[])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
