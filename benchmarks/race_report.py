"""The page and the figure of `benchmarks.race`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.common import markov
from benchmarks import race_notes
from benchmarks.entrants import DERIVED, NO_WARM_UP
from benchmarks.race_notes import TORCH, seconds_until
from regimes.base.statistics import t_interval
from regimes.plotting import style
from regimes.plotting.looks import Look
from regimes.plotting.words import add_headline, label_ends
from regimes.records import write_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
DELAY = {20: 0.025}  # seconds in each direction, of links in Mbit/s
PARAMETERS = {"race-lm": "115 k", "race-lm-460k": "427 k"}  # of grids
TARGETS = (3.0, 2.8)  # bits per byte
AT = 100  # Mbit/s, of the figure
CLEAR = 0.1  # a difference of steps whose order a prediction should have
SHOWN = (  # there; the table has all
    *("4 bits every 8", "4 bits", "every 8", "rank 4", "accordion"),
    *("DDP", "DDP, fp16 hook", "DDP, PowerSGD hook", "DDP, PostLocalSGD", NO_WARM_UP),
)
NAMES = {  # in the figure
    "4 bits every 8": "4 bits every 8 steps",
    "4 bits": "4 bits, each step",
    "every 8": "average every 8 steps",
    "rank 4": "PowerSGD, rank 4",
    "accordion": "ACCORDION",
}
DASHES = ("-", (0, (6, 1.2)), (0, (2, 1)), (0, (4, 1, 1, 1)))
MARKERS = "osD^vP*Xph<>d8"  # of the entrants, for grey prints; those of torch are hollow
READING = (
    "**How to read the tables.** The loss is in bits per byte, on a text that neither the "
    "training nor the choice of learning rates has seen. Brackets are 95 % t intervals over "
    "seeds. *kB / step* is what the kernel counted on the link in one direction, with headers "
    "and with the messages by which processes agree. *Predicted* has milliseconds and, in "
    "brackets, how far they are from the measured ones."
)
Line = dict[str, Any]


def grouped(lines: Sequence[Line], link: int) -> dict[str, list[Line]]:
    """The races on a link, by entrant, fastest to the first target first. Where some took a few
    steps only, seeds that were not raced have the losses of their whole races on other links."""
    races = [line for line in lines if line["stage"] == "race"]
    whole = max(sum(line["steps"]) for line in races)
    here = [line for line in races if line["link"] == link]
    few = any(sum(line["steps"]) < whole for line in here)
    found: dict[str, list[Line]] = {}
    for name, one in {line["entrant"]: line for line in here}.items():
        full = [x for x in races if x["entrant"] == name and sum(x["steps"]) == whole]
        runs = {x["seed"]: _at_speed(x, one) for x in full} if few else {}
        found[name] = [*(runs | {x["seed"]: x for x in full if x["link"] == link}).values()]

    def key(name: str) -> float:
        return statistics.fmean(seconds_until(x, TARGETS[0]) for x in found[name])

    return {name: found[name] for name in sorted(found, key=key)}


def _at_speed(whole: Line, other: Line) -> Line:
    """A whole race, with the bytes and the prediction of another, and the seconds of its steps:
    those at the same share of the training, because some entrants' steps change on the way."""
    each = [taken / n for taken, n in zip(other["seconds"], other["steps"], strict=True)]
    units = len(whole["steps"])
    seconds = [n * each[i * len(each) // units] for i, n in enumerate(whole["steps"])]
    more = {key: other[key] for key in ("link", "predicted", "crossed", "processor")}
    return {**whole, **more, "seconds": seconds}


def step_seconds(line: Line) -> float:
    return sum(line["seconds"]) / sum(line["steps"])


def _spread(values: Sequence[float], form: str) -> str:
    """Mean and 95 % t interval over seeds; of one seed the value."""
    if not all(np.isfinite(values)):
        reached = sum(np.isfinite(values))
        return f"in {reached} of {len(values)} seeds" if reached else "never"
    mean, low, high = t_interval(values)
    if not np.isfinite(low):  # too few for an interval
        return f"{mean:{form}}"
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def page(models: Mapping[str, Sequence[Line]], system: str) -> str:
    """Markdown: a table per model and link.

    Args:
        models: of each grid, the lines.
    """
    out = [
        "# Seconds until a loss, on a slow link",
        "",
        "This page says how many seconds of training a method takes until it reaches a loss, if "
        "the link between the nodes is slow. `python -m benchmarks.race` measures; its docstring "
        "describes how.",
        "",
        "![Loss against seconds](race.png)",
        "",
        *race_notes.entrants(),
        "",
        race_notes.level(),
        "",
        race_notes.missing(next(iter(models))),
        "",
        *([said, ""] if (said := race_notes.elsewhere(next(iter(models.values())))) else []),
    ]
    out += [READING, ""]
    for grid, lines in models.items():
        for link in dict.fromkeys(x["link"] for x in lines if x["stage"] == "race"):
            out += _table(PARAMETERS[grid], lines, link)
    out += race_notes.again(next(iter(models.values())))
    out += _notes(models, system)
    return "\n".join(out)


def _table(parameters: str, lines: Sequence[Line], link: int) -> list[str]:
    found = grouped(lines, link)
    seeds = max(len(x) for x in found.values())
    machines = sorted({x["processor"] for runs in found.values() for x in runs})
    delay = DELAY.get(link, 0.0)
    delayed = f" with a delay of {1e3 * delay:.0f} ms in each direction" if delay else ""
    says = race_notes.by_loss(found), race_notes.quarter(found)
    says = *says, race_notes.borrowed(found, lines, link)
    heads = "".join(f" seconds to {target:g} |" for target in TARGETS)
    out = [
        f"## {parameters} parameters, {link} Mbit/s{delayed}, {style.seeds_in_words([seeds])}",
        "",
        f"{_verdict(found)} Processor: {', '.join(machines)}.",
        "",
        " ".join(filter(None, says)),
        "",
        f"| entrant | rate |{heads} loss at the end | ms / step | predicted | kB / step |",
        f"|---|---:|{'---:|' * len(TARGETS)}---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        reached = [_spread([seconds_until(x, t) for x in runs], ".1f") for t in TARGETS]
        step = statistics.fmean(map(step_seconds, runs))
        guess = statistics.fmean(x["predicted"] for x in runs)
        crossed = statistics.fmean(x["crossed"] for x in runs) / 1e3
        out.append(
            f"| {name} | {runs[0]['rate']:g} | {' | '.join(reached)} | "
            f"{_spread([x['loss'][-1] for x in runs], '.3f')} | {1e3 * step:.1f} | "
            f"{1e3 * guess:.1f} ({100 * (guess / step - 1):+.0f} %) | {crossed:.0f} |"
        )
    return [*out, ""]


def _verdict(found: Mapping[str, Sequence[Line]]) -> str:
    """Who is first at each target, and how much sooner than what averages as seldom and than the
    best of torch's own methods."""
    parts = []
    for target in TARGETS:
        mean = race_notes.means(found, target)
        first = min(mean, key=lambda name: mean[name])
        if not np.isfinite(mean[first]):
            parts.append(f"No entrant reaches {target:g} bits per byte with all seeds.")
        else:
            peer = race_notes.against_peer(found, first, target)
            torch = race_notes.against_torch(found, first, target)
            beside = (torch, peer) if first.startswith(TORCH) else (peer, torch)
            parts += [f"**{first}** is the first to reach {target:g} bits per byte.", *beside]
    return " ".join(filter(None, parts))


def _notes(models: Mapping[str, Sequence[Line]], system: str) -> list[str]:
    lines = [line for each in models.values() for line in each]
    machines = sorted({line["processor"] for line in lines if line["stage"] == "race"})
    floor = 1e3 * statistics.median(_free(next(iter(models.values())), "DDP"))
    words: list[str] = []
    for machine in machines:
        words += [*_predictions(models, machine), ""]
    return [
        *words,
        "The largest errors have likely causes, which we have not tested. The two means of a step "
        "of *l-greco* differ in size, and the record has only their sum. At 1000 Mbit/s, DDP hides "
        "communication behind the backward pass of the larger model, but both use the same cores.",
        "",
        "Some races replace earlier ones:",
        "",
        "- *every 32*, *8 bits* and *4 bits* on the link with a delay, because the count of their "
        "collectives was wrong;",
        "- all entrants at 100 Mbit/s, and *accordion*, *l-greco* and *rate 2-1* on the link with "
        "a delay: we had predicted them from five units, which do not have the ranks of later "
        "units (errors of +15 % for *accordion* and -11 % for *l-greco*).",
        "",
        "*rank 1*, *accordion* and *l-greco* have other losses at 1000 Mbit/s than on the other "
        "links, likely because PowerSGD's rounding was changed after these races.",
        "",
        f"On unlimited links a step of plain DDP takes {floor:.0f} ms with 115 k parameters. "
        f"Four processes share 2 cores ({', '.join(machines)}; {system}).",
        "",
    ]


def _predictions(models: Mapping[str, Sequence[Line]], machine: str) -> list[str]:
    """How far the predictions of the races on a processor were from what was measured."""
    here = {k: [x for x in lines if x["processor"] == machine] for k, lines in models.items()}
    races = {
        (PARAMETERS[grid], link): [x for x in lines if x["stage"] == "race" and x["link"] == link]
        for grid, lines in here.items()
        for link in dict.fromkeys(x["link"] for x in lines if x["stage"] == "race")
    }
    entrants = {place: _by_entrant(lines) for place, lines in races.items()}
    each = {place: [*map(mean, groups)] for place, groups in entrants.items()}
    places = [
        f"- {parameters} parameters, {link} Mbit/s: {_wrong(pairs)}"
        for (parameters, link), pairs in each.items()
    ]
    right, pairs = (sum(x) for x in zip(*map(ordered, each.values()), strict=True))
    groups = [group for found in entrants.values() for group in found]
    single = [mean([line]) for group in groups for line in group]
    steps = [[*map(step_seconds, group)] for group in groups]
    drift = 100 * max(max(x) / min(x) - 1 for x in steps)
    all_races = [(models[k], x) for k, v in here.items() for x in v if x["stage"] == "race"]
    early = sum(not _before(lines, one) for lines, one in all_races)
    earlier = (
        f" For {early} of {len(all_races)} races we counted the collectives in an earlier way, and "
        "the steps on unlimited links were the first five units of one seed."
        if early
        else ""
    )
    return [
        f"**How the seconds of a step were predicted** (on {machine}). We predicted them before "
        "the race, from steps on unlimited links, and from the seconds that the same collectives "
        f"take alone, on unlimited links and on the link.{earlier} The error of an entrant's mean "
        f"over its seeds is {_wrong([x for y in each.values() for x in y])}:",
        "",
        *places,
        "",
        f"The error of a single race is {_wrong(single)}. Steps of one entrant on one link differ "
        f"by up to {drift:.0f} % between seeds. Of {pairs} pairs of entrants whose steps differ by "
        f"more than {100 * CLEAR:.0f} %, {right} are predicted in the right order.",
    ]


def _before(lines: Sequence[Line], race: Line) -> bool:
    """Were there steps on unlimited links before the races on that link?"""
    names = {race["entrant"], *DERIVED.get(race["entrant"], ())}
    return any(
        x["stage"] == "free" and x["entrant"] in names and x["link"] == race["link"] for x in lines
    )


def mean(races: Sequence[Line]) -> tuple[float, float]:
    """The mean seconds of a step of races: measured, predicted."""
    return (
        statistics.fmean(map(step_seconds, races)),
        statistics.fmean(line["predicted"] for line in races),
    )


def _by_entrant(lines: Sequence[Line]) -> list[list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["entrant"], []).append(line)
    return [*groups.values()]


def ordered(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Of the pairs of entrants on one link with clearly different `mean` steps: how many are
    predicted in the right order, and how many there are."""
    clear = [
        sorted(two)
        for two in itertools.combinations(pairs, 2)
        if max(two)[0] > (1 + CLEAR) * min(two)[0]
    ]
    return sum(faster[1] < slower[1] for faster, slower in clear), len(clear)


def _wrong(pairs: Sequence[tuple[float, float]]) -> str:
    """The errors of predictions; of pairs measured, predicted."""
    wrong = [100 * abs(predicted / measured - 1) for measured, predicted in pairs]
    median, largest = statistics.median(wrong), max(wrong)
    return f"{median:.0f} % in the median, {largest:.0f} % at most (n = {len(wrong)})"


def _free(lines: Sequence[Line], name: str) -> list[float]:
    found = [x for x in lines if x["stage"] == "free" and x["entrant"] == name]
    return [sum(x["seconds"][1:]) / sum(x["steps"][1:]) for x in found] or [float("nan")]


def figure(lines: Sequence[Line], link: int = AT) -> Figure:
    """Loss against seconds, mean over seeds; the entrants' names at the ends of their curves."""
    found = {name: runs for name, runs in grouped(lines, link).items() if name in SHOWN}
    fig = style.figure(4.6)
    ax = fig.subplots()
    ends = []
    for i, (name, runs) in enumerate(found.items()):
        time = np.mean([np.cumsum(run["seconds"]) for run in runs], 0)
        loss = np.mean([run["loss"] for run in runs], 0)
        hollow = name.startswith(TORCH)
        line: Any = {"dash": DASHES[i % 4], "marker": MARKERS[i % len(MARKERS)], "hollow": hollow}
        colour, width = ("#777777", 1.0) if hollow else (f"C{i % 10}", 1.5)
        look = Look(NAMES.get(name, name), colour, width=width, **line)
        ax.plot(time, loss, markevery=(0.02 * (i % 4), 0.09), **look.line)  # of the diagonal
        ends.append((float(time[-1]), float(loss[-1]), look.label, look))
    ax.set(xlabel=f"seconds of training, {link} Mbit/s between the islands", xscale="log")
    ax.set(ylabel="bits per byte of unseen text\nlower is better", ylim=(2.4, 4))
    ax.set_xticks(ticks := [2, 5, 10, 20, 50], [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(1.5, max(end[0] for end in ends) * 1.05)
    label_ends(ax, ends)
    first = next(iter(found))
    torch = next((name for name in found if name.startswith(TORCH)), first)
    mean = race_notes.means(found, TARGETS[0])
    ax.axhline(TARGETS[0], color="#bbbbbb", linewidth=0.8, zorder=0)
    counted = markov.known().get(race_notes.TEXT)
    for order in markov.ORDERS if counted else ():
        value = counted.bits[str(order)]
        ax.axhline(value, color="#777777", linewidth=0.9, linestyle=markov.DASHES[order], zorder=1)
        ax.text(1.55, value + 0.01, f"Markov, order {order}", fontsize=6, color="#555555")
    peer = race_notes.PEER if race_notes.PEER in mean and first != race_notes.PEER else torch
    add_headline(
        fig,
        f"{link} Mbit/s: {NAMES.get(first, first)} reaches {TARGETS[0]:g} bits per byte in "
        f"{mean[first]:.1f} s, {NAMES.get(peer, peer)} in {mean[peer]:.1f} s, torch's fastest in "
        f"{mean[torch]:.1f} s",
    )
    seeds = max(len(x) for x in found.values())
    style.add_caption(
        fig,
        "A GPT of 115 k parameters on source code, 4 processes in two islands of two, 600 steps, "
        f"every method at its own learning rate; mean over {style.seeds_in_words([seeds])}. "
        "Hollow: what torch offers. "
        "Four processes share 2 cores, so compute is slower than on nodes. "
        f"{race_notes.level()}",
    )
    return fig


def write(models: Mapping[str, Sequence[Line]], system: str) -> None:
    """``race.md`` and ``race.png`` beside this file."""
    raced = {k: v for k, v in models.items() if any(x["stage"] == "race" for x in v)}
    if not raced:
        return
    write_output(HERE / "race.md", page(raced, system))
    lines = next(iter(raced.values()))
    links = {line["link"] for line in lines if line["stage"] == "race"}
    with style.theme():
        content = style.render_figure(figure(lines, AT if AT in links else min(links)), "png")
    write_output(HERE / "race.png", content)
