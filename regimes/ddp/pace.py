"""When a unit of the hook ends, and at which learning rate it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from regimes.ddp.optimizer import described, rates
from regimes.errors import ConfigError, is_whole, unexpected


@runtime_checkable
class Epochs(Protocol):
    """What the hook wants of a ``DistributedSampler``: the epoch that ``set_epoch`` has named."""

    epoch: int


@runtime_checkable
class Rates(Protocol):
    """What the hook wants of an optimiser."""

    param_groups: list[dict[str, Any]]


@dataclass
class Pace:
    """When a unit ends.

    Attributes:
        every: so many steps; a sampler, whose epoch changes; or "epoch": the user says when.
        optimizer: whose rate it is, that of the first group.
        first: the rate at the unit's first step, where there is an optimiser.
        groups: the rates of all parameter groups at that step, where there are several.
        epoch: the sampler's when the unit began.
    """

    every: Any = "epoch"
    optimizer: Any = None
    first: float | None = None
    groups: list[float | None] | None = None
    epoch: int | None = None

    @property
    def own(self) -> bool:
        """Does the hook end units by itself?"""
        return self.every != "epoch"

    @property
    def steps(self) -> int | None:
        """Steps of a unit, if they are counted."""
        return self.every if isinstance(self.every, int) else None

    def begin(self) -> None:
        """A unit's first backward pass begins."""
        self.first, all_rates = self.rate(), self.all_rates()
        self.groups = all_rates if len(all_rates) > 1 else None
        self.epoch = None if self.steps or not self.own else self.every.epoch

    def state_dict(self) -> dict[str, Any]:
        """What was seen when the unit under way began."""
        return {"first": self.first, "groups": self.groups, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.first, self.epoch = state.get("first"), state.get("epoch")
        self.groups = state.get("groups")

    def over(self, steps: int) -> bool:
        """Is a unit of so many steps over, now that the next backward pass has begun?"""
        if not self.own or not steps:
            return False
        return steps >= self.steps if self.steps else self.every.epoch != self.epoch

    def rates(self) -> tuple[float, float]:
        """The rate at the first step of the unit just ended, and that of the unit to come."""
        now = self.rate()
        assert now is not None
        return now if self.first is None else self.first, now

    def all_rates(self) -> list[float | None]:
        """The rates of all parameter groups now; empty without an optimiser."""
        return [] if self.optimizer is None else rates(self.optimizer)

    def facts(self) -> dict[str, Any]:
        """What must be the same on all processes, in plain types."""
        unit = self.steps or ("sampler" if self.own else "epoch")
        known = None if self.optimizer is None else described(self.optimizer)
        return {"every": unit, "optimizer": known, "lr": self.all_rates()}

    def rate(self) -> float | None:
        """The optimiser's now; None without one."""
        if self.optimizer is None:
            return None
        return rate(self.optimizer.param_groups[0]["lr"], "the optimiser's learning rate")


def rate(value: Any, what: str) -> float:
    """A learning rate as schedulers give it: a number of Python, NumPy or torch, zero included."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool) and 0 <= float(number) < math.inf:
        return float(number)
    raise unexpected(what, value, "a number from zero up")


def choose(every: Any, optimizer: Any, model: nn.Module) -> Pace:
    """The arguments ``every`` and ``optimizer`` of ``attach``, checked; ConfigError otherwise."""
    whole = is_whole(every, 1)
    if not (whole or every == "epoch" or isinstance(every, Epochs)):
        raise unexpected(
            "every",
            every,
            'a number of steps from 1 up, "epoch" (then call '
            "epoch_end()), or a sampler with set_epoch()",
        )
    if optimizer is None:
        if every != "epoch":
            raise ConfigError(
                f"every = {every if whole else type(every).__name__}: the hook reads the learning "
                "rate of each unit from the optimiser: add optimizer=optimizer"
            )
        return Pace()
    if not isinstance(optimizer, Rates) or not optimizer.param_groups:
        raise unexpected("optimizer", optimizer, "an optimiser of torch, with param_groups")
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer: it has none of the model's parameters: build it from model.parameters()"
        )
    pace = Pace(every, optimizer)
    pace.rate()
    return pace
