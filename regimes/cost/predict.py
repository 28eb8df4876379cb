"""What runs and presets cost on a given network: ``regimes cost``. torch only for presets.

``regimes cost RUN ... --network 10Gbit/s,50us --workers 8`` reads records; ``regimes cost PRESET``
has none and measures. `regimes.cost.cases` makes work of both, `regimes.cost.network` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.config import DENSE, RunConfig
from regimes.console.stdout import console as new_console
from regimes.console.tables import Table
from regimes.cost.cases import Case, cases, measured
from regimes.cost.network import Network, spell
from regimes.cost.work import break_even
from regimes.errors import require
from regimes.records import load_all, mixed_circumstances, write_table

if TYPE_CHECKING:
    import pandas as pd

MOST = 10**9  # workers, and parts of a gradient
HEADS = ("", "compute", "compress", "network", "step", "s/{}", "× dense", "pays below")


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
                "seconds": epoch / steps,
                "epoch": epoch,
                "speed_up": base / epoch,
                "break_even": break_even(work * steps, whole, float(network.latency), *how[1:]),
            }
        )
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame, note: str = "", unit: str = "epoch") -> Table:
    """Milliseconds per step, legible at 80 columns.

    Args:
        unit: what the runs' epochs are, "epoch" or "unit".
    """
    lines: list[Sequence[str]] = []
    for kind, rows in frame.groupby("kind", sort=False):
        lines.append(({"level": "levels", "policy": "policies"}[str(kind)], *[""] * 7))
        for row in rows.to_dict("records"):
            parts = [
                f"{1e3 * row[k]:.3g}" for k in ("compute", "compress", "communicate", "seconds")
            ]
            lines.append(
                (
                    f" {row['case']}",
                    *parts,
                    f"{row['epoch']:.3g}",
                    f"{row['speed_up']:.2f}",
                    spell(row["break_even"]),
                )
            )
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
    for name, given in (("--workers", workers), ("--buckets", buckets)):
        good = given is None or 1 <= given <= MOST
        require(good, name, given, f"at least 1, at most {MOST}")
    runs = [] if config else load_all(*what)
    if config:
        workers = workers or config.workers
        found = measured(config, workers, steps)
    else:
        found = cases(runs, workers)
        workers = workers or runs[0].config["workers"]
    frame = predict(found, network, workers, algorithm, buckets)
    console = new_console(highlight=False)
    console.print(f"{workers} workers, {network}, {algorithm}; ms per step")
    unit = config.unit_steps if config else runs[0].config.get("unit_steps")
    shown = table(frame, unit="unit" if unit else "epoch")
    console.print(shown.drawn(padding=(0, 0, 0, 1)))
    for sentence in mixed_circumstances({"levels": runs} if runs else {}):
        console.print(f"note: {sentence}", markup=False)
    if csv:
        write_table(csv, frame)
    return frame
