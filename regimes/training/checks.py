"""Checks of a whole configuration before any work starts: how fields and plug-ins fit together.

The range of a single number stands in its annotation (``config.bounds``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from regimes.base import capabilities
from regimes.base.config import DENSE, OuterConfig, RunConfig, check_bounds
from regimes.base.errors import ConfigError, DataError, require
from regimes.compression import Compressor, make_compressor
from regimes.compression.base import check_level
from regimes.data import deficits
from regimes.data.task import Task
from regimes.policies import Policy, Windows, check_levels, make_policy
from regimes.training.needs import modes_of, parts_of, periods_of

_POLICIES = "policy", "batch_policy", "sync_policy"


@dataclass(frozen=True)
class PlugIns:
    """The plug-ins that a configuration names, checked against its levels.

    Attributes:
        batch_policy, sync_policy: of the batch size, and of the period between synchronisations;
            None without one.
    """

    compressor: Compressor
    policy: Policy
    batch_policy: Policy | None
    sync_policy: Policy | None
    deficit: deficits.Deficit

    @classmethod
    def from_config(cls, config: RunConfig) -> PlugIns:
        """Build the plug-ins of a configuration.

        Raises:
            ConfigError: a number outside its bounds, an unknown name, fields or levels that do not
                fit together.
        """
        check_bounds(config)
        chosen, rule = make_compressor(config.compressor), make_policy(config.policy)
        if chosen.level is not None:
            word = chosen.level_word
            raise ConfigError(
                f"compressor.{word} = {chosen.level!r}: in a configuration levels have names, "
                f'which a policy chooses: levels.low = ..., and policy.name = "static" for one'
            )
        for name, size in config.batch_levels.items():
            if size < config.batch_size or size % config.batch_size:
                raise ConfigError(
                    f"batch_levels.{name} = {size}: expected a multiple of batch_size = "
                    f"{config.batch_size}, the micro-batch that is accumulated"
                )
        batch = _whole_policy(config, "batch", "larger", "the smaller batch")
        deficit = deficits.make_deficit(config.deficit)
        sync = _whole_policy(config, "sync", "longer", "the shorter period")
        made = cls(chosen, rule, batch, sync, deficit)
        check_combined(config, made)
        check_periods(config.outer, periods_of(config, made))
        check_fields(config)
        check_windows_of_epochs(config, made)
        check_levels(rule, config.levels)
        for name, level in config.levels.items():
            try:
                check_level(chosen, level)
            except ConfigError as error:
                raise ConfigError(f"levels.{name}: {error}") from None
        return made

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies that there are, by field."""
        rules = {name: getattr(self, name) for name in _POLICIES}
        return {name: rule for name, rule in rules.items() if rule is not None}

    @property
    def policy_needs(self) -> list[str]:
        """The statistics that the policies read."""
        return [need for rule in self.policies.values() for need in rule.needs]


def _whole_policy(config: RunConfig, kind: str, more: str, less: str) -> Policy | None:
    """The ``batch_policy`` or ``sync_policy``, with levels that fit it and are in order; None
    without one."""
    field, levels = f"{kind}_policy", getattr(config, f"{kind}_levels")
    if (table := getattr(config, field)) is None:
        return None
    rule = make_policy(table, field)
    check_levels(rule, levels, field)
    if {"low", "high"} <= set(levels) and levels["low"] > levels["high"]:
        raise ConfigError(
            f"{kind}_levels.low = {levels['low']} is {more} than {kind}_levels.high = "
            f"{levels['high']}: low is the level that sends more, so {less}; swap them"
        )
    return rule


def check_fields(config: RunConfig) -> None:
    """Raise ConfigError unless the fields fit together; their bounds and plug-ins are checked."""
    check_outer(config.outer)
    unused = config.seed not in config.tuned_on
    expected = "another: this one has chosen the configuration (tuned_on)"
    require(unused, "seed", config.seed, expected)
    fits = config.precision == "strict" or config.dtype == "float32"
    require(fits, "precision", config.precision, f'"strict", as dtype = "{config.dtype}"')
    if DENSE in config.levels:
        raise ConfigError('levels.dense is always "dense": give the level another name')
    if budget := config.budget:
        known = [*config.levels, DENSE]
        require(budget.level in known, "budget.level", budget.level, f"one of {', '.join(known)}")
        expected = "1 with a budget: which unit is the last, and evaluated, is known only after it"
        require(config.evaluate_every == 1, "evaluate_every", config.evaluate_every, expected)
    for field in ("warmup_steps", "decay_steps", "cycle_steps"):
        if config.optimizer.per == "epoch" and getattr(config.optimizer, field) not in (None, ()):
            raise ConfigError(
                f"optimizer.{field}: the rate changes once per epoch, so a number of steps has no "
                'effect: set optimizer.per = "step"'
            )


def check_combined(
    config: RunConfig,
    plug_ins: PlugIns,
    device: torch.device | None = None,
    processes: int = 1,
) -> None:
    """Raise ConfigError where something in a configuration needs what one of its modes lacks."""
    modes = modes_of(config, plug_ins, device, processes)
    capabilities.check(parts_of(config, plug_ins), modes)


def check_outer(outer: OuterConfig) -> None:
    """Raise ConfigError unless the fields of an outer step fit together."""
    fits = not outer.nesterov or outer.momentum > 0
    require(fits, "outer.nesterov", outer.nesterov, "false, or a momentum above 0")


def check_periods(outer: OuterConfig, periods: Collection[int]) -> None:
    """Raise ConfigError unless an update is applied before its fragment is sent again."""
    least = min(periods, default=1)
    require(outer.delay < least, "outer.delay", outer.delay, f"below the shortest period, {least}")


def check_windows_of_epochs(config: RunConfig, plug_ins: PlugIns) -> None:
    """Raise ConfigError for a window after the last epoch, where a unit is an epoch."""
    if config.unit_steps is None and config.steps is None:
        for field, first in _window_starts(plug_ins.policies, plug_ins.deficit):
            if first >= config.epochs:
                raise ConfigError(
                    f"{field}: a window starts in epoch {first}, but the run ends after "
                    f"{config.epochs} epochs"
                )


def check_windows_fit(config: RunConfig, plug_ins: PlugIns, units: int) -> None:
    """Raise ConfigError for a checkpoint to keep, or a policy's window, after the run's last
    unit."""
    if isinstance(config.checkpoint_keep, tuple):
        for unit in config.checkpoint_keep:
            require(unit <= units, "checkpoint_keep", unit, f"units up to {units}, the run's last")
    expected = f"a window that starts within the run's {units} units"
    for field, first in _window_starts(plug_ins.policies):
        require(first < units, field, first, expected)


def _window_starts(
    policies: Mapping[str, Policy], deficit: deficits.Deficit | None = None
) -> Iterator[tuple[str, int]]:
    """(field, first unit) of each window, the windows of single layers included."""
    fields = {} if deficit is None else {"deficit.windows": deficit.windows}
    for table, rule in policies.items():
        if isinstance(rule, Windows):  # others may have fields of these names for something else
            fields[f"{table}.windows"] = rule.windows
            fields |= {f"{table}.layers.{name}": own for name, own in rule.layers.items()}
    for field, windows in fields.items():
        yield from ((field, first) for first, _ in windows)


def check_size(config: RunConfig, task: Task) -> None:
    """Raise DataError unless the data can serve every batch size of the run."""
    sizes = config.batch_levels.values() if config.batch_policy else ()
    for batch in (config.batch_size, *sizes):
        if task.size < config.workers * batch:
            raise DataError(
                f"{task.size} training samples are too few for one step of {config.workers} "
                f"workers x {batch}: lower the batch size, or use more data if there are"
            )
