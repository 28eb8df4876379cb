"""The models that a hook can serve, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regimes.errors import ConfigError

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


def wrapped(model: nn.Module) -> DistributedDataParallel:
    """The model itself, a DDP model without a communication hook.

    Raises:
        ConfigError: the hook cannot serve it.
    """
    if not isinstance(model, DistributedDataParallel):
        kinds = {kind.__name__ for kind in type(model).__mro__}
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, DistributedDataParallel):
            kinds = {"compiled DDP"}
        advice = next((words for kind, words in NOT_DDP.items() if kind in kinds), WRAP)
        raise ConfigError(
            f"attach needs a DistributedDataParallel model, got {_kind(model)}: {advice}"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which hands over gradients one '
            "by one and not in buckets: set it to True before wrapping the model"
        )
    hooks = getattr(model, "_comm_hooks", [])
    # A deep copy of a hooked model lists the original's hook, but its new reducer has none.
    hooks[:] = [(hook, of) for hook, of in hooks if not isinstance(of, ref) or of() is model]
    if hooks:
        raise ConfigError(
            "this model has a communication hook already: DDP takes one, attach it once, right "
            "after wrapping the model"
        )
    trainable(model)
    return model


def _kind(model: nn.Module) -> str:
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        return f"a compiled {type(inner).__name__}"
    sharded = any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)
    return "a model of fully_shard (FSDP2)" if sharded else type(model).__name__


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError unless compressors can handle all these parameters."""
    if len({p.device for p in parameters.values()}) > 1:
        raise ConfigError("the model's parameters are on several devices: the hook needs one")
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"parameter {name!r} is of type {parameter.dtype}: the hook needs float32 or "
                "float64 parameters, use torch.autocast for half precision"
            )


def trainable(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, by their names in the bare model, compiled or not. A tensor
    that several modules share appears once.

    Raises:
        ConfigError: there is none, or compressors cannot handle one.
    """
    parameters = {
        name: p
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    }
    if not parameters:
        raise ConfigError("the model has no parameter to train: DDP has nothing to reduce")
    check_parameters(parameters)
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(f"module {name!r} makes sparse gradients: build it with sparse=False")
    parallel = (nn.DataParallel, DistributedDataParallel)
    wrappers = {path for path, m in model.module.named_modules() if isinstance(m, parallel)}
    plain = plain_names(parameters, wrappers)
    return {plain[name]: parameter for name, parameter in parameters.items()}


def plain_names(names: Iterable[str], wrappers: Collection[str] = ()) -> dict[str, str]:
    """Each name without the parts that wrappers add: "_orig_mod" of torch.compile, and "module"
    right below a wrapper, whose path is given. Names stay as they are if two would become one."""
    plain = {}
    for name in names:
        parts = name.split(".")
        plain[name] = ".".join(
            part
            for i, part in enumerate(parts)
            if part != "_orig_mod" and not (part == "module" and ".".join(parts[:i]) in wrappers)
        )
    return plain if len({*plain.values()}) == len(plain) else {name: name for name in plain}
