"""The arguments of ``local_steps``, checked before anything is sent, and its record's header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regimes import compression, policies
from regimes.base.capabilities import Part
from regimes.base.config import DENSE, OuterConfig, from_dict
from regimes.base.errors import ConfigError, is_integer, require, unexpected_value
from regimes.collectives.group import on_group
from regimes.collectives.process_group import default_group
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression.elementwise import Dense
from regimes.compression.needs import compressor_parts
from regimes.hook.ddp.source import check_parameters
from regimes.hook.fsdp.replicas import ShardedGradients
from regimes.instruments.needs import policy_parts
from regimes.job import choices
from regimes.job.attached import AttachedJob
from regimes.job.recorder import RecordOptions
from regimes.policies import Policy, Static, check_levels
from regimes.policies.schedules import LONGEST, period_of
from regimes.records import Header
from regimes.training.plug_ins import check_model_levels, check_periods, outer_parts

_CALL = "local_steps()"
_PERIODS = {"low": 1, "high": 32}  # steps between synchronisations, where none are given


@dataclass(frozen=True)
class LocalChoice:
    """Holds a rule for the period, what a synchronisation does, and how pseudo-gradients are
    compressed.

    Attributes:
        rule: decides the period.
        exchange: the compressor of pseudo-gradients, its levels and what decides them.
        every: steps of a unit.
        varies: a policy decides the level; else it is the only one.
    """

    rule: Policy
    periods: Mapping[str, int]
    outer: OuterConfig
    exchange: choices.Choice
    every: int
    varies: bool = False

    def needed_parts(self) -> Iterator[Part]:
        """Yield what is chosen, each part with what it needs of a job (``capabilities``)."""
        yield from compressor_parts(self.exchange.compressor)
        yield from policy_parts(self.rule, "policy")
        yield from policy_parts(self.exchange.policy, "level_policy")
        yield from outer_parts(self.outer)
        yield from self.exchange.instrument_parts()

    def shared_facts(self) -> dict[str, Any]:
        """Return the choice in plain types; it must be the same on all processes."""
        values = self.exchange.values
        levels: dict[str, Any] = {"level": next(iter(values.values()), DENSE)}  # the only one
        if self.varies:
            rule = policies.REGISTRY.table(self.exchange.policy)
            levels = {"levels": values, "level_policy": rule}
        return {
            "policy": policies.REGISTRY.table(self.rule),
            "periods": dict(self.periods),
            "outer": asdict(self.outer),
            "compressor": compression.REGISTRY.table(self.exchange.compressor),
            **levels,
            **self.exchange.instrument_facts(),
        }


def choose_local(
    policy: Any,
    periods: Mapping[str, int] | None,
    outer: Any,
    compressor: Any,
    level_policy: Any,
    every: int,
    measured: Mapping[str, Mapping[str, Any]],
) -> LocalChoice:
    """Check the arguments of ``local_steps`` and make the choice of them. Raise ConfigError unless
    they go together."""
    require(is_integer(every, 1), "every", every, "a number of steps from 1 up")
    words = _PERIODS if periods is None else periods
    good = isinstance(words, Mapping) and all(
        isinstance(name, str) and is_integer(steps, 1) and steps <= LONGEST
        for name, steps in words.items()
    )
    require(good, "periods", words, 'numbers of steps by name, like {"low": 1, "high": 32}')
    words = {name: int(steps) for name, steps in words.items()}
    exchange = _choose_exchange(compressor, level_policy, measured)
    rule: Policy
    if isinstance(policy, int) and not isinstance(policy, bool):
        require(1 <= policy <= LONGEST, "policy", policy, "a period from 1 step up, or a policy")
        expected = f"none beside the constant period {policy}: a policy decides between periods"
        require(periods is None, "periods", periods, expected)
        rule = Static(str(policy))
    else:
        expected = "a period in steps, or a policy's name, table or object"
        rule = choices.pick_policy(policy, expected)
        check_levels(rule, words, "sync_policy")
        check_model_levels(words, "periods", "longer", "the shorter period")
    after = _choose_outer(outer)
    check_periods(after, {period_of(name, words) for name in rule.names})
    return LocalChoice(rule, words, after, exchange, every, level_policy is not None)


def _choose_exchange(
    compressor: Any, rule: Any, measured: Mapping[str, Mapping[str, Any]]
) -> choices.Choice:
    """A compressor with its only level, or with several and what decides them."""
    if rule is None:
        pressed, level, levels = choices.take_level("dense" if compressor is None else compressor)
        require(levels is None, "levels", levels, "none without level_policy: it is one level")
        if level is None and type(pressed) is not Dense:
            kind = type(pressed)
            raise ConfigError(
                f"compressor = {compressor!r}: it names no level, so nothing would be compressed: "
                f"say {kind.__name__}({kind.level_word}=...), or let a level_policy decide"
            )
        dense = level in (None, DENSE)
        known = {} if dense else choices.pick_levels(pressed, {"sent": level})
        static = Static(next(iter(known), DENSE))
        return choices.Choice(static, pressed, known, "update", instruments=measured)
    rule, pressed, levels = choices.choose_levels(rule, compressor, "dense")
    return choices.choose_exchange(rule, pressed, levels, "update", 0, (None, measured))


@dataclass(frozen=True)
class TrainedParameters:
    """Holds the trained parameters of a bare model, or of one that is divided within replicas.

    Attributes:
        parameters: by name, as the optimiser has them.
        local: this process's part of each.
        sharded: of a divided model; None of a bare one.
    """

    parameters: dict[str, nn.Parameter]
    local: list[Tensor]
    sharded: ShardedGradients | None = None

    def make_world(self, timeout: float) -> ProcessWorld:
        """Make a world of all processes, which all call this."""
        if self.sharded is not None:
            return self.sharded.make_world(timeout, _CALL)
        return on_group(default_group(), self.local[0].device, timeout, _CALL)

    def start_alike(self, world: World, model: nn.Module) -> None:
        """Let all processes begin with the parameters, frozen ones too, and the buffers of process
        0, or of the first replica."""
        if self.sharded is not None:
            self.sharded.start_alike()
        else:
            world.broadcast([*(p.data for p in model.parameters()), *model.buffers()])

    def shared_facts(self) -> dict[str, Any]:
        """Return what must be the same on all processes, in plain types."""
        return {} if self.sharded is None else self.sharded.shared_facts()


def check_trained(model: nn.Module, optimizer: Any, replicas: Any) -> TrainedParameters:
    """Return the trained parameters; raise ConfigError unless their steps can be local."""
    if default_group() is None:
        raise ConfigError(
            "local_steps: there is no process group: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if not isinstance(model, nn.Module):
        raise unexpected_value("model", model, "a torch.nn.Module")
    _check_values(model)
    several = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if not several or not all(isinstance(one, torch.optim.Optimizer) for one in several):
        expected = "an optimiser of torch, or a list of such"
        raise unexpected_value("optimizer", optimizer, expected)
    if replicas is None:
        parameters = _bare_parameters(model)
        found = TrainedParameters(parameters, [p.data for p in parameters.values()])
    else:
        source = ShardedGradients(model, replicas)
        source.refuse_columns()
        found = TrainedParameters(source.parameters, source.local, source)
    groups = [group for one in several for group in one.param_groups]
    stepped = [id(p) for group in groups for p in group["params"]]
    if len({*stepped}) < len(stepped):
        raise ConfigError("optimizer: several have the same parameter: each is stepped by one")
    if {*stepped} != {id(p) for p in found.parameters.values()}:
        raise ConfigError(
            "optimizer: it has other parameters than the model trains: build it from [p for p in "
            "model.parameters() if p.requires_grad]"
        )
    check_parameters(found.parameters, half=False)
    _check_one_type(found.parameters)
    return found


def _check_values(model: nn.Module) -> None:
    """Raise ConfigError unless all parameters and buffers have values."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ConfigError(
                f"local_steps: {name!r} is on the device meta and has no values: call "
                'model.to_empty(device="cpu"), or another device, and initialise the model first'
            )


def _check_one_type(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError unless all pseudo-gradients fit into one tensor."""
    kinds = {str(p.dtype).removeprefix("torch."): name for name, p in parameters.items()}
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
        raise ConfigError(
            f"local_steps: the model's parameters are of several types, {listed}: pseudo-"
            "gradients are exchanged in one: convert the model, model.float()"
        )


def _bare_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if "FSDPModule" in kinds:
        raise ConfigError(
            "local_steps: the model is divided by fully_shard: shard it over one dimension of a "
            'mesh, mesh["shard"], and name the other, replicas=mesh["replicate"]'
        )
    if isinstance(model, DistributedDataParallel) or "DataParallel" in kinds:
        raise ConfigError(
            f"local_steps: {type(model).__name__} exchanges something at each step by itself: give "
            "it the bare model"
        )
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ConfigError("the model has no parameter to train: there is nothing to synchronise")
    return found


def _choose_outer(given: Any) -> OuterConfig:
    if given is None or isinstance(given, OuterConfig):
        config = given or OuterConfig()
    elif isinstance(given, Mapping):
        config = from_dict(OuterConfig, given, "outer.")
        kind = given.get("period_one", "parameters")
        expected = '"parameters": in a loop of your own each process steps by its own gradient'
        require(kind == "parameters", "outer.period_one", kind, expected)
    else:
        raise unexpected_value("outer", given, 'a table like {"lr": 0.7, "momentum": 0.9}')
    return replace(config, period_one="parameters")


def local_header(
    options: RecordOptions | None,
    job: AttachedJob,
    chosen: LocalChoice,
    model: nn.Module,
    seed: int,
) -> Header:
    """Make the header of the record, ``run.json``. The record is named after the policy of levels
    by default, or without one after the rule for the period. It has the names of the periods that
    the rule can choose."""
    rule = policies.REGISTRY.table(chosen.rule)
    levels = policies.REGISTRY.table(chosen.exchange.policy)
    options = options or RecordOptions("")
    named = replace(options, name=options.name or (levels if chosen.varies else rule)["name"])
    return job._make_header(
        named,
        chosen.exchange,
        model,
        seed,
        sync_policy=rule,
        sync_levels={n: p for n, p in chosen.periods.items() if n in chosen.rule.names},
        outer=asdict(chosen.outer),
    )
