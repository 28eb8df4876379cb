"""Records as the hook writes them of somebody's own training: made from a trainer's by rewriting
what differs, so that readers can be tested without training a DDP job."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regimes.base.config import DataConfig, ModelConfig, OptimizerConfig, to_dict
from regimes.records import read_header, read_lines
from regimes.records.hook_fields import KNOWN

LOSSES = ("train_loss", "test_loss", "metric")
CLOCKS = ("epoch", "compute", "compress", "communicate")


def nothing(epoch: int) -> dict[str, float | None]:
    return {}


def hooked(
    source: Path,
    out: Path,
    *,
    units: int | None = None,
    ended: bool = True,
    metric: str = "loss",
    known: tuple[str, ...] = LOSSES,
    each: int = 1,
    logged: Callable[[int], dict[str, float | None]] = nothing,
    batch: int | None = None,
    unit_steps: int | None = None,
    policy: dict[str, Any] | None = None,
    statistics: bool = True,
    seed: int | None = None,
    made_up: bool = False,
) -> Path:
    """Rewrite the trainer's record in ``source`` as a hook's.

    Args:
        units: what the user has named; None: the number of rows once the job has ended.
        ended: has the job said that it is over?
        metric: its name; "loss" is the test loss.
        known: which of the losses and the metric the user has logged; the others are null.
        each: and in every so many-th epoch only.
        logged: what else, by epoch.
        statistics: False: of a policy that reads none.
        made_up: with the trainer's defaults for what is not known, as versions up to 0.2 wrote it.
    """
    header, rows = read_header(source), read_lines(source / "epochs.jsonl")
    rows = [
        row
        | {key: None for key in LOSSES if key not in known or (row["epoch"] + 1) % each}
        | {"batch_size": batch, "skipped": 0, "logged": logged(row["epoch"])}
        | ({} if statistics else {"statistics": {}})
        | (_unit(row["epoch"], unit_steps) if unit_steps else {})
        for row in rows
    ]
    if metric == "loss":
        rows = [row | {"metric": row["test_loss"] if "metric" in known else None} for row in rows]
    header |= {
        "written_by": "hook",
        "units": len(rows) if ended and units is None else units,
        "config": _config(header["config"], rows, batch, unit_steps, policy, seed, made_up),
        "data": {"digest": None, "train": None, "test": None},
        "metric": metric,
        "world": {"workers": 4, "processes": 4, "device": "cpu", "union_pass": False},
        "steps_per_epoch": None,
        "budget": None,
    }
    clocks = [{k: row[k] for k in CLOCKS} for row in read_lines(source / "seconds.jsonl")]
    events = [{"time": "2026-01-02T03:04:05+00:00", "event": e} for e in ("start", "end")]
    out.mkdir(parents=True)
    (out / "run.json").write_text(json.dumps(header))
    for name, lines in {
        "epochs": rows,
        "seconds": clocks,
        "events": events if ended else events[:1],
    }.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def _unit(unit: int, steps: int) -> dict[str, Any]:
    return {"unit": {"first": unit * steps, "stop": (unit + 1) * steps}, "steps": steps}


def _config(
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    batch: int | None,
    unit_steps: int | None,
    policy: dict[str, Any] | None,
    seed: int | None,
    made_up: bool,
) -> dict[str, Any]:
    optimizer = OptimizerConfig(name="SGD", lr=rows[0]["lr"], schedule="constant")
    found = config | {
        "seed": config["seed"] if seed is None else seed,
        "epochs": 0,
        "batch_size": batch,
        "unit_steps": unit_steps,
        "data": to_dict(DataConfig(name="own")),
        "model": to_dict(ModelConfig(name="Net")),
        "optimizer": to_dict(optimizer),
        "policy": policy or config["policy"],
    }
    if made_up:
        return found
    known = {"name": "SGD", "options": {"momentum": 0.5}, "lr": None, "schedule": None}
    return {key: found[key] for key in KNOWN if key in found} | {
        "epochs": None,
        "data": {"name": "own"},
        "model": {"name": "Net"},
        "optimizer": known,
    }


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """As if a process were writing the record."""
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
