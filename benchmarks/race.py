"""Seconds until a loss, on a slow link: schedules of Regimes and what torch offers itself.

    python -m benchmarks.race --minutes 60   # Linux, root, iproute2; hours; can be continued
    python -m benchmarks.race --report       # the page and the figure of what is there
    python -m benchmarks.race --again --only "4 bits" "8 bits" "4 bits every 8"   # these anew

Four processes on four nodes (`benchmarks.nodes`), two islands of two with one limited link between
them, train `lm-small` for 600 steps by each entrant (`analysis/grids/race-lm.toml`,
`benchmarks.entrants`) at the learning rate that other text has chosen for it, or with ``--grid
race-lm-460k`` a model four times as large, by some of them. What counts is the loss on a third
text, and the seconds of training until it is reached, without evaluation. All four share the cores
of one machine, so compute and compression take longer than on nodes of their own.

Before a link's first race each kind of collective is timed alone at some sizes, on unlimited links
and on the link. Before each race an entrant takes five units on unlimited links, or the whole
training if its ranks change. The predicted seconds of a step are those on unlimited links, and for
each collective of the step what it takes longer on the link at its size, less what
DistributedDataParallel hides behind the backward pass, and less what nodes that share cores gain on
the link: they leave a collective one after the other, and so share the cores with fewer. The kernel
counts what crosses the link. The link of 20 Mbit/s has a delay of 25 ms in each direction; there,
and with the larger model at 100 Mbit/s, entrants with constant period and ranks take four units,
since their losses do not depend on the link.

With ``--again`` what is asked for is raced anew, after a change of the code: its lines are taken
out first, and the collectives alone are timed again if they were on another processor. What was
raced on another processor has other seconds; the page names all, and ``--again`` alone repeats the
race. Broken off, it goes on without ``--again``.

Leaves ``benchmarks/race.jsonl``, one line per training and per table of collectives alone ("earlier
probe": of races predicted by an earlier count); ``race.md`` and ``race.png``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression
from torch import nn

from benchmarks.entrants import (
    BEFORE,
    CHANGING,
    DERIVED,
    NO_WARM_UP,
    PEERS,
    PERIOD,
    PLANNED,
    POST_LOCAL,
    QUARTER,
    TORCH_RANK,
)
from benchmarks.nodes import Nodes, crossed, islands, limit_trunk
from benchmarks.race_report import DELAY, write
from regimes.base.config import RunConfig, override, to_dict
from regimes.cost import cases
from regimes.cost.models import from_module
from regimes.data import load_task
from regimes.presets import get_grid
from regimes.records import provenance, write_output

HERE = Path(__file__).parent
LINES = HERE / "race.jsonl"
TUNED = HERE.parent / "data/reference"  # GRID-tune.json
LINKS = (100, 20, 1000)  # Mbit/s
SEEDS = (16000, 16001, 16002)
GRID = "race-lm"


@dataclass(frozen=True)
class Course:
    """Of torch's PowerSGD, which no schedule of a grid stands for: the rates that are tried, and
    the seeds."""

    rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]


COURSES = {
    GRID: Course(rates=(0.0015, 0.003, 0.006, 0.012), tuning_seeds=(1000, 1001)),
    "race-lm-460k": Course(rates=(0.0015, 0.003, 0.006), tuning_seeds=(1000,)),
}
HELD_OUT = 16385
RATE_OF = {  # torch's methods, and the schedule with the same numbers, whose rate they have
    "DDP": "dense",
    "DDP, fp16 hook": "half",
    POST_LOCAL: "post-local 8",
    NO_WARM_UP: "every 8",
    "HSDP": "dense",
}
POWER = "DDP, PowerSGD hook"
FREE_UNITS, SHORT_UNITS, DEADLINE = 5, 4, 1800.0
# of an answer, kept of steps on unlimited links only, for predictions
FREE = ("calls", "bytes", "buckets", "overlap")
# of the collectives that are timed alone: bytes, and how often
SIZES = (256, *(2**i for i in range(12, 18)), *(n << 16 for n in (3, 4, 6, 8, 16, 32)))
TIMES, DELAYED_TIMES = 41, 5
SELDOM = 0.1  # collectives a step
Line = dict[str, Any]


# -- what is trained -------------------------------------------------------------------------


def entrants(grid: str = GRID) -> dict[str, RunConfig]:
    """The schedules of the grid, and torch's methods with the configuration of `dense`."""
    schedules = get_grid(grid)
    return {**schedules, **dict.fromkeys(PEERS, schedules["dense"])}


def rates(lines: Sequence[Line], grid: str = GRID) -> dict[str, float]:
    """The chosen rate of each entrant with a complete choice."""
    chosen = {k: float(v.partition("=")[2]) for k, v in _chosen(grid).items()}
    course = COURSES[grid]
    chosen |= {name: chosen[other] for name, other in RATE_OF.items() if other in chosen}
    trials = [line for line in lines if line["stage"] == "tune"]
    if len(trials) == len(course.rates) * len(course.tuning_seeds):
        held = {
            rate: statistics.fmean(x["validation"][-1] for x in trials if x["rate"] == rate)
            for rate in course.rates
        }
        chosen[POWER] = min(held, key=lambda rate: held[rate])
    return chosen


@functools.cache
def _chosen(grid: str) -> dict[str, str]:
    path = TUNED / f"{grid}-tune.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: `regimes tune {grid}` chooses the learning rates")
    return dict(json.loads(path.read_text())["chosen"])


def configured(name: str, rate: float, seed: int, *settings: str, grid: str = GRID) -> RunConfig:
    return override(entrants(grid)[name], [f"optimizer.lr={rate}", f"seed={seed}", *settings])


def units_taken(stage: str, name: str, grid: str, link: int | None) -> int | None:
    """How many units of its training an entrant takes; None: the whole."""
    if stage == "free":
        return None if name in CHANGING else FREE_UNITS
    steady = name not in (*PLANNED, *CHANGING)
    slow = link in DELAY or (grid != GRID and link != max(LINKS))
    return SHORT_UNITS if stage == "race" and steady and slow else None


def shortened(config: RunConfig, units: int) -> RunConfig:
    """A training of a few units, with the schedule of the whole."""
    steps = units * int(config.unit_steps or 1)
    workers = config.workers * int(config.batch_size) * int(config.data.sequence)
    return override(config, [f"data.train_size={steps * workers + 1}"])


# -- on the nodes ----------------------------------------------------------------------------


def train(name: str, config: RunConfig, rate: int | None) -> Line:
    """One training of an entrant over links of ``rate`` Mbit/s (None: unlimited).

    In processes of its own: torch's modules with hooks are not always freed.
    """
    kind = name if name in PEERS else "regimes"
    delay = DELAY.get(rate, 0.0) if rate else 0.0
    with islands(delay) as (names, hubs), Nodes(names, DEADLINE) as nodes:
        limit_trunk(hubs, rate)
        before = crossed(hubs[0])
        with tempfile.TemporaryDirectory() as scratch:
            answers = nodes.ask("race", kind=kind, config=to_dict(config), out=f"{scratch}/run")
        sent = crossed(hubs[0]) - before
    rounded = {k: v for k, v in answers[0].items() if k not in (*FREE, "parts")}
    rounded["loss"] = [round(x, 5) for x in answers[0]["loss"]]
    rounded["seconds"] = [round(x, 4) for x in answers[0]["seconds"]]
    more = {k: answers[0][k] for k in FREE if k in answers[0]} if not rate else {}
    steps = sum(answers[0]["steps"])
    return {
        **rounded,
        **more,
        "crossed": round(sent / steps, 1),
        "processor": provenance.processor_name(),
    }


def probe(rate: int | None, grid: str) -> Line:
    """The seconds of each kind of collective alone, over links of ``rate`` Mbit/s."""
    model = to_dict(entrants(grid)["dense"])
    times = DELAYED_TIMES if rate in DELAY else TIMES
    with islands(DELAY.get(rate or 0, 0.0)) as (names, hubs), Nodes(names, DEADLINE) as nodes:
        limit_trunk(hubs, rate)
        answers = nodes.ask("collectives", config=model, sizes=SIZES, times=times)
    table = {}
    for kind in answers[0]:
        each = [statistics.median(x[kind][i][1] for x in answers) for i in range(len(SIZES))]
        growing = isotonic_regression(each).x  # more bytes never take less time
        table[kind] = [(size, round(float(t), 6)) for size, t in zip(SIZES, growing, strict=True)]
    return {"table": table, "processor": provenance.processor_name()}


def race(
    grid: str, links: Sequence[int], seeds: Sequence[int], minutes: float, only: Sequence[str]
) -> None:
    """Train what is missing, until the minutes are over: the choice of a rate, steps on unlimited
    links and predictions, then the races, link by link and seed by seed."""
    stop = time.monotonic() + 60 * minutes
    for todo in _missing(grid, links, seeds, only):
        if time.monotonic() > stop:
            return print("the minutes are over: start again to go on", flush=True)
        stage, name, seed, link, rate = todo
        head = dict(zip(("stage", "entrant", "seed", "link", "rate"), todo, strict=True))
        head["grid"] = grid
        if stage == "probe":
            _add(head | probe(link, grid))
            continue
        settings = [f"data.validation_size={HELD_OUT}"] if stage == "tune" else []
        config = configured(name, rate, seed, *settings, grid=grid)
        if units := units_taken(stage, name, grid, link):
            config = shortened(config, units)
        began = time.monotonic()
        found = train(name, config, None if stage == "free" else link)
        if stage == "race":
            head["predicted"] = predicted(head, read(grid), sum(found["steps"]))
        _add(head | found)
        said = f"{stage} {name}, seed {seed}, link {link}: {found['loss'][-1]:.3f}"
        print(f"{said}, {time.monotonic() - began:.0f} s", flush=True)
    return None


def forget(
    lines: Sequence[Line], grid: str, links: Sequence[int], only: Sequence[str], processor: str
) -> list[Line]:
    """The lines without the races of these entrants (none named: all) over these links, and the
    steps on unlimited links before them; collectives alone on another processor are earlier ones.
    """
    left = []
    for line in lines:
        ours = line.get("grid", GRID) == grid and line["link"] in (None, *links)
        if ours and line["stage"] in ("race", "free") and (not only or line["entrant"] in only):
            continue
        elsewhere = ours and line["stage"] == "probe" and line["processor"] != processor
        left.append({**line, "stage": "earlier probe"} if elsewhere else line)
    return left


def _add(line: Line) -> None:
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(grid: str = GRID) -> list[Line]:
    """The lines of one grid."""
    return [line for line in _all_lines() if line.get("grid", GRID) == grid]


def _all_lines() -> list[Line]:
    return [json.loads(x) for x in LINES.read_text().splitlines()] if LINES.exists() else []


def _missing(
    grid: str, links: Sequence[int], seeds: Sequence[int], only: Sequence[str]
) -> Iterator[tuple[str, str, int, int | None, float]]:
    """(stage, entrant, seed, link, rate) of what no line has; the rates of later ones follow from
    earlier ones."""

    def known(*key: Any) -> bool:
        names = ("stage", "entrant", "seed", "link", "rate")
        return any(tuple(line[name] for name in names) == key for line in read(grid))

    def new(*key: Any) -> Iterator[Any]:
        if not known(*key):
            yield key

    course = COURSES[grid]
    for seed in course.tuning_seeds if not only or POWER in only else ():
        for rate in course.rates:
            yield from new("tune", POWER, seed, None, rate)
    names = list(rates(read(grid), grid))
    for seed in seeds:
        for link in links:
            chosen = rates(read(grid), grid)
            todo = [x for x in names if not known("race", x, seed, link, chosen[x])]
            todo = [name for name in todo if not only or name in only]
            for where in (None, link) if todo else ():
                yield from new("probe", "", SEEDS[0], where, 0.0)
            for name in todo:
                for other in DERIVED.get(name, (name,)):
                    yield from new("free", other, seed, link, chosen[other])
                yield "race", name, seed, link, chosen[name]


# -- predictions -----------------------------------------------------------------------------


class Exchange(NamedTuple):
    """Equal collectives of an entrant: their kind, how many there are in a mean step, bytes."""

    kind: str
    often: float
    size: float


def exchanges(
    name: str, frees: Mapping[str, Line], steps: int, often: float | None, grid: str = GRID
) -> list[Exchange]:
    """The collectives of an entrant in a race of so many steps, in their order: from the record of
    its steps on unlimited links, or by formula; ``often`` as `_often` says."""
    numbers, low = _shapes(grid)
    mean = Exchange("mean", 1.0, 4.0 * numbers)
    if name == POST_LOCAL:
        first = [x._replace(often=QUARTER) for x in exchanges("DDP", frees, steps, None, grid)]
        return [*first, mean._replace(often=(1 - QUARTER) / PERIOD)]
    if name == NO_WARM_UP:
        return [mean._replace(often=1 / PERIOD)]
    if often is not None:  # its first units are not like the others
        return [mean._replace(often=often)]
    free = frees[name]
    if "bytes" in free:
        return _counted(free, steps)
    if name == "HSDP":  # each shard is a half; every block and the rest have a mean of their own
        return [Exchange("pairs", 1.0, 2.0 * part) for part in _parts(grid)]
    if name == POWER:  # two factors, and what is not compressed
        later = Exchange("mean", 3 * (1 - BEFORE), 4 * low / 3)
        return [mean._replace(often=BEFORE), later]
    share = 0.5 if "fp16" in name else 1.0
    return [Exchange("mean", 1.0, share * size) for size in free["buckets"]]


def _counted(free: Line, steps: int) -> list[Exchange]:
    """Of a schedule, with one period throughout. A unit that ends between two synchronisations has
    a collective of its losses more, which is not among the timed steps."""
    period, taken = max(free["period"]), sum(free["steps"])
    rounds = math.ceil(taken / period)
    between = sum(end % period > 0 for end in itertools.accumulate(free["steps"][:-1]))
    found = []
    for kind, calls in free["calls"].items():
        each = (sum(calls) - between * (kind == "mean")) / rounds
        if each:
            often = each * math.ceil(steps / period) / steps
            found.append(Exchange(kind, often, sum(free["bytes"][kind]) / each / rounds))
    joined = [x for x in found if x.kind == "exchange"]  # with a gather and a mean
    return [x._replace(kind="quantised") for x in joined] or found


def _often(name: str, rate: float, grid: str) -> float | None:
    """How many synchronisations a mean step has, of an entrant with a changing period."""
    if name == POST_LOCAL:
        return QUARTER + (1 - QUARTER) / PERIOD
    if name not in PLANNED:
        return None
    plan = cases.plan_units(override(entrants(grid)[name], [f"optimizer.lr={rate}"]), 600) or []
    return sum(steps / period for steps, _, period in plan) / sum(steps for steps, *_ in plan)


@functools.cache
def _model(grid: str) -> nn.Module:
    config = entrants(grid)["dense"]
    return load_task(config).build(config)


def _parts(grid: str) -> list[int]:
    """Numbers of each block of the model, and of the rest."""
    model = _model(grid)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    blocks = [sum(x.numel() for x in part.parameters()) for each in lists for part in each]
    return [*blocks, sum(x.numel() for x in model.parameters()) - sum(blocks)]


@functools.cache
def _shapes(grid: str) -> tuple[int, int]:
    """Numbers of the model, and of torch's PowerSGD: factors of matrices that shrink to less than
    half, and the rest."""
    layers = from_module(_model(grid), "lm-small").layers
    low = 0
    for layer in layers:
        n, m = layer.matrix
        factors = (n + m) * TORCH_RANK
        low += factors if layer.compressed and 2 * factors < layer.size else layer.size
    return sum(layer.size for layer in layers), low


def predicted(race: Line, lines: Sequence[Line], steps: int) -> float:
    """Seconds of a mean step of a race.

    Args:
        race: its entrant, link, rate and grid.
        lines: what was measured before.
        steps: of the race.
    """
    name, link, grid = race["entrant"], race["link"], race["grid"]
    frees = {x["entrant"]: x for x in lines if x["stage"] == "free"}  # the latest
    tables = {x["link"]: x["table"] for x in lines if x["stage"] == "probe"}

    def longer(kind: str, size: float) -> float:
        alone = [float(np.interp(size, *zip(*tables[x][kind], strict=True))) for x in (link, None)]
        return max(0.0, alone[0] - alone[1])

    often = _often(name, race["rate"], grid)
    found = exchanges(name, frees, steps, often, grid)
    seconds = _unlimited(name, frees, often)
    for kind, times, size in found:
        kind = "seldom" if kind == "mean" and times < SELDOM else kind
        seconds += times * longer(kind, size)
    first = found[0]
    rounds = min(1.0, max(x.often for x in found)) if often is None else often
    seconds -= rounds * max(0.0, longer("mean", first.size) - longer("after", first.size))
    behind = frees.get("DDP" if name == POST_LOCAL else name, {}).get("overlap", 0.0)
    behind *= name != NO_WARM_UP  # its mean of models follows the step
    return seconds - first.often * min(behind, longer(first.kind, first.size))


def _unlimited(name: str, frees: Mapping[str, Line], often: float | None) -> float:
    """Seconds of a mean step on unlimited links. If the period p of a schedule changes: a + b / p
    with the a and b of the same steps at periods of one and of `PERIOD`."""

    def mean(line: Line) -> float:
        return float(sum(line["seconds"][1:]) / sum(line["steps"][1:]))

    if often is None:
        return mean(frees[name])
    each, seldom = (mean(frees[other]) for other in DERIVED[name])
    slope = (each - seldom) / (1 - 1 / PERIOD)
    return each - slope * (1 - often)


def main() -> None:
    """Train what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--grid", choices=[*COURSES], default=GRID)
    parser.add_argument("--links", type=int, nargs="+", default=LINKS, help="Mbit/s")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--only", nargs="+", default=(), help="entrants")
    parser.add_argument("--report", action="store_true", help="only write the page and the figure")
    parser.add_argument("--again", action="store_true", help="anew, also what has been raced")
    chosen = parser.parse_args()
    if chosen.again:
        here = provenance.processor_name()
        left = forget(_all_lines(), chosen.grid, chosen.links, chosen.only, here)
        write_output(LINES, "".join(json.dumps(line) + "\n" for line in left))
    if not chosen.report:
        race(chosen.grid, chosen.links, SEEDS[: chosen.seeds], chosen.minutes, chosen.only)
    write({grid: read(grid) for grid in COURSES}, platform.platform())


if __name__ == "__main__":
    main()
