"""The state of a hook in one process: tensors and plain types, keyed by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

from torch import Tensor

from regimes.collectives.group import GroupWorld
from regimes.collectives.requests import Layer, Traffic
from regimes.compression import Compressor
from regimes.compression.reducer import Reducer
from regimes.config import DENSE, Level
from regimes.ddp.buckets import Buckets
from regimes.errors import ConfigError
from regimes.instruments.base import Gauge
from regimes.instruments.gradient_norm import NormsGauge
from regimes.instruments.panel import Panel


@runtime_checkable
class Stateful(Protocol):
    """What the state of a hook is taken from."""

    world: GroupWorld
    layers: list[Layer]
    compressor: Compressor
    values: Mapping[str, Level]
    reducer: Reducer
    buckets: Buckets
    panel: Panel
    rows: list[dict[str, Any]]
    lr: float | None
    earlier: Traffic

    @property
    def levels(self) -> dict[str, str]: ...
    @property
    def traffic(self) -> Traffic: ...


def save(hook: Stateful) -> dict[str, Any]:
    """See ``Hook.state_dict``."""
    b = hook.buckets
    if b.steps and not hook.panel.gauges.keys() <= {"norms"}:
        raise ConfigError(
            f"state_dict: {', '.join(hook.panel.gauges)} cannot be saved within an epoch: call it "
            "right after epoch_end"
        )
    memories, residuals = copy.deepcopy(hook.reducer.state_dict())
    for layer, unit in zip(hook.layers, b.units, strict=True):
        if residuals[layer.name] is not None:
            residuals[layer.name] /= unit
    return {
        **_identity(hook),
        "memories": memories,
        "residuals": residuals,
        "gauges": copy.deepcopy(hook.panel.state_dict()),
        "sums": copy.deepcopy(_sums(hook.panel.gauges)),
        "steps": [b.steps, b.kept],
        "total": b.total,
        "levels": hook.levels,
        "rows": copy.deepcopy(hook.rows),
        "lr": hook.lr,
        "traffic": [hook.traffic.floats, hook.traffic.bytes],
    }


def restore(hook: Stateful, state: Mapping[str, Any]) -> None:
    """See ``Hook.load_state_dict``; the levels are left to the caller."""
    _refuse_another(hook, state)
    state, device, b = copy.deepcopy(dict(state)), hook.world.device, hook.buckets
    hook.reducer.load_state_dict(state["memories"], state["residuals"])
    hook.reducer.to(device)
    b.units = [1.0] * len(hook.layers)
    b.steps, b.kept = state["steps"]
    b.total = state.get("total", sum(row["steps"] for row in state["rows"]) + b.steps)
    hook.panel.load_state_dict(state["gauges"])
    sums = _sums(hook.panel.gauges)
    sums.clear()
    sums.update({name: [t.to(device) for t in tensors] for name, tensors in state["sums"].items()})
    hook.rows, hook.lr = state["rows"], state["lr"]
    hook.world.meter.take()
    hook.earlier = Traffic(*state["traffic"])


def _identity(hook: Stateful) -> dict[str, Any]:
    """What must be the same where the state is loaded."""
    return {
        "worker": hook.world.rank,
        "workers": hook.world.workers,
        "compressor": describe(hook.compressor),
        "shapes": {layer.name: list(layer.shape) for layer in hook.layers},
    }


def _sums(gauges: Mapping[str, Gauge]) -> dict[str, list[Tensor]]:
    """The accumulated gradients of the epoch so far."""
    norms = gauges.get("norms")
    return norms.sums if isinstance(norms, NormsGauge) else {}


def describe(plug_in: Any) -> str:
    """A text that is the same on all processes."""
    kind = type(plug_in)
    return repr(plug_in) if hasattr(kind, "__dataclass_fields__") else kind.__qualname__


def _refuse_another(hook: Stateful, state: Mapping[str, Any]) -> None:
    mine = _identity(hook)
    if not isinstance(state, Mapping) or not {*mine, "residuals", "rows"} <= state.keys():
        _refuse("it is not what hook.state_dict() gave")
    saved, here = (state["worker"], state["workers"]), (mine["worker"], mine["workers"])
    if saved != here:
        _refuse(
            f"it was saved by process {saved[0]} of {saved[1]}, this is process {here[0]} of "
            f"{here[1]}: every process loads its own file, on the same number of processes, or "
            "what each still owes would be lost"
        )
    for name in {**mine["shapes"], **state["shapes"]}:
        ours, theirs = mine["shapes"].get(name), state["shapes"].get(name)
        if ours != theirs:
            _refuse(
                f"it is of another model, in which layer {name!r} "
                f"{'is missing' if theirs is None else f'has shape {theirs}'}, and here "
                f"{'it is missing' if ours is None else f'it has shape {ours}'}"
            )
    if state["compressor"] != mine["compressor"]:
        _refuse(f"it is of {state['compressor']}, and here is {mine['compressor']}")
    if unknown := set(state["levels"].values()) - {*hook.values, DENSE}:
        _refuse(f"it has a level {min(unknown)!r}, and here are {', '.join(hook.values) or 'none'}")
    if state["gauges"].keys() != hook.panel.gauges.keys():
        _refuse("it is of a policy that reads other statistics")


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"cannot load the hook's state: {why}")
