"""When a unit of a job ends, and the learning rate at which it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from regimes.ddp.optimizer import described, rates
from regimes.errors import ConfigError, is_whole, unexpected


@runtime_checkable
class HasEpoch(Protocol):
    """The part of a ``DistributedSampler`` that is used: the epoch that ``set_epoch`` has set."""

    epoch: int


@runtime_checkable
class HasGroups(Protocol):
    """The part of an optimiser that is used."""

    param_groups: list[dict[str, Any]]


@dataclass
class UnitSchedule:
    """Ends units and reads their learning rates.

    Attributes:
        every: steps of a unit; a sampler, a change of whose epoch ends the unit; or "epoch": the
            user calls ``epoch_end``.
        optimizer: its first group's rate is the unit's.
        first: the rate at the unit's first step, if there is an optimiser.
        groups: the rates of all parameter groups at that step, if there are several groups.
        epoch: the sampler's epoch when the unit began.
    """

    every: int | HasEpoch | Literal["epoch"] = "epoch"
    optimizer: HasGroups | None = None
    first: float | None = None
    groups: list[float | None] | None = None
    epoch: int | None = None

    @property
    def automatic(self) -> bool:
        """Whether units end without a call of ``epoch_end``."""
        return self.every != "epoch"

    @property
    def steps(self) -> int | None:
        """Steps of a unit, if they are counted."""
        return self.every if isinstance(self.every, int) else None

    def begin(self) -> None:
        """Note the rates and the sampler's epoch at the first step of a unit."""
        self.first, all_rates = self.rate(), self.all_rates()
        self.groups = all_rates if len(all_rates) > 1 else None
        self.epoch = self.every.epoch if isinstance(self.every, HasEpoch) else None

    def is_over(self, steps: int) -> bool:
        """Whether a unit of so many steps has ended; asked when the next backward pass begins."""
        if not self.automatic or not steps:
            return False
        if isinstance(self.every, int):
            return steps >= self.every
        return getattr(self.every, "epoch", None) != self.epoch

    def state_dict(self) -> dict[str, Any]:
        """What ``begin`` has noted for the unit under way."""
        return {"first": self.first, "groups": self.groups, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.epoch = state.get("first"), state.get("epoch")
        self.groups = state.get("groups")

    def rate(self) -> float | None:
        """The optimiser's rate now; None without an optimiser."""
        if self.optimizer is None:
            return None
        lr = self.optimizer.param_groups[0]["lr"]
        return learning_rate(lr, "the optimiser's learning rate")

    def rates(self) -> tuple[float, float]:
        """The rate at the first step of the unit that has ended, and that of the next unit."""
        now = self.rate()
        assert now is not None
        return now if self.first is None else self.first, now

    def all_rates(self) -> list[float | None]:
        """The rates of all parameter groups now; empty without an optimiser."""
        return [] if self.optimizer is None else rates(self.optimizer)

    def rates_of(self, parameters: Sequence[nn.Parameter]) -> list[float] | None:
        """The rate of each parameter now, 0 for one that the optimiser does not step; None without
        an optimiser. A sync point where the optimiser's rates are tensors on a GPU."""
        if self.optimizer is None:
            return None
        rate = {
            id(p): learning_rate(group["lr"], "the optimiser's learning rate")
            for group in self.optimizer.param_groups
            for p in group["params"]
        }
        return [rate.get(id(p), 0.0) for p in parameters]

    def facts(self) -> dict[str, Any]:
        """What must be the same on all processes, in plain types."""
        unit = self.steps or ("sampler" if self.automatic else "epoch")
        known = None if self.optimizer is None else described(self.optimizer)
        return {"every": unit, "optimizer": known, "lr": self.all_rates()}


def learning_rate(value: Any, what: str) -> float:
    """A rate as schedulers give it: a number of Python, NumPy or torch, from 0 up.

    Raises:
        ConfigError: anything else; ``what`` names it.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool) and 0 <= float(number) < math.inf:
        return float(number)
    raise unexpected(what, value, "a number from zero up")


def unit_schedule(every: Any, optimizer: Any, model: nn.Module) -> UnitSchedule:
    """The schedule for the arguments ``every`` and ``optimizer`` of ``attach``.

    Raises:
        ConfigError: an argument of another type; an optimiser that is missing, or that has none of
            the model's parameters.
    """
    counted = is_whole(every, 1)
    if not (counted or every == "epoch" or isinstance(every, HasEpoch)):
        raise unexpected(
            "every",
            every,
            'a number of steps from 1 up, "epoch" (then call '
            "epoch_end()), or a sampler with set_epoch()",
        )
    if optimizer is None:
        if every != "epoch":
            raise ConfigError(
                f"every = {every if counted else type(every).__name__}: the hook reads the "
                "learning rate of each unit from the optimiser: add optimizer=optimizer"
            )
        return UnitSchedule()
    if not isinstance(optimizer, HasGroups) or not optimizer.param_groups:
        raise unexpected("optimizer", optimizer, "an optimiser of torch, with param_groups")
    trained = {id(p) for p in model.parameters()}
    if not any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer: it has none of the model's parameters: build it from model.parameters()"
        )
    schedule = UnitSchedule(every, optimizer)
    schedule.rate()  # refuses a rate that is no number before anything is registered
    return schedule
