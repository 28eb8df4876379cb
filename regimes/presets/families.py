"""Families of schedules: each makes a grid from one configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regimes import policies
from regimes.base.config import RunConfig
from regimes.base.config.registry import Registry
from regimes.policies import detectors
from regimes.presets.registry import Grid

Table = dict[str, Any]  # of a policy


def static_table(level: str) -> Table:
    return {"name": "static", "level": level}


def windows_table(*windows: tuple[int, int], inside: str = "low", outside: str = "high") -> Table:
    return {"name": "windows", "windows": list(windows), "inside": inside, "outside": outside}


def at_rate(base: RunConfig, lr: float) -> RunConfig:
    """Set another learning rate, with the start of the warm-up in proportion."""
    optimizer = base.optimizer
    start = optimizer.warmup_from and optimizer.warmup_from * lr / optimizer.lr
    return replace(base, optimizer=replace(optimizer, lr=lr, warmup_from=start))


def grid_of_policies(base: RunConfig, policies: dict[str, Table]) -> Grid:
    """Make a grid of one training under several policies."""
    return {name: replace(base, name=name, policy=table) for name, table in policies.items()}


def figure2_schedules(
    base: RunConfig, critical: list[tuple[int, int]], late: tuple[int, int], **accordion: Any
) -> Grid:
    """Make the schedules of Figure 2 and their controls.

    Args:
        critical: hand-made critical windows ``[first, stop)``; the first is the early one.
        late: a window as long as the early one, after the decay (control of equal traffic).
        accordion: fields of the ACCORDION policy.
    """
    early = critical[0]
    policies: dict[str, Table] = {
        "dense": static_table("dense"),
        "low": static_table("low"),
        "high": static_table("high"),
        "low-in-critical": windows_table(*critical),
        "high-in-critical": windows_table(*critical, inside="high", outside="dense"),
        "accordion": {"name": "accordion", **accordion},
        "low-early": windows_table(early),
        "low-late": windows_table(late),
    }
    cells = grid_of_policies(base, policies)
    # As many epochs as the early window has are left out before the first decay (the warm-up
    # stays): does compression in that window do damage, or does it only cost time?
    sooner = tuple(first - early[1] for first in base.optimizer.decay_epochs)
    cells["dense-deleted"] = replace(
        cells["dense"],
        name="dense-deleted",
        epochs=base.epochs - early[1],
        optimizer=replace(base.optimizer, decay_epochs=sooner),
    )
    return cells


def _scaled(number: Any, share: float) -> Any:
    """A share of a length, at least one where there is any; of each of several."""
    if isinstance(number, tuple):
        return tuple(_scaled(each, share) for each in number)
    return number and max(1, round(share * number))


def _scaled_windows(windows: Any, share: float) -> list[tuple[int, int]]:
    ends = [(round(share * first), _scaled(stop, share)) for first, stop in windows]
    return sorted({(first, max(first + 1, stop)) for first, stop in ends})


def shorten_rule(rule: Table, share: float, kinds: Registry = policies.REGISTRY) -> Table:
    """Scale the table of a policy, or of another kind of rule, with its units in proportion:
    intervals (the default one, too), windows and epochs, in rules within it as well.

    Raises:
        ConfigError: an unknown name.
    """
    cls, short = kinds.load(rule["name"]), dict[str, Any]()
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name == "interval":
            short["interval"] = _scaled(rule.get("interval", field.default), share)
    for key, value in rule.items():
        if key == "epochs":
            short[key] = _scaled(value, share)
        elif key == "windows":
            short[key] = _scaled_windows(value, share)
        elif key == "layers" and isinstance(value, Mapping):
            short[key] = {layer: _scaled_windows(at, share) for layer, at in value.items()}
        elif key in ("base", "otherwise", "detector") and isinstance(value, Mapping):
            inner = detectors.REGISTRY if key == "detector" else kinds
            short[key] = shorten_rule(dict(value), share, inner)
        elif key == "groups":
            short[key] = {name: shorten_rule(each, share, kinds) for name, each in value.items()}
        else:
            short.setdefault(key, value)
    return short


def shorten_training(config: RunConfig, share: float) -> RunConfig:
    """Shorten a training to a share of its epochs or steps: decays, the budget and what its
    policies count in units in proportion, each at least one."""

    def scaled(number: Any) -> Any:
        return _scaled(number, share)

    def table(rule: Table) -> Table:
        return rule if share == 1 else shorten_rule(rule, share)

    optimizer, budget = config.optimizer, config.budget
    counts = ("decay_epochs", "decay_steps", "warmup_epochs", "warmup_steps", "cycle_epochs")
    changed = {name: scaled(getattr(optimizer, name)) for name in (*counts, "cycle_steps")}
    hold = round(share * optimizer.warmup_hold)
    return replace(
        config,
        epochs=scaled(config.epochs),
        steps=scaled(config.steps),
        start_compressing_after=round(share * config.start_compressing_after),
        optimizer=replace(optimizer, **changed, warmup_hold=hold),
        policy=table(config.policy),
        batch_policy=config.batch_policy and table(config.batch_policy),
        sync_policy=config.sync_policy and table(config.sync_policy),
        budget=budget and replace(budget, epochs=scaled(budget.epochs)),
    )
