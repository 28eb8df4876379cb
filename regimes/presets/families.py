"""Families of schedules: each makes a grid from one configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.config import RunConfig
from regimes.presets.registry import Grid

Table = dict[str, Any]  # of a policy


def static_table(level: str) -> Table:
    return {"name": "static", "level": level}


def windows_table(*windows: tuple[int, int], inside: str = "low", outside: str = "high") -> Table:
    return {"name": "windows", "windows": list(windows), "inside": inside, "outside": outside}


def at_rate(base: RunConfig, lr: float) -> RunConfig:
    """A run at another learning rate, with the start of the warm-up in proportion."""
    optimizer = base.optimizer
    start = optimizer.warmup_from and optimizer.warmup_from * lr / optimizer.lr
    return replace(base, optimizer=replace(optimizer, lr=lr, warmup_from=start))


def grid_of_policies(base: RunConfig, policies: dict[str, Table]) -> Grid:
    """A grid of one training under several policies."""
    return {name: replace(base, name=name, policy=table) for name, table in policies.items()}


def figure2_schedules(
    base: RunConfig, critical: list[tuple[int, int]], late: tuple[int, int], **accordion: Any
) -> Grid:
    """The schedules of Figure 2 and their controls.

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


def shorten_training(config: RunConfig, share: float) -> RunConfig:
    """The same training in a share of its epochs or steps: decays, windows, intervals and the
    budget in proportion, each at least one."""

    def scaled(number: Any) -> Any:
        if isinstance(number, tuple):
            return tuple(map(scaled, number))
        return number and max(1, round(share * number))

    def table(rule: dict[str, Any]) -> dict[str, Any]:
        changed_rule = dict(rule)
        if "interval" in rule:
            changed_rule["interval"] = scaled(rule["interval"])
        if "windows" in rule:
            ends = [(round(share * first), scaled(stop)) for first, stop in rule["windows"]]
            changed_rule["windows"] = [(first, max(first + 1, stop)) for first, stop in ends]
        return changed_rule

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
