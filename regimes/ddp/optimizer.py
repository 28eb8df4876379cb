"""An optimiser's class, hyper-parameters and learning rates in plain types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor

LEFT_OUT = ("params", "lr")  # of a group's options: the rate is each unit's own


def described(optimizer: Any) -> dict[str, Any]:
    """The class and hyper-parameters of an optimiser, in plain types.

    Returns:
        "name"; "options", those that are the same in all parameter groups; and if there are
        several groups, "groups": the number of ``parameters`` of each, and its other options. An
        option that is None is left out, because torch then takes its own default; one that is no
        plain value is None.
    """
    groups = [_options(optimizer, group) for group in optimizer.param_groups]
    shared = {k: v for k, v in groups[0].items() if all(k in g and g[k] == v for g in groups)}
    result: dict[str, Any] = {"name": type(optimizer).__name__, "options": shared}
    if len(groups) > 1:
        result["groups"] = [
            {"parameters": sum(p.numel() for p in group["params"])}
            | {key: value for key, value in own.items() if key not in shared}
            for group, own in zip(optimizer.param_groups, groups, strict=True)
        ]
    return result


def rates(optimizer: Any) -> list[Any]:
    """The learning rate of each parameter group now; None for one that is no finite number."""
    return [_plain(group["lr"]) for group in optimizer.param_groups]


def _options(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters: those for which its class has defaults. Schedulers add keys of
    their own, such as "initial_lr"."""
    known = getattr(optimizer, "defaults", None) or group
    names = [name for name in group if name in known and name not in LEFT_OUT]
    return {name: _plain(group[name]) for name in names if group[name] is not None}


def _plain(value: Any) -> Any:
    """A finite number of Python, a text, or a list of these; None for anything else."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, str | bool):
        return number
    if isinstance(number, Integral):
        return int(number)
    if isinstance(number, Real):
        return float(number) if math.isfinite(float(number)) else None
    if isinstance(number, Sequence):
        return [_plain(one) for one in number]
    return None
