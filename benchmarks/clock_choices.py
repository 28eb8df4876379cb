"""Do clocks predict and choose better than the plans that trained short runs?

    python -m benchmarks.clocks report   # writes it into the page of the clocks

Both are asked in the situations of `benchmarks.plans`, for which trainings of all methods exist. A
clock comes from another size than the one in question: 115 k for the larger ones, 427 k for 115 k.
It is on the line over the logarithm of the length that `clocks.held_out_gaps` takes, at most 1;
compression between local steps has the product of both clocks. With the seconds of a step, as the
plan itself predicted them, it gives the speed beside dense, clock x dense's seconds / the method's
seconds, and the fastest method is chosen. With dense's own losses at that size it predicts the gap
to dense. The rate is dense's best at the length nearest to clock x steps.

The conditions were set before this comparison was made: at 246 k and on the plans' situations an
rms error of predicted gaps of at most 0.05 bits, and below the plans' own; at the rate that is
printed a mean regret of at most 0.03 bits over nine situations or more; 85 % of the 95 % intervals
hold. That rate was found afterwards: of four rules this one, and dense's best at as many steps as
the method's, had the least regret.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.plans import (
    AT_ITS_RATE,
    FIXED,
    SEEDS,
    SITUATIONS,
    Losses,
    Situation,
    Truth,
    training,
)
from benchmarks.plans import _lines as lines_of
from regimes.base.statistics import t_interval

Clocks = Mapping[tuple[str, str, int], Sequence[float]]  # by size, method and length of 115k
OURS = "clock, at its rate"
FIXED_OURS = f"always {FIXED[-1]}, at its rate"


@dataclass(frozen=True)
class Line:
    """A method's clock over the logarithm of the length, by least squares.

    Attributes:
        level, slope: of the line.
        logs: of the lengths, one of each mean.
        spread: standard deviation of a seed's clock beside the line.
        free: degrees of freedom of the spread.
    """

    level: float
    slope: float
    logs: tuple[float, ...] = (0.0,)
    spread: float = 0.0
    free: int = 1

    def at(self, length: float) -> tuple[float, float, float]:
        """The clock, at most 1, and the 95 % interval of a mean over as many new seeds."""
        log, mean = math.log(length), statistics.fmean(self.logs)
        middle = min(1.0, self.level + self.slope * log)
        squares = sum((x - mean) ** 2 for x in self.logs)
        known = (1 / len(self.logs) + (log - mean) ** 2 / squares) if squares else 0.0
        error = self.spread * math.sqrt((1 + known) / len(SEEDS))
        half = float(student.ppf(0.975, self.free)) * error
        return middle, middle - half, middle + half


DENSE = Line(1.0, 0.0)


def fit_line(clocks: Clocks, method: str, sizes: Iterable[str]) -> Line | None:
    """The line of a method in some sizes; None: fewer than three lengths have a clock."""
    if method == "dense":
        return DENSE
    points = [
        (math.log(length), [*values])
        for (size, other, length), values in clocks.items()
        if other == method and size in sizes and all(map(math.isfinite, values))
    ]
    if len(points) < 3:
        return None
    logs, means = [x for x, _ in points], [statistics.fmean(values) for _, values in points]
    slope, level = (float(x) for x in np.polyfit(logs, means, 1))
    beside = [k - level - slope * x for x, values in points for k in values]
    free = len(beside) - 2
    return Line(level, slope, tuple(logs), math.sqrt(sum(x * x for x in beside) / free), free)


def clock_at(
    clocks: Clocks, method: str, sizes: Sequence[str], length: float
) -> tuple[float, float, float] | None:
    """The clock of a method at a length of 115k, with its interval; None: unknown. Where steps
    between synchronisations are local, the product of the compressor's clock and the period's."""
    sent, _, period = method.partition("/")
    parts = [sent, f"dense/{period}"] if period else [sent]
    lines = [fit_line(clocks, part, sizes) for part in parts]
    if any(line is None for line in lines):
        return None
    found = [line.at(length) for line in lines if line is not None]
    middle = math.prod(mean for mean, *_ in found)
    error = math.hypot(*((high - low) / 2 / mean for mean, low, high in found)) * middle
    return middle, middle - error, middle + error


@dataclass(frozen=True)
class Compared:
    """A situation, and what was predicted and chosen in it.

    Attributes:
        chosen: by the clocks.
        rate: that they print, in doublings of the preset's.
        regret: by who chose.
        gaps: of each method with a clock: predicted, low, high, measured, and what the plan
            predicted, which is nan where it predicts no gap.
    """

    case: Situation
    chosen: str
    best: str
    rate: float
    regret: Mapping[str, float]
    gaps: Mapping[str, tuple[float, float, float, float, float]] = field(default_factory=dict)


def compare(losses: Losses, clocks: Clocks, plans: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """Over the plans whose methods were all trained, and all have a clock."""
    found = (_compare(losses, clocks, plan) for plan in plans)
    return [each for each in found if each is not None]


def _compare(losses: Losses, clocks: Clocks, plan: Mapping[str, Any]) -> Compared | None:
    from benchmarks.clocks import SHARE, Dense

    (case,) = (case for case in SITUATIONS if case.name == plan["situation"])
    sizes = ("460k",) if case.size == "115k" else ("115k",)
    truth, curve = Truth(case.size, losses), Dense.of(losses, case.size)
    seconds: Mapping[str, float] = plan["seconds"]
    steps = {method: round(case.seconds / one) for method, one in seconds.items()}
    seen = {m: x[0] for m, n in steps.items() if (x := truth.at(m, n)) is not None}
    known = {
        method: clock
        for method, n in steps.items()
        if (clock := clock_at(clocks, method, sizes, n / SHARE[case.size])) is not None
    }
    if not seen.keys() == known.keys() == steps.keys():
        return None
    least = min(seen, key=lambda method: seen[method])
    chosen = max(known, key=lambda method: known[method][0] / seconds[method])
    rate = best_rate(losses, case.size, known[chosen][0] * steps[chosen])
    same = known[FIXED[-1]][0]
    (row,) = (row for row in plan["rows"] if row["method"] == plan["chosen"])
    printed = round(math.log2(row["rate"] / training(case.size).optimizer.lr))
    ends = {
        "clock": seen[chosen],
        OURS: truth.at_rate(chosen, steps[chosen], rate),
        "plan": seen[plan["chosen"]],
        AT_ITS_RATE: truth.at_rate(plan["chosen"], steps[plan["chosen"]], printed),
        **{f"always {method}": seen[method] for method in FIXED},
        FIXED_OURS: truth.at_rate(
            FIXED[-1], steps[FIXED[-1]], best_rate(losses, case.size, same * steps[FIXED[-1]])
        ),
    }
    regret = {who: loss - seen[least] for who, loss in ends.items()}
    rows = {row["method"]: row["loss"] for row in plan["rows"] if case.smaller}
    gaps = {}
    for method in steps.keys() - {"dense"}:
        at = [clock * steps[method] for clock in known[method]]
        predicted = [_gap(curve, clock, steps["dense"]) for clock in at]
        measured = seen[method] - seen["dense"]
        gaps[method] = (*_sorted(predicted), measured, rows.get(method, math.nan))
    return Compared(case, chosen, least, rate, regret, gaps)


def _gap(curve: Any, steps: float, dense: float) -> float:
    """Dense's loss after some steps minus that after as many as it has time for."""
    seeds = range(len(SEEDS))
    return statistics.fmean(curve.loss(s, steps) - curve.loss(s, dense) for s in seeds)


def _sorted(gaps: Sequence[float]) -> tuple[float, float, float]:
    """The gap, and the ends of its interval; beyond dense's lengths an end is open.

    Args:
        gaps: at the clock, and at the ends of its interval.
    """
    middle, slow, fast = gaps
    low = fast if math.isfinite(fast) else -math.inf
    return middle, low, slow if math.isfinite(slow) else math.inf


def best_rate(losses: Losses, size: str, steps: float) -> float:
    """Dense's best rate at the length nearest to some steps, of those with all seeds."""
    ends: dict[tuple[int, float], list[float]] = {}
    for (other, p), loss in losses.items():
        if (other, p.method) == (size, "dense"):
            ends.setdefault((p.steps, p.rate), []).append(loss)
    means = {key: statistics.fmean(x) for key, x in ends.items() if len(x) >= len(SEEDS)}
    near = min((n for n, _ in means), key=lambda n: abs(math.log(n / steps)))
    return min((r for n, r in means if n == near), key=lambda r: means[near, r])


@dataclass(frozen=True)
class Score:
    """How well gaps are predicted.

    Attributes:
        ours, plans: rms errors in bits, over the gaps that both predict.
        n: of these.
        inside, intervals: how many of the clocks' 95 % intervals hold, in all situations.
    """

    ours: float
    plans: float
    n: int
    inside: int
    intervals: int


def score(found: Sequence[Compared]) -> Score:
    """Over all situations."""
    both = [gap for gap in _all_gaps(found) if all(map(math.isfinite, (gap[0], gap[4])))]
    known = [gap for gap in _all_gaps(found) if math.isfinite(gap[0])]
    inside = sum(low <= measured <= high for _, low, high, measured, _ in known)
    ours, plans = (_rms([gap[i] - gap[3] for gap in both]) for i in (0, 4))
    return Score(ours, plans, len(both), inside, len(known))


def held_out_intervals(losses: Losses, clocks: Clocks, size: str = "260k") -> tuple[int, int]:
    """How many 95 % intervals of gaps hold at a size that no clock was fitted to, and of how
    many."""
    from benchmarks.clocks import SHARE, Dense, held_out_gaps

    curve, inside = Dense.of(losses, size), []
    for gap in held_out_gaps(losses, size):
        clock = clock_at(clocks, gap.method, ("115k", "460k"), gap.steps / SHARE[size])
        if clock is not None and math.isfinite(gap.predicted):
            _, low, high = _sorted([_gap(curve, k * gap.steps, gap.steps) for k in clock])
            inside.append(low <= gap.measured <= high)
    return sum(inside), len(inside)


def _all_gaps(found: Iterable[Compared]) -> Iterator[tuple[float, float, float, float, float]]:
    for each in found:
        yield from each.gaps.values()


def _rms(errors: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(x * x for x in errors))


def mean_regrets(found: Sequence[Compared]) -> dict[str, float]:
    """Over all situations, by who chose."""
    return {who: statistics.fmean(each.regret[who] for each in found) for who in found[0].regret}


def beside_fixed(found: Sequence[Compared]) -> list[float]:
    """The clocks' regret minus that of always the best fixed choice, both at a rate by one rule."""
    return [each.regret[OURS] - each.regret[FIXED_OURS] for each in found]


def read_plans() -> list[dict[str, Any]]:
    """The plans as committed."""
    from benchmarks.plans import PLANS

    return lines_of(PLANS)


def section(losses: Losses, clocks: Clocks) -> list[str]:
    """Lines of the page."""
    found = compare(losses, clocks, read_plans())
    if not found:
        return []
    total, means = score(found), mean_regrets(found)
    inside, count = held_out_intervals(losses, clocks)
    who = list(means)
    lines = [
        "## Beside the plans that trained short runs",
        "",
        f"Clocks and plans both predict {total.n} gaps to dense. The root mean square error is "
        f"{total.ours:.3f} bits for clocks and {total.plans:.3f} bits for plans. Of the 95 % "
        f"intervals of clocks, {total.inside} of {total.intervals} contain the measured gap in "
        f"these situations, and {inside} of {count} with 246 k parameters. The clocks come from "
        "another size of the model. The losses of dense come from the size itself; plans did not "
        "know them.",
        "",
        "The table has the *regret* of each choice: how many bits it ends above the best method at "
        "its best rate. In a column *at its rate* the training has a rate that a user would know. "
        "For a plan this is the rate that it prints. For the others it is dense's best rate at the "
        "length nearest to clock x steps. All other columns have the best rate of the method, "
        "which a user does not know. `quantised-all-reduce:4/8` sends 4 bits for each number, "
        "every 8 steps; `dense/8` averages the models every 8 steps.",
        "",
        f"| situation | clocks choose | best | {' | '.join(who)} |",
        "|---|---|---|" + "---:|" * len(who),
    ]
    for each in found:
        cells = [f"{each.regret[one]:.3f}" for one in who]
        lines.append(f"| {each.case.words} | {each.chosen} | {each.best} | {' | '.join(cells)} |")
    cells = [f"{means[one]:.3f}" for one in who]
    mean, low, high = t_interval(beside_fixed(found))
    return [
        *lines,
        f"| mean of {len(found)} |  |  | {' | '.join(cells)} |",
        "",
        f"The regret of *{OURS}* minus the regret of *{FIXED_OURS}* is {mean:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] bits. Both rates follow the same rule.",
        "",
    ]
