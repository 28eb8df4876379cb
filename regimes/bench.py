"""The detector bench: detectors named on the command line, replayed over runs, in tables.

``regimes detect RUN ... --detectors norm-change:interval=3 fixed-windows:windows=[[0,6]]``; from
Python ``bench(runs, ["norm-change:interval=3"])``. Several runs of one schedule are its seeds:
means with 95 % t intervals over them. No torch; pandas and rich are imported late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.agreement import interval
from regimes.errors import RecordError
from regimes.records import Record, find, load, write_table
from regimes.replay import Comparison, compare
from regimes.spelt import defaults, labels, rule
from regimes.terminal import console as new_console

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

NUMBERS = {
    "detectors": ("critical", "floats", "of_low", "seconds_per_epoch", "share_of_training"),
    "pairs": ("jaccard", "kappa", "lag", "best"),
}
KEYS = {"detectors": ["schedule", "detector"], "pairs": ["schedule", "a", "b", "granularity"]}


# -- over the runs ---------------------------------------------------------------------------


def read(places: Iterable[str | Path]) -> list[Record]:
    """The runs in or under several folders, each once.

    Raises:
        RecordError: a folder without a run, or two runs of one schedule and seed.
    """
    found: dict[tuple[str, int], Record] = {}
    for place in places:
        folders = find(place)
        if not folders:
            raise RecordError(f"no run in or under {place}")
        for run in map(load, folders):
            other = found.setdefault((run.name, run.seed), run)
            if other.folder.resolve() != run.folder.resolve():
                raise RecordError(
                    f"{other.folder} and {run.folder} are both {run.name!r} runs of seed "
                    f"{run.seed}: give one of them"
                )
    if not found:
        raise RecordError("name at least one run, or a folder of runs")
    return list(found.values())


def bench(runs: Sequence[Record], texts: Sequence[str] = ()) -> Comparison:
    """Replay detectors over every run; the frames gain the columns schedule and seed.

    Args:
        texts: see ``spelt.parse``; default ``defaults(runs)``.

    Raises:
        ConfigError: a text that names no detector.
        RecordError: a run lacks a detector's signal.
    """
    import pandas as pd

    names = labels(texts or defaults(runs))
    each = []
    for run in runs:
        one = compare(run, {short: rule(text, run) for text, short in names.items()})
        each.append((run, one))

    def joined(part: str) -> pd.DataFrame:
        frames = []
        for run, one in each:
            frame: pd.DataFrame = getattr(one, part).copy()
            frame.insert(0, "schedule", run.name)
            frame.insert(1, "seed", run.seed)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    notes = tuple(dict.fromkeys(note for _, one in each for note in one.notes))
    return Comparison(joined("detectors"), joined("pairs"), joined("epochs"), notes)


def over_seeds(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """Per schedule and detector (or pair): n and, per number, mean and 95 % t interval.

    A detector's number that one seed lacks is undefined (nan). Of a pair's, the seeds where it is
    undefined are left out; ``NUMBER_n`` says how many were not.
    """
    import pandas as pd

    rows = []
    for key, group in frame.groupby(KEYS[part], sort=False):
        row: dict[str, Any] = dict(zip(KEYS[part], key, strict=True)) | {"n": len(group)}
        for name in NUMBERS[part]:
            values = group[name].dropna().tolist()
            whole = bool(values) and (part == "pairs" or len(values) == len(group))
            mean, low, high = interval(values) if whole else (math.nan,) * 3
            row |= {name: mean, f"{name}_low": low, f"{name}_high": high, f"{name}_n": len(values)}
        rows.append(row)
    return pd.DataFrame(rows)


# -- what is shown ---------------------------------------------------------------------------


def _cell(row: Any, name: str, digits: int = 2, times: float = 1) -> str:
    """Mean ± half the interval; a dash where it is undefined."""
    mean, high = times * row[name], times * row[f"{name}_high"]
    if math.isnan(mean):
        return "-"
    spread = "" if math.isnan(high) else f" ± {high - mean:.{digits}f}"
    return f"{mean:.{digits}f}{spread}"


def tables(result: Comparison) -> list[Table]:
    """Two tables per schedule, legible at 80 columns."""
    from rich.table import Column, Table

    shown = []
    one, two = over_seeds(result.detectors, "detectors"), over_seeds(result.pairs, "pairs")
    for schedule, rows in one.groupby("schedule", sort=False):
        n = rows["n"].iloc[0]
        title = f"{schedule}, {n} seed{'s' if n > 1 else ''}"
        heads = ("critical %", "of low", "s / epoch", "% of training")
        table = Table(Column("detector", overflow="fold"),
                      *(Column(h, justify="right", no_wrap=True) for h in heads),
                      title=title, box=None, title_justify="left", pad_edge=False)  # fmt: skip
        for row in rows.to_dict("records"):
            table.add_row(
                row["detector"], _cell(row, "critical", 0, 100), _cell(row, "of_low"),
                _cell(row, "seconds_per_epoch", 3), _cell(row, "share_of_training", 1, 100),
            )  # fmt: skip
        shown.append(table)
        heads = ("by", "Jaccard", "kappa", "lag")
        table = Table(*(Column(h, overflow="fold") for h in ("detector", "beside")),
                      *(Column(h, justify="right", no_wrap=True) for h in heads),
                      box=None, pad_edge=False)  # fmt: skip
        for row in two[two["schedule"] == schedule].to_dict("records"):
            by = "layer" if "layer" in row["granularity"] else "epoch"
            table.add_row(row["a"], row["b"], by, _cell(row, "jaccard"), _cell(row, "kappa"),
                          _cell(row, "lag", 1))  # fmt: skip
        shown += [table] if len(table.rows) else []
    return shown


EXPLAINED = (
    "critical: share of epochs (and layers). of low: traffic over low compression throughout. "
    "s / epoch, % of training: what the signal costs, beside compute, compression and "
    "communication. by: epoch and layer, or epoch (a detector per layer is critical when at least "
    "half of the layers are). lag: epochs by which the second follows the first. "
    "±: 95 % t interval over seeds. -: undefined."
)


def main(places: Sequence[Path], texts: Sequence[str], out: Path | None) -> Comparison:
    """Print the tables; with ``out`` also write detectors.csv, pairs.csv and epochs.csv.

    Raises:
        ConfigError, RecordError: one sentence.
    """
    runs = read(places)
    result, console = bench(runs, texts), new_console(highlight=False)
    for table in tables(result):
        console.print(table, "")
    console.print(EXPLAINED, *result.notes[:1], sep="\n", style="dim", markup=False)
    if out:
        console.print(*map(str, write(result, out)), sep="\n")
    return result


def write(result: Comparison, out: Path) -> list[Path]:
    """The numbers in full precision: over seeds, and per run and epoch.

    Raises:
        RecordError: the folder cannot be written.
    """
    frames = {
        "detectors": over_seeds(result.detectors, "detectors"),
        "pairs": over_seeds(result.pairs, "pairs"),
        "epochs": result.epochs,
    }
    for name, frame in frames.items():
        write_table(out / f"{name}.csv", frame)
    return [out / f"{name}.csv" for name in frames]
