"""The lines of a record as two tables: one of its epochs, one of its layers. No torch; pandas is
imported late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
NULLABLE = (
    "train_loss",
    "test_loss",
    "metric",
    "perplexity",
    "validation_loss",
    "validation_metric",
    "batch_size",
)
MADE = ("seconds_", "total_")  # how columns begin that are no part of a row


def epochs(rows: Sequence[Row], seconds: dict[int, Row]) -> pd.DataFrame:
    """One row per epoch; see `Record`."""
    import pandas as pd

    columns = logged(rows)
    flat = [
        _scalars(row)
        | {columns[name]: value for name, value in row.get("logged", {}).items()}
        | {f"seconds_{k}": v for k, v in seconds.get(row["epoch"], {}).items()}
        for row in rows
    ]
    found = pd.DataFrame(flat)
    for name in {*NULLABLE, *columns.values()} & {*found}:
        if found[name].dtype == object:  # all null: not said, or not finite
            found[name] = found[name].astype(float)
    for name in ("floats", "bytes") if len(found) else ():
        found[f"total_{name}"] = found[name].cumsum()
    return found


def logged(rows: Sequence[Row]) -> dict[str, str]:
    """What a user's own training has logged besides losses and metric: its name, and its column
    among the epochs', which begins with "logged_" where the name is another column's."""
    taken = {name for row in rows for name in _scalars(row)}
    names = dict.fromkeys(name for row in rows for name in row.get("logged", {}))
    return {
        name: f"logged_{name}" if name in taken or name.startswith(MADE) else name for name in names
    }


def _scalars(row: Row) -> Row:
    """What a row says of the model in single values; "model_" stands before a statistic whose name
    is another value's."""
    plain = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
    plain |= {f"lr_{i}": rate for i, rate in enumerate(row.get("group_lr") or ()) if i}
    model = {f"model_{k}" if k in plain else k: v for k, v in row.get("model", {}).items()}
    held = {f"validation_{k}": v for k, v in row.get("validation", {}).items()}
    sync = row.get("sync", {})
    late = {k: sync.get(k) for k in ("period", "rounds")} if sync.get("level") else {}
    return plain | model | held | late


def layers(names: Sequence[str], rows: Sequence[Row]) -> pd.DataFrame:
    """One row per epoch and layer; see `Record`."""
    import pandas as pd

    columns: dict[str, list[Any]] = {"layer": []}
    for done, row in enumerate(rows):
        found = {
            "layer": names,
            **row["layers"],
            **row["statistics"],
            "epoch": [row["epoch"]] * len(names),
        }
        for name in [name for name in found if name not in columns]:
            columns[name] = [None] * (done * len(names))
        for name, column in columns.items():
            column += found.get(name, [None] * len(names))
    return pd.DataFrame(columns)
