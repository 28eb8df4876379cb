"""The page of methods that trained for the same seconds on a slow link.

    regimes pack runs/equal-seconds-30 data/reference/equal-seconds-30.tar.xz
    cp runs/tune/equal-seconds-30/tune.json data/reference/equal-seconds-30-tune.json
    python -m benchmarks.race --grid equal-seconds-30 --minutes 20   # Linux, root; can be continued
    python -m benchmarks.equal_seconds                               # of what is there

The grids ``equal-seconds-T`` (`analysis/grids/equal-seconds-60.toml` has their question, their
commands and what was predicted before they ran) stretch each method's schedule to the steps that
it takes in T seconds at 100 Mbit/s. Losses come from the archives ``equal-seconds-T.tar.xz`` in
``data/reference``, rates from ``equal-seconds-T-tune.json`` beside them, and the seconds that one
seed took on real processes from `benchmarks.race`. What is missing stands as "not run".

Leaves ``equal_seconds.md``, and ``equal_seconds.png`` if anything was trained.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import race
from benchmarks.race import COURSES, Line
from regimes.plotting import style
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import styles_of
from regimes.plotting.said import Estimate
from regimes.plotting.schedules import LAST
from regimes.plotting.words import add_headline, label_ends
from regimes.presets import get_grid
from regimes.records import Record, load_all, summary, write_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
NAME = "equal_seconds"
SECONDS = {grid: course.seconds for grid, course in COURSES.items() if course.seconds}
NEAR = 0.1  # of the meant seconds: as far as the measured ones may be from them
NOT_RUN, HOLDS, REFUTED, SIGN, FEW = "not run", "holds", "refuted", "in sign only", "too few seeds"
LOCAL, ROUNDED = "every 8", "4 bits every 8"
EACH_STEP = ("DDP", "fp16", "4 bits", "rank 4", "accumulation 4")  # that synchronise in each
SHORT, LONG = "equal-seconds-30", "equal-seconds-120"
LEAD, COST = 0.05, 0.03  # bits, of the first and the second prediction


@dataclass(frozen=True)
class Ended:
    """The runs of one method in one grid.

    Attributes:
        loss: of the last `LAST` units, mean, by seed, in bits per byte.
        rate: the learning rate.
        megabytes: that a worker sent, mean over seeds.
    """

    loss: Mapping[int, float]
    rate: float
    megabytes: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.loss.values())


Runs = Mapping[str, Ended]  # by method
Found = Mapping[str, Runs]  # by grid, without those that were not run
Said = tuple[str, str]  # a verdict, and the numbers behind it


def by_method(records: Iterable[Record]) -> dict[str, Ended]:
    """The finished runs of a grid."""
    finished = [record for record in records if record.finished]
    if not finished:
        return {}
    factor = tested_by(finished[0]).factor
    table, rates = summary(finished, LAST), {run.name: run.rate for run in finished}
    return {
        str(name): Ended(
            {
                int(seed): factor * loss
                for seed, loss in zip(runs["seed"], runs["metric"], strict=True)
            },
            rates[str(name)],
            float(runs["bytes"].mean()) / 1e6,
        )
        for name, runs in table.groupby("name")
    }


def difference(runs: Runs, one: str, other: str) -> Estimate:
    """The loss of one method minus that of another, paired over seeds."""
    a, b = runs[one].loss, runs[other].loss
    return Estimate.of([a[seed] - b[seed] for seed in a if seed in b])


# -- what was predicted ------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A sentence that was written before the runs.

    Attributes:
        grids, methods: that must have been run.
        tell: its verdict and numbers.
    """

    text: str
    grids: tuple[str, ...]
    methods: tuple[str, ...]
    tell: Callable[[Found], Said]

    def verdict(self, found: Found) -> Said:
        """`NOT_RUN` where a run is missing."""
        for grid in self.grids:
            if any(method not in found.get(grid, {}) for method in self.methods):
                return NOT_RUN, ""
        return self.tell(found)


def _rounded_leads(found: Found) -> Said:
    """Refuted by an interval that reaches 0; else it holds if each mean is large enough."""
    gaps = {other: difference(found[LONG], ROUNDED, other) for other in EACH_STEP}
    text = ", ".join(f"{gap.text('+.3f')} to {other}" for other, gap in gaps.items())
    verdicts = {gap.verdict() for gap in gaps.values()}
    if verdicts != {"below"}:
        return FEW if "open" in verdicts else REFUTED, text
    return HOLDS if all(gap.value <= -LEAD for gap in gaps.values()) else SIGN, text


def _judge(right: bool, gaps: Iterable[Estimate]) -> str:
    """Of a prediction about means: one that is right holds if no interval reaches 0."""
    verdicts = {gap.verdict() for gap in gaps}
    if "open" in verdicts:
        return FEW
    if not right:
        return REFUTED
    return SIGN if "not shown" in verdicts else HOLDS


def _rounding_costs(found: Found) -> Said:
    short, long = (difference(found[grid], LOCAL, ROUNDED) for grid in (SHORT, LONG))
    right = 0 < long.value < COST and short.value > long.value
    text = f"{LOCAL} minus it: {short.text('+.3f')} at 30 s, {long.text('+.3f')} at 120 s"
    return _judge(right, (short, long)), text


def _outer_momentum(found: Found) -> Said:
    gaps = [difference(found[SHORT], name, "every 32") for name in _DILOCO]
    right = 0 < gaps[1].value < gaps[0].value
    text = ", ".join(f"{gap.text('+.3f')} with {n}" for n, gap in zip(_DILOCO, gaps, strict=True))
    return _judge(right, gaps), text


def _accumulation(found: Found) -> Said:
    short, long = (difference(found[grid], "accumulation 4", "DDP") for grid in (SHORT, LONG))
    right = short.value > 0 > long.value
    text = f"{short.text('+.3f')} at 30 s, {long.text('+.3f')} at 120 s"
    return _judge(right, (short, long)), text


def _order(found: Found) -> Said:
    orders = [sorted(found[grid], key=lambda m: found[grid][m].mean) for grid in (SHORT, LONG)]
    gain = {m: runs.mean - found[LONG][m].mean for m, runs in found[SHORT].items()}
    most = max(gain, key=lambda method: gain[method])
    first = " and ".join(dict.fromkeys(order[0] for order in orders))
    text = f"lowest: {first}; {most} gains most, {gain[most]:.3f}, DDP {gain['DDP']:.3f}"
    return HOLDS if orders[0] != orders[1] and most == "DDP" else REFUTED, text


_DILOCO = ("DiLoCo 0.7 0.9", "DiLoCo 1 0.5")
_ALL = tuple(get_grid(SHORT))
PREDICTIONS = (
    Prediction(
        f"At 120 s {ROUNDED} is {LEAD} below each method that synchronises in each step; an "
        "interval that reaches 0 refutes it.",
        (LONG,),
        (ROUNDED, *EACH_STEP),
        _rounded_leads,
    ),
    Prediction(
        f"{ROUNDED} is below {LOCAL} by less than {COST} at 120 s, and by more at 30 s than at "
        "120 s.",
        (SHORT, LONG),
        (LOCAL, ROUNDED),
        _rounding_costs,
    ),
    Prediction(
        "Both DiLoCo are above every 32 at 30 s; with momentum 0.5 less than with 0.9.",
        (SHORT,),
        ("every 32", *_DILOCO),
        _outer_momentum,
    ),
    Prediction(
        "Accumulation is above DDP at 30 s, and below it at 120 s.",
        (SHORT, LONG),
        ("accumulation 4", "DDP"),
        _accumulation,
    ),
    Prediction(
        "The order of the methods at 30 s is not that at 120 s: DDP gains more than any other.",
        (SHORT, LONG),
        _ALL,
        _order,
    ),
)


# -- the page ----------------------------------------------------------------------------------


def page(found: Found, rates: Mapping[str, Mapping[str, float]], raced: Sequence[Line]) -> str:
    """Markdown: a table per grid, and the verdicts.

    Args:
        rates: chosen, by grid and method.
        raced: the lines of `benchmarks.race`.
    """
    out = [
        "# The loss after the same seconds on a slow link",
        "",
        "With a slow link a user fixes the seconds, and a faster method takes more steps. This "
        "page compares twelve methods of training a text model with 460 k parameters after T "
        "seconds at 100 Mbit/s, each with the steps that it takes in them, a schedule stretched "
        "to them and a learning rate of its own. `python -m benchmarks.equal_seconds` writes it; "
        "[the grids](../analysis/grids/equal-seconds-60.toml) have the commands.",
        "",
        *([f"![Loss against seconds of each method]({NAME}.png)", ""] if found else []),
    ]
    for grid, seconds in SECONDS.items():
        lines = {line["entrant"]: line for line in raced if line["grid"] == grid}
        out += _table(grid, seconds, found.get(grid, {}), rates.get(grid, {}), lines)
    out += [
        "## What was predicted",
        "",
        "| before the runs | verdict | differences in bits per byte |",
    ]
    out += ["|---|---|---|"]
    for each in PREDICTIONS:
        out.append(f"| {each.text} | {' | '.join(each.verdict(found))} |")
    excluded = (
        "Accumulation that overtakes DDP gains more than it: the last two exclude each other."
    )
    return "\n".join([*out, "", excluded, "", *_notes(raced)])


def _table(
    grid: str,
    seconds: float,
    runs: Runs,
    rates: Mapping[str, float],
    raced: Mapping[str, Line],
) -> list[str]:
    """The lowest loss first; methods that were not run in the order of the grid, below."""
    planned = get_grid(grid)
    counts = sorted({len(runs[name].loss) for name in runs})
    seeds = style.seeds_in_words(counts) if runs else NOT_RUN
    out = [
        f"## T = {seconds:g} s, {seeds}",
        "",
        "| method | steps | rate | bits per byte | MB | measured seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in sorted(planned, key=lambda n: runs[n].mean if n in runs else float("inf")):
        rate = f"{rates[name]:g}" if name in rates else "not tuned"
        loss, sent = NOT_RUN, ""
        if name in runs:
            rate = f"{runs[name].rate:g}"
            loss = Estimate.of([*runs[name].loss.values()]).text(".3f")
            sent = f"{runs[name].megabytes:.0f}"
        took = _took(raced[name], seconds) if name in raced else NOT_RUN
        out.append(f"| {name} | {planned[name].steps} | {rate} | {loss} | {sent} | {took} |")
    return [*out, "", *_held(raced, runs, seconds)]


def _took(line: Line, seconds: float) -> str:
    taken = sum(line["seconds"])
    return f"{taken:.1f} ({100 * (taken / seconds - 1):+.0f} %)"


def _held(raced: Mapping[str, Line], runs: Runs, seconds: float) -> list[str]:
    """Whether the measured seconds are those that the schedules were stretched to, and the losses
    those of the simulation."""
    if not raced:
        return []
    far = [n for n, x in raced.items() if abs(sum(x["seconds"]) / seconds - 1) > NEAR]
    near = f"{len(raced) - len(far)} of {len(raced)} methods"
    beyond = f"; not {', '.join(far)}" if far else ""
    pairs = {
        n: (statistics.fmean(x["loss"][-LAST:]), runs[n].loss.get(x["seed"]))
        for n, x in raced.items()
        if n in runs
    }
    apart = {n: abs(one - other) for n, (one, other) in pairs.items() if other is not None}
    most = max(apart, key=lambda name: apart[name], default="")
    losses = (
        f" Losses: at most {apart[most]:.3f} bits from simulated ones ({most})." if most else ""
    )
    return [f"Raced, within {NEAR:.0%} of T: {near}{beyond}.{losses}", ""]


def _notes(raced: Sequence[Line]) -> list[str]:
    machines = ", ".join(sorted({line["processor"] for line in raced})) or NOT_RUN
    return [
        "Bits per byte: on text that neither training nor the choice of rates has seen, mean of "
        f"the last {LAST} units, with the 95 % t interval over seeds; differences are paired. "
        "Losses are simulated, since they do not depend on the link. MB: what one worker sends. "
        "Measured seconds: of training, without evaluation, of the first seed on four real "
        "processes at 100 Mbit/s; DDP and fp16 are torch's own. Four batches are accumulated as "
        "one four times as large. Processor: "
        f"{machines}.",
        "",
    ]


def figure(found: Found) -> Figure:
    """The loss of each method against the seconds, mean and 95 % interval over seeds."""
    grids = [grid for grid in SECONDS if grid in found]
    if len(grids) == 1:
        return _figure_of_one(found[grids[0]], SECONDS[grids[0]])
    fig = style.figure(4.6)
    ax = fig.subplots()
    ends = []
    for name, look in styles_of({name for grid in grids for name in found[grid]}).items():
        mine = [grid for grid in grids if name in found[grid]]
        at = [SECONDS[grid] for grid in mine]
        loss = [Estimate.of([*found[grid][name].loss.values()]) for grid in mine]
        ax.plot(at, [x.value for x in loss], **look.line)
        ax.vlines(at, [x.low for x in loss], [x.high for x in loss], look.colour, linewidth=0.8)
        ends.append((at[-1], loss[-1].value, name, look))
    ax.set(xscale="log", xlabel="seconds of training, 100 Mbit/s between the islands")
    ax.set_ylabel("bits per byte of unseen text\nlower is better")
    ax.set_xticks([SECONDS[grid] for grid in grids], [f"{SECONDS[grid]:g}" for grid in grids])
    ax.minorticks_off()
    label_ends(ax, ends)
    lowest = [min(found[grid], key=lambda name: found[grid][name].mean) for grid in grids]
    each = (f"{n} after {SECONDS[grid]:g} s" for n, grid in zip(lowest, grids, strict=True))
    add_headline(fig, f"Lowest in the mean over seeds: {', '.join(each)}")
    _add_caption(fig, [len(runs.loss) for grid in grids for runs in found[grid].values()])
    return fig


def _figure_of_one(runs: Runs, seconds: float) -> Figure:
    """Of a single time a line a method says nothing: one row each, the lowest at the top."""
    fig = style.figure(4.2)
    ax = fig.subplots()
    names = sorted(runs, key=lambda name: runs[name].mean, reverse=True)
    for row, name in enumerate(names):
        loss = Estimate.of([*runs[name].loss.values()])
        ax.plot([loss.low, loss.high], [row, row], "-", color="0.6", linewidth=1.6)
        ax.plot(loss.value, row, "o", color="black", markersize=4)
        ax.annotate(
            f"{loss.value:.2f}", (loss.value, row), (0, 4), textcoords="offset points", ha="center"
        )
    ax.set_yticks(range(len(names)), names)
    ax.set_xlabel(
        f"bits per byte of unseen text after {seconds:g} s at 100 Mbit/s, lower is better"
    )
    add_headline(fig, f"Lowest in the mean over seeds: {names[-1]} after {seconds:g} s")
    _add_caption(fig, [len(each.loss) for each in runs.values()])
    return fig


def _add_caption(fig: Figure, counts: Sequence[int]) -> None:
    style.add_caption(
        fig,
        "A GPT of 460 k parameters on source code, 4 workers in two islands of two, each method "
        "with the steps that it takes in these seconds and at its own learning rate; "
        f"{style.seeds_in_words(counts)}, 95 % intervals. Losses are simulated.",
    )


def write(found: Found, rates: Mapping[str, Mapping[str, float]], raced: Sequence[Line]) -> None:
    """The page and the figure, beside this file."""
    write_output(HERE / f"{NAME}.md", page(found, rates, raced))
    if found:
        with style.theme():
            write_output(HERE / f"{NAME}.png", style.render_figure(figure(found), "png"))


def main() -> None:
    archives = {grid: race.TUNED / f"{grid}.tar.xz" for grid in SECONDS}
    found = {grid: by_method(load_all(path)) for grid, path in archives.items() if path.exists()}
    tuned = [grid for grid in SECONDS if (race.TUNED / f"{grid}-tune.json").exists()]
    raced = [line for grid in SECONDS for line in race.read(grid)]
    write(found, {grid: race.rates([], grid) for grid in tuned}, raced)


if __name__ == "__main__":
    main()
