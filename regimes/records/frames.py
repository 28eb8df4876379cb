"""The lines of a record as two tables, of epochs and of layers. No torch; pandas imported late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from regimes.records.schema import Row

LOSSES = ("train_loss", "test_loss", "validation_loss")
NULLABLE = (*LOSSES, "metric", "validation_metric", "perplexity", "batch_size")
COMPUTED = ("seconds_", "total_")  # prefixes of columns that are no part of a row


def epochs(rows: Sequence[Row], seconds: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """One row per epoch; see `Record`."""
    import pandas as pd

    columns = logged(rows)
    table = pd.DataFrame(
        [
            _scalars(row)
            | {columns[name]: value for name, value in row.get("logged", {}).items()}
            | {f"seconds_{k}": v for k, v in seconds.get(row["epoch"], {}).items()}
            for row in rows
        ]
    )
    for name in {*NULLABLE, *columns.values()} & {*table}:
        if table[name].dtype == object:  # all null
            table[name] = table[name].astype(float)
    for name in ("floats", "bytes") if len(table) else ():
        table[f"total_{name}"] = table[name].cumsum()
    return table


def logged(rows: Sequence[Row]) -> dict[str, str]:
    """The further values that a user's training has logged: name to column of the epochs, which
    begins with "logged_" where another column has the name."""
    taken = {name for row in rows for name in _scalars(row)}
    names = dict.fromkeys(name for row in rows for name in row.get("logged", {}))
    return {
        name: f"logged_{name}" if name in taken or name.startswith(COMPUTED) else name
        for name in names
    }


def _scalars(row: Row) -> dict[str, Any]:
    """The single values of a row; a statistic of the model begins with "model_" where another value
    has its name."""
    plain: dict[str, Any] = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
    plain |= {f"lr_{i}": rate for i, rate in enumerate(row.get("group_lr") or ()) if i}
    model = {f"model_{k}" if k in plain else k: v for k, v in row.get("model", {}).items()}
    validation = {f"validation_{k}": v for k, v in row.get("validation", {}).items()}
    sync = row.get("sync", {})
    local = {k: sync.get(k) for k in ("period", "rounds")} if sync.get("level") else {}
    return plain | model | validation | local


def layers(names: Sequence[str], rows: Sequence[Row]) -> pd.DataFrame:
    """One row per epoch and layer; see `Record`."""
    import pandas as pd

    columns: dict[str, list[Any]] = {"layer": []}
    for done, row in enumerate(rows):
        epoch = [row["epoch"]] * len(names)
        added: dict[str, Any] = {
            "layer": names,
            **row["layers"],
            **row["statistics"],
            "epoch": epoch,
        }
        for name in [name for name in added if name not in columns]:
            columns[name] = [None] * (done * len(names))
        for name, column in columns.items():
            column += added.get(name, [None] * len(names))
    return pd.DataFrame(columns)
