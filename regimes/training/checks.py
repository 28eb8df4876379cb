"""Checks of a whole configuration before any work starts: how fields and plug-ins fit together.

The range of a single number stands in its annotation (``config.bounds``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from regimes.compression import Compressor, compressor
from regimes.config import DENSE, OuterConfig, RunConfig, check_bounds
from regimes.data import deficits
from regimes.data.task import Task
from regimes.detectors.statistics import Statistic
from regimes.errors import ConfigError, DataError, require
from regimes.policies import Policy, check_levels, policy
from regimes.policies.schedules import period_of
from regimes.training.presence import check_churn

POLICIES = "policy", "batch_policy", "sync_policy"


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
    def of(cls, config: RunConfig) -> PlugIns:
        """Build those of a configuration.

        Raises:
            ConfigError: a number outside its bounds, an unknown name, fields or levels that do not
                fit together.
        """
        check_bounds(config)
        chosen, rule = compressor(config.compressor), policy(config.policy)
        for name, size in config.batch_levels.items():
            if size < config.batch_size or size % config.batch_size:
                raise ConfigError(
                    f"batch_levels.{name} = {size}: expected a multiple of batch_size = "
                    f"{config.batch_size}, the micro-batch that is accumulated"
                )
        batch = _whole_policy(config, "batch", "larger", "the smaller batch")
        deficit = deficits.deficit(config.deficit)
        sync = _whole_policy(config, "sync", "longer", "the shorter period")
        made = cls(chosen, rule, batch, sync, deficit)
        _check_local_steps(config, made)
        check_fields(config)
        check_churn(config)
        check_levels(rule, config.levels)
        for level in config.levels.values():
            chosen.check(level)
        return made

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies that there are, by field."""
        rules = {name: getattr(self, name) for name in POLICIES}
        return {name: rule for name, rule in rules.items() if rule is not None}

    @property
    def needs(self) -> list[str]:
        """The statistics that the policies read."""
        return [need for rule in self.policies.values() for need in rule.needs]


def _whole_policy(config: RunConfig, kind: str, more: str, less: str) -> Policy | None:
    """The ``batch_policy`` or ``sync_policy``, whose levels fit it and are in order; None without
    one."""
    field, levels = f"{kind}_policy", getattr(config, f"{kind}_levels")
    if (table := getattr(config, field)) is None:
        return None
    rule = policy(table, field)
    check_levels(rule, levels, field)
    if {"low", "high"} <= set(levels) and levels["low"] > levels["high"]:
        raise ConfigError(
            f"{kind}_levels.low = {levels['low']} is {more} than {kind}_levels.high = "
            f"{levels['high']}: low is the level that sends more, so {less}; swap them"
        )
    return rule


def _check_local_steps(config: RunConfig, plug_ins: PlugIns) -> None:
    """Raise ConfigError for what does not go with local steps, or without."""
    if plug_ins.sync_policy is None:
        expected = "a sync_policy with it: without one workers share each step"
        require(config.outer == OuterConfig(), "outer", "[outer]", expected)
        return
    if type(plug_ins.deficit).updates is not deficits.Deficit.updates:
        raise ConfigError(
            "deficit: workers that step locally share no update that could be made worse: choose "
            "another deficit, or leave sync_policy out"
        )
    if config.pruning is not None:
        raise ConfigError(
            "pruning: with local steps each worker has its own weights and would prune other "
            "coordinates than the others: leave pruning or sync_policy out"
        )
    readers = [
        name
        for name, rule in plug_ins.policies.items()
        if any(Statistic.parse(need).is_norm for need in rule.needs)
    ]
    periods = {period_of(name, config.sync_levels) for name in plug_ins.sync_policy.names}
    check_periods(config.outer, periods)
    shares_gradients = config.outer.plain and config.outer.period_one == "gradients"
    mixed = shares_gradients and 1 in periods and periods != {1}
    if readers and mixed and not config.signal.startswith("movement"):
        raise ConfigError(
            f"signal = {config.signal!r}: {readers[0]} reads a norm, that of gradients at a "
            'period of 1 but of movements at a longer period: set signal = "movement/lr", or '
            'outer.period_one = "parameters"'
        )


def check_fields(config: RunConfig) -> None:
    """Raise ConfigError unless the fields fit together; their bounds and plug-ins are checked."""
    check_outer(config.outer)
    unused = config.seed not in config.tuned_on
    expected = "another: this one has chosen the configuration (tuned_on)"
    require(unused, "seed", config.seed, expected)
    fits = config.precision == "strict" or config.dtype == "float32"
    require(fits, "precision", config.precision, f'"strict", as dtype = "{config.dtype}"')
    if config.sync_policy is not None and config.dtype in ("bfloat16", "float16"):
        raise ConfigError(
            f"dtype = {config.dtype!r}: the small movements of local steps need float32 "
            "parameters; leave dtype or sync_policy out"
        )
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
    if config.unit_steps is None and config.steps is None:  # a unit is an epoch
        for field, first in _window_starts(config, *POLICIES, "deficit"):
            if first >= config.epochs:
                raise ConfigError(
                    f"{field}: a window starts in epoch {first}, but the run ends after "
                    f"{config.epochs} epochs"
                )


def check_graphs(
    config: RunConfig, plug_ins: PlugIns, device: torch.device, processes: int
) -> None:
    """Raise ConfigError where ``graphs`` would have no effect, or other numbers."""
    if config.graphs is None:
        return
    name = config.compressor.get("name")
    reasons = {
        "on a CPU: there is nothing to launch": device.type != "cuda",
        "on several processes: collectives are not captured": processes > 1,
        "with compile: torch decides there what is captured": config.compile,
        "with a sync_policy: local steps are not captured": config.sync_policy is not None,
        "with pruning: masks appear during the run": config.pruning is not None,
        "with churn: the workers present change during the run": config.churn is not None,
        f"with the compressor {name!r}: what it launches depends on values, or its class does not "
        "say replayable": not plug_ins.compressor.replayable,
    }
    for reason, applies in reasons.items():
        require(not applies, "graphs", config.graphs, f"none {reason}")


def check_shards(config: RunConfig, plug_ins: PlugIns, shards: int) -> None:
    """Raise ConfigError for what needs whole layers, or a worker's whole batch, on one process."""
    if shards == 1:
        return
    name, signals = config.compressor.get("name"), {config.signal, *_readings(config)}
    whole = [x for x in config.instruments if x != "norms"]
    whole += [x for x in plug_ins.needs if Statistic.parse(x).instrument != "norms"]
    rows = plug_ins.compressor.joins_shards or plug_ins.compressor.entrywise
    reasons = {
        "with a branch: train it without": config.branch is not None,
        "with churn: the workers present change during the run": config.churn is not None,
        "with a sync_policy: use local_steps on a model of your own": config.sync_policy
        is not None,
        "with graphs: collectives are not captured": config.graphs is not None,
        "with compile": config.compile,
        "with channels_last: rows of layers are divided": config.channels_last,
        "with pruning: a mask is of whole layers": config.pruning is not None,
        "with this deficit: it changes whole updates": type(plug_ins.deficit).updates
        is not deficits.Deficit.updates,
        f"with dtype = {config.dtype!r}: use float32 or float64": config.dtype
        not in ("float32", "float64"),
        'with movements of parameters, which are of whole layers: choose the signal "update"': any(
            x.startswith("movement") for x in signals
        ),
        f"with {', '.join(whole)}, which read whole layers": bool(whole),
        f"with the compressor {name!r}, which would compress the rows of each process by themselves"
        ": choose one whose numbers do not depend on the shards, such as powersgd, cast or dense": (
            not rows
        ),
    }
    for reason, applies in reasons.items():
        require(not applies, "--shards", shards, f"1 {reason}")
    expected = f"at least --shards, {shards}: each process has a part of a worker's samples"
    require(config.batch_size >= shards, "batch_size", config.batch_size, expected)


def _readings(config: RunConfig) -> list[str]:
    """The norms that the configuration asks for besides the signal."""
    return [str(x) for x in config.instruments.get("norms", {}).get("readings", ())]


def check_outer(outer: OuterConfig) -> None:
    """Raise ConfigError unless the fields of an outer step fit together."""
    fits = not outer.nesterov or outer.momentum > 0
    require(fits, "outer.nesterov", outer.nesterov, "false, or a momentum above 0")
    fits = outer.states == "keep" or not outer.streams
    expected = '"keep" with fragments, a delay or mixing, where workers are never alike'
    require(fits, "outer.states", outer.states, expected)


def check_periods(outer: OuterConfig, periods: Collection[int]) -> None:
    """Raise ConfigError unless an update is applied before its fragment is sent again."""
    least = min(periods, default=1)
    require(outer.delay < least, "outer.delay", outer.delay, f"below the shortest period, {least}")


def check_windows_fit(config: RunConfig, units: int) -> None:
    """Raise ConfigError for a policy's window, or a pruning, after the run's last unit."""
    if config.pruning is not None:
        epoch = config.pruning.epoch
        require(epoch < units, "pruning.epoch", epoch, f"one of the run's {units} units")
    if isinstance(config.checkpoint_keep, tuple):
        for unit in config.checkpoint_keep:
            require(unit <= units, "checkpoint_keep", unit, f"units up to {units}, the run's last")
    if config.churn is not None and config.churn.per == "unit":
        expected = f"windows that start within the run's {units} units"
        for window in config.churn.away:
            require(window[1] < units, "churn.away", list(window), expected)
    expected = f"a window that starts within the run's {units} units"
    for field, first in _window_starts(config, *POLICIES):
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
