"""What a hook is made of, checked before anything is registered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn, cast, get_args
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes import compression, policies
from regimes.compression import Compressor
from regimes.config import DENSE, Level, Signal
from regimes.detectors.statistics import INSTRUMENT, Statistic
from regimes.errors import ConfigError, is_whole, nearest, require, unexpected
from regimes.policies import Policy, check_levels

WRAP = "wrap it first, model = DistributedDataParallel(model)"
SHARDED = (
    "it keeps a part of the parameters on each process and never exchanges whole gradients, which "
    "the hook compresses: where the model fits on one device, wrap it in DistributedDataParallel"
)
NOT_DDP = {  # by the name of a class, so that none is imported
    "compiled DDP": "attach before compiling, hook = regimes.attach(ddp), then torch.compile(ddp)",
    "FullyShardedDataParallel": SHARDED,
    "FSDPModule": SHARDED,
    "DataParallel": "it is one process with several devices, between which nothing is exchanged "
    "that could be compressed: start a process per device (torchrun) and use "
    "DistributedDataParallel",
    "DeepSpeedEngine": "it exchanges gradients by itself: use DistributedDataParallel",
    "OptimizedModule": WRAP,
}

SAME_OF_DDP = (  # what decides the collectives, or which layers a step leaves alone
    "bucket_bytes_cap",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
)
LONGEST = 1e9  # seconds
FROM_GRADIENTS = ("norms", "msdr", "noise", "error")  # instruments that need no data


@dataclass(frozen=True)
class Choice:
    """What a hook's user has chosen, checked: the arguments of ``attach``."""

    policy: Policy
    compressor: Compressor
    levels: Mapping[str, Level]
    signal: Signal
    dense_start: int = 0


def choose(
    policy: Any, compressor: Any, levels: Mapping[str, Level] | None, signal: str, dense_start: int
) -> Choice:
    """A policy, a compressor and a signal that go together; ConfigError otherwise."""
    whole = is_whole(dense_start, 0)
    require(whole, "start_compressing_after", dense_start, "a number of steps, from 0 up")
    read = pick_signal(signal)
    chosen = pick_compressor(compressor)
    known = pick_levels(chosen.usual if levels is None else levels)
    check_values(chosen, known)
    return Choice(pick_policy(policy, known), chosen, known, read, dense_start)


def facts(chosen: Choice) -> dict[str, Any]:
    """A choice in plain types, which must be the same on all processes."""
    return {
        "policy": policies.REGISTRY.table(chosen.policy),
        "compressor": compression.REGISTRY.table(chosen.compressor),
        "levels": dict(chosen.levels),
        "signal": chosen.signal,
        "start_compressing_after": chosen.dense_start,
    }


def check_seed(seed: Any) -> None:
    """As in a configuration; ConfigError otherwise."""
    good = is_whole(seed, -(2**63)) and seed < 2**63
    require(good, "seed", seed, "a whole number of at most 63 bits")


def wrapped(model: nn.Module) -> DistributedDataParallel:
    """The model, if it is one of DDP's without a hook that a hook can serve; ConfigError
    otherwise."""
    if not isinstance(model, DistributedDataParallel):
        kinds = {kind.__name__ for kind in type(model).__mro__}
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, DistributedDataParallel):
            kinds = {"compiled DDP"}
        known = next((words for kind, words in NOT_DDP.items() if kind in kinds), WRAP)
        raise ConfigError(
            f"attach needs a DistributedDataParallel model, got {_name(model)}: {known}"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which hands over gradients one '
            "by one and not in buckets: set it to True before wrapping the model"
        )
    hooks = getattr(model, "_comm_hooks", [])
    # a deep copy lists the hook of the model that it was made from; its reducer has none
    hooks[:] = [(hook, of) for hook, of in hooks if not isinstance(of, ref) or of() is model]
    if hooks:
        raise ConfigError(
            "this model has a communication hook already: DDP takes one, attach it once, right "
            "after wrapping the model"
        )
    trainable(model)
    return model


def _name(model: nn.Module) -> str:
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        return f"a compiled {type(inner).__name__}"
    kind = next((k for k in type(model).__mro__ if k.__name__ == "FSDPModule"), None)
    return "a model of fully_shard (FSDP2)" if kind else type(model).__name__


def suited(found: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError unless a compressor can handle all these parameters."""
    if len({p.device for p in found.values()}) > 1:
        raise ConfigError("the model's parameters are on several devices: the hook needs one")
    for name, parameter in found.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"parameter {name!r} is of type {parameter.dtype}: the hook needs float32 or "
                "float64 parameters, use torch.autocast for half precision"
            )


def trainable(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, by the names of the bare model: a model has the same ones
    compiled or not. A tensor shared by several modules appears once.

    Raises:
        ConfigError: none at all, or some that no compressor can handle.
    """
    found = {
        name: p
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    }
    if not found:
        raise ConfigError("the model has no parameter to train: DDP has nothing to reduce")
    suited(found)
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(f"module {name!r} makes sparse gradients: build it with sparse=False")
    parallel = (nn.DataParallel, DistributedDataParallel)
    wrappers = {path for path, m in model.module.named_modules() if isinstance(m, parallel)}
    plain = plain_names(found, wrappers)
    return {plain[name]: parameter for name, parameter in found.items()}


def plain_names(names: Iterable[str], wrappers: Collection[str] = ()) -> dict[str, str]:
    """What each name is without the parts that wrappers add: "_orig_mod" of torch.compile, and
    "module" right below a wrapper (its path is given). All as they are if two became one."""
    found = {}
    for name in names:
        parts = name.split(".")
        found[name] = ".".join(
            part
            for i, part in enumerate(parts)
            if part != "_orig_mod" and not (part == "module" and ".".join(parts[:i]) in wrappers)
        )
    return found if len({*found.values()}) == len(found) else {name: name for name in found}


def pick_policy(given: Any, levels: Mapping[str, Level]) -> Policy:
    """A policy from a name, a table or an object.

    Raises:
        ConfigError: it is none, asks for unknown levels, or reads more than gradients.
    """
    table = {"name": given} if isinstance(given, str) else given
    chosen = policies.policy(dict(table)) if isinstance(table, Mapping) else table
    objects = "an object with decide(), needs and names"
    if not isinstance(chosen, Policy):
        raise unexpected("policy", given, f"a name, a table with a name, or {objects}")
    check_levels(chosen, dict(levels))
    for statistic in chosen.needs:
        if INSTRUMENT.get(Statistic.parse(statistic).family) not in FROM_GRADIENTS:
            known = [s for s, instrument in INSTRUMENT.items() if instrument in FROM_GRADIENTS]
            raise ConfigError(
                f"the policy needs the statistic {statistic!r}, but a hook sees gradients only "
                f"and can measure {', '.join(known)}: train with regimes.run, or take a policy "
                "that reads one of these"
            )
    return chosen


def pick_compressor(given: Any) -> Compressor:
    """A compressor from a name, a table or an object; ConfigError unless it is one."""
    table = {"name": given} if isinstance(given, str) else given
    chosen = compression.compressor(dict(table)) if isinstance(table, Mapping) else table
    if not isinstance(chosen, Compressor):
        raise unexpected("compressor", given, "a name, a table with a name, or a Compressor")
    return chosen


def pick_levels(given: Any) -> dict[str, Level]:
    """Levels by name; numbers may be NumPy's."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise unexpected("levels", given, 'a table of levels by name, like {"low": 4, "high": 1}')
    return {name: _plain(level) for name, level in given.items()}


def _plain(level: Any) -> Any:
    """A number of Python's for one of NumPy's."""
    if isinstance(level, bool | int | float) or not isinstance(level, Real):
        return level
    return int(level) if isinstance(level, Integral) else float(level)


def check_wait(timeout: Any, scaler: Any) -> None:
    """Raise ConfigError unless these can be a timeout and a scaler, or none."""
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not number or not 0 < float(timeout) <= LONGEST:
        raise unexpected("timeout", timeout, f"a positive number of seconds up to {LONGEST:g}")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise unexpected("scaler", scaler, "a GradScaler of torch, with get_scale(), or None")


def check_values(chosen: Compressor, levels: Mapping[str, Level]) -> None:
    """Raise ConfigError unless the levels are those of a compressor."""
    if not levels:
        raise ConfigError(
            f"levels: {type(chosen).__name__} has none of its own: say what low and high are, e.g. "
            'levels={"low": ..., "high": ...}'
        )
    if DENSE in levels:
        raise ConfigError('levels: "dense" is always known, give the level another name')
    for level in levels.values():
        chosen.check(level)


def pick_signal(given: str) -> Signal:
    """One of the four readings of the norm, or ConfigError."""
    if given not in get_args(Signal):
        raise ConfigError(f"signal = {given!r}: {nearest(str(given), get_args(Signal))}")
    return cast(Signal, given)


def no_data(*_: Any) -> NoReturn:
    """In place of a context's data, which a hook has none of."""
    raise ConfigError("a hook has no training data to measure on")
