"""How far compressed training comes in a step, as a share of a step of dense: a method's *clock*.

    python -m benchmarks.clocks report

A method that ends at some loss after N steps has the clock k if dense ends there after k N steps,
each at its own best learning rate. The lines of ``clocks.jsonl`` add methods, lengths, a size and
an optimiser to the trainings of `benchmarks.plans`, by the same rule: rates a factor of two apart
until the best is no end of the list, and three seeds at the two best rates. They also have, with
the same seeds, what each of nine plans chose for a larger model, at the rate that the plan prints.
What has trained them is in commit 607b16c6.

The losses of the plans (three sizes, seven methods) suggest that a clock hardly depends on the size
of the model, that it is about 1 for 8 and 4 bits and 0.8 for a synchronisation every 8 steps, and
that it falls with length for methods that lose much: rank 4 has 0.82, 0.72 and 0.68 at 300, 600 and
1,200 steps, and in a check with two rates TopK of 10 % had 0.67 and 0.56, and rank 2 0.65 and 0.51,
at 300 and 600. That was found afterwards. Written before any training of this module. Each of these
would refute it, where a clock is the mean over seeds, and lengths are those of 115 k parameters
(halved at 427 k):

- *Size*: for some method and length the clock at 427 k divided by that at 115 k is outside 0.85 to
  1.18, by more than its 95 % interval.
- *Length*: the clock of 4 bits, or of a synchronisation every 8 steps, changes by more than 10 %
  with a doubling of the length; or that of rank 1, rank 2, TopK of 10 % or signs does not fall by
  10 to 30 % with each.
- *Values at 600 steps*: rank 1 outside 0.35 +- 0.1, rank 2 outside 0.51 +- 0.08, TopK of 10 %
  outside 0.56 +- 0.08, every 32 steps outside 0.63 +- 0.08.
- *Optimiser*: with SGD the clock of rank 1, TopK of 10 % or every 8 steps differs from that with
  AdamW by more than 20 %.
- *Held out*: the size 246 k, and its lengths of 450 and 900 steps, are trained last. Each method's
  clock is taken from a line over the logarithm of the length that is fitted to 115 k and 427 k.
  Together with dense's own losses at 246 k it predicts the gaps to dense; their rms error over all
  methods and both lengths is above 0.05 bits per byte.
- *Plans*: at the plan's rate the mean regret of the nine plans is outside 0.08 to 0.25 bits (at the
  best rate that was found it is 0.008 for plans from a smaller model), or always 4 bits every 8
  steps at its own best rate is worse than the plans by more than 0.05 bits.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks import clock_choices, race, race_report
from benchmarks.plans import (
    LOSSES,
    PARAMETERS,
    SCALED,
    SEEDS,
    Losses,
    known,
)
from regimes.base.statistics import t_interval
from regimes.plotting import style
from regimes.plotting.words import add_headline
from regimes.records import write_output

PAGE = Path(__file__).with_name("clocks.md")
OWN = Path(__file__).with_name("clocks.jsonl")
METHODS = (
    *("powersgd:1", "powersgd:2", "powersgd:4", "topk:10", "sign:1"),
    *("quantised-all-reduce:4", "dense/8", "dense/32"),
)
FEW = ("powersgd:1", "topk:10", "dense/8")


def all_losses() -> Losses:
    """Those of the plans, and of this module."""
    return known(LOSSES, OWN)


# -- what the clocks are ----------------------------------------------------------------------

Clock = Sequence[float]  # of each seed; nan where the loss is above all that dense was trained to
LENGTHS = (300, 600, 1200)  # of 115k; those of the other sizes are as long in `SHARE`
SHARE = {**SCALED, "115k, sgd": 1.0, "260k": 0.75}
LABELS = {
    "powersgd:1": "rank 1",
    "powersgd:2": "rank 2",
    "powersgd:4": "rank 4",
    "topk:10": "TopK, 10 %",
    "sign:1": "signs",
    "quantised-all-reduce:8": "8 bits",
    "quantised-all-reduce:4": "4 bits",
    "dense/8": "every 8 steps",
    "dense/32": "every 32 steps",
}


def best_ends(losses: Losses, size: str, method: str, steps: int) -> list[float]:
    """The losses at the best of the rates that have all seeds, in the order of these; else none."""
    by_rate: dict[float, dict[int, float]] = {}
    for (other, p), loss in losses.items():
        if (other, p.method, p.steps) == (size, method, steps):
            by_rate.setdefault(p.rate, {})[p.seed] = loss
    whole = [[ends[s] for s in SEEDS] for ends in by_rate.values() if ends.keys() >= {*SEEDS}]
    return min(whole, key=statistics.fmean, default=[])


@dataclass(frozen=True)
class Dense:
    """What dense training of a size reaches, by its length.

    Attributes:
        steps: the lengths, ascending.
        ends: of each length, the loss of each seed.
    """

    steps: list[int]
    ends: list[list[float]]

    @classmethod
    def of(cls, losses: Losses, size: str) -> Dense:
        trained = sorted({p.steps for (other, p) in losses if (other, p.method) == (size, "dense")})
        found = {n: best_ends(losses, size, "dense", n) for n in trained}
        return cls([n for n in trained if found[n]], [found[n] for n in trained if found[n]])

    def loss(self, seed: int, steps: float) -> float:
        """On lines over the logarithm of the steps; nan below and above the lengths."""
        inside = self.steps[0] <= steps <= self.steps[-1]
        curve = self._curve(seed)
        return float(np.interp(math.log(steps), np.log(self.steps), curve)) if inside else math.nan

    def clock(self, ends: Sequence[float], steps: int) -> Clock:
        """After how many steps dense has each seed's loss, as a share of ``steps``."""
        logs = np.log(self.steps)
        shares = []
        for seed, loss in enumerate(ends):
            curve = self._curve(seed)
            at = float(np.interp(-loss, -curve, logs))
            if (
                loss < curve[-1]
            ):  # better than dense's longest: on its last line, by a tenth at most
                slope = (curve[-2] - curve[-1]) / (logs[-1] - logs[-2])
                at = logs[-1] + (curve[-1] - loss) / slope if slope > 0 else math.inf
            known = loss <= curve[0] and at <= logs[-1] + math.log(1.1)
            shares.append(math.exp(at) / steps if known else math.nan)
        return shares

    def _curve(self, seed: int) -> Any:
        """The losses of a seed; where a longer training ends higher, that of the shorter one."""
        return np.minimum.accumulate([ends[seed] for ends in self.ends])


def all_clocks(losses: Losses) -> dict[tuple[str, str, int], Clock]:
    """By size, method and length of the 115k training that is as long in its size."""
    found = {}
    for size, share in SHARE.items():
        dense = Dense.of(losses, size)
        for method in LABELS:
            for length in LENGTHS:
                if ends := best_ends(losses, size, method, round(share * length)):
                    found[size, method, length] = dense.clock(ends, round(share * length))
    return found


def ratio(a: Clock, b: Clock) -> tuple[float, float, float]:
    """The geometric mean of a / b over seeds, and its 95 % interval."""
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean, low, high = (math.exp(x) for x in t_interval(logs))
    return mean, low, high


@dataclass(frozen=True)
class Gap:
    """Loss minus dense's after as many steps, at a size that no clock was fitted to."""

    method: str
    steps: int
    predicted: float
    measured: float


def held_out_gaps(losses: Losses, size: str = "260k") -> list[Gap]:
    """The gaps that clocks of 115 k and 427 k predict, beside what was trained. A method's clock is
    on a line over the logarithm of the length, by least squares."""
    clocks, dense, gaps = all_clocks(losses), Dense.of(losses, size), []
    for method in METHODS:
        points = [
            (math.log(length), statistics.fmean(clocks[one, method, length]))
            for one in ("115k", "460k")
            for length in LENGTHS
            if (one, method, length) in clocks
        ]
        points = [point for point in points if math.isfinite(point[1])]
        for length in (600, 1200):
            steps = round(SHARE[size] * length)
            ends = best_ends(losses, size, method, steps)
            if len(points) < 3 or not ends:
                continue
            slope, level = np.polyfit([x for x, _ in points], [k for _, k in points], 1)
            clock = min(1.0, float(level + slope * math.log(length)))
            seeds = range(len(SEEDS))
            predicted = [dense.loss(s, clock * steps) - dense.loss(s, steps) for s in seeds]
            measured = [ends[s] - dense.loss(s, steps) for s in seeds]
            gaps.append(Gap(method, steps, statistics.fmean(predicted), statistics.fmean(measured)))
    return gaps


# -- the page ---------------------------------------------------------------------------------


def report(losses: Losses) -> str:
    """The page."""
    clocks = all_clocks(losses)
    return "\n".join(
        [
            "# The clocks of compressed training",
            "",
            "The *clock* of a method says how many steps without compression (*dense*) one of its "
            "steps is worth. A method has the clock k if N of its steps reach the loss that k N "
            "steps of dense reach, each of the two at its own best learning rate. `python -m "
            "benchmarks.clocks report` writes this page; commit 607b16c6 has what trained.",
            "",
            f"The table has the mean of n = {len(SEEDS)} seeds, with its 95 % interval. All models "
            "are language models on one text. The optimiser is AdamW, unless a column names SGD. "
            "The column *steps* holds for 115 k parameters. The model of 427 k was trained for "
            "half as many steps, and the model of 1.64 M for a quarter as many.",
            "",
            "![Clocks of nine methods, and the speeds that they predict](clocks.png)",
            "",
            *table(clocks),
            "",
            '"-" means that the method was not trained. "<" means that no clock is known. The loss '
            "is then above the loss of dense's shortest training, or so far below the loss of its "
            "longest that dense would need more than a tenth more steps.",
            "",
            "## What was predicted",
            "",
            "Each line has a prediction and its outcome. *Size* is refuted if an interval lies "
            "wholly outside 0.85 to 1.18. All others are refuted by their means alone.",
            "",
            *_outcomes(clocks),
            *_held_out(held_out_gaps(losses)),
            "",
            *clock_choices.section(losses, clocks),
            *_race_lines(clocks),
        ]
    )


def table(clocks: Mapping[tuple[str, str, int], Clock]) -> list[str]:
    """Lines of the table of clocks, a row for each method and length."""
    sizes = ("115k", "460k", "1800k", "115k, sgd")
    lines = [
        "| method | steps | " + " | ".join(map(_in_words, sizes)) + " |",
        "|---|---:|" + "---:|" * len(sizes),
    ]
    for method, label in LABELS.items():
        for length in LENGTHS:
            cells = [_cell(clocks.get((size, method, length))) for size in sizes]
            lines.append(f"| {label} | {length} | {' | '.join(cells)} |")
    return lines


def _in_words(size: str) -> str:
    """A size as pages have it: the number of parameters, and SGD where it is the optimiser."""
    size, comma, _ = size.partition(",")
    return PARAMETERS[size] + (", SGD" if comma else "")


def _cell(clock: Clock | None) -> str:
    if clock is None:
        return "-"
    if not all(map(math.isfinite, clock)):
        return "<"
    mean, low, high = t_interval(clock)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _race_lines(clocks: Mapping[tuple[str, str, int], Clock]) -> list[str]:
    """Predicted beside measured speeds; none without clocks."""
    speeds = raced_speeds(clocks)
    if len(speeds) < 2:
        return []
    logs = np.log([[x.predicted, x.measured] for x in speeds]).T
    lines = [
        "## Beside the race",
        "",
        "The table says how many times as fast as DDP an entrant of the [race](race.md) reaches 3 "
        f"bits per byte (n = {len(speeds)}). The prediction is the clock of 115 k parameters after "
        "600 steps, times the measured seconds of a step of DDP, divided by those of the entrant. "
        "The root mean square of the logarithm of predicted / measured is "
        f"{raced_error(speeds):.2f}, and the two logarithms have a correlation of "
        f"{np.corrcoef(logs)[0, 1]:.3f}.",
        "",
        "| model | link, Mbit/s | entrant | predicted | measured |",
        "|---|---:|---|---:|---:|",
    ]
    for x in speeds:
        size = race_report.PARAMETERS[x.grid]
        words = f"| {size} | {x.link} | {x.entrant} |"
        lines.append(f"{words} {x.predicted:.2f} | {x.measured:.2f} |")
    return [*lines, ""]


ENTRANTS = {  # of the race, by method
    "rank 1": "powersgd:1",
    "rank 2": "powersgd:2",
    "rank 4": "powersgd:4",
    "8 bits": "quantised-all-reduce:8",
    "4 bits": "quantised-all-reduce:4",
    "every 8": "dense/8",
    "every 32": "dense/32",
    "4 bits every 8": "quantised-all-reduce:4/8",
}


@dataclass(frozen=True)
class Raced:
    """How many times as fast as DDP an entrant of the race came to 3 bits per byte, and what its
    clock times the seconds of their steps say."""

    grid: str
    link: int
    entrant: str
    predicted: float
    measured: float


def raced_speeds(clocks: Mapping[tuple[str, str, int], Clock], length: int = 600) -> list[Raced]:
    """Of the entrants that have a clock, on all links and models. The clock is taken from the model
    of 115 k parameters, at one length."""
    found = []
    for grid in race.COURSES:
        lines = race.read(grid)
        for link in dict.fromkeys(x["link"] for x in lines if x["stage"] == "race"):
            runs = race_report.grouped(lines, link)
            plain = _means(runs["DDP"])
            for entrant in ENTRANTS.keys() & runs.keys():
                clock = clock_choices.clock_at(clocks, ENTRANTS[entrant], ("115k",), length)
                until, step = _means(runs[entrant])
                if clock is not None and math.isfinite(until) and math.isfinite(plain[0]):
                    predicted = clock[0] * plain[1] / step
                    found.append(Raced(grid, link, entrant, predicted, plain[0] / until))
    return sorted(found, key=lambda x: (x.grid, x.link, x.entrant))


def _means(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds until 3 bits per byte, and of a step."""
    until = [race_report.seconds_until(dict(run), 3.0) for run in runs]
    return statistics.fmean(until), statistics.fmean(
        race_report.step_seconds(dict(x)) for x in runs
    )


def raced_error(speeds: Sequence[Raced]) -> float:
    """The rms of the logarithm of predicted over measured speeds."""
    return math.sqrt(statistics.fmean(math.log(x.predicted / x.measured) ** 2 for x in speeds))


def figure(clocks: Mapping[tuple[str, str, int], Clock], length: int = 600) -> Any:
    """The clock of each method after 600 steps, in four settings; one row a method. Beside it the
    speeds that clocks predict for the race, and the measured ones."""
    settings = {
        "115k": (f"{PARAMETERS['115k']}, AdamW", "o", "0.0"),
        "460k": (_in_words("460k"), "s", "0.45"),
        "1800k": (_in_words("1800k"), "D", "0.7"),
        "115k, sgd": (_in_words("115k, sgd"), "^", "white"),
    }
    fig = style.figure(4.0)
    ax, beside = fig.subplots(1, 2, width_ratios=[1.5, 1])
    for place, (size, (words, marker, face)) in enumerate(settings.items()):
        for row, method in enumerate(reversed(LABELS)):
            clock = clocks.get((size, method, length), ())
            if not clock or not all(map(math.isfinite, clock)):
                continue
            mean, low, high = t_interval(clock)
            at = row + 0.27 - 0.18 * place
            ax.plot([low, high], [at, at], color="0.3", linewidth=0.8, zorder=1)
            look: Any = {"marker": marker, "markerfacecolor": face, "linestyle": "none"}
            ax.plot(mean, at, markeredgecolor="black", markersize=5, **look)
        look = {"marker": marker, "markerfacecolor": face, "linestyle": "none"}
        ax.plot([], [], markeredgecolor="black", markersize=5, label=words, **look)
    ax.axvline(1.0, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
    ax.set_yticks(range(len(LABELS)), [*reversed(LABELS.values())])
    ax.set_xlim(0.0, 1.5)
    ax.set_xlabel("clock: steps without compression that one step is worth")
    ax.legend(loc="lower left", frameon=False)
    speeds = raced_speeds(clocks, length)
    for grid, (words, marker, face) in zip(race.COURSES, settings.values(), strict=False):
        mine = [x for x in speeds if x.grid == grid]
        look = {"marker": marker, "markerfacecolor": face, "linestyle": "none"}
        label = words.partition(",")[0].removesuffix(" parameters")
        x, y = [one.predicted for one in mine], [one.measured for one in mine]
        beside.plot(x, y, markeredgecolor="black", markersize=4.5, label=label, **look)
    ends = [f(v for x in speeds for v in (x.predicted, x.measured)) for f in (min, max)]
    beside.plot(ends, ends, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
    beside.set(xscale="log", yscale="log", ylabel="measured, to 3 bits per byte")
    beside.set_xlabel("times as fast as DDP, predicted")
    for axis in (beside.xaxis, beside.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    beside.legend(loc="upper left", frameon=False)
    add_headline(
        fig,
        "A clock hardly depends on size, much on the optimiser, and says how fast a method trains",
    )
    style.add_caption(
        fig,
        f"After {length} steps (427 k: {length // 2}, 1.64 M: {length // 4}) of GPTs (sizes in "
        "parameters) on one text, each method at its own best learning rate; "
        f"means and 95 % intervals over {len(SEEDS)} seeds. A row without a mark was not trained, "
        "or no training without compression is short enough. Signs are below 0.2. Right: a race on "
        f"links of 20, 100 and 1000 Mbit/s, {len(speeds)} entrants, with clocks of 115 k; "
        f"rms log error {raced_error(speeds):.2f}.",
    )
    return fig


def _outcomes(clocks: Mapping[tuple[str, str, int], Clock]) -> list[str]:
    """What became of the predictions in the module's docstring, one line each."""

    def seen(size: str, method: str, length: int) -> Clock | None:
        clock = clocks.get((size, method, length))
        return clock if clock is not None and all(map(math.isfinite, clock)) else None

    apart, compared = [], 0
    for method, label in LABELS.items():
        for length in LENGTHS:
            small, large = seen("115k", method, length), seen("460k", method, length)
            if small is not None and large is not None:
                mean, low, high = ratio(large, small)
                compared += 1
                if high < 0.85 or low > 1.18:
                    apart.append(f"{label} at {length} steps: {mean:.2f} [{low:.2f}, {high:.2f}]")
    lines = [
        "- *Size*: with 427 k parameters a clock is 0.85 to 1.18 times the clock with 115 k: "
        + (f"refuted by {'; '.join(apart)}" if apart else "holds")
        + f" ({compared} methods and lengths).",
    ]
    for methods, least, most, words in (
        (("quantised-all-reduce:4", "dense/8"), 0.9, 1.1, "changes by at most 10 %"),
        (("powersgd:1", "powersgd:2", "topk:10", "sign:1"), 0.7, 0.9, "falls by 10 to 30 %"),
    ):
        for method in methods:
            steps = [
                (size, length, ratio(two, one)[0])
                for size in ("115k", "460k")
                for length in LENGTHS[:-1]
                if (one := seen(size, method, length)) is not None
                and (two := seen(size, method, 2 * length)) is not None
            ]
            wrong = [f"{x:.2f} ({PARAMETERS[size]}, {n} to {2 * n})" for size, n, x in steps]
            holds = all(least <= x <= most for *_, x in steps)
            verdict = "not known" if not steps else "holds" if holds else "refuted"
            lines.append(
                f"- *Length*: the clock of {LABELS[method]} {words} with a doubling: {verdict}"
                + (f"; the ratios are {', '.join(wrong)}." if steps else ".")
            )
    for method, value, margin in (
        ("powersgd:1", 0.35, 0.1),
        ("powersgd:2", 0.51, 0.08),
        ("topk:10", 0.56, 0.08),
        ("dense/32", 0.63, 0.08),
    ):
        clock = seen("115k", method, 600)
        if clock is not None:
            mean = statistics.fmean(clock)
            verdict = "holds" if abs(mean - value) <= margin else "refuted"
            lines.append(
                f"- *Value*: {LABELS[method]} has {value} +- {margin} at 600 steps: {verdict}, "
                f"{_cell(clock)}."
            )
    for method in FEW:
        for length in LENGTHS:
            adam, sgd = seen("115k", method, length), seen("115k, sgd", method, length)
            if adam is not None and sgd is not None:
                mean, low, high = ratio(sgd, adam)
                verdict = "holds" if 0.8 <= mean <= 1.2 else "refuted"
                lines.append(
                    f"- *Optimiser*: with SGD the clock of {LABELS[method]} at {length} steps "
                    f"differs by at most 20 %: {verdict}, it is {mean:.2f} [{low:.2f}, {high:.2f}] "
                    "times AdamW's."
                )
    return lines


def _held_out(gaps: Sequence[Gap]) -> list[str]:
    known_gaps = [gap for gap in gaps if math.isfinite(gap.predicted)]
    if not known_gaps:
        return ["- *Held out*: 246 k is not trained yet."]
    rms = math.sqrt(statistics.fmean((g.predicted - g.measured) ** 2 for g in known_gaps))
    whole = len(gaps) == 2 * (len(METHODS) - 1)  # signs have no clock, dense has none so short
    verdict = ("refuted" if rms > 0.05 else "holds") if whole else "not all trained yet"
    lines = [
        "- *Held out*: with 246 k parameters the gaps (loss minus dense's loss) are predicted with "
        f"a root mean square error of at most 0.05 bits: {verdict}, it is {rms:.4f} over "
        f"{len(known_gaps)} gaps. Signs have no clock from which to predict.",
        "",
        "| method | steps | predicted gap, bits | measured |",
        "|---|---:|---:|---:|",
    ]
    for gap in gaps:
        predicted = f"{gap.predicted:+.3f}" if math.isfinite(gap.predicted) else "-"
        lines.append(f"| {LABELS[gap.method]} | {gap.steps} | {predicted} | {gap.measured:+.3f} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["report"])
    parser.parse_args()
    losses = all_losses()
    write_output(PAGE, text := report(losses))
    with style.theme():
        content = style.render_figure(figure(all_clocks(losses)), "png")
    write_output(PAGE.with_suffix(".png"), content)
    print(text)
