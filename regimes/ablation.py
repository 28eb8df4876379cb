"""The ``ablate`` command: run a grid's cells, say how it goes, print the table at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Column, Table

from regimes import launch, terminal
from regimes.errors import TrainingError
from regimes.presets import Grid
from regimes.progress import metric
from regimes.records import load, summary


def main(
    grid: Grid,
    seeds: list[int],
    out: Path,
    jobs: int,
    executor: str | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Run what is missing and print the table.

    Args:
        executor, options: see ``launch.submit``; None: ``jobs`` processes of this machine.

    Raises:
        TrainingError: some cells failed; all others are finished.
    """
    leader = int(os.environ.get("RANK", "0")) == 0
    console = terminal.console(quiet=not leader, highlight=False)
    cells = launch.cells(grid, seeds, out)
    todo = [cell for cell in cells if not launch.done(*cell)]
    terminal.tell(console, f"{len(cells)} runs in {out}, {len(cells) - len(todo)} already finished")
    start, ended = time.monotonic(), 0

    def progress(folder: Path, error: str | None) -> None:
        nonlocal ended
        ended += 1
        passed = time.monotonic() - start
        left = passed / ended * (len(todo) - ended)
        if error:
            said = f"failed: {error}"
        else:
            record = load(folder)
            floats = record.epochs["floats"].sum() / 1e6
            name, value = metric(record.header, record.epochs["metric"].iloc[-1])
            said = f"{name} {value}  {floats:.3f} M floats"
        place = folder.relative_to(out)
        terminal.tell(
            console,
            escape(f"[{ended}/{len(todo)}] {place}: {said}, {left / 60:.1f} min left"),
            soft_wrap=True,
        )

    if executor is None:
        failures = launch.ablate(todo, jobs, progress)
    else:
        failures = launch.submit(todo, out, executor, options or {}, progress)
    if failures:
        raise TrainingError(f"{len(failures)} of {len(todo)} runs failed; first: {failures[0]}")
    records = [load(folder) for folder, _ in cells]
    terminal.tell(console, as_table(summary(records), records[0].header["metric"]))


def means(runs: pd.DataFrame) -> pd.DataFrame:
    """`records.summary` over seeds: by schedule n, metric (mean) and its sd, the others' means."""
    return runs.groupby("name", sort=False).agg(
        n=("seed", "count"),
        metric=("metric", "mean"),
        sd=("metric", "std"),
        floats=("floats", "mean"),
        bytes=("bytes", "mean"),
        seconds=("seconds", "mean"),
    )


def as_table(runs: pd.DataFrame, metric: str = "accuracy") -> Table:
    """Per schedule: the metric (mean of the last three epochs, mean +- sd over seeds), floats."""
    unit, percent = (" %", 100) if metric == "accuracy" else ("", 1)
    table = Table(
        Column("schedule", no_wrap=True),
        "n", metric + unit, "floats (M)", "of low", "MB sent", "s per run",
        caption=f"{metric}: mean of the last 3 epochs, mean ± sd over seeds; "
        "floats: the paper's count; MB: by each worker",
    )  # fmt: skip
    rows = means(runs)
    low = rows["floats"].get("low")
    for name, row in rows.iterrows():
        spread = "" if pd.isna(row["sd"]) else f" ± {percent * row['sd']:.1f}"
        ratio = f"{row['floats'] / low:.2f}" if low else ""
        table.add_row(
            str(name), f"{row['n']:.0f}", f"{percent * row['metric']:.1f}{spread}",
            f"{row['floats'] / 1e6:.3f}", ratio, f"{row['bytes'] / 1e6:.2f}",
            f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table
