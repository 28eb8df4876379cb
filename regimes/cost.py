"""What runs and presets cost on a given network: ``regimes cost``. torch only for presets.

``regimes cost RUN ... --network 10Gbit/s,50us --workers 8`` reads records: their traffic, and the
seconds that compute and compression took. ``regimes cost PRESET`` has no record and measures
(`regimes.timing`). `regimes.network` turns both into seconds.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.config import DENSE, RunConfig
from regimes.errors import RecordError
from regimes.network import Network, Work, break_even, mean, spell
from regimes.policies import PastEpoch, policy
from regimes.records import Record, load_all, write_table
from regimes.terminal import console as new_console

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

ITEMSIZE = {"float32": 4, "float64": 8}
SAME = ("model", "workers", "dtype", "autocast", "batch_size", "compressor", "levels")
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

    Raises:
        RecordError: the record does not say where the time went.
    """
    sample = per_sample([run]) if sample is None else sample
    hosted = 1 if run.header["world"].get("union_pass") else _hosted(run)
    found = []
    for row, seconds in zip(run.rows, run.epochs["seconds_compress"], strict=True):
        steps, sent = row["steps"], row["collectives"]
        calls, size = ({kind: n / steps for kind, n in sent[what].items()}
                       for what in ("calls", "bytes"))  # fmt: skip
        found.append(
            (steps, Work(sample * row["batch_size"], seconds / steps / hosted, calls, size))
        )
    return found


def _hosted(run: Record) -> int:
    world = run.header["world"]
    return world["workers"] // world["processes"]


def per_sample(runs: Iterable[Record]) -> float:
    """Median seconds that one worker computes for one sample, over the epochs of all runs.

    Raises:
        RecordError: a run that does not say where the time went.
    """
    values: list[float] = []
    for run in runs:
        clocks = run.epochs.reindex(columns=["seconds_compute", "seconds_compress"])
        if clocks.empty or clocks.isna().to_numpy().any():
            raise RecordError(f"{run.folder} does not say where the time of its epochs went")
        samples = run.epochs["steps"] * run.epochs["batch_size"] * _hosted(run)
        values += (clocks["seconds_compute"] / samples).tolist()
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
    _check(runs)
    sample, config = per_sample(runs), runs[0].config
    share = config["workers"] / (workers or config["workers"])
    labelled = [
        [(_uniform(run, row), (steps * share, work))
         for row, (steps, work) in zip(run.rows, recorded(run, sample), strict=True)]
        for run in runs
    ]  # fmt: skip
    levels: dict[str, list[Epoch]] = {}
    for level, epoch in (pair for epochs in labelled for pair in epochs):
        if level is not None:
            levels.setdefault(level, []).append(epoch)
    if DENSE not in levels:
        levels[DENSE] = [_dense(runs[0], labelled[0][0][1])]
    compress = {name: statistics.median(w.compress for _, w in epochs)
                for name, epochs in levels.items()}  # fmt: skip
    known = [_level(name, config["levels"].get(name),
                   [(epochs[0][0], replace(mean(epochs), compress=compress[name]))])
             for name, epochs in levels.items()]  # fmt: skip
    known.sort(key=lambda case: -sum(case.work.bytes.values()))
    policies: dict[str, Case] = {}
    for run, epochs in zip(runs, labelled, strict=True):
        typical = [(steps, replace(work, compress=compress.get(level or "", work.compress)))
                   for level, (steps, work) in epochs]  # fmt: skip
        old = policies.get(run.name, Case(run.name, []))
        policies[run.name] = Case(run.name, old.epochs + typical, old.runs + 1)
    return [*known, *policies.values()]


def _uniform(run: Record, row: dict[str, Any]) -> str | None:
    """The level of all compressed layers in an epoch; None if they differ, or the batch does."""
    if row["batch_size"] != run.config["batch_size"]:
        return None
    names = {level for level, layer in zip(row["layers"]["level"], run.header["layers"],
                                           strict=True) if layer["compressed"]}  # fmt: skip
    return names.pop() if len(names) == 1 else None


def _check(runs: Sequence[Record]) -> None:
    if not runs:
        raise RecordError("name at least one run, or a folder of runs")
    for run in runs:
        differ = [key for key in SAME if run.config.get(key) != runs[0].config.get(key)]
        if differ:
            raise RecordError(
                f"{run.folder} and {runs[0].folder} differ in {', '.join(differ)}: a table "
                "compares runs of one setting; give the others apart"
            )


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
    statistic of the run (static, windows).

    Raises:
        ConfigError, DataError: as from training it.
    """
    from regimes.timing import timed

    per_epoch, found = timed(config, workers, steps)
    known = [
        _level(name, config.levels.get(name), [(per_epoch, work)]) for name, work in found.items()
    ]
    rule = policy(config.policy)
    if rule.needs:
        return known
    past: list[PastEpoch] = []
    for _ in range(config.epochs):
        past.append(PastEpoch(0.0, 0.0, {}, [rule.decide(past, ["all"])[0].level]))
    return [*known, Case(config.name, [(per_epoch, found[p.levels[0]]) for p in past], 1)]


# -- the table -------------------------------------------------------------------------------


def predict(
    found: Sequence[Case], network: Network, workers: int, algorithm: str = "ring", buckets: int = 1
) -> pd.DataFrame:
    """One row per case: seconds per step (compute, compress, communicate, seconds, which is less
    than their sum where they overlap), seconds per epoch, and how an epoch compares with a dense
    one: the speed-up, and the bandwidth (bits/s) below which it is faster. Where levels change,
    ``break_even`` is that of the mean step."""
    import pandas as pd

    how = (network, workers, algorithm, buckets)
    dense = next(case for case in found if case.name == DENSE and not case.runs)
    steps, work = dense.epochs[0]
    base, whole = steps * float(work.seconds(*how)), work * steps
    rows = []
    for case in found:
        work, epochs = case.work, len(case.epochs)
        steps = sum(n for n, _ in case.epochs) / epochs
        epoch = sum(n * float(w.seconds(*how)) for n, w in case.epochs) / epochs
        rows.append({
            "kind": "policy" if case.runs else "level", "case": case.name, "runs": case.runs,
            "steps_per_epoch": steps, "bytes_per_step": sum(work.bytes.values()),
            "compute": work.compute, "compress": work.compress,
            "communicate": float(work.communicate(*how)), "seconds": epoch / steps,
            "epoch": epoch, "speed_up": base / epoch,
            "break_even": break_even(work * steps, whole, float(network.latency), *how[1:]),
        })  # fmt: skip
    return pd.DataFrame(rows)


HEADS = ("compute", "compress", "network", "step", "s/epoch", "× dense", "pays below")


def table(frame: pd.DataFrame) -> Table:
    """Milliseconds per step, legible at 80 columns."""
    from rich.table import Column, Table

    shown = Table(Column("", overflow="fold", min_width=16),
                  *(Column(head, justify="right", no_wrap=True) for head in HEADS),
                  box=None, pad_edge=False, padding=(0, 0, 0, 1))  # fmt: skip
    for kind, rows in frame.groupby("kind", sort=False):
        shown.add_row({"level": "levels", "policy": "policies"}[str(kind)], style="bold")
        for row in rows.to_dict("records"):
            parts = [f"{1e3 * row[k]:.3g}"
                     for k in ("compute", "compress", "communicate", "seconds")]  # fmt: skip
            shown.add_row(row["case"], *parts, f"{row['epoch']:.3g}", f"{row['speed_up']:.2f}",
                          spell(row["break_even"]))  # fmt: skip
    return shown


def main(
    what: Sequence[str], config: RunConfig | None, network: Network, workers: int | None,
    *, algorithm: str = "ring", buckets: int = 1, steps: int = 5, csv: Path | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Print the table for runs, or for a configuration where there are none yet.

    Args:
        what: runs, folders or archives of runs; unused with a configuration.
        csv: file for the numbers in full precision.

    Raises:
        ConfigError, DataError, RecordError: one sentence.
    """
    runs = [] if config else [run for place in what for run in load_all(place)]
    if config:
        workers = workers or config.workers
        found = measured(config, workers, steps)
    else:
        found = cases(runs, workers)
        workers = workers or runs[0].config["workers"]
    frame = predict(found, network, workers, algorithm, buckets)
    console = new_console(highlight=False)
    console.print(f"{workers} workers, {network}, {algorithm}; ms per step")
    console.print(table(frame))
    if csv:
        write_table(csv, frame)
    return frame
