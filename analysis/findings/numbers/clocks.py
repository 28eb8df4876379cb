"""Clocks of compressed training, from the losses of ``benchmarks/clocks.jsonl``: numbers for
templates."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ..sources import number, record_read
from ..values import Interval, mean_of

PLANS = "../../benchmarks/plans.jsonl"
FILES = ("plans_losses.jsonl", "clocks.jsonl")


def _losses() -> Mapping[Any, float]:
    return _read(*(record_read(f"../../benchmarks/{name}") for name in FILES))


@functools.cache
def _read(*files: Any) -> Mapping[Any, float]:
    from benchmarks.plans import known  # benchmarks are in a checkout alone, as the pages are

    return known(*files)


def _clocks() -> Mapping[tuple[str, str, int], Any]:
    from benchmarks.clocks import all_clocks

    return all_clocks(dict(_losses()))


@number
def clock(size: str, method: str, length: int) -> Interval:
    """The clock of a method, a value per seed."""
    return mean_of([*_clocks()[size, method, length]])


@number
def clock_ratio(above: str, below: str, method: str, length: int) -> Interval:
    """The clock in one setting divided by that in another, geometric mean over seeds."""
    return _ratio(_clocks()[above, method, length], _clocks()[below, method, length])


def _ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    from benchmarks.clocks import ratio

    return Interval(*ratio(above, below), len(above))


@number
def clock_share(size: str, method: str, length: int, other: int) -> Interval:
    """The clock at one length divided by that at another, geometric mean over seeds."""
    return _ratio(_clocks()[size, method, length], _clocks()[size, method, other])


@number
def clocks_alike() -> dict[str, int]:
    """How many methods and lengths have a clock with 115 k and with 427 k parameters, and in how
    many the interval of their ratio lies outside 0.85 to 1.18."""
    clocks = _clocks()
    known = {key for key, values in clocks.items() if all(map(math.isfinite, values))}
    both = [
        (method, length)
        for size, method, length in sorted(known)
        if size == "460k" and ("115k", method, length) in known
    ]
    ratios = [clock_ratio("460k", "115k", *one) for one in both]
    return {"value": len(both), "apart": sum(x.high < 0.85 or x.low > 1.18 for x in ratios)}


@number
def clock_gaps() -> dict[str, float]:
    """Gaps to dense at 260 k parameters, which no clock was fitted to: the root mean square error
    of what clocks predict, and of how many."""
    from benchmarks.clocks import held_out_gaps

    gaps = held_out_gaps(dict(_losses()))
    known = [gap for gap in gaps if math.isfinite(gap.predicted)]
    rms = math.sqrt(fmean((gap.predicted - gap.measured) ** 2 for gap in known))
    return {"value": rms, "n": len(known), "of": len(gaps)}


@number
def clock_table() -> str:
    """The clock of each method at each length, in four settings."""
    from benchmarks.clocks import table

    return "\n".join(table(_clocks()))


@number
def clock_choices() -> dict[str, float]:
    """Clocks beside the plans that trained short runs, in the same situations: rms errors of the
    gaps that both predict, intervals that hold, mean regrets, and how much less is lost than by
    always 4 bits every 8 steps."""
    from benchmarks import clock_choices as choices
    from benchmarks.plans import AT_ITS_RATE
    from regimes.base.statistics import t_interval

    plans = [json.loads(line) for line in record_read(PLANS).read_text().splitlines()]
    losses, clocks = dict(_losses()), _clocks()
    found = choices.compare(losses, clocks, plans)
    total, regret = choices.score(found), choices.mean_regrets(found)
    inside, count = choices.held_out_intervals(losses, clocks)
    mean, low, high = t_interval(choices.beside_fixed(found))
    return {
        "value": total.ours,
        "plans": total.plans,
        "n": total.n,
        "inside": total.inside,
        "intervals": total.intervals,
        "held_inside": inside,
        "held": count,
        "situations": len(found),
        "best": sum(each.chosen == each.best for each in found),
        "ours": regret[choices.OURS],
        "ours_best": regret["clock"],
        "plan": regret[AT_ITS_RATE],
        "dense": regret["always dense"],
        "bits": regret["always quantised-all-reduce:4"],
        "fixed_best": regret["always quantised-all-reduce:4/8"],
        "fixed": regret[choices.FIXED_OURS],
        "less": mean,
        "less_low": low,
        "less_high": high,
    }


@number
def clock_race() -> dict[str, float]:
    """Speeds beside DDP in the race: the rms of the logarithm of what clocks predict over what was
    measured, of how many entrants on links, and the correlation."""
    import numpy as np

    from benchmarks.clocks import raced_error, raced_speeds

    record_read("../../benchmarks/race.jsonl")
    speeds = raced_speeds(_clocks())
    logs = np.log([[x.predicted, x.measured] for x in speeds]).T
    return {
        "value": raced_error(speeds),
        "n": len(speeds),
        "r": float(np.corrcoef(logs)[0, 1]),
        "least": min(x.measured for x in speeds),
        "most": max(x.measured for x in speeds),
    }
