"""The units of a job in its saved state: by reference to the record, where there is one.

A policy may read every unit so far, so that without a record all units are saved. With one a
checkpoint does not grow with the job: the state of process 0 says how many lines the record's file
of units had and their digest, and has the units that were not written yet; the states of the other
processes have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes.base.errors import RegimesError
from regimes.collectives.processes import ProcessWorld
from regimes.job.fit_state import damage_as_error, refuse_state
from regimes.job.recorder import JobRecorder
from regimes.job.state import State
from regimes.records import Row
from regimes.records.chain import RunningDigest
from regimes.records.lines import complete_lines

_FILE = "epochs.jsonl"


def saved_units(
    rows: Sequence[Row], recorder: JobRecorder | None, elsewhere: bool
) -> dict[str, Any]:
    """Return the entries of a saved state for its units: "rows", and "recorded" if the record has
    some of them.

    Args:
        elsewhere: another process has the record.
    """
    count = len(rows)
    written = None if recorder is None else recorder.file_state
    if written is not None and recorder is not None:
        place = {"units": count, "folder": str(recorder.folder.resolve()), **written}
        return {"rows": rows[written["lines"] :], "recorded": place}
    return {"rows": [], "recorded": {"units": count}} if elsewhere else {"rows": rows}


def restore_units(saved: Any, world: ProcessWorld, recorder: JobRecorder | None) -> Any:
    """Return a saved state together with the units that it leaves to the record; all processes call
    this.

    Raises:
        ConfigError: on all processes: the record is gone, or has changed since; on this one: its
            state is of another unit than process 0's.
    """
    refers = isinstance(saved, Mapping) and "recorded" in saved
    if not any(world.gather_object(refers)):  # gathered: all take part in the next one, or none
        return saved
    found = world.gather_object(_read_units(saved, recorder) if world.rank == 0 else None)[0]
    if isinstance(found, str):
        refuse_state(found)
    if not refers:
        return saved
    with damage_as_error():
        if (units := saved["recorded"]["units"]) != len(found):
            refuse_state(
                f"it was saved after {units} units, the state of process 0 after {len(found)}"
            )
    return _without_reference(saved) | {"rows": found}


def with_recorded_units(state: State, recorder: JobRecorder | None) -> State:
    """Return the state of all processes with the units that it leaves to the record.

    Raises:
        ConfigError: the record is gone, or has changed since.
    """
    if "recorded" not in state:
        return state
    if isinstance(found := _read_units(state, recorder), str):
        refuse_state(found)
    return _without_reference(state) | {"rows": found}


def _without_reference(state: Mapping[str, Any]) -> State:
    return {key: value for key, value in state.items() if key != "recorded"}


def _read_units(saved: Any, recorder: JobRecorder | None) -> list[Any] | str:
    """All units, from process 0's saved state; or why they cannot be read, as a text, so that all
    processes raise it together."""
    try:
        place = saved.get("recorded", {})
        if "folder" not in place:
            return saved["rows"]
        expected = {"lines": place["lines"], "sha256": place["sha256"]}
        current = [] if recorder is None else [recorder.folder]  # first: the record may have moved
        for folder in (*current, Path(place["folder"])):
            lines = complete_lines(folder / _FILE)[: place["lines"]]
            if RunningDigest(line + b"\n" for line in lines).state == expected:
                return [*map(json.loads, lines), *saved["rows"]]
    except RegimesError as error:
        return str(error)
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        return f"it is damaged ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return (
        f"its first {place['lines']} units are in the record {place['folder']}, which is not there "
        "or has changed: put it back, or attach with record= the folder where it is now"
    )
