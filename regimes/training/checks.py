"""Checks of a whole configuration before any work starts: how fields fit together.

The range of a single number stands in its annotation (``config.bounds``). Each error is one
sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from regimes.config import DENSE, OuterConfig, RunConfig
from regimes.data.deficits import Deficit
from regimes.data.task import Task
from regimes.detectors.statistics import Statistic
from regimes.errors import ConfigError, DataError, require
from regimes.policies import Policy, check_levels, policy
from regimes.policies.periods import period_of


def check_fields(config: RunConfig) -> None:
    """Raise ConfigError unless the fields fit together; their bounds and plug-ins are checked."""
    outer, budget = config.outer, config.budget
    fits = not outer.nesterov or outer.momentum > 0
    require(fits, "outer.nesterov", outer.nesterov, "false, or a momentum above 0")
    unused = config.seed not in config.tuned_on
    expected = "another: this one has chosen the configuration (tuned_on)"
    require(unused, "seed", config.seed, expected)
    fits = config.precision == "strict" or config.dtype == "float32"
    require(fits, "precision", config.precision, f'"strict", as dtype = "{config.dtype}"')
    if DENSE in config.levels:
        raise ConfigError('levels.dense is always "dense": give the level another name')
    if budget and budget.level not in {*config.levels, DENSE}:
        known = ", ".join([*config.levels, DENSE])
        raise ConfigError(f"budget.level = {budget.level!r}: expected one of {known}")
    _check_step_fields(config)
    if config.unit_steps is None and config.steps is None:  # a unit is an epoch
        tables = "policy", "batch_policy", "sync_policy", "deficit"
        for field, first in _window_starts(config, *tables):
            if first >= config.epochs:
                raise ConfigError(
                    f"{field}: a window starts in epoch {first}, but the run ends after "
                    f"{config.epochs} epochs"
                )


def _check_step_fields(config: RunConfig) -> None:
    """Raise ConfigError for a schedule in steps where the rate changes once per epoch."""
    optimizer = config.optimizer
    if optimizer.per != "epoch":
        return
    for field in ("warmup_steps", "decay_steps", "cycle_steps"):
        if getattr(optimizer, field) not in (None, ()):
            raise ConfigError(
                f"optimizer.{field}: the rate changes once per epoch, so steps mean nothing to it: "
                'set optimizer.per = "step"'
            )


def check_windows_fit(config: RunConfig, units: int) -> None:
    """Raise ConfigError for a policy's window, or a pruning, after the run's last unit."""
    if config.pruning is not None:
        epoch = config.pruning.epoch
        require(epoch < units, "pruning.epoch", epoch, f"one of the run's {units} units")
    if isinstance(config.checkpoint_keep, tuple):
        for unit in config.checkpoint_keep:
            require(unit <= units, "checkpoint_keep", unit, f"units up to {units}, the run's last")
    expected = f"a window that starts within the run's {units} units"
    for field, first in _window_starts(config, "policy", "batch_policy", "sync_policy"):
        require(first < units, field, first, expected)


def _window_starts(config: RunConfig, *tables: str) -> Iterator[tuple[str, int]]:
    """(field, first unit) of each window of some plug-ins, the windows of single layers
    included."""
    for table in tables:
        settings = getattr(config, table) or {}
        fields = {f"{table}.windows": settings.get("windows", ())}
        for layer, windows in (settings.get("layers") or {}).items():
            fields[f"{table}.layers.{layer}"] = windows
        for field, windows in fields.items():
            yield from ((field, first) for first, _ in windows)


def build_batch_policy(config: RunConfig) -> Policy | None:
    """The batch policy, None without one.

    Raises:
        ConfigError: its levels are not multiples of the batch size, or are missing or swapped.
    """
    for name, size in config.batch_levels.items():
        if size < config.batch_size or size % config.batch_size:
            raise ConfigError(
                f"batch_levels.{name} = {size}: expected a multiple of batch_size = "
                f"{config.batch_size}, the micro-batch that is accumulated"
            )
    if config.batch_policy is None:
        return None
    rule = policy(config.batch_policy, "batch_policy")
    check_levels(rule, config.batch_levels, "batch_policy")
    _check_level_order("batch_levels", config.batch_levels, "larger", "the smaller batch")
    return rule


def _check_level_order(field: str, levels: Mapping[str, int], more: str, less: str) -> None:
    if {"low", "high"} <= set(levels) and levels["low"] > levels["high"]:
        raise ConfigError(
            f"{field}.low = {levels['low']} is {more} than {field}.high = {levels['high']}: "
            f"low is the level that sends more, so {less}; swap them"
        )


def build_sync_policy(config: RunConfig, deficit: Deficit) -> Policy | None:
    """The policy of the period between synchronisations, None without one.

    Raises:
        ConfigError: its levels do not make sense, or the run has parts that need a shared step.
    """
    if config.sync_policy is None:
        expected = "a sync_policy with it: without one workers share each step"
        require(config.outer == OuterConfig(), "outer", "[outer]", expected)
        return None
    rule = policy(config.sync_policy, "sync_policy")
    check_levels(rule, config.sync_levels, "sync_policy")
    _check_level_order("sync_levels", config.sync_levels, "longer", "the shorter period")
    if type(deficit).updates is not Deficit.updates:
        raise ConfigError(
            "deficit: workers that step locally share no update that could be made worse: choose "
            "another deficit, or leave sync_policy out"
        )
    if config.pruning is not None:
        raise ConfigError(
            "pruning: workers that step locally have weights of their own, of which each would "
            "prune others: leave pruning or sync_policy out"
        )
    _check_one_signal(config, rule)
    return rule


def _check_one_signal(config: RunConfig, sync_rule: Policy) -> None:
    """Raise ConfigError if a detector would compare norms of gradients with norms of movements."""
    tables = {"policy": config.policy, "batch_policy": config.batch_policy}
    rules = {name: policy(table, name) for name, table in tables.items() if table is not None}
    readers = [
        name
        for name, rule in {**rules, "sync_policy": sync_rule}.items()
        if any(Statistic.parse(need).is_norm for need in rule.needs)
    ]
    periods = {period_of(name, config.sync_levels) for name in sync_rule.names}
    shares_gradients = config.outer.plain and config.outer.period_one == "gradients"
    mixed = shares_gradients and 1 in periods and periods != {1}
    if readers and mixed and not config.signal.startswith("movement"):
        raise ConfigError(
            f"signal = {config.signal!r}: {readers[0]} reads a norm, which is of gradients at a "
            'period of 1 and of movements at a longer one: set signal = "movement/lr", or '
            'outer.period_one = "parameters"'
        )


def check_size(config: RunConfig, task: Task) -> None:
    """Raise ConfigError or DataError unless the data can serve every batch size of the run."""
    if config.batch_policy and not task.splits:
        raise ConfigError(
            "batch_policy: the batch of a text is its number of parallel streams, which cannot "
            "change during a run; leave batch_policy out"
        )
    sizes = config.batch_levels.values() if config.batch_policy else ()
    for batch in (config.batch_size, *sizes):
        if task.size < config.workers * batch:
            raise DataError(
                f"{task.size} training samples are too few for one step of {config.workers} "
                f"workers x {batch}: lower the batch size, or use more data if there are"
            )
