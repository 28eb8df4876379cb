"""How far a run has come and what one row stands for, from its header and rows alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from regimes.records.schema import Event, Header, Row


def is_complete(header: Header, rows: Sequence[Row]) -> bool:
    """Answer whether the run has trained all its units, or spent its budget of floats."""
    budget, wanted = header.get("budget"), number_of_units(header)
    spent = budget is not None and sum(row["floats"] for row in rows) >= budget
    return spent or (wanted is not None and len(rows) >= wanted)


def has_ended(events: Sequence[Event]) -> bool:
    """Answer whether the run has ended by itself since its last start or resume. A trainer writes
    the event "end" after its last checkpoint: a run that has all rows but not the event has no
    final weights."""
    kinds = ("start", "resume", "end", "stopped")
    return [event["event"] for event in events if event["event"] in kinds][-1:] == ["end"]


def number_of_units(header: Header) -> int | None:
    """Return the number of units (epochs, or of ``unit_steps`` steps) of a run; None for a user's
    own training of unknown length."""
    return header["units"] if "units" in header else header["config"]["epochs"]


def run_length(header: Header, rows: Sequence[Row]) -> int:
    """Return the number of units of a run; if unknown, of those it has trained."""
    wanted = number_of_units(header)
    return len(rows) if wanted is None else wanted


def count_units(header: Header, rows: Sequence[Row]) -> str:
    """Write the number of units: "24 epochs", "24 units of 50 steps"; "3 epochs so far" of an
    unknown number."""
    number, (word, _, rest) = run_length(header, rows), unit_name(header["config"]).partition(" ")
    counted = f"{number} {word}{'s' * (number != 1)} {rest}".rstrip()
    return f"{counted} so far" if number_of_units(header) is None else counted


def format_progress(header: Header, rows: Sequence[Row], of: str = "/") -> str:
    """Write how far a run has come: "3/24 epochs", or "3 epochs so far"; ``of`` stands between the
    numbers."""
    counted = count_units(header, rows)
    return counted if number_of_units(header) is None else f"{len(rows)}{of}{counted}"


def unit_name(config: Mapping[str, Any]) -> str:
    """Name what a row is: "epoch", or "unit of 50 steps"."""
    steps = config.get("unit_steps")
    return f"unit of {steps} steps" if steps else "epoch"


def run_name(config: Mapping[str, Any]) -> str:
    """Name a run by its schedule and seed, as it is called beside others: "low (1)"."""
    return f"{config['name']} ({config['seed']})"


class Exchanges(NamedTuple):
    """Counts how often the layers were exchanged in a unit.

    Attributes:
        dense: uncompressed, within ``start_compressing_after``.
        chosen: at the levels of its policy.
    """

    dense: int
    chosen: int


def count_exchanges(header: Header, row: Row) -> Exchanges:
    """Count the exchanges of a unit: one in each step, or in each round of local steps."""
    steps, sync = row["steps"], row.get("sync", {})
    rounds, period = sync.get("rounds", steps), sync.get("period", 1)
    first = row["unit"]["first"] if "unit" in row else row["epoch"] * steps
    until = header["config"].get("start_compressing_after") or 0  # at the usual batch size
    multiple = row.get("batch", {}).get("multiple", 1)
    begun, dense = first // multiple, max(-((first - until) // multiple), 0)  # steps
    if dense < steps:  # a round that ends later is compressed
        ended = (begun + dense) // period - begun // period
        return Exchanges(min(ended, rounds), rounds - min(ended, rounds))
    return Exchanges(rounds, 0)


def share_of_low(header: Header, rows: Sequence[Row]) -> float | None:
    """Divide the floats sent so far by the floats of low compression in the same steps; None if the
    run has no level "low"."""
    return sum_sent(rows).of_low(header)


def low_floats(header: Header) -> float:
    """Return the floats that a step at low compression sends; 0 if the run has no level "low"."""
    return header["per_step"]["low"]["floats"] if "low" in header["per_step"] else 0.0


class Sent(NamedTuple):
    """Counts what was sent in some rows, and in how many steps.

    Attributes:
        bytes: that one worker had for others.
        dense: bytes of the same without compression, in rows that have counted them.
        uncounted: steps of the other rows.
    """

    floats: float = 0
    steps: int = 0
    bytes: float = 0
    dense: float = 0
    uncounted: int = 0

    def after(self, row: Row) -> Sent:
        """Add what one more row has sent."""
        counted = row["collectives"].get("dense")
        return Sent(
            self.floats + row["floats"],
            self.steps + row["steps"],
            self.bytes + row["bytes"],
            self.dense + sum((counted or {}).values()),
            self.uncounted + (row["steps"] if counted is None else 0),
        )

    def dense_bytes(self, header: Header) -> float:
        """Return the bytes of the same steps without compression; 0 if they have nothing to send,
        or the record does not say."""
        cost = header["per_step"].get("dense", {"bytes": 0})["bytes"]  # in float32
        width = 2 if header["config"].get("dtype") == "float64" else 1
        return self.dense + cost * width * self.uncounted

    def of_dense(self, header: Header) -> float | None:
        """Divide the bytes by `dense_bytes`; None where these are 0."""
        dense = self.dense_bytes(header)
        return self.bytes / dense if dense else None

    def of_low(self, header: Header) -> float | None:
        """Divide the floats by the floats of low compression in the same steps; None if the run has
        no level "low"."""
        low = low_floats(header)
        return self.floats / (low * self.steps) if low and self.steps else None


def sum_sent(rows: Sequence[Row]) -> Sent:
    """Add up what was sent in all these rows."""
    return functools.reduce(Sent.after, rows, Sent())
