"""What a configuration must say before any work starts: one sentence for each thing that is off."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from regimes.config import DENSE, OuterConfig, RunConfig
from regimes.data.deficits import Deficit
from regimes.data.task import Task
from regimes.detectors.statistics import Statistic
from regimes.errors import ConfigError, DataError, require
from regimes.policies import Policy, check_levels, policy
from regimes.policies.periods import period_of
from regimes.records.schema import MOST_EPOCHS

POSITIVE, FROM_ZERO, FROM_ONE = "a positive number", "a number from 0 up", "at least 1"
LARGEST = 1e30  # of a rate or a decay: a step multiplies some of them, and float32 ends at 3e38
LONGEST = 1e9  # seconds
SHARE = "a share, from 0 to 1"
UP_TO = f"a number from 0 to {LARGEST:g}"


def check_numbers(config: RunConfig) -> None:
    """Raise ConfigError unless the plain numbers make sense."""
    for name, value, good, expected in _numbers(config):
        require(good, name, value, expected)
    require(
        config.seed not in config.tuned_on,
        "seed",
        config.seed,
        "another: this one has chosen the configuration (tuned_on)",
    )
    narrow = config.precision == "strict" or config.dtype == "float32"
    require(narrow, "precision", config.precision, f'"strict", as dtype = "{config.dtype}"')
    if DENSE in config.levels:
        raise ConfigError('levels.dense is always "dense": give the level another name')
    for table in ("policy", "batch_policy", "sync_policy", "deficit") if in_epochs(config) else ():
        for field, first in _starts(config, table):
            if first >= config.epochs:
                raise ConfigError(
                    f"{field}: a window starts in epoch {first}, but the run ends after "
                    f"{config.epochs} epochs"
                )
    o = config.optimizer
    for field, used in {
        "warmup_steps": o.warmup_steps is not None,
        "decay_steps": o.decay_steps,
        "cycle_steps": o.cycle_steps is not None,
    }.items():
        if used and o.per == "epoch":
            raise ConfigError(
                f"optimizer.{field}: the rate changes once per epoch, so steps mean nothing to it: "
                'set optimizer.per = "step"'
            )
    if config.budget and config.budget.level not in {*config.levels, DENSE}:
        known = ", ".join([*config.levels, DENSE])
        raise ConfigError(f"budget.level = {config.budget.level!r}: expected one of {known}")


def in_epochs(config: RunConfig) -> bool:
    """Is a unit an epoch, and the run whole epochs?"""
    return config.unit_steps is None and config.steps is None


def check_windows_fit(config: RunConfig, units: int) -> None:
    """Raise ConfigError for a policy's window, or a pruning, that starts after the run's last
    unit."""
    if config.pruning is not None:
        require(
            config.pruning.epoch < units,
            "pruning.epoch",
            config.pruning.epoch,
            f"one of the run's {units} units",
        )
    for table in ("policy", "batch_policy", "sync_policy"):
        for field, first in _starts(config, table):
            require(
                first < units, field, first, f"a window that starts within the run's {units} units"
            )


def _starts(config: RunConfig, table: str) -> Iterator[tuple[str, int]]:
    """(field, first unit) of each window of a table, those of single layers among them."""
    chosen = getattr(config, table) or {}
    fields = {f"{table}.windows": chosen.get("windows", ())}
    fields |= {
        f"{table}.layers.{name}": windows for name, windows in (chosen.get("layers") or {}).items()
    }
    return ((field, first) for field, windows in fields.items() for first, _ in windows)


def _numbers(c: RunConfig) -> list[tuple[str, Any, bool, str]]:
    """(field, its value, is it good?, what is expected)."""
    o, decays = c.optimizer, list(c.optimizer.decay_epochs)
    return [
        ("epochs", c.epochs, 1 <= c.epochs <= MOST_EPOCHS, f"{FROM_ONE}, up to {MOST_EPOCHS}"),
        ("steps", c.steps, c.steps is None or c.steps >= 1, FROM_ONE),
        ("unit_steps", c.unit_steps, c.unit_steps is None or c.unit_steps >= 1, FROM_ONE),
        (
            "start_compressing_after",
            c.start_compressing_after,
            c.start_compressing_after >= 0,
            FROM_ZERO,
        ),
        ("batch_size", c.batch_size, c.batch_size >= 1, FROM_ONE),
        ("workers", c.workers, c.workers >= 1, FROM_ONE),
        ("checkpoint_every", c.checkpoint_every, c.checkpoint_every >= 1, FROM_ONE),
        (
            "checkpoint_seconds",
            c.checkpoint_seconds,
            0 <= (c.checkpoint_seconds or 0) < inf,
            FROM_ZERO,
        ),
        *(
            (f"data.{split}_size", size, size is None or size >= 1, FROM_ONE)
            for split, size in {
                "train": c.data.train_size,
                "test": c.data.test_size,
                "validation": c.data.validation_size,
            }.items()
        ),
        (
            "budget.epochs",
            c.budget and c.budget.epochs,
            not c.budget or c.budget.epochs >= 1,
            FROM_ONE,
        ),
        (
            "pruning.epoch",
            c.pruning and c.pruning.epoch,
            not c.pruning or c.pruning.epoch >= 0,
            FROM_ZERO,
        ),
        (
            "pruning.share",
            c.pruning and c.pruning.share,
            not c.pruning or 0 < c.pruning.share < 1,
            "a share, above 0 and below 1",
        ),
        (
            "timeout",
            c.timeout,
            0 < c.timeout <= LONGEST,
            f"{POSITIVE} of seconds up to {LONGEST:g}",
        ),
        ("bucket_mb", c.bucket_mb, 0 < c.bucket_mb < inf, POSITIVE),
        ("optimizer.lr", o.lr, 0 < o.lr <= LARGEST, f"{POSITIVE} up to {LARGEST:g}"),
        ("optimizer.warmup_from", o.warmup_from, 0 <= (o.warmup_from or 0) <= LARGEST, UP_TO),
        ("optimizer.warmup_epochs", o.warmup_epochs, o.warmup_epochs >= 1, FROM_ONE),
        ("optimizer.warmup_hold", o.warmup_hold, o.warmup_hold >= 0, FROM_ZERO),
        ("optimizer.warmup_steps", o.warmup_steps, (o.warmup_steps or 0) >= 0, FROM_ZERO),
        ("optimizer.decay_steps", list(o.decay_steps), min([1, *o.decay_steps]) >= 1, FROM_ONE),
        ("optimizer.decay_share", o.decay_share, 0 <= o.decay_share <= 1, SHARE),
        ("optimizer.cycle_epochs", o.cycle_epochs, o.cycle_epochs >= 1, FROM_ONE),
        (
            "optimizer.cycle_steps",
            o.cycle_steps,
            o.cycle_steps is None or o.cycle_steps >= 1,
            FROM_ONE,
        ),
        ("optimizer.cycle_factor", o.cycle_factor, o.cycle_factor >= 1, FROM_ONE),
        ("optimizer.final", o.final, 0 <= o.final <= 1, SHARE),
        ("optimizer.decay_epochs", decays, min([1, *decays]) >= 1, FROM_ONE),
        ("optimizer.decay_factor", o.decay_factor, 1 <= o.decay_factor < inf, FROM_ONE),
        ("optimizer.momentum", o.momentum, 0 <= o.momentum < 1, "from 0 up and below 1"),
        ("optimizer.weight_decay", o.weight_decay, 0 <= o.weight_decay <= LARGEST, UP_TO),
        *(
            (f"sync_levels.{name}", period, 1 <= period <= LONGEST, FROM_ONE)
            for name, period in c.sync_levels.items()
        ),
        ("outer.lr", c.outer.lr, 0 < c.outer.lr <= LARGEST, f"{POSITIVE} up to {LARGEST:g}"),
        ("outer.momentum", c.outer.momentum, 0 <= c.outer.momentum < 1, "from 0 up and below 1"),
        (
            "outer.nesterov",
            c.outer.nesterov,
            not c.outer.nesterov or c.outer.momentum > 0,
            "false, or a momentum above 0",
        ),
        ("optimizer.clip", o.clip, o.clip is None or 0 < o.clip < inf, POSITIVE),
    ]


def build_batch_policy(config: RunConfig) -> Policy | None:
    """The batch policy, if there is one; ConfigError unless its levels make sense."""
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
    levels = config.batch_levels
    if {"low", "high"} <= set(levels) and levels["low"] > levels["high"]:
        raise ConfigError(
            f"batch_levels.low = {levels['low']} is larger than batch_levels.high = "
            f"{levels['high']}: low is the level that sends more, so the smaller batch; swap them"
        )
    return rule


def build_sync_policy(config: RunConfig, deficit: Deficit) -> Policy | None:
    """The policy of local steps, if there is one; ConfigError unless it makes sense with the rest
    of the configuration."""
    if config.sync_policy is None:
        require(
            config.outer == OuterConfig(),
            "outer",
            "[outer]",
            "a sync_policy with it: without one workers share each step",
        )
        return None
    rule = policy(config.sync_policy, "sync_policy")
    check_levels(rule, config.sync_levels, "sync_policy")
    levels = config.sync_levels
    if {"low", "high"} <= set(levels) and levels["low"] > levels["high"]:
        raise ConfigError(
            f"sync_levels.low = {levels['low']} is longer than sync_levels.high = "
            f"{levels['high']}: low is the level that sends more, so the shorter period; swap them"
        )
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


def _check_one_signal(config: RunConfig, rule: Policy) -> None:
    """A norm is of one thing throughout the run, or no detector could compare it with itself."""
    tables = {"policy": config.policy, "batch_policy": config.batch_policy}
    rules = {name: policy(table, name) for name, table in tables.items() if table is not None}
    reading = [
        name
        for name, other in {**rules, "sync_policy": rule}.items()
        if any(Statistic.parse(need).is_norm for need in other.needs)
    ]
    periods = {period_of(name, config.sync_levels) for name in rule.names}
    shares = config.outer.plain and config.outer.period_one == "gradients"
    mixed = shares and 1 in periods and periods != {1}
    if reading and mixed and not config.signal.startswith("movement"):
        raise ConfigError(
            f"signal = {config.signal!r}: {reading[0]} reads a norm, which is of gradients at a "
            'period of 1 and of movements at a longer one: set signal = "movement/lr", or '
            'outer.period_one = "parameters"'
        )


def check_size(config: RunConfig, task: Task) -> None:
    if config.batch_policy and not task.splits:
        raise ConfigError(
            "batch_policy: the batch of a text is its number of parallel streams, which cannot "
            "change during a run; leave batch_policy out"
        )
    used = config.batch_levels.values() if config.batch_policy else ()
    for batch in (config.batch_size, *used):
        if task.size < config.workers * batch:
            raise DataError(
                f"{task.size} training samples are too few for one step of {config.workers} "
                f"workers x {batch}: lower the batch size, or use more data if there are"
            )
