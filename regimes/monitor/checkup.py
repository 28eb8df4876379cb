"""The ``doctor`` command for records: is each as it was written, by its hash chain? No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regimes.console.stdout import escape_control
from regimes.errors import RecordError
from regimes.monitor.watch import ACTIVE, state
from regimes.records import find, find_edit, load, unpacked


def check(places: Sequence[Path]) -> bool:
    """Print one line per record in or under folders and archives; are all intact?

    Raises:
        RecordError: a place without a record.
    """
    intact = True
    for place in places:
        with unpacked(place) as root:
            runs = find(root)
            if not runs:
                raise RecordError(f"no run in or under {place}")
            for run in runs:
                name = str(place / run.relative_to(root))
                what, more = verdict(run)
                details = f"; {more.replace(str(run), name)}" if more else ""
                print(escape_control(f"{name}: {what}{details}"))
                intact &= what not in ("edited", "unreadable")
    return intact


def verdict(run: Path) -> tuple[str, str]:
    """(whole, running, starting, broken off, stopped, no chain, edited or unreadable; details)."""
    try:
        record = load(run)
        what, more = state(run, record.header, record.rows)
        why = find_edit(run, growing=what in ACTIVE)
    except RecordError as error:
        return "unreadable", str(error)
    if why:
        return "edited", why
    if not (run / "chain.jsonl").exists():
        return "no chain", f"{what}; of an earlier version, or its chain.jsonl was removed"
    return ("whole", "") if what == "finished" else (what, more)
