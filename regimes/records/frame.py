"""All runs of a folder in one table."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import ConfigError, RecordError, require
from regimes.records.archive import load_all
from regimes.records.files import check_output, write_output
from regimes.records.reader import OF_RUN

if TYPE_CHECKING:
    import pandas as pd


@check_arguments(error=RecordError)
def frame(*folders: str | Path, where: Sequence[str] = (), layers: bool = False) -> pd.DataFrame:
    """Puts the epochs of all runs into one table.

    >>> frame("data/reference/smoke-resnet8.tar.xz")[["schedule", "seed", "epoch"]].shape[1]
    3

    Args:
        folders: Folders of runs, or archives that ``regimes pack`` wrote.
        where: Only runs for which this holds, such as ``["optimizer.lr=0.4"]``.
        layers: One row per run, epoch and layer (`Record.layers`), in place of one per run and
            epoch (`Record.epochs`).

    Returns:
        A table with the columns "schedule" and "seed", and the columns of the runs' tables. A value
        that a run lacks is nan.

    Raises:
        ConfigError: no folder is given.
        RecordError: there is no run, a run is damaged, or two runs have one experiment and seed.
    """
    require(bool(folders), "folders", folders, "one or more")
    import pandas as pd

    runs = load_all(*folders, where=where)
    tables = [(run.layers if layers else run.epochs) for run in runs]
    named = [
        table.assign(schedule=run.name, seed=run.seed)
        for run, table in zip(runs, tables, strict=True)
    ]
    # A run that has no row yet lacks columns; for them pandas would make floats of whole numbers.
    joined = pd.concat([x for x in named if len(x)] or named, ignore_index=True)
    return joined[[*OF_RUN, *(name for name in joined if name not in OF_RUN)]]


def write_frame(table: pd.DataFrame, out: Path) -> None:
    """Write a table as ``.csv`` or ``.parquet``, as the file's name says; numbers in full.

    Raises:
        ConfigError: another name, or Parquet without the package pyarrow.
        RecordError: it cannot be written.
    """
    check_output(out)
    if out.suffix == ".csv":
        write_output(out, table.to_csv(index=False, lineterminator="\n"))
        return
    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: expected a name that ends with .csv or .parquet")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"--out {out}: Parquet needs the package pyarrow: pip install pyarrow, or write .csv"
        ) from None
    plain = table.copy()
    for name in plain:  # reasons and the like: tables, which differ from row to row
        if plain[name].map(lambda value: isinstance(value, dict | list)).any():
            plain[name] = plain[name].map(
                lambda value: None if value is None else json.dumps(value)
            )
    buffer = io.BytesIO()
    plain.to_parquet(buffer, index=False)
    write_output(out, buffer.getvalue())
