"""Warnings about a run that has ended well: its policies made no difference, so that it has tested
nothing, or units had no finite gradient. No torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from regimes.base.errors import RegimesError
from regimes.policies import REGISTRY, make_policy
from regimes.records import Header, Row, count_units


def run_warnings(header: Header, rows: Sequence[Row]) -> list[str]:
    """Return one sentence for each way in which the policies of a run made no difference; first,
    that the gradients of whole units were not finite.

    A policy chose one level throughout; its interval is as long as the run; or decays of the
    learning rate decided most of the time, in place of the detector.
    """
    config, warnings = header["config"], list[str]()
    lost = [row["epoch"] for row in rows if 0 < row.get("steps", 0) <= row.get("skipped", 0)]
    if lost:
        warnings.append(
            f"no step of {len(lost)} of {len(rows)} units has finite gradients (NaN or infinity), "
            f"the first is unit {lost[0]}: has the training diverged?"
        )
    uncompressed = config.get("start_compressing_after") or 0
    steps = sum(row.get("steps", 0) for row in rows)
    if 0 < steps <= uncompressed:
        warnings.append(
            f"start_compressing_after = {uncompressed}: the run has {steps} steps, so none was "
            "compressed"
        )
    if len(rows) < 2:
        return warnings
    compressed = [i for i, layer in enumerate(header["layers"]) if layer["compressed"]]
    if compressed and config.get("policy"):
        layers = [row["layers"] for row in rows]
        units = [[(x["level"][i], x["why"][i]) for i in compressed] for x in layers]
        warnings += _of_policy(header, rows, "policy", units)
    for table in ("batch", "sync"):
        if config.get(f"{table}_policy"):
            columns: list[dict[str, Any]] = [dict(row)[table] for row in rows]
            units = [[(column["level"], column["why"])] for column in columns]
            warnings += _of_policy(header, rows, f"{table}_policy", units)
    return warnings


def _of_policy(
    header: Header,
    rows: Sequence[Row],
    where: str,
    decided: list[list[tuple[str, dict[str, Any] | None]]],
) -> list[str]:
    """The warnings for one policy, from the levels and reasons that it decided per unit."""
    table, units, warnings = header["config"][where], len(decided), list[str]()
    name, chosen = table["name"], {level for unit in decided for level, _ in unit}
    if name == "static":
        return []
    interval = _comparison_interval(table)
    # the first comparison follows unit ``interval``; one after the last unit decides nothing
    compared = None if interval is None or interval < 2 else max(0, units - 2) // interval
    if compared == 0:
        warnings.append(
            f"{where}: {name} compares every {interval} units, and the run has {units}: it has "
            f"compared nothing. Set {where}.interval lower."
        )
    decays = sum(any(w and w.get("rule") == "lr decay" for _, w in unit) for unit in decided)
    if decays > units / 2:
        warnings.append(
            f"{where}: the learning rate decayed before {decays} of {units} units, so that the "
            f"decay rule of {name} held nearly all the time. Set {where}.step_decay higher."
        )
    if len(chosen) == 1:
        more = f"It compares every {interval} units, here {compared} time{'s' * (compared != 1)}: "
        more += f"set {where}.interval lower to compare more often."
        warnings.append(
            f"{where}: {name} chose {chosen.pop()!r} for everything in all of "
            f"{count_units(header, rows)}: the run is one at a static level."
            + (f" {more}" if compared else "")
        )
    return warnings


def _comparison_interval(table: dict[str, Any]) -> int | None:
    """Units between a policy's comparisons, if it has such a field. A user's class, which a reader
    does not import, has what the table says."""
    interval = table.get("interval")
    if REGISTRY.knows(table["name"]):
        with contextlib.suppress(RegimesError):  # the table has a field of another version
            interval = getattr(make_policy(table), "interval", None)
    return interval if type(interval) is int else None
