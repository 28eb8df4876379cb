"""The ``doctor`` of records: is each as it was written? By its files and their chain. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regimes.console.stdout import escape_control
from regimes.errors import RecordError
from regimes.monitor.watch import BUSY, state
from regimes.records import edited, find, load, opened

SICK = ("edited", "unreadable")


def check(places: Sequence[Path]) -> bool:
    """Print one line per record in or under folders and archives; are all as they were written?

    Raises:
        RecordError: a place without a record.
    """
    well = True
    for place in places:
        with opened(place) as root:
            runs = find(root)
            if not runs:
                raise RecordError(f"no run in or under {place}")
            for run in runs:
                name = str(place / run.relative_to(root))
                what, more = verdict(run)
                print(
                    escape_control(
                        f"{name}: {what}{'; ' * bool(more)}{more.replace(str(run), name)}"
                    )
                )
                well &= what not in SICK
    return well


def verdict(run: Path) -> tuple[str, str]:
    """(whole, running, starting, broken off, stopped, no chain, edited or unreadable; more)."""
    try:
        record = load(run)
        what, more = state(run, record.header, record.rows)
        why = edited(run, growing=what in BUSY)
    except RecordError as error:
        return "unreadable", str(error)
    if why:
        return "edited", why
    if not (run / "chain.jsonl").exists():
        return "no chain", f"{what}; of an earlier version, or its chain.jsonl was removed"
    return ("whole", "") if what == "finished" else (what, more)
