"""Errors for users: one sentence each, with what is wrong, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 200  # letters of a value in a sentence


class RegimesError(Exception):
    """Is the base of every error that Regimes raises on purpose. The command line and the cell of a
    notebook print it without a traceback.
    """

    exit_code = 2

    def _render_traceback_(self) -> list[str]:  # IPython calls it
        return [f"{type(self).__name__}: {self}"]


class ConfigError(RegimesError):
    """Says that a configuration or an argument cannot be used."""


class CallError(ConfigError, TypeError):
    """Says that a call lacks an argument that a function needs, or has one that it does not
    have."""


class DataError(RegimesError):
    """Says that a data set is missing, corrupt or too small."""


class RecordError(RegimesError):
    """Says that a record or checkpoint cannot be read, written or continued."""


class LackingError(RecordError):
    """Says that records lack a schedule or a statistic that a figure needs."""


class FolderInUse(RecordError):
    """Says that another process writes to the folder of a record."""


class TrainingError(RegimesError):
    """Says that a run cannot go on, because of a loss that is not finite or a lost process. Its
    record is intact.
    """

    exit_code = 3


MANY = 24  # an error lists no more names than this


def suggest_nearest(word: str, known: Iterable[str], listed: str = "") -> str:
    """Write a hint for a misspelt name: the nearest known one, and all of them where they are few.

    Args:
        listed: the command that lists them where they are many.
    """
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]!r}? " if match else ""
    if listed and len(known) > MANY:
        return f"{hint}{listed} lists all {len(known)}."
    return f"{hint}Known: {', '.join(known)}."


def unexpected_value(field: str, value: object, expected: str) -> ConfigError:
    """Make the error for a field with a value that is not allowed."""
    text = repr(value)
    if "\n" in text:  # a model's, say
        text = " ".join(text.split())
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return ConfigError(f"{field} = {shown}: expected {expected}")


def is_integer(value: object, low: int) -> bool:
    """Answer whether it is a whole number from ``low`` up. A bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Raise ConfigError for a field unless the condition holds."""
    if not condition:
        raise unexpected_value(field, value, expected)
