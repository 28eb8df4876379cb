"""The phases of a run: consecutive units under one configuration. No torch.

A plain run has one. A branch (`regimes.branch`) continues its trunk's phases by one of its own; a
pulse, a branch of a certain length, then by the trunk's again. Whether a configuration can follow
another one is decided here, before any work; `changed_fields` fits the state to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regimes.base import capabilities
from regimes.base.capabilities import NEW_START, OWN_LENGTH, Part
from regimes.base.config import (
    BranchConfig,
    RunConfig,
    from_dict,
    override,
    override_fields,
    to_dict,
)
from regimes.base.errors import ConfigError, require
from regimes.records import (
    SAVING,
    changed_fields,
    in_force,
    locate_trunk,
    read_header,
    splice_phases,
    trunk_reference,
)
from regimes.records import list_phases as recorded_phases
from regimes.records.earlier import as_present

# Fields and tables that a branch shares with its trunk: its state or its units depend on them.
_FIXED = ("seed", "workers", "unit_steps", "dtype", "data", "model")
_FREE = ("data.augment", "model.dropout")
_LENGTH = ("epochs", "steps", "budget")  # a pulse returns to its trunk's
# kept from the branch after a pulse
_HARDWARE_FIELDS = (*SAVING, "device", "graphs", "bucket_mb", "name", "role")


@dataclass(frozen=True)
class Phase:
    """Describes the units ``[first, stop)`` of a run, which have one configuration.

    Attributes:
        config: of these units.
        recorded: of the run's record.
        stop: None: to the end of the run.
        following: the configuration from ``stop`` on.
        earlier: (first unit, configuration) of the phases before, the trunk's included.
        trunk: the folder of the run that a branch continues.
    """

    config: RunConfig
    recorded: RunConfig
    first: int = 0
    stop: int | None = None
    following: RunConfig | None = None
    earlier: tuple[tuple[int, RunConfig], ...] = ()
    trunk: Path | None = None

    def is_over(self, done: int) -> bool:
        """Answer whether another phase follows after so many units."""
        return self.stop is not None and done >= self.stop

    def config_before(self, done: int) -> RunConfig:
        """Return the configuration of the last of so many units."""
        everything = [*self.earlier, (self.first, self.config)]
        return [config for first, config in everything if first < max(done, 1)][-1]

    @property
    def left_out(self) -> bool:
        """Answer whether its units are recorded, but not trained."""
        return self.config.branch is not None and bool(self.config.branch.skip)

    @property
    def has_changed(self) -> bool:
        """Answer whether earlier units used another configuration."""
        return any(decisive_changes(config, self.config) for _, config in self.earlier)

    def ends_local_steps(self, done: int) -> bool:
        """Answer whether the workers must synchronise after so many units, because the next phase
        has other rules for it."""
        after = self.following
        if after is None or done != self.stop:
            return False
        return (after.sync_policy is None) != (self.config.sync_policy is None)


def decisive_changes(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Return the first one's values of the fields that decide numbers and are others in the
    second."""
    return changed_fields(to_dict(before), to_dict(after))


def branch_phases(config: RunConfig, branch: BranchConfig, out: Path) -> list[Phase]:
    """List the phases that a branch in a folder trains itself.

    Raises:
        ConfigError: the state of its trunk cannot be continued under a branch's configuration.
        RecordError: there is no trunk.
    """
    trunk = locate_trunk(out, branch.of)
    if (header := read_header(trunk)).get("written_by") == "hook":
        raise ConfigError(
            f"{trunk} is the record of your own training script and has no checkpoint"
        )
    every = [
        (first, from_dict(RunConfig, as_present(plain)))
        for first, plain in splice_phases(recorded_phases(trunk), to_dict(config))
    ]
    at, kept = branch.at, {name: getattr(config, name) for name in _HARDWARE_FIELDS}
    every = [(first, replace(c, branch=None, **kept) if first > at else c) for first, c in every]
    phases = []
    for i, (first, own) in enumerate(every):
        if first >= at:
            stop, after = every[i + 1] if i + 1 < len(every) else (None, None)
            phases.append(Phase(own, config, first, stop, after, tuple(every[:i]), trunk))
    trained = in_force(recorded_phases(trunk), at)
    check_branch(from_dict(RunConfig, as_present(trained)), config, header["units"])
    return phases


def check_branch(before: RunConfig, after: RunConfig, units: int | None) -> None:
    """Raise ConfigError unless the second configuration can continue the first one."""
    branch = after.branch
    assert branch is not None
    length = units if after.epochs == before.epochs and after.steps == before.steps else None
    if length is not None:
        require(branch.at < length, "branch.at", branch.at, f"one of the run's {length} units")
    changed, parts = decisive_changes(before, after), []
    for field, old in changed.items():
        table = field.partition(".")[0]
        fixed = table in _FIXED and field not in _FREE
        needs = {*([NEW_START] if fixed else []), *([OWN_LENGTH] if table in _LENGTH else [])}
        value: Any = to_dict(after)
        for key in field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        parts.append(Part(field, needs, value, "none" if old is None else repr(old)))
    if branch.skip is not None:
        require(branch.skip, "branch.skip", branch.skip, "true, or no such key")
        require(branch.length is not None, "branch.length", None, "a number with branch.skip")
        others = [field for field in changed if field != "branch.skip"]
        require(not others, "branch.skip", True, f"none with another {''.join(others[:1])}")
    modes = [capabilities.BRANCH, *([] if branch.length is None else [capabilities.PULSE])]
    capabilities.check(parts, modes)
    if "batch_size" in changed:
        expected = (
            f"{before.batch_size}, as units of steps count at it (batch_policy may change it)"
        )
        whole = after.unit_steps is None and after.steps is None
        require(whole, "batch_size", after.batch_size, expected)


def branch_config(
    trunk: Path, branch: BranchConfig, settings: Mapping[str, Any] | Sequence[str], out: Path
) -> RunConfig:
    """Make the configuration of a branch in folder ``out``: its trunk's at the unit, changed.

    Raises:
        ConfigError: an unknown key, a wrong type, a setting without "=".
        RecordError: there is no trunk.
    """
    table = in_force(recorded_phases(trunk), branch.at)
    base = from_dict(RunConfig, as_present(table))
    base = replace(base, branch=None, checkpoint_keep=None, reporters=())
    if isinstance(settings, Mapping):
        made = override_fields(base, settings)
    else:
        made = override(base, [settings] if isinstance(settings, str) else list(settings))
    return replace(made, branch=replace(branch, of=trunk_reference(trunk, out)))
