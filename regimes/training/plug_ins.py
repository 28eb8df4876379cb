"""The plug-ins that a configuration names, and what it needs with them: checked against its levels,
and against the modes in which it runs (`capabilities`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from regimes.base import capabilities
from regimes.base.capabilities import (
    ALIKE_WORKERS,
    BATCH_SIZES,
    CAPTURED_STEPS,
    HALF_PARAMETERS,
    NAMED_TASK,
    OWN_COLLECTIVES,
    WORKER_MODELS,
    Mode,
    Part,
)
from regimes.base.config import DataConfig, ModelConfig, OuterConfig, RunConfig
from regimes.base.errors import ConfigError, require
from regimes.compression import Compressor, make_compressor
from regimes.compression.base import check_level
from regimes.compression.needs import compressor_parts
from regimes.data import deficits
from regimes.instruments import make_instruments
from regimes.instruments.needs import needs_of, policy_parts, signal_parts
from regimes.policies import Policy, Windows, check_levels, make_policy
from regimes.policies.by_layer import ByLayer
from regimes.policies.schedules import period_of
from regimes.records import OWN

_POLICIES = "policy", "batch_policy", "sync_policy"
# Fields that need something where they have another value than by default: needs, and what an error
# expects in place of the value.
FIELDS: dict[str, tuple[frozenset[str], str]] = {
    "channels_last": (frozenset({NAMED_TASK}), "false"),
    "label_smoothing": (frozenset({NAMED_TASK}), "0.0"),
    "graphs": (frozenset({CAPTURED_STEPS}), "none"),
    "batch_policy": (frozenset({BATCH_SIZES}), "none"),
    "sync_policy": (frozenset({WORKER_MODELS}), "none"),
}


@dataclass(frozen=True)
class PlugIns:
    """Holds the plug-ins that a configuration names, checked against its levels.

    Attributes:
        config: the configuration.
        batch_policy, sync_policy: of the batch size, and of the period between synchronisations;
            None without one.
    """

    config: RunConfig
    compressor: Compressor
    policy: Policy
    batch_policy: Policy | None
    sync_policy: Policy | None
    deficit: deficits.Deficit

    @classmethod
    def from_config(cls, config: RunConfig) -> PlugIns:
        """Build the plug-ins of a configuration.

        Raises:
            ConfigError: an unknown name, fields or levels that do not fit together, or a seed that
                has chosen the configuration.
        """
        unused = config.seed not in config.tuned_on
        expected = "another: this one has chosen the configuration (tuned_on)"
        require(unused, "seed", config.seed, expected)
        chosen, rule = make_compressor(config.compressor), make_policy(config.policy)
        if chosen.level is not None:
            word = chosen.level_word
            raise ConfigError(
                f"compressor.{word} = {chosen.level!r}: in a configuration levels have names, "
                f'which a policy chooses: levels.low = ..., and policy.name = "static" for one'
            )
        batch = _model_policy(config, "batch", "larger", "the smaller batch")
        deficit = deficits.make_deficit(config.deficit)
        sync = _model_policy(config, "sync", "longer", "the shorter period")
        made = cls(config, chosen, rule, batch, sync, deficit)
        made.check(made.modes())
        check_periods(config.outer, made.periods)
        if config.unit_steps is None and config.steps is None:  # a unit is an epoch
            for field, first in made.window_starts(deficit):
                if first >= config.epochs:
                    raise ConfigError(
                        f"{field}: a window starts in epoch {first}, but the run ends after "
                        f"{config.epochs} epochs"
                    )
        check_levels(rule, config.levels)
        for name, level in config.levels.items():
            try:
                check_level(chosen, level)
            except ConfigError as error:
                raise ConfigError(f"levels.{name}: {error}") from None
        return made

    @property
    def policies(self) -> dict[str, Policy]:
        """Return the policies that there are, by field."""
        rules = {name: getattr(self, name) for name in _POLICIES}
        return {name: rule for name, rule in rules.items() if rule is not None}

    @property
    def policy_needs(self) -> list[str]:
        """Return the statistics that the policies read."""
        return [need for rule in self.policies.values() for need in rule.needs]

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Return the batch sizes of the run, by field: first the usual one, which all others are
        multiples of, then those that a batch policy may choose."""
        levels = {} if self.batch_policy is None else self.config.batch_levels
        more = {f"batch_levels.{name}": size for name, size in levels.items()}
        return {"batch_size": self.config.batch_size, **more}

    @property
    def periods(self) -> set[int]:
        """Return the periods that a sync policy may choose; none without one."""
        rule, levels = self.sync_policy, self.config.sync_levels
        return set() if rule is None else {period_of(name, levels) for name in rule.names}

    def check(self, modes: Collection[Mode]) -> None:
        """Raise ConfigError where something in the configuration needs what one of the modes
        lacks."""
        capabilities.check(self.parts(), modes)

    def parts(self) -> list[Part]:
        """List everything in the configuration that needs something.

        Raises:
            ConfigError: an instrument that does not exist, or has wrong fields.
        """
        config, parts = self.config, list[Part]()
        for field, (needs, instead) in FIELDS.items():
            value = getattr(config, field)
            if value:
                shown = value if isinstance(value, bool | int | float) else capabilities.ABSENT
                parts.append(Part(field, needs, shown, instead))
        if config.dtype in ("bfloat16", "float16"):
            parts.append(Part("dtype", {HALF_PARAMETERS}, config.dtype, "float32 or float64"))
        data = config.data
        if data != DataConfig(name=data.name, drop_last=data.drop_last, reshuffle=data.reshuffle):
            parts.append(Part("data", {NAMED_TASK}))
        if config.model != ModelConfig(name=config.model.name):
            parts.append(Part("model", {NAMED_TASK}))
        parts += [*outer_parts(config.outer), *compressor_parts(self.compressor)]
        for name, tool in make_instruments(config.instruments).items():
            parts.append(Part(f"instruments.{name}", needs_of(tool)))
        for field, rule in self.policies.items():
            parts += policy_parts(rule, field)
        parts += signal_parts(config.signal, *self.policies.values())
        if config.deficit is not None:
            needs = capabilities.declared_needs(self.deficit, deficits.UNDECLARED)
            parts.append(Part("deficit", needs, config.deficit["name"]))
        return parts

    def modes(self, device: torch.device | None = None, processes: int = 1) -> list[Mode]:
        """List the modes in which the configuration runs, as far as they are known before model and
        data.

        Args:
            device: None: not yet known.
        """
        config, local = self.config, self.sync_policy is not None
        # at a period of 1 gradients are shared, pseudo-gradients at others
        shares = local and config.outer.plain and config.outer.period_one == "gradients"
        found = {
            capabilities.PROCESSES: processes > 1,
            capabilities.SHARED_STEPS: not local,
            capabilities.LOCAL: local,
            capabilities.MIXED_PERIODS: shares and 1 in self.periods and self.periods != {1},
            capabilities.STREAMING: config.outer.leaves_apart,
            capabilities.ON_CPU: device is not None and device.type != "cuda",
            capabilities.COMPILED: config.compile,
            capabilities.OWN_OBJECTS: config.data.name == OWN,
            capabilities.mode_of(
                self.compressor, f"with the compressor {config.compressor['name']!r}"
            ): True,
        }
        return [mode for mode, applies in found.items() if applies]

    def check_units(self, count: int) -> None:
        """Raise ConfigError for a checkpoint to keep, or a policy's window, after the run's last
        unit."""
        if isinstance(keep := self.config.checkpoint_keep, tuple):
            for unit in keep:
                expected = f"units up to {count}, the run's last"
                require(unit <= count, "checkpoint_keep", unit, expected)
        for field, first in self.window_starts():
            expected = f"a window that starts within the run's {count} units"
            require(first < count, field, first, expected)

    def window_starts(self, deficit: deficits.Deficit | None = None) -> Iterator[tuple[str, int]]:
        """Yield (field, first unit) of each window, the windows of single layers included."""
        fields = {} if deficit is None else {"deficit.windows": deficit.windows}
        rules = [
            (table, inner)
            for table, rule in self.policies.items()
            for inner in (rule.rules if isinstance(rule, ByLayer) else (rule,))
        ]
        for table, rule in rules:
            if isinstance(rule, Windows):  # others may have fields of these names for another thing
                fields[f"{table}.windows"] = rule.windows
                fields |= {f"{table}.layers.{name}": own for name, own in rule.layers.items()}
        for field, windows in fields.items():
            yield from ((field, first) for first, _ in windows)


def _model_policy(config: RunConfig, kind: str, more: str, less: str) -> Policy | None:
    """The ``batch_policy`` or ``sync_policy``, with levels that fit it and are in order; None
    without one."""
    field, levels = f"{kind}_policy", getattr(config, f"{kind}_levels")
    if (table := getattr(config, field)) is None:
        return None
    rule = make_policy(table, field)
    check_levels(rule, levels, field)
    check_model_levels(levels, f"{kind}_levels", more, less)
    return rule


def check_model_levels(levels: Mapping[str, int], field: str, more: str, less: str) -> None:
    """Raise ConfigError if the batch size or period "low" sends less than "high"."""
    if {"low", "high"} <= levels.keys() and levels["low"] > levels["high"]:
        raise ConfigError(
            f"{field}.low = {levels['low']} is {more} than {field}.high = {levels['high']}: low is "
            f"the level that sends more, so {less}; swap them"
        )


def check_periods(outer: OuterConfig, periods: Collection[int]) -> None:
    """Raise ConfigError unless an update is applied before its fragment is sent again."""
    least = min(periods, default=1)
    require(outer.delay < least, "outer.delay", outer.delay, f"below the shortest period, {least}")


def outer_parts(outer: OuterConfig) -> Iterator[Part]:
    """List what a synchronisation after local steps does that needs something."""
    if outer != OuterConfig():
        yield Part("outer", {WORKER_MODELS})
    if outer.delay:
        yield Part("outer.delay", {WORKER_MODELS}, outer.delay, "0")
    if outer.states != "keep":
        needs = {WORKER_MODELS, ALIKE_WORKERS, *([OWN_COLLECTIVES] * (outer.states == "average"))}
        yield Part("outer.states", needs, outer.states, "keep")
