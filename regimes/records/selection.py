"""Selecting runs by what their headers say (``--where optimizer.lr=0.4``), and what a command that
averages runs should say of them. No torch.

A command reads within `reading`; every `load_all` in it then gives the runs that were selected,
separated by experiment, and adds its `experiment.notes` to those of the command::

    with reading(["optimizer.lr=0.4"], say=True):
        ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from regimes.config import read_value
from regimes.console.stdout import escape_control
from regimes.errors import ConfigError, RecordError, nearest
from regimes.records.experiment import Fields, field_text, notes, separate

if TYPE_CHECKING:
    from regimes.records.reader import Record

_reading: ContextVar[tuple[tuple[str, ...], dict[str, None]] | None] = ContextVar(
    "reading", default=None
)


@contextlib.contextmanager
def reading(where: Sequence[str] = (), say: bool = False) -> Iterator[dict[str, None]]:
    """Let `load_all` select by ``where``; yields the sentences that it finds, as keys.

    Args:
        say: print them at the end.

    Raises:
        ConfigError: a condition that is not FIELD=VALUE.
    """
    for text in where:
        _parsed(text)
    said: dict[str, None] = {}
    token = _reading.set((tuple(where), said))
    try:
        yield said
    finally:  # of a command that refuses the runs, the notes say why
        _reading.reset(token)
        for sentence in said if say else ():
            print(f"note: {escape_control(sentence)}")


def gathered(runs: Iterable[Record], where: Sequence[str] = ()) -> list[Record]:
    """The runs that ``where`` and the command select, separated by experiment.

    Raises:
        RecordError: no run is left, an unknown field, or two runs of one experiment and seed.
    """
    asked, said = _reading.get() or ((), {})
    here = (where,) if isinstance(where, str) else where
    found = separate(select(runs, (*asked, *here)))
    said |= dict.fromkeys(notes(found))
    return found


def select(runs: Iterable[Record], where: Sequence[str]) -> list[Record]:
    """The runs whose header has each value, e.g. ``["optimizer.lr=0.4", "name=low"]``: a value as
    the configuration spells it, of a digest its beginning, "none" for a field without a value.

    Raises:
        ConfigError: a condition that is not FIELD=VALUE.
        RecordError: a field that no run has, or no run with the value.
    """
    left = list(runs)
    for text in [where] if isinstance(where, str) else where:
        field, value = _parsed(text)
        raw = text.partition("=")[2]
        tables = [{"name": run.config["name"], **run.said} for run in left]
        if left and not any(field in table for table in tables):
            known = dict.fromkeys(name for table in tables for name in table)
            raise RecordError(f"--where {text}: no run says {field!r}; {nearest(field, known)}")
        chosen = [
            run
            for run, table in zip(left, tables, strict=True)
            if _equal(field, table.get(field), value, raw) or (field == "name" and run.name == raw)
        ]
        if left and not chosen:
            there = ", ".join(dict.fromkeys(_shown(field, table) for table in tables))
            raise RecordError(f"--where {text}: no run has it; {field} is {there}")
        left = chosen
    return left


def _parsed(text: str) -> tuple[str, Any]:
    field, sign, value = text.partition("=")
    if not (sign and field and value):
        raise ConfigError(f"--where {text}: expected FIELD=VALUE, e.g. --where optimizer.lr=0.4")
    return field, read_value(value)


def _equal(field: str, found: Any, wanted: Any, raw: str) -> bool:
    if field.endswith("digest") and found is not None:
        return str(found).startswith(raw)
    same_kind = isinstance(found, bool) == isinstance(wanted, bool)  # 1 == True in Python
    return found == raw or (same_kind and found == wanted)


def _shown(field: str, table: Fields) -> str:
    return field_text(field, table.get(field))
