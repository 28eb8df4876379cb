"""The plan of a unit: decided before it, from the units so far; and the samples it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from regimes.policies.controller import Levels, check_reasons
from regimes.policies.periods import period_of
from regimes.training.build import Run
from regimes.training.rows import BatchColumn, SyncColumn


@dataclass(frozen=True)
class Plan:
    """What is decided before a unit, from the units so far.

    Attributes:
        scale: of the learning rate, by the batch size.
        levels: of all layers, with reasons.
        sync: the period that starts at the next synchronisation.
    """

    unit: int
    batch: BatchColumn
    scale: float
    levels: Levels
    sync: SyncColumn


def decide(run: Run, unit: int) -> Plan:
    """The plan of unit ``len(rows)``."""
    batch, levels, sync = _batch(run), run.controller.decide(run.rows), _sync(run)
    check_reasons(run.controller.policy, levels.why)
    if run.batch_controller is not None:
        check_reasons(run.batch_controller.policy, [batch["why"]])
    if run.sync_controller is not None:
        check_reasons(run.sync_controller.policy, [sync["why"]])
    scale = batch["multiple"] if run.config.optimizer.scale_with_batch else 1
    return Plan(unit, batch, scale, levels, sync)


def _batch(run: Run) -> BatchColumn:
    if run.batch_controller is None:
        return BatchColumn(level=None, why=None, multiple=1)
    decision = run.batch_controller.decide(run.rows)
    multiple = run.batch_size(decision.level) // run.config.batch_size
    return BatchColumn(level=decision.level, why=decision.why, multiple=multiple)


def _sync(run: Run) -> SyncColumn:
    if run.sync_controller is None:
        return SyncColumn(level=None, why=None, period=1)
    decision = run.sync_controller.decide(run.rows)
    period = period_of(decision.level, run.config.sync_levels)
    return SyncColumn(level=decision.level, why=decision.why, period=period)


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


def minibatches(run: Run, plan: Plan) -> tuple[int, Iterator[Minibatch]]:
    """How many steps a unit has, and what they train on."""
    batches = run.batches.rebatched(run.batch_size(plan.batch["level"]))
    multiple, per_epoch = plan.batch["multiple"], run.units.per_epoch
    # (epoch, first step, stop) in steps of this batch size; an epoch's last batch may be short
    parts = [
        (epoch, first // multiple, len(batches) if stop == per_epoch else -(-stop // multiple))
        for epoch, first, stop in run.units.parts(plan.unit)
    ]
    count = sum(stop - first for _, first, stop in parts)
    may_end = plan.unit == len(run.units) - 1 or run.config.budget is not None
    may_end |= run.phase.ends_local_steps(plan.unit + 1)

    def generate() -> Iterator[Minibatch]:
        left = count
        for epoch, first, stop in parts:
            data = batches.epoch(epoch, run.world.hosted, first)
            for step, (x, y) in zip(range(first, stop), data, strict=False):
                left -= 1
                at = epoch * per_epoch + step * multiple
                lr = run.learning_rate(at) * plan.scale
                yield Minibatch(epoch, step, at, lr, may_end and not left, x, y)

    return count, generate()
