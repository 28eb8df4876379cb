"""What `regimes plan` chose before clocks, held against trainings that it had not seen.

    python -m benchmarks.plans truth --jobs 2   # 4 hours on 2 cores; can be continued
    python -m benchmarks.plans report

*truth* trains a text model of three sizes (`lm-small`, which has 115 k parameters, and two wider
ones with 427 k and 1.64 M) by each method at several lengths, with three learning rates each and
more where the best is at an end, and with two more seeds at the two best rates. The loss of a
method in T seconds on a link is that at the steps for which its predicted seconds leave time,
between the lengths on a line over the logarithm, at the rate of the lowest mean over seeds. The
second rate was added after the first losses were there, and before any plan: at 300 steps the rate
that was best by one seed lost 0.6 bits in another.

The plans of ``plans.jsonl`` were asked for in each of `SITUATIONS`, 10 minutes of one core each,
with seeds of their own, of the search that `regimes plan` had up to commit fd0251ea, where the
command that asked stands. Plans of the larger sizes train the smallest alone (``probe``); those
named *own* train the size itself.

*report* tells for each plan the regret of the method that it chooses: its loss minus the best
method's, in bits per byte. Once the method is taken at its best rate, which the trainings of all
methods found, and once at the rate that the plan prints, which a user would train with. Beside it
stand the regrets of always the same method, and of what `regimes cost` advised, which knew no loss
of this model; each at its own best rate. It counts the
intervals that contain the measured loss (of larger sizes: its difference to dense). It leaves
``plans.md``.

The first search (commits up to 2f4820db) fitted one parabola of the learning rate for all methods,
and compared many short trainings. Its twelve plans were predicted to lose at most 0.03 bits to the
best method in the mean; the six of the smallest size lost 0.112, more than always 4 bits (0.094),
and 26 of 33 intervals held. This is the second search: fewer and longer trainings, each method at
the best rate that was tried. It was made with the losses of the smallest size in sight, so that
only 427 k and 1.64 M judge it. Before any of their losses that count, the seconds of three of their
situations became shorter: trainings of fast methods would have been longer than any that is
measured.

Written before any plan of the second search, and before any loss of 1.64 M and most of 427 k: the
regret of plans from own probes is at most 0.03 bits in the mean, and below each fixed choice's; at
least 85 % of the 95 % intervals contain what is measured. For plans from a smaller model it is
doubtful that its gap to dense is the larger one's: if less than 85 % hold there, or the regret is
above 0.06, they serve to leave methods out alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regimes.base.config import RunConfig, override_fields
from regimes.base.statistics import LEAST, t_interval
from regimes.cost.methods import parse_method
from regimes.plotting.groups import tested_by
from regimes.presets import get_preset
from regimes.records import load, write_output
from regimes.search import sweep
from regimes.search.plans.clock import Probe
from regimes.search.plans.probes import configure_probe, in_steps, name_probe

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
STEPS = 600  # of the preset
RATES = (-1.0, 0.0, 1.0)
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
HARMLESS = {"dense", "quantised-all-reduce:8", "quantised-all-reduce:4"}
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


def wanted_lengths(size: str) -> dict[str, list[int]]:
    return {method: lengths(size, method) for method in METHODS}


def missing(size: str, losses: Losses, wanted: Mapping[str, Sequence[int]]) -> list[Probe]:
    """Trainings that come next: three rates at each length, then one beyond a best rate at an end,
    then more seeds at the two best.

    Args:
        wanted: the lengths of each method, in steps.
    """
    mine = {probe: loss for (other, probe), loss in losses.items() if other == size}
    todo: list[Probe] = []
    for method, all_steps in wanted.items():
        for steps in all_steps:
            first = {
                p.rate: loss
                for p, loss in mine.items()
                if (p.method, p.steps, p.seed) == (method, steps, SEEDS[0])
            }
            runs = [Probe(method, steps, r, SEEDS[0]) for r in RATES if r not in first]
            if not runs:
                best = min(first, key=lambda rate: first[rate])
                if best in (min(first), max(first)) and abs(best) < 3:
                    beyond = best - 1 if best == min(first) else best + 1
                    runs = [Probe(method, steps, beyond, SEEDS[0])]
                else:
                    two = sorted(first, key=lambda rate: first[rate])[:2]
                    more = (Probe(method, steps, rate, seed) for rate in two for seed in SEEDS[1:])
                    runs = [probe for probe in more if probe not in mine]
            todo += runs
    return todo


def train(sizes: Sequence[str], out: Path, jobs: int) -> None:
    """Train what is missing, and keep each loss in a line."""
    for size in sizes:
        config = in_steps(training(size), STEPS)

        def next_runs(size: str = size) -> list[Probe]:
            return missing(size, known(), wanted_lengths(size))

        train_rounds(size, config, next_runs, LOSSES, out, jobs)


def train_rounds(
    size: str,
    config: RunConfig,
    next_runs: Callable[[], Sequence[Probe]],
    file: Path,
    out: Path,
    jobs: int,
) -> None:
    """Train in rounds, and append each loss to a file as a line.

    Args:
        config: in steps, as `in_steps` gives it.
        next_runs: gives the trainings of the next round; none: it is done.
        out: the folder of the runs.
    """
    with sweep.make_trainer(jobs, [config.device], None) as trainer:
        while todo := next_runs():
            probes = {out / size / name_probe(probe): probe for probe in todo}
            cells = [
                (folder, configure_probe(config, parse_method(p.method), *_of(p)))
                for folder, p in probes.items()
            ]

            def ended(
                folder: Path, error: str | None, probes: Mapping[Path, Probe] = probes
            ) -> None:
                loss = None if error else _loss(folder)
                method, steps, rate, seed = probes[folder].method, *_of(probes[folder])
                line = {"size": size, "method": method, "steps": steps, "rate": rate}
                _append(file, {**line, "seed": seed, "loss": loss})
                print(f"{size} {folder.name}: {loss}", flush=True)

            trainer(cells, ended)


def _of(probe: Probe) -> tuple[int, float, int]:
    return probe.steps, probe.rate, probe.seed


def _loss(run: Path) -> float | None:
    record = load(run)
    value = tested_by(record).factor * float(record.epochs["metric"].dropna().iloc[-1])
    return value if math.isfinite(value) else None


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


@dataclass(frozen=True)
class Verdict:
    """A plan beside what trainings did.

    Attributes:
        case: what was asked.
        chosen: the method.
        best: the one that ends lowest.
        regret: of the plan, in bits; by name also the regrets of the plan's method at the plan's
            rate, of fixed choices and of `regimes cost`.
        covered: of the intervals with something measured, how many contain it; and their number.
    """

    case: Situation
    chosen: str
    decided: bool
    best: str
    regret: Mapping[str, float]
    covered: tuple[int, int]


def verdicts(plans: Iterable[Mapping[str, Any]], losses: Losses) -> list[Verdict]:
    """Over the plans with losses of all their methods."""
    cases = {case.name: case for case in SITUATIONS}
    found = []
    for line in plans:
        case = cases[line["situation"]]
        truth = Truth(case.size, losses)
        steps = {row["method"]: row["steps"] for row in line["rows"]}
        seen = {m: x for m, n in steps.items() if (x := truth.at(m, n)) is not None}
        if seen.keys() != steps.keys():
            continue  # the best method may be one that is not measured
        best = min(seen, key=lambda m: seen[m][0])
        choices = {"plan": line["chosen"], **{f"always {m}": m for m in FIXED}}
        choices["cost"] = _advised(line)
        # a method that the plan left out takes as long as dense, and ends no lower than it
        regret = {who: seen.get(m, seen["dense"])[0] - seen[best][0] for who, m in choices.items()}
        (row,) = (row for row in line["rows"] if row["method"] == line["chosen"])
        rate = round(math.log2(row["rate"] / training(case.size).optimizer.lr))
        printed = truth.at_rate(row["method"], row["steps"], rate)
        regret = {"plan": regret.pop("plan"), AT_ITS_RATE: printed - seen[best][0], **regret}
        inside = [
            row["low"] - 2 * error <= value <= row["high"] + 2 * error
            for row in line["rows"]
            if row["method"] in seen
            for value, error in [_told(case, row["method"], seen)]
            if not (case.smaller and row["method"] == "dense")
        ]
        covered = sum(inside), len(inside)
        found.append(Verdict(case, line["chosen"], line["decided"], best, regret, covered))
    return found


def _told(
    case: Situation, method: str, seen: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """What a plan's interval is about: the loss, or its difference to dense; with its error."""
    value, error = seen[method]
    if not case.smaller:
        return value, error
    dense, other = seen["dense"]
    return value - dense, math.hypot(error, other)


def _advised(line: Mapping[str, Any]) -> str:
    """The fastest method with a loss known to be harmless, as `regimes cost` advised before it knew
    clocks."""
    return min(HARMLESS & line["seconds"].keys(), key=lambda m: float(line["seconds"][m]))


def markdown(found: Sequence[Verdict]) -> str:
    choices = list(found[0].regret) if found else []
    text = [
        "# What `regimes plan` chose before clocks, beside trainings of all methods",
        "",
        "This page compares what `regimes plan` chose, as it was before clocks, with trainings of "
        "all methods that it has not seen ([clocks beside it](clocks.md)). `python -m "
        "benchmarks.plans` measures; its docstring describes how. Plans with a method that was not "
        "trained at its length are left out.",
        "",
        "| training | chosen | best | " + " | ".join(choices) + " | intervals that hold |",
        "|---|---|---|" + "---:|" * (len(choices) + 1),
    ]
    for each in found:
        cells = [f"{each.regret[c]:.3f}" for c in choices]
        sure = each.chosen + ("" if each.decided else " (not decided)")
        inside, count = each.covered
        text.append(
            f"| {each.case.words} | {sure} | {each.best} | {' | '.join(cells)} | "
            f"{inside} of {count} |"
        )
    groups = {
        PARAMETERS["115k"]: [each for each in found if each.case.size == "115k"],
        "larger, own probes": [each for each in found if each.case.own],
        "larger, probes of a smaller model": [each for each in found if each.case.smaller],
    }
    for words, mine in groups.items():
        if mine:
            means = [statistics.fmean(e.regret[c] for e in mine) for c in choices]
            inside, count = (sum(e.covered[i] for e in mine) for i in (0, 1))
            text.append(
                f"| mean, {words} |  |  | {' | '.join(f'{x:.3f}' for x in means)} | "
                f"{inside} of {count} ({inside / count:.0%}) |"
            )
    return "\n".join(
        [
            *text,
            "",
            "Regret is the loss in bits per byte above that of the best method in the same "
            f"seconds. Each method is taken at its best rate (n = {len(SEEDS)} seeds), which a "
            f"user does not know; *{AT_ITS_RATE}* takes the chosen method at the rate that the "
            "plan prints, of "
            "which many trainings have one seed. *cost* is the fastest method that was harmless "
            "elsewhere. Intervals are those of the plan, 95 %, widened by twice the standard error "
            "of what was measured.",
            "",
            *_plan_against_one(groups["larger, probes of a smaller model"]),
            *_outcomes(found),
        ]
    )


def _plan_against_one(found: Sequence[Verdict]) -> list[str]:
    """How much better plans choose than always the best of the fixed choices."""
    if len(found) < LEAST:
        return []
    one = f"always {FIXED[-1]}"
    mean, low, high = t_interval([each.regret["plan"] - each.regret[one] for each in found])
    shown = "shown" if high < 0 else "not shown"
    return [
        f"That plans of larger models, from probes of a smaller one, choose better than {one} is "
        f"{shown}: the difference is {mean:+.3f} [{low:+.3f}, {high:+.3f}] bits, "
        f"n = {len(found)}, each method at its best rate.",
        "",
    ]


def _outcomes(found: Sequence[Verdict]) -> list[str]:
    """What became of the predictions in the module's docstring."""
    lines = ["## What was predicted", ""]
    for words, mine, most, leads in (  # leads: also below each fixed choice's
        ("own probes", [each for each in found if each.case.own], 0.03, True),
        ("probes of a smaller model", [each for each in found if each.case.smaller], 0.06, False),
    ):
        if not mine:
            continue
        mean = {who: statistics.fmean(e.regret[who] for e in mine) for who in mine[0].regret}
        fixed = min((who for who in mean if who.startswith("always")), key=mean.__getitem__)
        inside, count = (sum(e.covered[i] for e in mine) for i in (0, 1))
        lowest = ", and below each fixed choice's" if leads else ""
        held = mean["plan"] <= most and not (leads and mean["plan"] >= mean[fixed])
        lines.append(
            f"- Plans from {words} have a mean regret of at most {most} bits{lowest}: "
            f"{'holds' if held else 'refuted'}, {mean['plan']:.3f} ({fixed}: {mean[fixed]:.3f}), "
            f"n = {len(mine)}."
        )
        lines.append(
            f"- At least 85 % of their intervals hold: "
            f"{'holds' if inside >= 0.85 * count else 'refuted'}, {inside} of {count}."
        )
    return [*lines, ""]


def report() -> str:
    """The page, from the lines that are there."""
    return markdown(verdicts(_lines(PLANS), known()))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["truth", "report"])
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=", ".join(WIDTHS))
    parser.add_argument("--out", type=Path, default=Path("runs/plans"))
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()
    if unknown := {*chosen.sizes} - {*WIDTHS}:
        parser.error(f"no such size: {', '.join(sorted(unknown))}; there are {', '.join(WIDTHS)}")
    if chosen.what == "truth":
        train(chosen.sizes or [*WIDTHS], chosen.out, chosen.jobs)
    else:
        write_output(HERE / "plans.md", text := report())
        print(text)


if __name__ == "__main__":
    main()
