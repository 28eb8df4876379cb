"""Seconds until a loss, on a slow link: schedules of Regimes and what torch offers itself.

    python -m benchmarks.race --minutes 60   # Linux, root, iproute2; hours; can be continued
    python -m benchmarks.race --report       # the page and the figure of what is there

Four processes on four nodes (`benchmarks.nodes`), two islands of two whose one link is limited,
train `lm-small` for 600 steps by each entrant (`analysis/grids/race-lm.toml`,
`benchmarks.entrants`) at the learning rate that other text has chosen for it, or with ``--grid
race-lm-460k`` a model four times as large, by some of them. What counts is the
loss on a third text, and the seconds of training until it is reached, without evaluation. All four
share the cores of one machine, so compute and compression take longer than on nodes of their own.

Before a link's first race each entrant takes five units on unlimited links, and each kind of
collective is timed alone at some sizes, on unlimited links and on the link. The predicted seconds
of a step are those on unlimited links, and for each collective of the step what it takes longer on
the link at its size. The kernel counts what crosses the link. The link of 20 Mbit/s has a delay of
25 ms in each direction; there, and with the larger model at 100 Mbit/s, most entrants take four
units, since their losses do not depend on the link.

Leaves ``benchmarks/race.jsonl``, one line per training; ``race.md`` and ``race.png``.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.entrants import BEFORE, PEERS, PERIOD, QUARTER, TORCH_RANK
from benchmarks.nodes import Nodes, crossed, islands, limit_trunk
from benchmarks.race_report import DELAY, write
from regimes.config import RunConfig, override, to_dict
from regimes.cost import cases
from regimes.cost.network import Work
from regimes.presets import get_grid
from regimes.records import provenance

HERE = Path(__file__).parent
LINES = HERE / "race.jsonl"
TUNED = HERE.parent / "data/reference"  # GRID-tune.json
LINKS = (100, 20, 1000)  # Mbit/s
SEEDS = (16000, 16001, 16002)
GRID = "race-lm"
TRIALS = {  # of torch's PowerSGD, which no schedule stands for: learning rates and seeds
    GRID: ((0.0015, 0.003, 0.006, 0.012), (1000, 1001)),
    "race-lm-460k": ((0.0015, 0.003, 0.006), (1000,)),
}
HELD_OUT = 16385
POST_LOCAL = "DDP, PostLocalSGD"
RATE_OF = {  # torch's methods, and the schedule with the same numbers, whose rate they have
    "DDP": "dense",
    "DDP, fp16 hook": "half",
    POST_LOCAL: "post-local 8",
    "HSDP": "dense",
}
POWER = "DDP, PowerSGD hook"
PLANNED = ("post-local 8", "qsr")  # periods that change
FREE_UNITS, SHORT_UNITS, DEADLINE = 5, 4, 1800.0
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
    """The chosen rate of each entrant whose choice is complete."""
    values, seeds = TRIALS[grid]
    chosen = {k: float(v.partition("=")[2]) for k, v in _chosen(grid).items()}
    chosen |= {name: chosen[other] for name, other in RATE_OF.items() if other in chosen}
    trials = [line for line in lines if line["stage"] == "tune"]
    if len(trials) == len(values) * len(seeds):
        held = {
            rate: statistics.fmean(x["validation"][-1] for x in trials if x["rate"] == rate)
            for rate in values
        }
        chosen[POWER] = min(held, key=lambda rate: held[rate])
    return chosen


@functools.cache
def _chosen(grid: str) -> dict[str, str]:
    return dict(json.loads((TUNED / f"{grid}-tune.json").read_text())["chosen"])


def configured(name: str, rate: float, seed: int, *settings: str, grid: str = GRID) -> RunConfig:
    return override(entrants(grid)[name], [f"optimizer.lr={rate}", f"seed={seed}", *settings])


def shortened(config: RunConfig, units: int = FREE_UNITS) -> RunConfig:
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
    rounded = {k: v for k, v in answers[0].items() if k not in ("parts", "calls", "bytes")}
    rounded["loss"] = [round(x, 5) for x in answers[0]["loss"]]
    rounded["seconds"] = [round(x, 4) for x in answers[0]["seconds"]]
    more = {k: answers[0][k] for k in ("calls", "bytes") if k in answers[0]} if not rate else {}
    steps = sum(answers[0]["steps"])
    return {
        **rounded,
        **more,
        "crossed": round(sent / steps, 1),
        "processor": provenance.processor(),
    }


def probe(rate: int | None) -> Line:
    """The seconds of each kind of collective alone, over links of ``rate`` Mbit/s."""
    times = DELAYED_TIMES if rate in DELAY else TIMES
    with islands(DELAY.get(rate or 0, 0.0)) as (names, hubs), Nodes(names, DEADLINE) as nodes:
        limit_trunk(hubs, rate)
        answers = nodes.ask("collectives", sizes=SIZES, times=times)
    table = {}
    for kind in answers[0]:
        each = [statistics.median(x[kind][i][1] for x in answers) for i in range(len(SIZES))]
        growing = isotonic_regression(each).x  # more bytes never take less time
        table[kind] = [(size, round(float(t), 6)) for size, t in zip(SIZES, growing, strict=True)]
    return {"table": table, "processor": provenance.processor()}


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
            _add(head | probe(link))
            continue
        settings = [f"data.validation_size={HELD_OUT}"] if stage == "tune" else []
        config = configured(name, rate, seed, *settings, grid=grid)
        if stage == "free":
            config = shortened(config)
        elif _short(grid, link) and name not in PLANNED:
            config = shortened(config, SHORT_UNITS)
        began = time.monotonic()
        found = train(name, config, link)
        if stage == "race":
            head["predicted"] = predicted(name, read(grid), link, grid)
        _add(head | found)
        said = f"{stage} {name}, seed {seed}, link {link}: {found['loss'][-1]:.3f}"
        print(f"{said}, {time.monotonic() - began:.0f} s", flush=True)
    return None


def _add(line: Line) -> None:
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _short(grid: str, link: int | None) -> bool:
    """Do most entrants take a few units there? Losses do not depend on the link."""
    return link in DELAY or (grid != GRID and link != max(LINKS))


def read(grid: str = GRID) -> list[Line]:
    """The lines of one grid."""
    if not LINES.exists():
        return []
    lines = [json.loads(line) for line in LINES.read_text().splitlines()]
    return [line for line in lines if line.get("grid", GRID) == grid]


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

    values, tuning_seeds = TRIALS[grid]
    for seed in tuning_seeds if not only or POWER in only else ():
        for rate in values:
            yield from new("tune", POWER, seed, None, rate)
    known_to = entrants(grid)
    names = [name for name in rates(read(grid), grid) if name in known_to]
    names = [name for name in names if not only or name in only]
    yield from new("probe", "", SEEDS[0], None, 0.0)
    for name in names:
        yield from new("free", name, SEEDS[0], None, rates(read(grid), grid)[name])
    for seed in seeds:
        for link in links:
            yield from new("probe", "", SEEDS[0], link, 0.0)
            for name in names:
                yield from new("race", name, seed, link, rates(read(grid), grid)[name])


# -- predictions -----------------------------------------------------------------------------


def work(name: str, free: Line, grid: str = GRID) -> Work:
    """What an entrant hands to the collectives in a mean step: from its record, or by formula."""
    steps = sum(free["steps"])
    numbers, low = _shapes(grid)
    dense = Work(0.0, 0.0, {"mean": 1.0}, {"mean": 4.0 * numbers})
    if name in PLANNED:  # their first units are not like the others
        return dense * statistics.fmean(1 / period for period in _periods(name, free["rate"], grid))
    if name == POST_LOCAL:
        return dense * (QUARTER + (1 - QUARTER) / PERIOD)
    if "bytes" in free:
        size = {kind: sum(x) / steps for kind, x in free["bytes"].items() if sum(x)}
        calls = {kind: sum(x) / steps for kind, x in free["calls"].items() if kind in size}
        return Work(0.0, 0.0, calls, size)
    if name == "HSDP":  # each shard is a half; every block and the rest have a mean of their own
        blocks = int(entrants(grid)["dense"].model.depth)
        return Work(0.0, 0.0, {"pairs": blocks + 1.0}, {"pairs": 2.0 * numbers})
    if name == POWER:
        return Work(0, 0, {"mean": 3.0}, {"mean": BEFORE * 4 * numbers + (1 - BEFORE) * 4 * low})
    return Work(0, 0, {"mean": 1.0}, {"mean": 2.0 * numbers}) if "fp16" in name else dense


def _periods(name: str, rate: float, grid: str) -> list[int]:
    """Of each step of a schedule whose period changes."""
    plan = cases.planned(override(entrants(grid)[name], [f"optimizer.lr={rate}"]), 600)
    return [period for steps, _, period in plan or [] for _ in range(steps)]


@functools.cache
def _shapes(grid: str) -> tuple[int, int]:
    """Numbers of the model, and of torch's PowerSGD: factors of matrices that shrink to less than
    half, and the rest."""
    from regimes.cost.models import from_module
    from regimes.data import load

    config = entrants(grid)["dense"]
    layers = from_module(load(config).build(config), "lm-small").layers
    low = 0
    for layer in layers:
        n, m = layer.matrix
        factors = (n + m) * TORCH_RANK
        low += factors if layer.compressed and 2 * factors < layer.size else layer.size
    return sum(layer.size for layer in layers), low


def predicted(name: str, lines: Sequence[Line], link: float, grid: str = GRID) -> float:
    """Seconds of a mean step on a link: those of the steps on unlimited links, and what each
    collective of its size takes longer there."""
    frees = {x["entrant"]: x for x in lines if x["stage"] == "free"}
    tables = {x["link"]: x["table"] for x in lines if x["stage"] == "probe"}
    step = work(name, frees[name], grid)
    longer = 0.0
    for kind, calls in step.calls.items():
        size = step.bytes[kind] / calls
        kind = "seldom" if kind == "mean" and calls < SELDOM else kind
        alone = [float(np.interp(size, *zip(*tables[x][kind], strict=True))) for x in (link, None)]
        longer += calls * max(0.0, alone[0] - alone[1])
    return _unlimited(name, frees, grid) + longer


def _unlimited(name: str, frees: dict[str, Line], grid: str) -> float:
    """Seconds of a mean step on unlimited links. Of a schedule whose period p changes: a + b / p
    with the a and b of the same steps at periods of one and of `PERIOD`."""

    def mean(line: Line, first: int = 1) -> float:
        return float(sum(line["seconds"][first:]) / sum(line["steps"][first:]))

    if name in PLANNED:
        each, seldom = mean(frees["dense"]), mean(frees["every 8"])
        often = statistics.fmean(1 / period for period in _periods(name, frees[name]["rate"], grid))
    elif name == POST_LOCAL:
        each, seldom = mean(frees["DDP"]), mean(frees[name])
        often = QUARTER + (1 - QUARTER) / PERIOD
    else:
        return mean(frees[name])
    slope = (each - seldom) / (1 - 1 / PERIOD)
    return each - slope * (1 - often)


def main() -> None:
    """Train what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--grid", choices=TRIALS, default=GRID)
    parser.add_argument("--links", type=int, nargs="+", default=LINKS, help="Mbit/s")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--only", nargs="+", default=(), help="entrants")
    parser.add_argument("--report", action="store_true", help="only write the page and the figure")
    chosen = parser.parse_args()
    if not chosen.report:
        race(chosen.grid, chosen.links, SEEDS[: chosen.seeds], chosen.minutes, chosen.only)
    write({grid: read(grid) for grid in TRIALS}, platform.platform())


if __name__ == "__main__":
    main()
