"""The ``ablate`` command: run a grid's cells, print the progress and the final table."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regimes.base.config import to_dict
from regimes.base.console import stdout
from regimes.base.errors import TrainingError
from regimes.collectives.launcher import read_launch
from regimes.plotting.text import metric_text
from regimes.presets import Grid
from regimes.records import load, separate_experiments, sibling_difference, write_notes
from regimes.search import cluster, sweep


def run_ablation(
    grid: Grid,
    seeds: list[int],
    out: Path,
    jobs: int,
    executor: str | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Run what is missing of a grid, and print the table.

    Args:
        executor, options: see ``cluster.submit_ablation``; None: ``jobs`` processes of this
            machine.
    """
    console = stdout.make_console(quiet=read_launch().rank > 0, highlight=False, markup=False)
    show = functools.partial(stdout.try_print, on=console)
    cells = sweep.list_cells(grid, seeds, out)
    todo = [cell for cell in cells if not sweep.is_finished(*cell)]
    sweep.check_configs({folder.parent: config for folder, config in todo}.values())
    show(f"{len(cells)} runs in {out}, {len(cells) - len(todo)} already finished")
    for folder, config in {cell[0].parent: cell for cell in todo}.values():
        if note := sibling_difference(to_dict(config), folder):
            show(f"note: {note}")
    progress = _progress(show, out, len(todo))
    if executor is None:
        failures = sweep.ablate(todo, jobs, progress)
    else:
        failures = cluster.submit_ablation(todo, out, executor, options or {}, progress)
    if failures:
        raise TrainingError(f"{len(failures)} of {len(todo)} runs failed; first: {failures[0]}")
    if others := [folder for folder, config in cells if not sweep.is_finished(folder, config)]:
        show(
            f"{len(others)} runs are trained by another process: start the same command again when "
            "it has ended, for the table"
        )
        return
    from regimes.plotting.schedules import (  # pandas, so late
        differences_between,
        tabulate_schedules,
    )

    runs = separate_experiments(load(folder) for folder, _ in cells)
    summary = tabulate_schedules(runs)
    note = (
        f"{summary.metric.name}: mean of the last 3 epochs, mean ± sd over seeds; "
        "floats: the paper's count; bytes: sent by each worker"
    )
    columns = ("n", "metric", "floats", "of_base", "bytes", "seconds")
    show(summary.table(columns, note).drawn())
    if differences := differences_between(runs):
        show("", differences.drawn())
    for sentence in write_notes(runs):
        show(f"note: {sentence}")


def _progress(show: Callable[[str], None], out: Path, runs: int) -> sweep.Progress:
    """Shows the result of each run as it ends, and the time left for the others."""
    start, counter = time.monotonic(), itertools.count(1)

    def progress(folder: Path, error: str | None) -> None:
        ended = next(counter)
        left = (time.monotonic() - start) / ended * (runs - ended)
        if isinstance(error, sweep.InUse):
            result = f"left out: {error}"
        elif error:
            result = f"failed: {error}"
        else:
            record = load(folder)
            name, value = metric_text(record.header, record.epochs["metric"].iloc[-1])
            result = f"{name} {value}  {record.epochs['floats'].sum() / 1e6:.3f} M floats"
        place = f"[{ended}/{runs}] {folder.relative_to(out)}"
        show(f"{place}: {result}, {left / 60:.1f} min left")

    return progress
