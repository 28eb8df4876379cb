"""The trainings that a plan compares: one configuration by several methods, lengths and rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.base.config import DENSE, RunConfig
from regimes.base.errors import require
from regimes.cost.methods import Method
from regimes.presets.families import at_rate, shorten_training, static_table
from regimes.search.plans.clock import Probe

LEVEL = "sent"  # the level of a method in its configuration


def in_steps(config: RunConfig, per_epoch: int) -> RunConfig:
    """Count a training's length, and the changes of its learning rate, in steps.

    A plan can then cut the training to any length. The rate changes after each step, no longer
    after each epoch.

    Args:
        config: the training, in epochs or in steps.
        per_epoch: the number of steps in an epoch.

    Raises:
        ConfigError: a branch, a run that ends by a budget of floats, or batches that grow.
    """
    for name in ("branch", "budget", "batch_policy"):
        given = getattr(config, name)
        require(given is None, name, given, "none in a plan")
    optimizer, total = config.optimizer, config.steps or config.epochs * per_epoch
    changed: dict[str, Any] = {"per": "step"}
    if optimizer.warmup_steps is None and optimizer.warmup_from is not None:
        rising = optimizer.warmup_hold + optimizer.warmup_epochs  # steps hold no first rate
        changed |= {"warmup_steps": rising * per_epoch, "warmup_hold": 0}
    if optimizer.schedule == "step":
        epochs = [epoch * per_epoch for epoch in optimizer.decay_epochs]
        changed |= {"decay_steps": tuple(sorted([*optimizer.decay_steps, *epochs]))}
        changed |= {"decay_epochs": ()}
    if optimizer.schedule == "cyclic":
        changed["cycle_steps"] = optimizer.cycle_steps or optimizer.cycle_epochs * per_epoch
    return replace(config, steps=total, unit_steps=total, optimizer=replace(optimizer, **changed))


def configure_probe(
    config: RunConfig, method: Method, steps: int, rate: float, seed: int
) -> RunConfig:
    """Configure a short training by a method.

    Args:
        config: in steps, as `in_steps` gives it.
        steps: of the training; the schedule of the rate is in proportion.
        rate: doublings of the configuration's learning rate.
    """
    share = steps / (config.steps or steps)
    made = shorten_training(at_rate(config, config.optimizer.lr * 2.0**rate), share)
    compressed = method.level != DENSE
    return replace(
        made,
        name=method.label,
        seed=seed,
        steps=steps,
        unit_steps=steps,
        compressor=dict(method.table) if compressed else made.compressor,
        levels={LEVEL: method.level} if compressed else made.levels,
        policy=static_table(LEVEL if compressed else DENSE),
        sync_levels={LEVEL: method.period} if method.period > 1 else {},
        sync_policy=static_table(LEVEL) if method.period > 1 else None,
        instruments={},
        reporters=(),
        drawn_per_seed=(),
        checkpoint_keep=None,
    )


def name_probe(probe: Probe) -> str:
    """Name a probe as the log and its folder do."""
    method = probe.method.replace("/", " ")
    return f"{method}/{probe.steps} steps/rate {probe.rate:+g}/seed-{probe.seed}"
