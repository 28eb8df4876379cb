"""The plan of a unit: decided before it, from the units so far; and the samples it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regimes.job.rows import NO_BATCH, NO_SYNC
from regimes.policies.controller import Levels, check_reasons
from regimes.policies.schedules import period_of
from regimes.training.build import Run


@dataclass(frozen=True)
class UnitPlan:
    """What is decided before a unit, from the units so far.

    Attributes:
        batch_size: samples per worker and step.
        scale: of the learning rate, by the batch size.
        levels: of all layers, with reasons.
        sync: the period that starts at the next synchronisation.
    """

    unit: int
    batch: dict[str, Any]
    batch_size: int
    scale: float
    levels: Levels
    sync: dict[str, Any]


def plan_unit(run: Run, unit: int) -> UnitPlan:
    """Decides on unit ``len(rows)``."""
    rows, config, size = run.rows, run.config, run.config.batch_size
    batch: dict[str, Any] = dict(NO_BATCH)
    sync: dict[str, Any] = dict(NO_SYNC)
    if run.batch_controller is not None:
        chosen = run.batch_controller.decide(rows)
        check_reasons(run.batch_controller.policy, [chosen.why])
        size = config.batch_levels[chosen.level]
        multiple = size // config.batch_size
        batch = {"level": chosen.level, "why": chosen.why, "multiple": multiple}
    levels = run.controller.decide(rows)
    check_reasons(run.controller.policy, levels.why)
    if run.sync_controller is not None:
        chosen = run.sync_controller.decide(rows)
        check_reasons(run.sync_controller.policy, [chosen.why])
        period = period_of(chosen.level, config.sync_levels)
        sync = {"level": chosen.level, "why": chosen.why, "period": period}
    scale = batch["multiple"] if config.optimizer.scale_with_batch else 1
    return UnitPlan(unit, batch, size, scale, levels, sync)


@dataclass(frozen=True)
class Minibatch:
    """One step's samples ``x [L, b, ...]``, ``y [L, b]`` of the hosted workers.

    Attributes:
        epoch, step: its place in the data.
        at: steps at the configuration's batch size since the run began.
        lr: the learning rate.
        last: no step of the run follows, or none of a unit after which a budget may end it.
    """

    epoch: int
    step: int
    at: int
    lr: float
    last: bool
    x: Tensor
    y: Tensor


def minibatches(run: Run, plan: UnitPlan) -> tuple[int, Iterator[Minibatch]]:
    """How many steps a unit has, and what they train on."""
    batches = run.batches.rebatched(plan.batch_size)
    multiple, per_epoch = plan.batch["multiple"], run.units.per_epoch
    # (epoch, first step, stop) in steps of this batch size; an epoch's last batch may be short
    parts = [
        (epoch, first // multiple, len(batches) if stop == per_epoch else -(-stop // multiple))
        for epoch, first, stop in run.units.epoch_spans(plan.unit)
    ]
    count = sum(stop - first for _, first, stop in parts)
    may_end = plan.unit == len(run.units) - 1 or run.config.budget is not None
    may_end |= run.phase.ends_local_steps(plan.unit + 1)

    def generate() -> Iterator[Minibatch]:
        left = count
        for epoch, first, stop in parts:
            data = batches.epoch(epoch, run.world.hosted, first)
            for step, (x, y) in zip(range(first, stop), data, strict=False):
                at = epoch * per_epoch + step * multiple
                left -= 1
                lr = run.learning_rate(at) * plan.scale
                yield Minibatch(epoch, step, at, lr, may_end and not left, x, y)

    return count, generate()
