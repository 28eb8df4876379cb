"""Runs grouped by schedule (a configuration's name) and seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from regimes.config import DataConfig, from_dict, to_dict
from regimes.errors import ConfigError, RecordError
from regimes.plotting.decays import decay_epochs
from regimes.plotting.looks import order
from regimes.plotting.metrics import Metric, named
from regimes.records import Record

Groups = dict[str, list[Record]]
BASELINES = ("low", "small-batch", "rank 4", "none")  # what the others' traffic is a share of
SAME = ("workers", "batch_size", "data", "model", "compressor", "levels", "signal", "quirks")


def groups(
    runs: Iterable[Record],
    needed: Sequence[str] = (),
    only: bool = False,
    unfinished: bool = False,
) -> Groups:
    """Runs by schedule, each list by seed.

    Args:
        only: leave out the runs of schedules that are not ``needed``.
        unfinished: take unfinished runs as well.

    Raises:
        RecordError: an unfinished run (unless asked for), two of one schedule and seed, runs of
            different settings, or a schedule of ``needed`` that is missing.
    """
    runs, found = list(runs), Groups()
    known: dict[str, tuple[Any, Record]] = {}
    names = {run.name for run in runs}
    if missing := [name for name in needed if name not in names]:
        raise RecordError(
            f"no run of schedule {', '.join(missing)}; found {', '.join(order(names)) or 'none'}: "
            "run the missing ones (regimes ablate GRID --schedules ...) before drawing"
        )
    runs = [run for run in runs if run.name in needed or not only]
    for run in runs:
        if not unfinished:
            run.check_finished()
        _check_alike(run, known)
        others = found.setdefault(run.name, [])
        if any(run.seed == other.seed for other in others):
            raise RecordError(f"{run.folder}: there is another {run.name!r} run of seed {run.seed}")
        others.append(run)
    return {name: sorted(found[name], key=lambda r: r.seed) for name in order(found)}


def _check_alike(run: Record, known: dict[str, tuple[Any, Record]]) -> None:
    """Compare a run's setting with the first run that has each of its values, and keep its own."""
    ours = _setting(run)
    differ = [k for k in ours if known.setdefault(k, (ours[k], run))[0] != ours[k]]
    if differ:
        raise RecordError(
            f"{run.folder} and {known[differ[0]][1].folder} differ in {', '.join(differ)}: a "
            "figure compares runs of one setting; move them to folders of their own"
        )


def _setting(run: Record) -> dict[str, Any]:
    """What runs of one figure share, with the images themselves in place of where they lay; not
    the batch of a run whose batch is decided."""
    data = run.config["data"]
    with contextlib.suppress(ConfigError):  # an older record has what it does not say by default
        data = to_dict(from_dict(DataConfig, data))
    data = {k: v for k, v in data.items() if k not in ("path", "download")}
    found = {**run.config, "data": {**data, "digest": run.header["data"]["digest"]}}
    decided = bool(run.config.get("batch_policy"))
    return {key: found.get(key) for key in SAME if not (decided and key == "batch_size")}


def tested_by(run: Record) -> Metric:
    """What the run was tested by."""
    return measured(run, run.header.get("metric", "accuracy"))


def measured(run: Record, column: str) -> Metric:
    """How a column of the run's epochs is written."""
    return named(column, unit_known=not run.hooked)


def compressed(run: Record) -> list[dict[str, Any]]:
    """The compressed layers in network order."""
    return [layer for layer in run.header["layers"] if layer["compressed"]]


def windows(found: Groups) -> list[list[int]]:
    """The hand-made critical windows ``[first, stop)``; none if no run has them."""
    for name, table in (("low-in-critical", "policy"), ("high-in-critical", "policy"),
                        ("small-in-critical", "batch_policy")):  # fmt: skip
        if found.get(name):
            return found[name][0].config[table].get("windows", [])
    return []


def decaying(found: Groups) -> Record:
    """A run whose decays most of the schedules share."""
    firsts = [runs[0] for runs in found.values()]
    decays = [decay_epochs(run) for run in firsts]
    return firsts[decays.index(max(decays, key=decays.count))]
