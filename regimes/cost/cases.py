"""The work of levels and policies, from records or timed here, for `regimes.cost.predict_seconds`.

In a simulated run one process does the work of L = W / P workers. One worker's seconds are then
compute / L and compress / L; after a union pass compress is not divided (one gradient is
compressed once). Both quotients are lower bounds: a union pass of a large batch is a little faster
than L small ones, and gathered tensors are decoded once for all hosted workers. A real run (L = 1)
needs no division. Compute is the median over the epochs of all given runs, which do the same work.
Instruments, evaluation, checkpoints and waiting for a slower worker are left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from regimes.base.config import DENSE, RunConfig, as_level
from regimes.base.errors import RecordError
from regimes.cost.network import Work, mean_step
from regimes.policies import PastEpoch, Static, make_policy
from regimes.policies.history import History
from regimes.policies.schedules import period_of
from regimes.records import (
    Record,
    Row,
    count_exchanges,
    differing_fields,
    identify_experiment,
    list_uncompressed_layers,
    separate_experiments,
)
from regimes.records.fields import differences_text
from regimes.training.learning_rate import LearningRate
from regimes.training.units import Units

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 4, "float16": 4}  # of what travels
SAME = {"model", "data", "workers", "dtype", "precision"}
SAME |= {"batch_size", "unit_steps"}
METHOD = {"compressor", "levels"}  # its levels are lines of their own
WITHIN = ("sum", "join")  # collectives of one replica's processes, over their own links
Epoch = tuple[float, Work]  # steps, and the work of one


@dataclass(frozen=True)
class Case:
    """Holds one line of the table: a level, or a policy.

    Attributes:
        epochs: of all its runs; of a level one whole unit.
        dense_steps: of the same samples without compression, at the usual batch size.
        lengths: how many epochs each of its runs has, in their order; none for a level.
        uncompressed: how many compressed layers a level sends whole, because it would not send less
            of them.
    """

    name: str
    epochs: list[Epoch]
    dense_steps: float
    lengths: tuple[int, ...] = ()
    uncompressed: int = 0

    @property
    def runs(self) -> int:
        """Return how many runs it has; 0 for a level."""
        return len(self.lengths)

    @property
    def by_run(self) -> list[list[Epoch]]:
        """Return the epochs of each of its runs."""
        ends = [*accumulate(self.lengths)]
        return [self.epochs[stop - n : stop] for n, stop in zip(self.lengths, ends, strict=True)]

    @property
    def work(self) -> Work:
        """Return the mean step."""
        return mean_step(self.epochs)


def recorded_work(run: Record, sample: float | None = None) -> list[Epoch]:
    """Return one worker's work in each of `trained_rows`.

    Args:
        sample: seconds of compute per sample; default the run's own median.
    """
    sample = per_sample([run]) if sample is None else sample
    union, hosted = run.header["world"].get("union_pass"), _hosted(run)
    epochs: list[Epoch] = []
    for row, seconds, batch in zip(run.rows, _compress(run), _batches(run), strict=True):
        steps, sent = row["steps"], row["collectives"]
        if not steps:
            continue
        calls = {kind: n / steps for kind, n in sent["calls"].items() if kind not in WITHIN}
        size = {kind: n / steps for kind, n in sent["bytes"].items() if kind not in WITHIN}
        seconds /= 1 if union else hosted
        epochs.append((steps, Work(sample * batch, seconds, calls, size, not _is_local(row))))
    return epochs


def trained_rows(run: Record) -> list[Row]:
    """Return the epochs with steps: a branch may leave some out (``BranchConfig.skip``)."""
    return [row for row in run.rows if row["steps"]]


def _usual_steps(run: Record) -> list[float]:
    """Steps of the samples of each of `trained_rows` at the usual batch size. Rows of the first
    records, of whole epochs, do not say them."""
    epoch, rows = run.header["steps_per_epoch"], trained_rows(run)
    spans = [row.get("unit") or {"first": 0, "stop": epoch or row["steps"]} for row in rows]
    return [float(span["stop"] - span["first"]) for span in spans]


def _is_local(row: Row) -> bool:
    """Did workers take more than one step between synchronisations?"""
    return row.get("sync", {}).get("period", 1) > 1


def _compress(run: Record) -> list[float]:
    """Seconds of compression per step, by epoch. For an epoch without, the median of the epochs at
    the same levels, or of all."""
    seconds = run.epochs["seconds_compress"] / run.epochs["steps"]
    levels = np.array([str(row["layers"]["level"]) for row in run.rows])
    same = seconds.groupby(levels).transform("median")
    return seconds.fillna(same).fillna(seconds.median()).tolist()


def _batches(run: Record) -> list[float]:
    """Samples per worker and step, by epoch; 1 where the record of a user's training has no batch
    size, so that a step counts as a sample."""
    usual = run.config.get("batch_size")
    return [1.0 if usual is None else float(row["batch_size"] or usual) for row in run.rows]


def _hosted(run: Record) -> int:
    """Workers of a process."""
    world = run.header["world"]
    return max(1, world["workers"] // world["processes"])  # several may be one worker


def per_sample(runs: Iterable[Record]) -> float:
    """Compute the median seconds that one worker computes for one sample, over the epochs with
    seconds of all runs (an epoch may lose its seconds when a run is killed).

    Raises:
        RecordError: a run has no such epoch, is of FSDP2's own collectives, or had workers that
            were absent.
    """
    values: list[float] = []
    for run in runs:
        if "gather" in run.config:
            raise RecordError(
                f"{run.folder} is of attach_shards: the time of FSDP2's own collectives is "
                "not predicted"
            )
        if any("churn" in row for row in run.rows):
            raise RecordError(
                f"{run.folder} had workers that were absent, which versions up to 0.4 allowed: its "
                "time is not predicted"
            )
        # of a run without an epoch all three are missing
        epochs = run.epochs.reindex(columns=["steps", "seconds_compute", "seconds_compress"])
        trained = epochs["steps"] > 0
        if epochs[trained].dropna().empty:
            raise RecordError(f"{run.folder} does not say where the time of its epochs went")
        samples = epochs["steps"] * _batches(run) * _hosted(run)
        values += (epochs["seconds_compute"] / samples)[trained].dropna().tolist()
    return statistics.median(values)


def make_cases(runs: Sequence[Record], workers: int | None = None) -> list[Case]:
    """Make levels, from the epochs in which all compressed layers had the same one, then policies.

    A level's seconds of compression are the median over its epochs, also in the policies' epochs.
    Dense is always among the levels; if no run has it, its compression is free. Where runs have
    several compressors, each has its own levels.

    Args:
        workers: W, which share an epoch's samples at the runs' batch per worker; default theirs.

    Raises:
        RecordError: no run, runs of different settings, or one without seconds.
    """
    runs = separate_experiments(runs)
    _check_alike(runs)
    sample, config = per_sample(runs), runs[0].config
    share = config["workers"] / (workers or config["workers"])
    methods: dict[str, list[Record]] = {}
    for run in runs:
        methods.setdefault(json.dumps(_fields_of(run, METHOD), sort_keys=True), []).append(run)
    levels, policies = list[Case](), list[Case]()
    for group in methods.values():
        found, own = _cases_of(group, sample, share)
        if len(methods) > 1:
            name = group[0].config["compressor"]["name"]
            found = [x if x.name == DENSE else replace(x, name=f"{name} {x.name}") for x in found]
        levels += found
        policies += own
    dense = [case for case in levels if case.name == DENSE]
    measured = next((case for case in dense if case.work.compress), dense[0])
    levels = [measured, *(case for case in levels if case.name != DENSE)]
    levels.sort(key=lambda case: -sum(case.work.bytes.values()))
    return [*levels, *policies]


def _cases_of(runs: Sequence[Record], sample: float, share: float) -> tuple[list[Case], list[Case]]:
    """Levels and policies of runs with one compressor.

    Args:
        sample: seconds of computing a sample.
        share: of an epoch's steps.
    """
    config = runs[0].config
    epochs = [
        (run.name, uniform_level(run, row), share * usual, (steps * share, work))
        for run in runs
        for row, usual, (steps, work) in zip(
            trained_rows(run), _usual_steps(run), recorded_work(run, sample), strict=True
        )
    ]
    unit = max(usual for _, _, usual, _ in epochs)  # the last one of a run may be shorter
    levels: dict[str, list[Epoch]] = {}
    for _, level, _, epoch in epochs:
        if level is not None:
            levels.setdefault(level, []).append(epoch)
    if DENSE not in levels:
        _, work = epochs[0][-1]
        usual_batch = replace(work, compute=sample * (config.get("batch_size") or 1))
        levels[DENSE] = [(unit, _dense(runs[0], usual_batch))]
    compress = {name: statistics.median(w.compress for _, w in at) for name, at in levels.items()}
    level_cases = []
    for name, at in levels.items():
        work = replace(mean_step(at), compress=compress[name])
        label = _labelled(name, config["levels"])
        count = max(len(list_uncompressed_layers(run.header, name)) for run in runs)
        level_cases.append(Case(label, [(unit, work)], unit, uncompressed=count))
    policies: dict[str, list[Epoch]] = {}
    whole: dict[str, float] = {}
    for name, level, usual, (steps, work) in epochs:
        work = replace(work, compress=compress.get(level or "", work.compress))
        policies.setdefault(name, []).append((steps, work))
        whole[name] = whole.get(name, 0.0) + usual
    lengths: dict[str, tuple[int, ...]] = {}
    for run in runs:
        lengths[run.name] = (*lengths.get(run.name, ()), len(trained_rows(run)))
    return level_cases, [Case(x, at, whole[x], lengths[x]) for x, at in policies.items()]


def _labelled(level: str, levels: Mapping[str, Any]) -> str:
    """ "low (4)"."""
    return f"{level} ({as_level(levels[level])})" if level in levels else level


def uniform_level(run: Record, row: Row) -> str | None:
    """Return the level of all compressed layers in an epoch; None if the levels differ, in another
    batch size, with local steps, or where the run began uncompressed."""
    usual = run.config.get("batch_size")
    if (usual is not None and row["batch_size"] != usual) or _is_local(row):
        return None
    if count_exchanges(run.header, row).dense:
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
        if differ := differing_fields([compared_fields(runs[0]), compared_fields(run)]):
            raise RecordError(
                f"{run.folder} and {runs[0].folder} differ in {differences_text(differ)}: a table "
                "compares runs of one setting; choose one with --where FIELD=VALUE, or give the "
                "others apart"
            )


def compared_fields(run: Record) -> dict[str, Any]:
    """Return the fields in which compared runs must agree."""
    return _fields_of(run, SAME)


def _fields_of(run: Record, tables: Collection[str]) -> dict[str, Any]:
    return {k: v for k, v in identify_experiment(run).items() if k.partition(".")[0] in tables}


def _dense(run: Record, work: Work) -> Work:
    """The work of the run's first epoch without compression: one mean per step, of the gradient and
    the other values that are sent (the loss)."""
    row, item = trained_rows(run)[0], ITEMSIZE[run.config.get("dtype", "float32")]
    size = item * sum(math.prod(layer["shape"]) for layer in run.header["layers"])
    sent = row["collectives"]["bytes"]
    other = sent["mean"] + sent["gather"] + sent.get("exchange", 0) - sum(row["layers"]["bytes"])
    none = {kind: 0.0 for kind in work.calls if kind in ("gather", "exchange")}
    calls = {**work.calls, "mean": 1.0} | none
    moved = {**work.bytes, "mean": size + other / row["steps"]} | none
    return Work(work.compute, 0.0, calls, moved)


def measure_cases(config: RunConfig, workers: int, steps: int = 5) -> list[Case]:
    """Time the levels of a configuration on this machine, and its policy if that needs no statistic
    of the run (static, windows, periods by the rate; AdaComm as if the loss were constant) and has
    one level for all layers."""
    from regimes.compression import make_compressor
    from regimes.compression.traffic import name_uncompressed_layers
    from regimes.cost.measure import time_steps

    per_epoch, (works,), layers, _ = time_steps([config], workers, steps)
    unit = config.unit_steps or per_epoch  # steps in a row of the record
    compressor, levels = make_compressor(config.compressor), list[Case]()
    for name, work in works.items():
        level = config.levels.get(name, DENSE)
        count = len(name_uncompressed_layers(compressor, layers, level, workers))
        label = _labelled(name, config.levels)
        levels.append(Case(label, [(unit, work)], unit, uncompressed=count))
    compressed = [layer.name for layer in layers if layer.compressed]
    plan = plan_units(config, int(per_epoch), compressed)
    if plan is None:
        return levels
    epochs: list[Epoch] = [(n, works[level].every(period)) for n, level, period in plan]
    return [*levels, Case(config.name, epochs, sum(n for n, _ in epochs), (len(epochs),))]


def plan_units(
    config: RunConfig, per_epoch: int, layers: Sequence[str] = ("all",)
) -> list[tuple[int, str, int]] | None:
    """Plan (steps, level, period) of each unit; None if they depend on measurements, or if the
    level differs between layers.

    Args:
        layers: the names of the compressed layers.
    """
    rule = make_policy(config.policy)
    sync = make_policy(config.sync_policy, "sync_policy") if config.sync_policy else Static("1")
    if rule.needs or sync.needs:
        return None
    units = Units.from_config(config, per_epoch)
    rate = LearningRate(config.optimizer, units.per_epoch, units.total)
    past, past_sync, plan = History(), History(), []
    for unit in range(len(units)):
        first, stop = units.step_span(unit)
        levels = [decision.level for decision in rule.decide(past, layers)] or [DENSE]
        if len({*levels}) > 1:
            return None
        period = sync.decide(past_sync, ["sync"])[0].level
        rates = rate(first), rate(stop)
        past.append(PastEpoch(*rates, {}, levels))
        past_sync.append(PastEpoch(*rates, {}, [period], {"train_loss": 1.0}))
        plan.append((stop - first, levels[0], period_of(period, config.sync_levels)))
    return plan
