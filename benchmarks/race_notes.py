"""What the numbers of the race mean, sentence by sentence, from its lines: for `race_report`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common import markov
from benchmarks.entrants import NO_WARM_UP, PERIOD, POST_LOCAL, QUARTER
from regimes.base.statistics import t_interval
from regimes.presets import get_grid

Line = dict[str, Any]
Runs = Mapping[str, Sequence[Line]]  # by entrant
TEXT = "cc5d3e71f30caa855852a0be9e6cf88ebf98ae008d6c680b387d22524834b281"  # digest of the text
PEER = f"every {PERIOD}"  # averages as seldom, without compression
DILOCO, STEPS = "diloco 32", 600
ELSEWHERE = Path(__file__).with_name("race_elsewhere.jsonl")  # races on another processor
TORCH = ("DDP", "HSDP")  # with which the names of torch's own methods begin
LOSSES = np.round(np.arange(4.5, 2.45, -0.05), 2)  # at which it is said who is first


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


def means(found: Runs, target: float) -> dict[str, float]:
    """Seconds until a loss by entrant, mean over seeds."""
    return {
        n: statistics.fmean(seconds_until(x, target) for x in runs) for n, runs in found.items()
    }


def times_as_fast(found: Runs, name: str, peer: str, target: float) -> str:
    """How many times as fast an entrant is as another, by seed: geometric mean and interval."""
    own, others = ({x["seed"]: seconds_until(x, target) for x in found[n]} for n in (name, peer))
    ratios = [np.log(others[seed] / own[seed]) for seed in own if seed in others]
    if not ratios or not np.isfinite(ratios).all():
        return ""
    mean, low, high = np.exp(t_interval(ratios))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]" if np.isfinite(low) else f"{mean:.2f}"


def against_peer(found: Runs, first: str, target: float) -> str:
    """The first entrant beside `PEER`, which averages as seldom; a part of a sentence."""
    if first == PEER or PEER not in found:
        return ""
    ratio = times_as_fast(found, first, PEER, target)
    if not ratio:
        reached = sum(np.isfinite(seconds_until(x, target)) for x in found[PEER])
        return f" ({PEER} arrives with {reached} of {len(found[PEER])} seeds)"
    return f", {ratio} times as fast as {PEER}"


def against_torch(found: Runs, first: str, target: float) -> str:
    """The first entrant beside the fastest of torch's own, where all seeds of that arrive."""
    mean = {n: x for n, x in means(found, target).items() if n.startswith(TORCH)}
    peer = min(mean, key=lambda name: mean[name], default="")
    if first.startswith(TORCH):
        return ", which is torch's own"
    if not peer or not np.isfinite(mean[peer]):
        return "; none of torch's arrives with all seeds"
    ours = " with our first quarter" if peer == POST_LOCAL else ""
    return (
        f", {times_as_fast(found, first, peer, target)} times as fast as {peer}{ours}, the fastest "
        "of torch's"
    )


def by_loss(found: Runs) -> str:
    """Which entrant is first down to which loss."""
    firsts = []
    for target in LOSSES:
        mean = means(found, float(target))
        if np.isfinite(least := min(mean.values())):
            firsts.append((float(target), next(n for n, x in mean.items() if x == least)))
    parts = []
    for name, group in groupby(firsts, key=lambda one: one[1]):
        each = [target for target, _ in group]
        ends = f"{each[0]:.2f} to {each[-1]:.2f}" if len(each) > 1 else f"{each[0]:.2f}"
        parts.append(f"{name} from {ends}" if len(each) > 1 else f"{name} at {ends}")
    return f"First by loss, in the mean of all seeds: {', '.join(parts)} bits." if parts else ""


def quarter(found: Runs) -> str:
    """What PostLocalSGD's first quarter, a setting of ours, takes; nothing where it is not raced
    whole."""
    runs = found.get(POST_LOCAL, ())
    if not runs:
        return ""
    spent = [sum(x["seconds"][: round(QUARTER * len(x["seconds"]))]) for x in runs]
    until = means({POST_LOCAL: runs}, 3.0)[POST_LOCAL]
    without = (
        f"{NO_WARM_UP} is the same without it"
        if NO_WARM_UP in found
        else f"without it, it is {PEER}, the fair peer, and has not been raced here"
    )
    return (
        f"{POST_LOCAL} synchronises each step in its first quarter, a setting of ours: that is "
        f"{statistics.fmean(spent):.1f} of its {until:.1f} seconds to 3 bits; {without}."
    )


def borrowed(found: Runs, lines: Sequence[Line], link: int) -> str:
    """Which entrants of a link have the losses of races on other links, and no race to the end of
    their own."""
    here = [x for x in lines if x["stage"] == "race" and x["link"] == link]
    whole = max(sum(x["steps"]) for x in lines if x["stage"] == "race")
    short = {x["entrant"] for x in here if sum(x["steps"]) < whole}
    if not short:
        return ""
    steps = {sum(x["steps"]) for x in here if x["entrant"] in short}
    others = [name for name in found if name not in short]
    whole_here = f" but {', '.join(others)}" if others else ""
    return (
        f"On this link no entrant{whole_here} was trained to a loss: {min(steps)} steps of one "
        "seed gave the seconds of a step, and the losses are those of whole races on another link, "
        "so that the intervals hold the spread of losses alone."
    )


def level() -> str:
    """What the losses are worth: Markov models of the same text."""
    counted = markov.known().get(TEXT)
    if counted is None:
        return ""
    two, three = (counted.bits[str(order)] for order in markov.ORDERS)
    return (
        f"Markov models counted on the same {counted.train / 1e6:.1f} MB of training text reach "
        f"{two:.2f} bits (order 2) and {three:.2f} bits (order 3) on the same "
        f"{counted.test / 1000:.0f} kB of test text: 3 bits per byte is more than counting triples "
        "of bytes gives, so the race is about the first steps of a training. Intervals hold seeds, "
        "not other texts."
    )


def missing(grid: str) -> str:
    """What the race does not show."""
    cells = get_grid(grid)
    outer = next((cells[name].outer for name in (DILOCO,) if name in cells), None)
    diloco = (
        f" DiLoCo takes {STEPS // 32} outer steps and a last one, at the outer rate and momentum "
        f"that its paper has for much longer runs ({outer.lr:g} and {outer.momentum:g}); neither "
        "was tuned here."
        if outer
        else ""
    )
    return (
        "Not raced: torch's hierarchical averager (`HierarchicalModelAverager`), Streaming DiLoCo, "
        f"SparseLoCo, and plain accumulation of gradients over {PERIOD} steps.{diloco} All methods "
        "take as many steps; with a slow link a user fixes the seconds, and would take more steps "
        "with a method that is faster."
    )


def raced_elsewhere() -> list[Line]:
    """The races on another processor."""
    known = [json.loads(line) for line in ELSEWHERE.read_text().splitlines()]
    return [line for line in known if line["stage"] == "race"]


def again(lines: Sequence[Line]) -> list[str]:
    """A section on the entrants of these lines that were raced once more, with later code and on
    another processor: seconds beside DDP's of the same race, then and again."""
    later = raced_elsewhere()
    links = [link for link in (1000, 100) if any(x["link"] == link for x in later)]
    races = {"then": [x for x in lines if x["stage"] == "race"], "again": later}
    steps: dict[tuple[str, str, int], float] = {}
    for when, group in races.items():
        for name, link in {(x["entrant"], x["link"]) for x in group}:
            here = [x for x in group if (x["entrant"], x["link"]) == (name, link)]
            each = [sum(x["seconds"]) / sum(x["steps"]) for x in here]
            steps[when, name, link] = 1e3 * statistics.fmean(each)
    both = [
        name
        for name in dict.fromkeys(x["entrant"] for x in later)
        if all((when, name, link) in steps for when in races for link in links)
    ]
    if "DDP" not in both or len(both) == 1:
        return []
    heads = "".join(f" {n} Mbit/s: ms / step | of DDP's | then |" for n in links)
    rows = []
    for name in both:
        cells = []
        for link in links:
            now, was = (
                steps[when, name, link] / steps[when, "DDP", link] for when in ("again", "then")
            )
            cells.append(f" {steps['again', name, link]:.1f} | {now:.2f} | {was:.2f} |")
        rows.append(f"| {name} |{''.join(cells)}")
    return [
        "## Raced again with later code",
        "",
        f"{len(both)} entrants with the code of version 0.4 on another processor, "
        f"{later[-1]['processor']}, which is slower (`benchmarks/race_elsewhere.jsonl`): "
        "milliseconds of a step, beside those of DDP in the same race, and what that share was in "
        "the tables above. Means of up to three seeds; the losses are those of above.",
        "",
        f"| entrant |{heads}",
        f"|---|{'---:|---:|---:|' * len(links)}",
        *rows,
        "",
    ]


def elsewhere(lines: Sequence[Line]) -> str:
    """What was raced on another processor: its seconds cannot stand in these tables, beside its
    peer's loss here; nothing where the peer was not raced."""
    known = [line for line in raced_elsewhere() if line["entrant"] == NO_WARM_UP]
    whole = {x["seed"]: x for x in known if len(x["loss"]) * 25 == STEPS}
    peers = {
        x["seed"]: x
        for x in lines
        if x["stage"] == "race" and x["entrant"] == PEER and len(x["loss"]) * 25 == STEPS
    }
    if not peers:
        return ""
    ends = [t_interval([line["loss"][-1] for line in group.values()]) for group in (whole, peers)]
    (ours, low, high), (theirs, least, most) = ends
    some = next(iter(whole.values()))
    return (
        f"{some['entrant']} was raced on another processor, {some['processor']} "
        "(`benchmarks/race_elsewhere.jsonl`), whose seconds do not compare with these tables. It "
        f"is {PEER} by torch's means: its loss at the end is {ours:.2f} [{low:.2f}, {high:.2f}], "
        f"that of {PEER} {theirs:.2f} [{least:.2f}, {most:.2f}]. They are not tested alike: {PEER} "
        "as it was last synchronised, which is after the last step; torch's on each process as it "
        f"is there, {(STEPS - 1) % PERIOD} steps after the last mean."
    )
