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
    """The first entrant beside `PEER`, which averages as seldom; a sentence."""
    if first == PEER or PEER not in found:
        return ""
    ratio = times_as_fast(found, first, PEER, target)
    if not ratio:
        reached = sum(np.isfinite(seconds_until(x, target)) for x in found[PEER])
        return f"*{PEER}* reaches this loss with {reached} of {len(found[PEER])} seeds."
    return f"*{first}* is {ratio} times as fast as *{PEER}*."


def against_torch(found: Runs, first: str, target: float) -> str:
    """The first entrant beside the fastest of torch's own, where all seeds of that arrive; a
    sentence."""
    mean = {n: x for n, x in means(found, target).items() if n.startswith(TORCH)}
    peer = min(mean, key=lambda name: mean[name], default="")
    if first.startswith(TORCH):
        return f"*{first}* is one of torch's own methods."
    if not peer or not np.isfinite(mean[peer]):
        return "None of torch's own methods reaches this loss with all seeds."
    ours = " with our first quarter" if peer == POST_LOCAL else ""
    return (
        f"*{first}* is {times_as_fast(found, first, peer, target)} times as fast as *{peer}*{ours},"
        " the fastest of torch's own methods."
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
        parts.append(f"*{name}* ({ends} bits)")
    if not parts:
        return ""
    return f"In the mean of all seeds, the first to reach a loss is {', '.join(parts)}."


def quarter(found: Runs) -> str:
    """What PostLocalSGD's first quarter, a setting of ours, takes; nothing where it is not raced
    whole."""
    runs = found.get(POST_LOCAL, ())
    if not runs:
        return ""
    spent = [sum(x["seconds"][: round(QUARTER * len(x["seconds"]))]) for x in runs]
    until = means({POST_LOCAL: runs}, 3.0)[POST_LOCAL]
    without = (
        f"*{NO_WARM_UP}* is the same entrant without this quarter."
        if NO_WARM_UP in found
        else f"Without this quarter the entrant would do the same as *{PEER}*, which would be a "
        "fairer comparison. We have not raced it so here."
    )
    return (
        f"*{POST_LOCAL}* synchronises in each step of its first quarter. We chose this setting. "
        f"The quarter takes {statistics.fmean(spent):.1f} of the {until:.1f} seconds to 3 bits. "
        f"{without}"
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
    listed = ", ".join(f"*{name}*" for name in others)
    whole_here = f"Only {listed} raced to the end on this link." if others else ""
    return (
        f"{whole_here} Of {'the other' if others else 'all'} entrants we measured the seconds of a "
        f"step here, over {min(steps)} steps of one seed. Their losses are from whole races on "
        "another link, so their intervals have the spread of losses alone."
    ).strip()


def level() -> str:
    """What the losses are worth: Markov models of the same text."""
    counted = markov.known().get(TEXT)
    if counted is None:
        return ""
    two, three = (counted.bits[str(order)] for order in markov.ORDERS)
    return (
        f"Markov models that are counted on the same {counted.train / 1e6:.1f} MB of training text "
        f"reach {two:.2f} bits (order 2) and {three:.2f} bits (order 3) on the same "
        f"{counted.test / 1000:.0f} kB of test text. A loss of 3 bits per byte is worse than both: "
        "the race is about the first steps of a training. Intervals are over seeds, not over texts."
    )


MEANINGS = (  # rows of a table: entrants, and what they do
    ("dense", "Each step exchanges all gradients, without compression."),
    ("half", "Numbers are sent in float16."),
    ("8 bits, 4 bits", "A quantised all-reduce sends 8 or 4 bits for each number."),
    ("rank 1, rank 2, rank 4", "PowerSGD compresses at this rank."),
    ("rate 2-1", "Rank 2 while the learning rate is at least half of its peak, then rank 1."),
    ("accordion", "ACCORDION chooses between rank 4 and rank 1 for each layer."),
    (
        "l-greco",
        "L-GreCo chooses ranks 1 to 4 for the layers: the fewest floats with no more "
        "error than rank 2 has.",
    ),
    ("every 8, every 32", "Workers average their models once in so many steps, uncompressed."),
    ("4 bits every 8", "As *every 8*, with 4 bits for each number."),
    ("post-local 8", "As *dense* in the first quarter, then as *every 8*."),
    (
        "qsr",
        "The number of steps between two averages, at least 4, grows as the learning rate "
        "falls (the quadratic synchronisation rule).",
    ),
    ("diloco 32", "As *every 32*, with an outer optimiser that has momentum."),
    ("DDP", "Torch's DistributedDataParallel, without a hook or with torch's own hook."),
    ("HSDP", "Torch's `fully_shard` over two shards and two replicas."),
)


def entrants() -> list[str]:
    """A table of what the entrants do."""
    return [
        "| entrant | what it does |",
        "|---|---|",
        *(f"| {names} | {meaning} |" for names, meaning in MEANINGS),
    ]


def missing(grid: str) -> str:
    """What the race does not show."""
    cells = get_grid(grid)
    outer = next((cells[name].outer for name in (DILOCO,) if name in cells), None)
    diloco = (
        f" DiLoCo takes {STEPS // 32} outer steps and a last one. Its outer learning rate and "
        f"momentum ({outer.lr:g} and {outer.momentum:g}) are those that its paper uses for much "
        "longer runs. We tuned neither."
        if outer
        else ""
    )
    return (
        "We did not race torch's hierarchical averager (`HierarchicalModelAverager`), Streaming "
        f"DiLoCo, SparseLoCo, or plain accumulation of gradients over {PERIOD} steps.{diloco} All "
        "entrants take equally many steps. On a slow link a user would rather fix the seconds: a "
        "faster method can then take more steps."
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
    heads = "".join(f" {n} Mbit/s: ms / step | by DDP's | then |" for n in links)
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
        f"We raced {len(both)} entrants again, with the code of version 0.4, on another processor, "
        f"which is slower: {later[-1]['processor']} (`benchmarks/race_elsewhere.jsonl`). The table "
        "has the milliseconds of a step. Beside them it has these milliseconds divided by those of "
        "DDP in the same race, and the same quotient in the tables above (*then*). All are means "
        "of up to three seeds.",
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
        f"We raced *{some['entrant']}* on another processor, {some['processor']} "
        "(`benchmarks/race_elsewhere.jsonl`). Its seconds cannot be compared with these tables. "
        f"It does the same as *{PEER}*, with torch's own classes. Its loss at the end is "
        f"{ours:.2f} [{low:.2f}, {high:.2f}], and the loss of *{PEER}* is "
        f"{theirs:.2f} [{least:.2f}, {most:.2f}]. The two are not tested alike. "
        f"We tested *{PEER}* after its last synchronisation, which follows the last step. "
        "We tested torch's method on each process with the weights there, "
        f"{(STEPS - 1) % PERIOD} steps after the last mean."
    )
