"""What a policy has not done: a run may end well and have tested nothing. From the record alone,
without torch: the trainer's rows and those of the DDP hook alike."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from regimes.errors import RegimesError
from regimes.policies import REGISTRY, policy
from regimes.records import count_units

Row = dict[str, Any]


def inactivity_warnings(header: Row, rows: Sequence[Row]) -> list[str]:
    """One sentence for each way in which the policies of a run made no difference.

    A policy chose one level for everything in the whole run; its interval is as long as the run;
    or a decay of the learning rate decided most of the time, in place of the detector.
    """
    config = header["config"]
    compressed = [i for i, layer in enumerate(header["layers"]) if layer["compressed"]]
    found = []
    if len(rows) > 1 and compressed and config.get("policy"):
        levels = [[row["layers"]["level"][i] for i in compressed] for row in rows]
        why = [[row["layers"]["why"][i] for i in compressed] for row in rows]
        found += _said(header, rows, "policy", levels, why)
    for what in ("batch", "sync"):
        if len(rows) > 1 and config.get(f"{what}_policy"):
            whole = [row[what] for row in rows]
            levels, why = [[x["level"]] for x in whole], [[x["why"]] for x in whole]
            found += _said(header, rows, f"{what}_policy", levels, why)
    return found


def _said(
    header: Row,
    rows: Sequence[Row],
    where: str,
    levels: list[list[str]],
    why: list[list[Row | None]],
) -> list[str]:
    table, units = header["config"][where], len(levels)
    name, chosen, found = table["name"], {x for row in levels for x in row}, []
    if name == "static":
        return []
    interval = _interval(table)
    # the first comparison follows unit ``interval``; one after the last unit decides nothing
    compared = None if interval is None or interval < 2 else max(0, units - 2) // interval
    if compared == 0:
        found.append(
            f"{where}: {name} compares every {interval} units, and the run has {units}: it has "
            f"compared nothing. Set {where}.interval lower."
        )
    decays = sum(any(w and w.get("rule") == "lr decay" for w in row) for row in why)
    if decays > units / 2:
        found.append(
            f"{where}: the learning rate decayed before {decays} of {units} units, so that the "
            f"decay rule of {name} held nearly all the time. Set {where}.step_decay higher."
        )
    if len(chosen) == 1:
        found.append(
            f"{where}: {name} chose {chosen.pop()!r} for everything in all of "
            f"{count_units(header, rows)}: the run is one at a static level."
            + (
                f" It compares every {interval} units, here {compared} time{'s' * (compared > 1)}: "
                f"set {where}.interval lower to compare more often."
                if compared
                else ""
            )
        )
    return found


def _interval(table: Row) -> int | None:
    """Units between a policy's comparisons, if it has such a thing; of somebody's own class, which
    a reader does not import, as the table has it."""
    found = table.get("interval")
    if table["name"] in REGISTRY:
        with contextlib.suppress(RegimesError):  # a field of another version
            found = getattr(policy(table), "interval", None)
    return found if type(found) is int else None
