"""The units of a user's own training: when one ends, at which learning rate and in what time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, SupportsFloat

from torch import Tensor, nn

from regimes.base.errors import ConfigError, is_integer, require, unexpected_value


class _JoinedOptimizers:
    """Several optimisers of one model, as one with the parameter groups of all."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:
        return {k: v for one in self.optimizers for k, v in getattr(one, "defaults", {}).items()}

    @property
    def name(self) -> str:
        return " and ".join(type(one).__name__ for one in self.optimizers)


def join_optimizers(several: Sequence[Any]) -> Any:
    """Join several optimisers to one; return the first, if it is the only one."""
    return several[0] if len(several) == 1 else _JoinedOptimizers(several)


_OF_COPIES = (
    "leave out optimizer= and every=, and call hook.epoch_end(lr=...) at the end of each unit"
)
_LEFT_OUT = ("params", "lr")  # of a group's options: the rate is each unit's own


@dataclass
class UnitSchedule:
    """Ends units and reads their learning rates.

    Attributes:
        every: steps of a unit; a sampler: the unit ends when ``sampler.epoch`` changes; or "epoch":
            the user calls ``epoch_end``.
        optimizer: has ``param_groups``; the rate of the first is the unit's.
        first: the rate at the unit's first step, if there is an optimiser.
        groups: the rates of all parameter groups at that step, if there are several groups.
        epoch: the sampler's epoch when the unit began.
        lr: the rate of this unit, as given to the previous ``epoch_end``.
    """

    every: Any = "epoch"
    optimizer: Any = None
    first: float | None = None
    groups: list[float | None] | None = None
    epoch: int | None = None
    lr: float | None = None

    @property
    def automatic(self) -> bool:
        """Return whether units end without a call of ``epoch_end``."""
        return self.every != "epoch"

    @property
    def steps(self) -> int | None:
        """Return the steps of a unit, if they are counted, else None."""
        return self.every if isinstance(self.every, int) else None

    def begin_unit(self) -> None:
        """Note the rates and the sampler's epoch at the first step of a unit."""
        self.first, all_rates = self.current_rate(), self.all_rates()
        self.groups = all_rates if len(all_rates) > 1 else None
        self.epoch = getattr(self.every, "epoch", None)

    def is_over(self, steps: int) -> bool:
        """Return whether a unit of so many steps has ended; this is asked when the next backward
        pass begins."""
        if not self.automatic or not steps:
            return False
        if isinstance(self.every, int):
            return steps >= self.every
        return getattr(self.every, "epoch", None) != self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the values that ``begin_unit`` has noted for the current unit."""
        return {"first": self.first, "groups": self.groups, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.epoch = state.get("first"), state.get("epoch")
        self.groups = state.get("groups")

    def current_rate(self) -> float | None:
        """Return the optimiser's rate now; None without an optimiser."""
        if self.optimizer is None:
            return None
        lr = self.optimizer.param_groups[0]["lr"]
        return learning_rate(lr, "the optimiser's learning rate")

    def unit_rates(self) -> tuple[float, float]:
        """Return the rates at the first step of the unit that has ended, and of the next unit."""
        now = self.current_rate()
        assert now is not None
        return now if self.first is None else self.first, now

    def named_rates(
        self, lr: SupportsFloat | None, next_lr: SupportsFloat | None
    ) -> tuple[float, float]:
        """Return the rates of the unit (see ``unit_rates``), from the arguments of ``epoch_end``.

        Raises:
            ConfigError: a rate that is no number from zero up, or none at all.
        """
        given = lr if lr is not None else self.current_rate()
        if given is None:
            raise ConfigError(
                "epoch_end: give the learning rate, epoch_end(lr=...), or the optimiser to "
                "attach(..., optimizer=optimizer)"
            )
        now = learning_rate(given, "epoch_end: lr")
        if next_lr is not None:
            following = learning_rate(next_lr, "epoch_end: next_lr")
        else:  # ``now`` is the next epoch's; this epoch's was that of the call before
            following, before = now, self.first if lr is None else self.lr
            now = now if before is None else before
        self.lr = following
        return now, following

    def all_rates(self) -> list[float | None]:
        """Return the rates of all parameter groups now, None for one that is no finite number;
        empty without an optimiser."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [_as_plain(group["lr"]) for group in groups]

    def rates_of(self, parameters: Sequence[nn.Parameter]) -> list[float] | None:
        """Return the rate of each parameter now, 0 for one that the optimiser does not step; None
        without an optimiser. This is a sync point if the optimiser's rates are tensors on a GPU."""
        if self.optimizer is None:
            return None
        rate = {
            id(p): learning_rate(group["lr"], "the optimiser's learning rate")
            for group in self.optimizer.param_groups
            for p in group["params"]
        }
        return [rate.get(id(p), 0.0) for p in parameters]

    def shared_facts(self) -> dict[str, Any]:
        """Return what must be the same on all processes, in plain types."""
        unit = self.steps or ("sampler" if self.automatic else "epoch")
        known = None if self.optimizer is None else describe_optimizer(self.optimizer)
        return {"every": unit, "optimizer": known, "lr": self.all_rates()}


def learning_rate(value: Any, what: str) -> float:
    """Return a rate as schedulers give it, a number of Python, NumPy or torch from 0 up, as a
    float.

    Raises:
        ConfigError: anything else; ``what`` names it.
    """
    number = _as_plain(value)
    good = isinstance(number, int | float) and not isinstance(number, bool) and number >= 0
    require(good, what, value, "a number from zero up")
    return float(number)


def unit_schedule(every: Any, optimizer: Any, model: nn.Module) -> UnitSchedule:
    """Make the schedule that says when a unit ends, from arguments of ``attach``.

    Args:
        every: steps of a unit, "epoch", or a sampler whose ``set_epoch`` ends a unit.
        optimizer: one optimiser or a list, whose learning rate the record has; or None.
        model: what the optimiser must train.

    Raises:
        ConfigError: an argument of another type; an optimiser that is missing, or that has none of
            the model's parameters.
    """
    counted = is_integer(every, 1)
    if not (counted or every == "epoch" or hasattr(every, "epoch")):
        calls = '"epoch" (then call epoch_end()), or a sampler with set_epoch()'
        raise unexpected_value("every", every, f"a number of steps from 1 up, {calls}")
    if optimizer is None:
        if every != "epoch":
            raise ConfigError(
                f"every = {every if counted else type(every).__name__}: the hook reads the "
                "learning rate of each unit from the optimiser: add optimizer=optimizer; if that "
                f"steps copies of the weights, {_OF_COPIES}"
            )
        return UnitSchedule()
    several = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not several or not all(getattr(one, "param_groups", None) for one in several):
        expected = "an optimiser of torch, with param_groups, or a list of such"
        raise unexpected_value("optimizer", optimizer, expected)
    optimizer = join_optimizers(several)
    trained = {id(p) for p in model.parameters()}
    if not any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer: it has none of the model's parameters: build it from model.parameters(); "
            f"if it steps copies of them, as masters in float32, {_OF_COPIES}"
        )
    schedule = UnitSchedule(every, optimizer)
    schedule.current_rate()  # refuses a rate that is no number before anything is registered
    return schedule


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Describe the class and the hyper-parameters of an optimiser, in plain types.

    Returns:
        "name"; "options", those that are the same in all parameter groups; and if there are
        several groups, "groups": the number of ``parameters`` of each, and its other options. An
        option that is None is left out, because torch then takes its own default; one that is no
        plain value is None.
    """
    groups = [_group_options(optimizer, group) for group in optimizer.param_groups]
    shared = {k: v for k, v in groups[0].items() if all(k in g and g[k] == v for g in groups)}
    name = optimizer.name if isinstance(optimizer, _JoinedOptimizers) else type(optimizer).__name__
    result: dict[str, Any] = {"name": name, "options": shared}
    if len(groups) > 1:
        result["groups"] = [
            {"parameters": sum(p.numel() for p in group["params"])}
            | {key: value for key, value in own.items() if key not in shared}
            for group, own in zip(optimizer.param_groups, groups, strict=True)
        ]
    return result


def _group_options(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters: those for which its class has defaults. Schedulers add keys of
    their own, such as "initial_lr"."""
    known = getattr(optimizer, "defaults", None) or group
    names = [name for name in group if name in known and name not in _LEFT_OUT]
    return {name: _as_plain(group[name]) for name in names if group[name] is not None}


def _as_plain(value: Any) -> Any:
    """A finite number of Python, a text, or a list of these; None for anything else."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, str | bool):
        return number
    if isinstance(number, Integral):
        return int(number)
    if isinstance(number, Real):
        return float(number) if math.isfinite(float(number)) else None
    if isinstance(number, Sequence):
        return [_as_plain(one) for one in number]
    return None
