"""A level that the script sets. Oracle: the same job without an interruption."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes

pytestmark = pytest.mark.usefixtures("one_process")

STEPS, UNIT = 16, 4
# by step: set between two units, replaced within the second, given back within the third
CALLS = {4: "dense", 6: "high", 7: "low", 10: None}


class Training:
    """A model, its optimiser, and a job of either kind."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(8, 8)
        options: dict[str, Any] = {"compressor": "powersgd", "levels": {"low": 4, "high": 1}}
        options |= {"every": UNIT, "summary": False}
        if kind == "hook":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if kind == "hook":
            options |= {"policy": "accordion", "optimizer": self.optimizer}
            self.job: Any = regimes.attach(self.model, **options)
        else:
            options |= {"policy": 2, "level_policy": "accordion"}
            self.job = regimes.local_steps(self.model, self.optimizer, **options)

    def step(self, number: int) -> None:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        if isinstance(self.job, regimes.LocalSteps):
            self.job.step()

    def state(self) -> tuple[Any, ...]:
        parts = self.model, self.optimizer, self.job
        return tuple(copy.deepcopy(part.state_dict()) for part in parts)

    def load(self, state: tuple[Any, ...]) -> None:
        for part, saved in zip((self.model, self.optimizer, self.job), state, strict=True):
            part.load_state_dict(saved)


def train(kind: str, stop: int | None = None) -> tuple[list[Any], torch.Tensor]:
    """The layers of all units, and the weights; saved and resumed before step ``stop``."""
    training = Training(kind)
    for number in range(STEPS):
        if number == stop:
            saved = training.state()
            training.job.close()
            training = Training(kind)
            training.load(saved)
        if number in CALLS:
            training.job.set_level(CALLS[number], why=f"at {number}")
        training.step(number)
    training.job.close()
    layers = [row["layers"] for row in training.job.rows]
    return layers, next(training.model.parameters()).detach()


@pytest.mark.parametrize("kind", ["hook", "local steps"])
def test_a_job_that_is_resumed_within_a_unit_keeps_its_level_to_the_end_of_it(kind: str) -> None:
    """Also where the script has set another level, or none, for the next unit."""
    layers, weight = train(kind)
    assert [layer["level"][0] for layer in layers[1:3]] == ["dense", "low"]
    assert [layer["why"][0]["why"] for layer in layers[1:3]] == ["at 4", "at 7"]
    assert layers[3]["level"][0] in ("low", "high")
    for stop in (7, 8, 9, 11, 12):
        found, here = train(kind, stop)
        assert found == layers, stop
        assert torch.equal(here, weight), stop


@pytest.mark.parametrize("kind", ["hook", "local"])
@pytest.mark.parametrize("level", ["high", None])
def test_a_reason_that_is_no_text_is_refused(kind: str, level: str | None) -> None:
    training = Training(kind)
    with pytest.raises(regimes.ConfigError, match="expected a text"):
        training.job.set_level(level, why=3)
    training.job.close()
