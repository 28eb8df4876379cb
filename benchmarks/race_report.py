"""The page and the figure of `benchmarks.race`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regimes.plotting import style
from regimes.plotting.bandwidth import apart
from regimes.records import write_output
from regimes.statistics import t_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
TARGETS = (3.0, 2.8)  # bits per byte
AT = 100  # Mbit/s, of the figure
SHOWN = (  # there; the table has all
    *("4 bits every 8", "4 bits", "every 8", "rank 4", "accordion", "l-greco", "diloco 32"),
    *("DDP", "DDP, fp16 hook", "DDP, PowerSGD hook", "DDP, PostLocalSGD"),
)
DASHES = ("-", (0, (6, 1.2)), (0, (2, 1)), (0, (4, 1, 1, 1)))
Line = dict[str, Any]


def seconds_until(line: Line, target: float) -> float:
    """Seconds of training until the loss is at most ``target``, between two units by
    interpolation; infinite where it never is."""
    time = np.concatenate([[0.0], np.cumsum(line["seconds"])])
    loss = np.concatenate([[8.0], line["loss"]])  # a byte has 8 bits before training
    below = np.flatnonzero(loss <= target)
    if not below.size:
        return float("inf")
    i = int(below[0])
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i])
    return float(time[i - 1] + share * (time[i] - time[i - 1]))


def grouped(lines: Sequence[Line], link: int) -> dict[str, list[Line]]:
    """The races on a link, by entrant, fastest to the first target first."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line["stage"] == "race" and line["link"] == link:
            found.setdefault(line["entrant"], []).append(line)

    def key(name: str) -> float:
        return statistics.fmean(seconds_until(x, TARGETS[0]) for x in found[name])

    return {name: found[name] for name in sorted(found, key=key)}


def step_seconds(line: Line) -> float:
    return sum(line["seconds"]) / sum(line["steps"])


def _spread(values: Sequence[float], form: str) -> str:
    """Mean and 95 % t interval over seeds; of one seed the value."""
    if not all(np.isfinite(values)):
        reached = sum(np.isfinite(values))
        return f"never ({reached} of {len(values)} seeds)" if len(values) > 1 else "never"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    mean, low, high = statistics.fmean(values), *t_interval(list(values))
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def errors(lines: Sequence[Line]) -> list[float]:
    """Predicted over measured seconds of a step, less 1, of every race."""
    races = [line for line in lines if line["stage"] == "race"]
    return [line["predicted"] / step_seconds(line) - 1 for line in races]


def page(lines: Sequence[Line], system: str) -> str:
    """Markdown: a table per link."""
    floor = statistics.median(_free(lines, "DDP"))
    out = [
        "This page races methods on a slow link: seconds of training until a loss. `python -m "
        "benchmarks.race` measures; its docstring describes the method.",
        "",
        "![Loss against seconds](race.png)",
        "",
    ]
    for link in dict.fromkeys(x["link"] for x in lines if x["stage"] == "race"):
        found = grouped(lines, link)
        seeds = max(len(x) for x in found.values())
        heads = "".join(f" seconds to {target:g} |" for target in TARGETS)
        out += [
            f"## {link} Mbit/s between two islands, {seeds} seed{'s' * (seeds > 1)}",
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
        out.append("")
    wrong = [abs(error) for error in errors(lines)]
    median, largest = 100 * statistics.median(wrong), 100 * max(wrong)
    machines = sorted({line["processor"] for line in lines})
    out += [
        "The loss is in bits per byte, on text that neither training nor the choice of rates has "
        "seen; intervals are 95 % t intervals over seeds. kB / step: what the kernel counted on "
        "the link, in one direction, headers and the processes' agreement included. Predicted: "
        "from three units on unlimited links and the rate of the link; median error "
        f"{median:.0f} %, largest {largest:.0f} % (n = {len(wrong)}). Two inputs were settled "
        "after a first pass at 100 Mbit/s, which is not shown: the nominal rate in place of a "
        "measured goodput, which was too low by up to ten times, and the planned periods of "
        "schedules whose period changes. The floor, plain DDP on "
        f"unlimited links: {1e3 * floor:.0f} ms a step. Four processes share 2 cores "
        f"({', '.join(machines)}; {system}).",
        "",
    ]
    return "\n".join(out)


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
        torch = name.startswith(("DDP", "HSDP"))
        colour = "#777777" if torch else f"C{i % 10}"
        look = {"color": colour, "linestyle": DASHES[i % 4], "linewidth": 1.0 if torch else 1.5}
        ax.plot(time, loss, **look)
        ends.append((float(loss[-1]), float(time[-1]), name, colour))
    ax.set(xlabel=f"seconds of training, {link} Mbit/s between the islands", xscale="log")
    ax.set(ylabel="bits per byte of unseen text (lower is better)", ylim=(2.4, 4))
    ax.set_xticks(ticks := [2, 5, 10, 20, 50], [str(tick) for tick in ticks])
    ax.minorticks_off()
    ends.sort()
    low, high = ax.get_ylim()
    right = max(end[1] for end in ends)
    places = apart(np.array([(end[0] - low) / (high - low) for end in ends]), 0.045)
    for (loss, time, name, colour), at in zip(ends, places, strict=True):
        ax.annotate(
            name,
            xy=(time, loss),
            xytext=(1.03, at),
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "relpos": (0, 0.5)},
        )
    ax.set_xlim(1.5, right * 1.05)
    first = next(iter(found))
    ax.set_title(f"{first} steps reaches {TARGETS[0]:g} bits per byte first")
    seeds = max(len(x) for x in found.values())
    style.caption(
        fig,
        "A GPT of 115 k parameters on source code, 4 processes in two islands of two, 600 steps, "
        f"every method at its own learning rate; {style.seeds_in_words([seeds])}. Grey: "
        "what torch offers. Four processes share 2 cores, so compute is slower than on nodes.",
    )
    return fig


def write(lines: Sequence[Line], system: str) -> None:
    """``race.md`` and ``race.png`` beside this file."""
    if not any(line["stage"] == "race" for line in lines):
        return
    write_output(HERE / "race.md", page(lines, system))
    links = {line["link"] for line in lines if line["stage"] == "race"}
    with style.theme():
        content = style.drawn(figure(lines, AT if AT in links else min(links)), "png")
    write_output(HERE / "race.png", content)
