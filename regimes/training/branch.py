"""Branches of a run: continue it from a unit's checkpoint under another configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes.config import BranchConfig
from regimes.config.arguments import checked
from regimes.job.reporters import Reporter
from regimes.records import Record
from regimes.records.files import record_folder
from regimes.training.loop import run
from regimes.training.phases import branch_config


@checked()
def branch(
    record: Record | str | Path,
    *,
    at: int,
    out: str | Path,
    length: int | None = None,
    set: Mapping[str, Any] | Sequence[str] = (),
    reporters: Sequence[Reporter] = (),
) -> Record:
    """Continue a run from the start of a unit under another configuration, in a folder of its own.

    The trunk needs the checkpoint before that unit (``checkpoint_keep``); unit 0 needs none. What
    becomes of the state is in `training.changes`. Called again after a stop, it goes on; with
    nothing changed it ends with the trunk's bits.

    Args:
        record: the trunk, or its folder.
        at: the first unit of the branch.
        out: the branch's folder, which holds its own rows and the path to the trunk.
        length: units after which the trunk's configuration returns (a pulse); None: never.
        set: what is changed: ``{"policy.level": "high"}``, or ``["policy.level=high"]``.
        reporters: as of `run`.

    Raises:
        ConfigError: a field that a branch cannot change, or as for `run`.
        RecordError: no such run or checkpoint, or ``out`` holds another run.
    """
    out = record_folder(out)
    folder = record.folder if isinstance(record, Record) else Path(record)
    config = branch_config(folder, BranchConfig(at=at, length=length), set, out)
    return run(config, out, resume=(out / "run.json").exists(), reporters=reporters)
