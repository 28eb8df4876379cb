"""The arguments of ``local_steps``, checked before anything travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes import compression, policies
from regimes.collectives.group import default_group
from regimes.collectives.requests import Layer
from regimes.config import DENSE, Level, OuterConfig, from_dict
from regimes.ddp import validate
from regimes.detectors.statistics import INSTRUMENT, Statistic
from regimes.errors import ConfigError, is_whole, require, unexpected
from regimes.policies import Policy, Static, check_levels
from regimes.policies.controller import Levels
from regimes.policies.periods import LONGEST

MEASURED = ("norms", "noise", "error", "spread")  # instruments that need no data
PERIODS = {"low": 1, "high": 32}


@dataclass(frozen=True)
class Chosen:
    """What a user of local steps has chosen.

    Attributes:
        rule: decides the period.
        exchange: what is sent of the movement; its level is the same throughout.
        every: steps of a unit.
    """

    rule: Policy
    periods: Mapping[str, int]
    outer: OuterConfig
    exchange: validate.Choice
    every: int

    def value(self, name: str) -> Level:
        """What a level's name means."""
        return DENSE if name == DENSE else self.exchange.levels[name]

    def levels(self, layers: Sequence[Layer]) -> Levels:
        """The level of each layer: the one chosen, or dense where none is compressed."""
        level = next(iter(self.exchange.levels), DENSE)
        names = [level if layer.compressed else DENSE for layer in layers]
        return Levels(names, [None] * len(names), {})


def choose(
    policy: Any,
    periods: Mapping[str, int] | None,
    outer: Any,
    compressor: Any,
    level: Level,
    every: int,
) -> Chosen:
    """ConfigError unless they go together."""
    require(is_whole(every, 1), "every", every, "a number of steps from 1 up")
    words = _periods(PERIODS if periods is None else periods)
    return Chosen(_rule(policy, words), words, _outer(outer), _exchange(compressor, level), every)


def facts(chosen: Chosen) -> dict[str, Any]:
    """A choice in plain types, which must be the same on all processes."""
    return {
        "policy": policies.REGISTRY.table(chosen.rule),
        "periods": dict(chosen.periods),
        "outer": asdict(chosen.outer),
        "compressor": compression.REGISTRY.table(chosen.exchange.compressor),
        "level": next(iter(chosen.exchange.levels.values()), DENSE),
    }


def trainable(model: nn.Module, optimizer: Any) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; ConfigError unless these can be local steps."""
    if default_group() is None:
        raise ConfigError(
            "local_steps: there is no process group: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if isinstance(model, DistributedDataParallel) or kinds & {"FSDPModule", "DataParallel"}:
        raise ConfigError(
            f"local_steps: {type(model).__name__} exchanges something at each step by itself: give "
            "it the bare model"
        )
    if not isinstance(model, nn.Module):
        raise unexpected("model", model, "a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise unexpected("optimizer", optimizer, "an optimiser of torch")
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not found or stepped != {id(p) for p in found.values()}:
        raise ConfigError(
            "optimizer: it has other parameters than the model trains: build it from the "
            "model's parameters"
        )
    validate.suited(found)
    return found


def _periods(given: Any) -> dict[str, int]:
    good = isinstance(given, Mapping) and all(
        isinstance(name, str) and is_whole(steps, 1) and steps <= LONGEST
        for name, steps in given.items()
    )
    require(good, "periods", given, 'numbers of steps by name, like {"low": 1, "high": 32}')
    return {name: int(steps) for name, steps in given.items()}


def _rule(given: Any, periods: dict[str, int]) -> Policy:
    if isinstance(given, int) and not isinstance(given, bool):
        require(1 <= given <= LONGEST, "policy", given, "a period from 1 step up, or a policy")
        return Static(str(given))
    table = {"name": given} if isinstance(given, str) else given
    rule = policies.policy(dict(table)) if isinstance(table, Mapping) else table
    if not isinstance(rule, Policy):
        raise unexpected("policy", given, "a period in steps, or a policy's name, table or object")
    check_levels(rule, periods, "sync_policy")
    for need in rule.needs:
        if INSTRUMENT.get(Statistic.parse(need).family) not in MEASURED:
            raise ConfigError(
                f"the policy needs the statistic {need!r}, but only what is exchanged is seen "
                "here: norm, spread, noise_scale, diversity, error; or train with regimes.run"
            )
    return rule


def _outer(given: Any) -> OuterConfig:
    if given is None or isinstance(given, OuterConfig):
        made = given or OuterConfig()
    elif isinstance(given, Mapping):
        made = from_dict(OuterConfig, given, "outer.")
    else:
        raise unexpected("outer", given, 'a table like {"lr": 0.7, "momentum": 0.9}')
    good = made.lr > 0 and 0 <= made.momentum < 1 and (made.momentum > 0 or not made.nesterov)
    require(
        good, "outer", made, "lr above 0, momentum from 0 up and below 1, nesterov only with it"
    )
    return replace(made, period_one="parameters")


def _exchange(compressor: Any, level: Level) -> validate.Choice:
    chosen, levels = validate.pick_compressor(compressor), {}
    if level != DENSE:
        levels = validate.pick_levels({"sent": level})
        validate.check_values(chosen, levels)
    return validate.Choice(Static(next(iter(levels), DENSE)), chosen, levels, "update")
