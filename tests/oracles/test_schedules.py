"""The learning rate against torch's own schedulers, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as theirs

from regimes.base.config import OptimizerConfig
from regimes.training.learning_rate import LearningRate

STEPS = 1000
LR = 0.4


def rates(make: Callable[[torch.optim.Optimizer], Any]) -> Iterator[float]:
    """What a scheduler of torch gives in each of `STEPS` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = make(optimizer)
    for _ in range(STEPS):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


def after_warmup(first: int, rest: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A linear warm-up from a quarter of the rate, then another scheduler."""
    return lambda o: theirs.SequentialLR(
        o, [theirs.LinearLR(o, 0.25, 1.0, first), rest(o)], milestones=[first]
    )


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "constant": ({"schedule": "constant"}, lambda o: theirs.ConstantLR(o, 1.0)),
    "steps": (
        {"schedule": "step", "decay_steps": (300, 700), "decay_factor": 4.0},
        lambda o: theirs.MultiStepLR(o, [300, 700], 0.25),
    ),
    "cosine": (
        {"schedule": "cosine", "final": 0.1},
        lambda o: theirs.CosineAnnealingLR(o, STEPS, 0.1 * LR),
    ),
    "linear": ({"schedule": "linear"}, lambda o: theirs.LinearLR(o, 1.0, 1e-12, STEPS)),
    "wsd": (
        {"schedule": "wsd", "decay_share": 0.3},
        lambda o: theirs.SequentialLR(
            o, [theirs.ConstantLR(o, 1.0), theirs.LinearLR(o, 1.0, 1e-12, 300)], [700]
        ),
    ),
    "cyclic": (
        {"schedule": "cyclic", "cycle_steps": 100, "final": 0.01},
        lambda o: theirs.CosineAnnealingWarmRestarts(o, 100, 1, 0.01 * LR),
    ),
    "warm-up": (
        {"schedule": "constant", "warmup_steps": 50, "warmup_from": LR / 4},
        after_warmup(50, lambda o: theirs.ConstantLR(o, 1.0)),
    ),
    "warm-up and cosine": (
        {"schedule": "cosine", "warmup_steps": 50, "warmup_from": LR / 4},
        after_warmup(50, lambda o: theirs.CosineAnnealingLR(o, STEPS - 50)),
    ),
    "warm-up and cyclic": (
        {"schedule": "cyclic", "cycle_steps": 100, "warmup_steps": 50, "warmup_from": LR / 4},
        after_warmup(50, lambda o: theirs.CosineAnnealingWarmRestarts(o, 100)),
    ),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:The epoch parameter")
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_torchs(name: str) -> None:
    fields, make = CASES[name]
    ours = LearningRate(OptimizerConfig(lr=LR, per="step", **fields), 10, STEPS)
    assert [ours(step) for step in range(STEPS)] == pytest.approx(list(rates(make)), abs=1e-9)


@pytest.mark.parametrize("schedule", ["step", "cosine", "linear", "wsd", "cyclic"])
def test_a_rate_per_epoch_is_that_of_its_first_step(schedule: Any) -> None:
    fields: dict[str, Any] = {"schedule": schedule, "warmup_from": 0.1, "decay_epochs": (40,)}
    per_step = LearningRate(OptimizerConfig(per="step", **fields), 10, STEPS)
    per_epoch = LearningRate(OptimizerConfig(**fields), 10, STEPS)
    for step in range(STEPS):
        assert per_epoch(step) == per_step(step // 10 * 10)


def test_a_smooth_schedule_ends_where_it_says() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        config = OptimizerConfig(lr=LR, schedule=schedule, per="step", final=0.25)  # type: ignore[arg-type]
        assert LearningRate(config, 10, STEPS)(STEPS) == pytest.approx(0.25 * LR)


def test_a_held_warm_up_lags() -> None:
    """By hand: 0.1 is held an epoch longer, then the ramp of five epochs."""
    config = OptimizerConfig(lr=0.4, warmup_from=0.1, warmup_epochs=5, warmup_hold=1)
    rate = LearningRate(config, 98, 98 * 300)
    found = [rate(98 * epoch) for epoch in range(8)]
    assert found == pytest.approx([0.1, 0.1, 0.16, 0.22, 0.28, 0.34, 0.4, 0.4])
    from_zero = LearningRate(OptimizerConfig(lr=0.4, warmup_from=0.0, warmup_epochs=2), 98, 294)
    assert [from_zero(98 * epoch) for epoch in range(3)] == pytest.approx([0.0, 0.2, 0.4])


def test_a_rate_divided_by_more_than_a_float_is_none() -> None:
    config = OptimizerConfig(lr=0.4, decay_epochs=(1, 2), decay_factor=1e200)
    rate = LearningRate(config, per_epoch=1, total=3)
    assert [rate(step) for step in range(3)] == [0.4, 0.4 / 1e200, 0.0]
