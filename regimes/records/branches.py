"""Rows of a branch: its trunk's, by reference, and its own. No torch.

A branch is a run that continues another, its trunk, from the start of unit ``at``
(``config.branch``). Its files have its own rows alone, from epoch ``at`` on. The header says by
which digests the trunk's files began when the branch was made (``trunk.files``, as in `chain`);
readers compare them, so that a branch is never read with the rows of another run. A trunk may be a
branch itself; its first unit is then earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from regimes.base.config.convert import flatten_table
from regimes.base.errors import RecordError
from regimes.records.chain import RunningDigest
from regimes.records.fields import STORAGE, Fields, is_circumstance, resolve_config
from regimes.records.lines import branch_table, complete_lines, parse_line, read_header
from regimes.records.lines import read_lines as read_own_lines
from regimes.records.schema import FileState, Header, Row, Trunk, row_fault

Lines = list[dict[str, Any]]
Read = Callable[[Path], Lines]
Config = Mapping[str, Any]  # plain
SHARED = ("epochs.jsonl", "instruments.jsonl")  # the trunk's files that a branch has digests of


def first_unit(header: Header) -> int:
    """Return the first unit that a record has a row of its own for."""
    return (header["config"].get("branch") or {}).get("at", 0)


def trunk_of(folder: Path) -> Path | None:
    """Finds the folder of the run from which a branch started; None if ``folder`` has no branch."""
    return _find_trunk(folder, branch_table(folder))


def _find_trunk(folder: Path, branch: Config | None) -> Path | None:
    """The folder of the trunk that ``branch`` (``config.branch``, if there is one) names."""
    of = (branch or {}).get("of")
    return None if of is None else locate_trunk(folder, of)


def locate_trunk(folder: Path, of: str) -> Path:
    """Find the folder of a trunk, from its path as a branch's configuration has it; RecordError for
    an absolute path."""
    if os.path.isabs(of):
        raise RecordError(f"{folder}: branch.of is {of!r:.60}, expected a path from there")
    real = os.path.realpath(folder)  # where it is, if ``folder`` is a link: the path is from there
    base = folder if real == os.path.abspath(folder) else Path(real)
    return Path(os.path.normpath(base / of))


def trunk_reference(trunk: Path, folder: Path) -> str:
    """Write the path of a trunk from a branch's folder."""
    return Path(os.path.relpath(os.path.realpath(trunk), os.path.realpath(folder))).as_posix()


def read_rows(folder: Path, header: Header, read: Read | None = None) -> list[Row]:
    """Read the rows of a run, a branch's trunk included; the last row of the trunk has the branch's
    rate as its ``next_lr``.

    Args:
        read: a cache of `read_lines`; default none.

    Raises:
        RecordError: a row does not fit the header; the trunk is missing or has changed.
    """
    path = folder / "epochs.jsonl"
    lines = read(path) if read else read_own_lines(path, first_unit(header))
    own = cast("list[Row]", lines)
    for number, row in enumerate(own, start=1):
        check_row(path, number, header, row)
    return [*_read_trunk_rows(folder, header, read), *own]


def check_row(path: Path, number: int, header: Header, row: Row) -> None:
    """Raise RecordError unless a row, a line of a file, fits the header."""
    if why := row_fault(header, row):
        raise RecordError(f"{path} line {number} is damaged: {why}")


def _read_trunk_rows(folder: Path, header: Header, read: Read | None) -> list[Row]:
    trunk = _find_trunk(folder, header["config"].get("branch"))
    if trunk is None:
        return []
    at = first_unit(header)
    _check_trunk(trunk, folder, header)
    trunk_header = read_header(trunk)
    rows = read_rows(trunk, trunk_header, read)[:at]
    same_layers = trunk_header["layers"] == header["layers"]
    fits = same_layers and not any(row_fault(header, r) for r in rows)
    if len(rows) < at or not fits:
        raise RecordError(f"{folder} is no branch of {trunk}: its layers or rows are others")
    if rows:
        rows[-1] = cast("Row", {**rows[-1], "next_lr": header["trunk"]["next_lr"]})
    return rows


def read_all(folder: Path, header: Header, name: str) -> Lines:
    """Read the lines of ``seconds.jsonl`` or ``instruments.jsonl`` of a run and its trunks. It does
    not check the trunks: `read_rows` does."""
    own = read_own_lines(folder / name, first_unit(header))
    trunk = _find_trunk(folder, header["config"].get("branch"))
    if trunk is None:
        return own
    trunk_lines = read_all(trunk, read_header(trunk), name)
    return [*(line for line in trunk_lines if line["epoch"] < first_unit(header)), *own]


# -- the trunk -------------------------------------------------------------------------------


def _shared_state(trunk: Path, at: int) -> dict[str, FileState]:
    """Lines and digest of what a branch at unit ``at`` shares of each file of its trunk."""
    states: dict[str, FileState] = {}
    for name in SHARED:
        lines = [line + b"\n" for line in complete_lines(trunk / name)]
        states[name] = RunningDigest(
            line for line in lines if (parse_line(line) or {}).get("epoch", at) < at
        ).state
    return states


def _check_trunk(trunk: Path, folder: Path, header: Header) -> None:
    """Raise RecordError unless a trunk is there and begins as the branch says."""
    at = first_unit(header)
    if not (trunk / "run.json").is_file():
        raise RecordError(
            f"{folder} is a branch of {trunk}, which is missing: both folders must keep "
            "their places relative to each other"
        )
    if branch_table(trunk).get("at", -1) >= at:
        raise RecordError(f"{folder} is damaged: unit {at} is not one that {trunk} trained itself")
    if _values_before(read_header(trunk), header["config"]) != header["trunk"]["before"]:
        raise RecordError(f"{folder} is a branch of {trunk}, whose configuration has changed since")
    present = _shared_state(trunk, at)
    for name, state in header["trunk"]["files"].items():
        if present.get(name) != state:
            raise RecordError(
                f"{folder} is a branch of {trunk} at unit {at}, whose {name} has changed since"
            )


def trunk_table(trunk: Path, at: int, config: Config, next_lr: float | None) -> Trunk:
    """Make the header's table for a branch of this configuration."""
    return Trunk(
        files=_shared_state(trunk, at),
        before=_values_before(read_header(trunk), config),
        next_lr=next_lr,
    )


def _values_before(header: Header, config: Config) -> Fields:
    """The values, in the trunk with this header, of the fields that a branch of this configuration
    has changed."""
    before = changed_fields(header["config"], config)
    if further := header.get("trunk", {}).get("before"):  # the trunk is itself a branch
        branch = {k: v for k, v in header["config"]["branch"].items() if k != "of"}
        before |= {"branch": branch, "before": further}
    return before


def changed_fields(before: Config, after: Config) -> Fields:
    """Find, by dotted path, the fields that decide numbers and differ between two configurations,
    each with its value in the first one; None where that has none."""
    old, new = (flatten_table(resolve_config(config)) for config in (before, after))
    fields = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: old.get(key) for key in fields if _decides_numbers(key)}


def _decides_numbers(field: str) -> bool:
    if field == "branch.skip":
        return True
    plain = field not in ("name", *STORAGE) and not field.startswith("branch.")
    return plain and not is_circumstance(field)


def list_phases(folder: Path) -> list[tuple[int, Config]]:
    """List (first unit, configuration) of each part of a run and its trunks, in order: one of a
    plain run, three of a pulse."""
    header = read_header(folder)
    config, trunk = header["config"], trunk_of(folder)
    return [(0, config)] if trunk is None else splice_phases(list_phases(trunk), config)


def splice_phases(before: list[tuple[int, Config]], config: Config) -> list[tuple[int, Config]]:
    """Make the phases of a branch of this configuration, from its trunk's."""
    branch = config["branch"]
    at, length = branch["at"], branch.get("length")
    result = [*(phase for phase in before if phase[0] < at), (at, config)]
    if length is None:
        return result
    end = at + length
    returning = (end, in_force(before, end))
    return [*result, returning, *(phase for phase in before if phase[0] > end)]


def in_force(parts: list[tuple[int, Config]], unit: int) -> Config:
    """Finds the configuration under which a unit was trained.

    Args:
        parts: first units, rising, each with the configuration that holds from it on.
        unit: at or after the first of them.
    """
    return [config for first, config in parts if first <= unit][-1]
