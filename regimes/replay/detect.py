"""``regimes detect``: detectors replayed over runs, in tables. No torch; pandas is imported late.

From Python: ``bench(runs, ["norm-change:interval=3"])``. Several runs of one schedule are its
seeds: means with 95 % t intervals over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.console.stdout import console as new_console
from regimes.console.tables import Table
from regimes.errors import RecordError
from regimes.records import Record, load_all, separate, write_table
from regimes.replay.compare import Comparison, compare
from regimes.replay.spelling import defaults, labels, rule
from regimes.statistics import t_interval

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = {
    "detectors": ("critical", "floats", "of_low", "seconds_per_epoch", "share_of_training"),
    "pairs": ("jaccard", "kappa", "lag", "best"),
}
WORD = 18  # letters: two columns of such words and the numbers fit in 80
KEYS = {"detectors": ["schedule", "detector"], "pairs": ["schedule", "a", "b", "granularity"]}


def read(places: Iterable[str | Path]) -> list[Record]:
    """The runs in or under several folders or archives; a folder named twice is read once.

    Raises:
        RecordError: a folder without a run, or a run that two of the folders hold.
    """
    places = list(dict.fromkeys(Path(place).resolve() for place in places))
    if not places:
        raise RecordError("name at least one run, or a folder of runs")
    return load_all(*places)


def bench(runs: Sequence[Record], texts: Sequence[str] = ()) -> Comparison:
    """Replay detectors over every run; the frames gain the columns schedule and seed.

    Args:
        texts: see ``spelling.parse``; default ``defaults(runs)``.
    """
    import pandas as pd

    runs = separate(runs)
    names = labels(texts or defaults(runs))
    parts: dict[str, list[pd.DataFrame]] = {"detectors": [], "pairs": [], "epochs": []}
    notes: dict[str, None] = {}
    for run in runs:
        compared = compare(run, {short: rule(text, run) for text, short in names.items()})
        notes |= dict.fromkeys(compared.notes)
        for part, frames in parts.items():
            frames.append(getattr(compared, part).copy())
            frames[-1].insert(0, "schedule", run.name)
            frames[-1].insert(1, "seed", run.seed)
    joined = {part: pd.concat(frames, ignore_index=True) for part, frames in parts.items()}
    return Comparison(**joined, notes=tuple(notes))


def over_seeds(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """Per schedule and detector (or pair): n and, per number, mean and 95 % t interval (of three
    seeds or more).

    A detector's number is undefined (nan) if one seed lacks it; a pair's leaves such seeds out, and
    ``NUMBER_n`` is the count of the others.
    """
    import pandas as pd

    rows = []
    for key, group in frame.groupby(KEYS[part], sort=False):
        row: dict[str, Any] = dict(zip(KEYS[part], key, strict=True)) | {"n": len(group)}
        for name in NUMBERS[part]:
            values = group[name].dropna().tolist()
            defined = bool(values) and (part == "pairs" or len(values) == len(group))
            mean, low, high = t_interval(values) if defined else (math.nan,) * 3
            row |= {name: mean, f"{name}_low": low, f"{name}_high": high, f"{name}_n": len(values)}
        rows.append(row)
    return pd.DataFrame(rows)


def _cell(row: Any, name: str, digits: int = 2, times: float = 1) -> str:
    """Mean ± half the interval; a dash where it is undefined."""
    mean, high = times * row[name], times * row[f"{name}_high"]
    if math.isnan(mean):
        return "-"
    spread = "" if math.isnan(high) else f" ± {high - mean:.{digits}f}"
    return f"{mean:.{digits}f}{spread}"


COLUMNS = {  # of the first table: (number, digits, factor)
    "critical %": ("critical", 0, 100),
    "of low": ("of_low", 2, 1),
    "s / epoch": ("seconds_per_epoch", 3, 1),
    "% of training": ("share_of_training", 1, 100),
}
PAIR_COLUMNS = {"Jaccard": ("jaccard", 2, 1), "kappa": ("kappa", 2, 1), "lag": ("lag", 1, 1)}


def tables(result: Comparison) -> list[Table]:
    """Two tables per schedule, legible at 80 columns; no second one for a single detector."""
    shown = []
    pairs = over_seeds(result.pairs, "pairs").to_dict("records")
    detectors = over_seeds(result.detectors, "detectors")
    for schedule, rows in detectors.groupby("schedule", sort=False):
        n = rows["n"].iloc[0]
        lines: list[Sequence[str]] = [
            (row["detector"], *(_cell(row, *column) for column in COLUMNS.values()))
            for row in rows.to_dict("records")
        ]
        title = f"{schedule}, {n} seed{'s' if n > 1 else ''}"
        shown.append(Table(("detector", *COLUMNS), lines, title=title))
        lines = []
        for row in pairs:
            if row["schedule"] == schedule:
                by = "layer" if "layer" in row["granularity"] else "epoch"
                numbers = (_cell(row, *column) for column in PAIR_COLUMNS.values())
                lines.append((row["a"], row["b"], by, *numbers))
        if lines:
            shown.append(Table(("detector", "beside", "by", *PAIR_COLUMNS), lines, texts=2))
    return shown


EXPLAINED = (
    "critical: share of epochs (and layers). of low: traffic over low compression throughout. "
    "s / epoch, % of training: what the signal costs, beside compute, compression and "
    "communication. by: epoch and layer, or epoch (a detector per layer is critical when at least "
    "half of the layers are). lag: epochs by which the second follows the first. "
    "±: 95 % t interval over seeds, of three or more. -: undefined."
)


def main(places: Sequence[Path], texts: Sequence[str], out: Path | None) -> Comparison:
    """Print the tables; with ``out`` also write detectors.csv, pairs.csv and epochs.csv."""
    result, console = bench(read(places), texts), new_console(highlight=False)
    for table in tables(result):
        console.print(table.drawn(word=WORD, padding=(0, 1, 0, 0)), "")
    console.print(EXPLAINED, *result.notes[:1], sep="\n", style="dim", markup=False)
    if out:
        console.print(*map(str, write(result, out)), sep="\n")
    return result


def write(result: Comparison, out: Path) -> list[Path]:
    """The numbers in full precision: over seeds, and per run and epoch."""
    frames = {
        "detectors": over_seeds(result.detectors, "detectors"),
        "pairs": over_seeds(result.pairs, "pairs"),
        "epochs": result.epochs,
    }
    for name, frame in frames.items():
        write_table(out / f"{name}.csv", frame)
    return [out / f"{name}.csv" for name in frames]
