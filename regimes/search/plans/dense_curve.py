"""Reads the losses at which earlier trainings without compression ended: from a CSV file, records
or a mapping."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from regimes.base import inputs
from regimes.base.config import DENSE
from regimes.base.errors import ConfigError, require
from regimes.plotting.groups import tested_by
from regimes.records import Record, load_all

HOW = "expected lines of steps,loss, one for the end of each training without compression"


def read_curve(given: str | Path | Mapping[float, float]) -> dict[float, float]:
    """Read at what losses trainings without compression ended, by their steps, in the unit of
    figures.

    Of a record with a constant learning rate each test counts, as the end of a training so long;
    of others the last one alone, because a rate that falls later keeps the loss high before.

    Args:
        given: a CSV file of steps and losses; or a folder of records; or both by steps.

    Raises:
        ConfigError: no such numbers.
        RecordError: a record that is not finished, or damaged.
    """
    if isinstance(given, Mapping):
        points = [(float(steps), float(loss)) for steps, loss in given.items()]
    elif Path(given).suffix == ".csv":
        points = _read_csv(Path(given))
    else:
        points = [point for run in load_all(given) for point in _points_of_record(run)]
    by_steps: dict[float, list[float]] = {}
    for steps, loss in points:
        require(math.isfinite(steps) and steps > 0, "curve: steps", steps, "a number above 0")
        require(math.isfinite(loss), f"curve: loss after {steps:g} steps", loss, "a finite number")
        by_steps.setdefault(steps, []).append(loss)
    require(len(points) > 0, "curve", str(given), "one training or more")
    return {steps: statistics.fmean(by_steps[steps]) for steps in sorted(by_steps)}


def _read_csv(path: Path) -> list[tuple[float, float]]:
    inputs.add_input(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        heading = bool(rows) and re.match(r"\s*[-+.\d]", rows[0][0]) is None
        return [(float(row[0]), float(row[1])) for row in rows[heading:]]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--curve {path} cannot be read ({error}): {HOW}") from None
    except (ValueError, IndexError):
        raise ConfigError(f"--curve {path}: {HOW}, with a heading or without") from None


def _points_of_record(run: Record) -> list[tuple[float, float]]:
    run.check_finished()
    of_dense = (run.header.get("per_step") or {}).get(DENSE, {"bytes": 0})["bytes"]
    steps = sum(run.epochs["steps"])
    is_uncompressed = sum(row["bytes"] for row in run.rows) >= 0.99 * of_dense * steps
    none = "a training without compression"
    require(is_uncompressed, f"curve: {run.folder}", "compressed", none)
    metric, total, ends = tested_by(run), 0, list[tuple[float, float]]()
    for row in run.rows:
        total += row["steps"]
        if row["metric"] is not None:
            ends.append((total, metric.factor * row["metric"]))
    require(len(ends) > 0, "curve", str(run.folder), "a training that was tested")
    fell = run.rows[-1]["lr"] < max(row["lr"] for row in run.rows)
    return ends[-1:] if fell else ends
