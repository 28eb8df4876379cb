"""What a unit will do: decided before it, from the units so far; and the samples it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regimes.policies.controller import Levels
from regimes.policies.periods import period_of
from regimes.policies.returns import check_reasons
from regimes.training.build import Run


@dataclass(frozen=True)
class Plan:
    """What is decided before a unit, from the units so far.

    Attributes:
        batch: as the record has it, see ``_batch``.
        scale: of the learning rate, by the batch size.
        levels: of all layers, with reasons.
        sync: the period between synchronisations, as the record has it, see ``_sync``.
    """

    unit: int
    batch: dict[str, Any]
    scale: float
    levels: Levels
    sync: dict[str, Any]


def decide(run: Run, unit: int) -> Plan:
    """The plan of unit ``len(rows)``."""
    batch = _batch(run)
    scale = batch["multiple"] if run.config.optimizer.scale_with_batch else 1
    levels, sync = run.controller.decide(run.rows), _sync(run)
    for by, reasons in (
        (run.controller, levels.why),
        (run.batch_controller, [batch["why"]]),
        (run.sync_controller, [sync["why"]]),
    ):
        if by is not None:
            check_reasons(by.policy, reasons)
    return Plan(unit, batch, scale, levels, sync)


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
    multiple, every = plan.batch["multiple"], run.units.per_epoch
    parts = [
        (epoch, first // multiple, len(batches) if stop == every else -(-stop // multiple))
        for epoch, first, stop in run.units.parts(plan.unit)
    ]

    count = sum(stop - first for _, first, stop in parts)
    ends = plan.unit == len(run.units) - 1 or run.config.budget is not None

    def each() -> Iterator[Minibatch]:
        left = count
        for epoch, first, stop in parts:
            data = batches.epoch(epoch, run.world.hosted, first)
            for step, (x, y) in zip(range(first, stop), data, strict=False):
                left -= 1
                at = epoch * every + step * multiple
                lr = run.learning_rate(at) * plan.scale
                yield Minibatch(epoch, step, at, lr, ends and not left, x, y)

    return count, each()


def _batch(run: Run) -> dict[str, Any]:
    """The unit's batch size, as the record has it: its level, why, and the multiple that it is of
    the configuration's ``batch_size``."""
    if run.batch_controller is None:
        return {"level": None, "why": None, "multiple": 1}
    decision = run.batch_controller.decide(run.rows)
    multiple = run.batch_size(decision.level) // run.config.batch_size
    return {"level": decision.level, "why": decision.why, "multiple": multiple}


def _sync(run: Run) -> dict[str, Any]:
    """The period that is taken up at the next synchronisation: its level, and why."""
    if run.sync_controller is None:
        return {"level": None, "why": None, "period": 1}
    decision = run.sync_controller.decide(run.rows)
    period = period_of(decision.level, run.config.sync_levels)
    return {"level": decision.level, "why": decision.why, "period": period}
