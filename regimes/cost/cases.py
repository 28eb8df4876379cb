"""The work of levels and policies, from records or timed here: what `regimes.cost.predict` prices.

One worker's seconds from a simulated run, in which one process did the work of L = W / P workers:
compute / L; compress / L too, but whole after a union pass (one gradient, compressed once). A union
pass of a large batch is a little more efficient than L small ones, and what was gathered is decoded
once for all hosted workers, so both quotients are lower bounds. A real run (L = 1) needs no
division. Compute is the median over the epochs of all given runs, which do the same work. Seconds
of instruments, evaluation and checkpoints, and of waiting for a slower worker, are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regimes.config import DENSE, RunConfig
from regimes.cost.work import Work, mean
from regimes.errors import RecordError
from regimes.policies import PastEpoch, Static, policy
from regimes.policies.periods import period_of
from regimes.records import Record, Row, differing, identity, separate
from regimes.training.learning_rate import LearningRate
from regimes.training.units import Units

ITEMSIZE = {"float32": 4, "float64": 8}
SAME = (
    "model",
    "data",
    "workers",
    "dtype",
    "precision",
    "batch_size",
    "compressor",
    "levels",
    "unit_steps",
)
Epoch = tuple[float, Work]  # steps, and what one of them is


@dataclass(frozen=True)
class Case:
    """One line of the table: a level, or a policy.

    Attributes:
        epochs: of its runs, one after the other.
        runs: how many; 0 for a level.
    """

    name: str
    epochs: list[Epoch]
    runs: int = 0

    @property
    def work(self) -> Work:
        """The mean step."""
        return mean(self.epochs)


def _level(name: str, value: Any, epochs: list[Epoch]) -> Case:
    return Case(name if name == DENSE else f"{name} ({value})", epochs)


# -- from records ----------------------------------------------------------------------------


def recorded(run: Record, sample: float | None = None) -> list[Epoch]:
    """One worker's work in each epoch of a run.

    Args:
        sample: seconds of compute per sample; default the run's own median.
    """
    sample = per_sample([run]) if sample is None else sample
    hosted = 1 if run.header["world"].get("union_pass") else _hosted(run)
    found: list[tuple[float, Work]] = []
    columns = _compress(run), _batches(run)
    for row, seconds, batch in zip(run.rows, *columns, strict=True):
        steps, sent = row["steps"], row["collectives"]
        calls, size = (
            {kind: n / steps for kind, n in table.items()}
            for table in (sent["calls"], sent["bytes"])
        )
        alone = row.get("sync", {}).get("period", 1) > 1
        work = Work(sample * batch, seconds / hosted, calls, size, not alone)
        found.append((steps, work))
    return found


def _compress(run: Record) -> list[float]:
    """Seconds of compression per step, by epoch. Where an epoch has lost its seconds, the median of
    those at the same levels, or of all."""
    known = (run.epochs["seconds_compress"] / run.epochs["steps"]).tolist()
    levels = [row["layers"]["level"] for row in run.rows]
    there = [(x, level) for x, level in zip(known, levels, strict=True) if not math.isnan(x)]

    def typical(level: list[str]) -> float:
        alike = [x for x, other in there if other == level]
        return statistics.median(alike or [x for x, _ in there])

    return [typical(level) if math.isnan(x) else x for x, level in zip(known, levels, strict=True)]


def _batches(run: Record) -> list[float]:
    """Samples per worker and step, by epoch; one throughout where a user's own training has not
    said it, so that a step stands for a sample."""
    usual = run.config.get("batch_size")
    if usual is None:
        return [1.0] * len(run.rows)
    return [float(row["batch_size"] or usual) for row in run.rows]


def _hosted(run: Record) -> int:
    world = run.header["world"]
    return world["workers"] // world["processes"]


def per_sample(runs: Iterable[Record]) -> float:
    """Median seconds that one worker computes for one sample, over those epochs of all runs that
    have their seconds (a kill may lose those of one).

    Raises:
        RecordError: a run has none.
    """
    values: list[float] = []
    for run in runs:
        clocks = run.epochs.reindex(columns=["seconds_compute", "seconds_compress"])
        if clocks.dropna().empty:
            raise RecordError(f"{run.folder} does not say where the time of its epochs went")
        samples = run.epochs["steps"] * _batches(run) * _hosted(run)
        values += (clocks["seconds_compute"] / samples).dropna().tolist()
    return statistics.median(values)


def cases(runs: Sequence[Record], workers: int | None = None) -> list[Case]:
    """Levels, from the epochs in which all compressed layers had the same one, then policies.

    A level's compression takes the median over its epochs, in the policies' lines too. Dense is
    always among the levels; where no run has it, its compression is taken to be free.

    Args:
        workers: W, who share an epoch's samples at the runs' batch per worker; default theirs.

    Raises:
        RecordError: no run, runs of different settings, or one without seconds.
    """
    runs = separate(runs)
    _check_alike(runs)
    sample, config = per_sample(runs), runs[0].config
    share = config["workers"] / (workers or config["workers"])
    found = [
        (
            run.name,
            [
                (_uniform(run, row), (steps * share, work))
                for row, (steps, work) in zip(run.rows, recorded(run, sample), strict=True)
            ],
        )
        for run in runs
    ]
    levels: dict[str, list[Epoch]] = {}
    for level, epoch in (pair for _, epochs in found for pair in epochs):
        if level is not None:
            levels.setdefault(level, []).append(epoch)
    if DENSE not in levels:
        levels[DENSE] = [_dense(runs[0], found[0][1][0][1])]
    compress = {
        name: statistics.median(work.compress for _, work in epochs)
        for name, epochs in levels.items()
    }
    known = []
    for name, epochs in levels.items():
        work = replace(mean(epochs), compress=compress[name])
        known.append(_level(name, config["levels"].get(name), [(epochs[0][0], work)]))
    known.sort(key=lambda case: -sum(case.work.bytes.values()))
    return [*known, *_policies(found, compress)]


def _policies(
    found: list[tuple[str, list[tuple[str | None, Epoch]]]], compress: dict[str, float]
) -> Iterable[Case]:
    """The runs of each policy in one case, with the compression that is typical of their levels."""
    cases: dict[str, Case] = {}
    for name, epochs in found:
        typical = [
            (steps, replace(work, compress=compress.get(level or "", work.compress)))
            for level, (steps, work) in epochs
        ]
        old = cases.get(name, Case(name, []))
        cases[name] = Case(name, old.epochs + typical, old.runs + 1)
    return cases.values()


def _uniform(run: Record, row: Row) -> str | None:
    """The level of all compressed layers in an epoch; None if they differ, if the batch does, or
    where workers step locally."""
    usual = run.config.get("batch_size")
    if usual is not None and row["batch_size"] != usual:
        return None
    if row.get("sync", {}).get("period", 1) > 1:
        return None
    names = {
        level
        for level, layer in zip(row["layers"]["level"], run.header["layers"], strict=True)
        if layer["compressed"]
    }
    return names.pop() if len(names) == 1 else None


def _check_alike(runs: Sequence[Record]) -> None:
    if not runs:
        raise RecordError("name at least one run, or a folder of runs")
    for run in runs:
        if differ := differing([setting(runs[0]), setting(run)]):
            words = ", ".join(f"{name} ({a}, {b})" for name, (a, b) in differ.items())
            raise RecordError(
                f"{run.folder} and {runs[0].folder} differ in {words}: a table compares runs of "
                "one setting; choose one with --where FIELD=VALUE, or give the others apart"
            )


def setting(run: Record) -> dict[str, Any]:
    """What runs share whose steps are priced together."""
    return {k: v for k, v in identity(run).items() if k.partition(".")[0] in SAME}


def _dense(run: Record, epoch: Epoch) -> Epoch:
    """What the run's first epoch would have been without compression: one mean per step, which
    holds the gradient and what travels beside it (the loss)."""
    steps, work = epoch
    row, item = run.rows[0], ITEMSIZE[run.config.get("dtype", "float32")]
    size = item * sum(math.prod(layer["shape"]) for layer in run.header["layers"])
    sent = row["collectives"]["bytes"]
    beside = sent["mean"] + sent["gather"] - sum(row["layers"]["bytes"])
    calls = {**work.calls, "mean": 1.0, "gather": 0.0}
    moved = {**work.bytes, "mean": size + beside / row["steps"], "gather": 0.0}
    return steps, Work(work.compute, 0.0, calls, moved)


# -- from a preset ---------------------------------------------------------------------------


def measured(config: RunConfig, workers: int, steps: int = 5) -> list[Case]:
    """Levels of a configuration, timed on this machine, and its policy where that needs no
    statistic of the run (static, windows, periods by the rate; AdaComm as if the loss stayed).
    """
    from regimes.cost.measure import timed

    per_epoch, found = timed(config, workers, steps)
    each = min(per_epoch, config.unit_steps or per_epoch)  # steps in a row of the record
    known = [_level(name, config.levels.get(name), [(each, work)]) for name, work in found.items()]
    plan = _planned(config, int(per_epoch))
    if plan is None:
        return known
    epochs: list[Epoch] = [(n, found[level].every(period)) for n, level, period in plan]
    return [*known, Case(config.name, epochs, 1)]


def _planned(config: RunConfig, per_epoch: int) -> list[tuple[int, str, int]] | None:
    """Of each unit its steps, level and period; None where that depends on what is measured."""
    rule = policy(config.policy)
    sync = policy(config.sync_policy, "sync_policy") if config.sync_policy else Static("1")
    if rule.needs or sync.needs:
        return None
    units = Units.of(config, per_epoch)
    rate = LearningRate(config.optimizer, units.per_epoch, units.total)
    past: list[PastEpoch] = []
    late: list[PastEpoch] = []
    plan = []
    for unit in range(len(units)):
        first, stop = units.span(unit)
        level = rule.decide(past, ["all"])[0].level
        period = sync.decide(late, ["sync"])[0].level
        rates = rate(first), rate(stop)
        past.append(PastEpoch(*rates, {}, [level]))
        late.append(PastEpoch(*rates, {}, [period], {"train_loss": 1.0}))
        plan.append((stop - first, level, period_of(period, config.sync_levels)))
    return plan
