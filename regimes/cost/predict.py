"""``regimes cost``: predicted seconds of recorded runs, or of a preset, which is timed here.

torch only for presets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from regimes.base.config import DENSE, RunConfig
from regimes.base.console.stdout import make_console as new_console
from regimes.base.console.tables import Table
from regimes.base.errors import require
from regimes.cost.cases import Case, make_cases, measure_cases
from regimes.cost.network import Network, break_even, format_bandwidth
from regimes.records import load_all, mixed_circumstances, write_table

MOST = 10**9  # workers, and parts of a gradient: more is a slip
HEADS = ("", "compute", "compress", "network", "step", "s/{}", "× dense", "pays below")


def predict_seconds(
    cases: Sequence[Case], network: Network, workers: int, algorithm: str = "ring", buckets: int = 1
) -> pd.DataFrame:
    """Make a table with one row per case: seconds per step (compute, compress, communicate, and
    ``seconds``, less than their sum where they overlap), of the mean step where levels change;
    steps and seconds per whole epoch or unit, its speed-up over a dense one of the same samples,
    and the bandwidth (bits/s) below which it is faster, ``break_even``."""
    how = (network, workers, algorithm, buckets)
    dense = next(case for case in cases if case.name == DENSE and not case.runs)
    dense_steps, dense_work = dense.epochs[0]  # a level has one whole epoch
    dense_epoch = dense_work * dense_steps
    dense_seconds = dense_steps * float(dense_work.seconds(*how))
    latency = float(network.latency)
    rows = []
    for case in cases:
        # a policy's epochs differ in steps and work: sums over all, per epoch's worth of samples
        work, epochs = case.work, case.dense_steps / dense_steps
        steps = sum(n for n, _ in case.epochs) / epochs
        seconds = sum(n * float(w.seconds(*how)) for n, w in case.epochs) / epochs
        rows.append(
            {
                "kind": "policy" if case.runs else "level",
                "case": case.name,
                "runs": case.runs,
                "steps_per_epoch": steps,
                "bytes_per_step": sum(work.bytes.values()),
                "compute": work.compute,
                "compress": work.compress,
                "communicate": float(work.communicate(*how)),
                "seconds": seconds / steps,
                "epoch": seconds,
                "speed_up": dense_seconds / seconds,
                "break_even": break_even(work * steps, dense_epoch, latency, *how[1:]),
            }
        )
    return pd.DataFrame(rows)


def _format_table(frame: pd.DataFrame, note: str = "", unit: str = "epoch") -> Table:
    """Milliseconds per step, legible at 80 columns.

    Args:
        unit: the name of the runs' unit, "epoch" or "unit".
    """
    lines: list[Sequence[str]] = []
    for kind, rows in frame.groupby("kind", sort=False):
        lines.append(("levels" if kind == "level" else "policies", *[""] * 7))
        for row in rows.to_dict("records"):
            names = ("compute", "compress", "communicate", "seconds")
            numbers = [f"{1e3 * row[name]:.3g}" for name in names]
            numbers += [
                f"{row['epoch']:.3g}",
                f"{row['speed_up']:.2f}",
                format_bandwidth(row["break_even"]),
            ]
            lines.append((f" {row['case']}", *numbers))
    return Table([head.format(unit) for head in HEADS], lines, note)


def main(
    what: Sequence[str],
    config: RunConfig | None,
    network: Network,
    workers: int | None,
    *,
    algorithm: str = "ring",
    buckets: int = 1,
    steps: int = 5,
    csv: Path | None = None,
) -> pd.DataFrame:
    """Print the table for runs, or for a configuration where there are none yet.

    Args:
        what: runs, folders or archives of runs; unused with a configuration.
        csv: file for the numbers in full precision.
    """
    for name, count in (("--workers", workers), ("--buckets", buckets)):
        good = count is None or 1 <= count <= MOST
        require(good, name, count, f"at least 1, at most {MOST}")
    runs = [] if config else load_all(*what)
    if config:
        workers, unit = workers or config.workers, config.unit_steps
        work = measure_cases(config, workers, steps)
    else:
        work = make_cases(runs, workers)
        workers, unit = workers or runs[0].config["workers"], runs[0].config.get("unit_steps")
    frame = predict_seconds(work, network, workers, algorithm, buckets)
    if csv:  # before anything is printed: the pipe may be closed
        write_table(csv, frame)
    console = new_console(highlight=False)
    console.print(f"{workers} workers, {network}, {algorithm}; ms per step")
    result = _format_table(frame, unit="unit" if unit else "epoch")
    console.print(result.drawn(padding=(0, 0, 0, 1)))
    for case in work:
        if case.uncompressed:
            why = "because it would not send less of them"
            console.print(
                f"note: layers sent whole at {case.name}: {case.uncompressed}, {why}", markup=False
            )
    for sentence in mixed_circumstances({"levels": runs} if runs else {}):
        console.print(f"note: {sentence}", markup=False)
    return frame
