"""The state of a hook in one process: tensors and plain types, keyed by parameter name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from regimes.collectives.group import GroupWorld
from regimes.collectives.requests import Layer, Traffic
from regimes.compression import Compressor
from regimes.compression.reducer import Reducer
from regimes.config import Level
from regimes.ddp.buckets import Buckets
from regimes.ddp.journal import Journal
from regimes.ddp.pace import Pace
from regimes.errors import ConfigError
from regimes.instruments.base import Gauge
from regimes.instruments.gradient_norm import NormsGauge
from regimes.instruments.panel import Panel
from regimes.policies.controller import Controller

NOTHING: dict[str, Any] = {"layers": {}, "calls": {}, "sent": {}}  # of a meter; older states


@runtime_checkable
class Stateful(Protocol):
    """What the state of a hook is taken from."""

    world: GroupWorld
    layers: list[Layer]
    compressor: Compressor
    controller: Controller
    values: Mapping[str, Level]
    reducer: Reducer
    buckets: Buckets
    panel: Panel
    rows: list[dict[str, Any]]
    lr: float | None
    earlier: Traffic
    pace: Pace
    journal: Journal | None

    @property
    def levels(self) -> dict[str, str]: ...
    @property
    def traffic(self) -> Traffic: ...


def save(hook: Stateful) -> dict[str, Any]:
    """See ``Hook.state_dict``."""
    b = hook.buckets
    if b.steps and not within(hook):
        steps = hook.pace.steps
        raise ConfigError(
            f"state_dict: {', '.join(hook.panel.gauges)} cannot be saved within an epoch: "
            + (
                f"save with full_state_dict() after a multiple of {steps} steps"
                if steps
                else "call it right after epoch_end"
            )
        )
    if hook.journal is not None:
        hook.journal.fill()
    memories, residuals = copy.deepcopy(hook.reducer.state_dict())
    for layer, unit in zip(hook.layers, b.units, strict=True):
        if residuals[layer.name] is not None:
            residuals[layer.name] /= unit
    return {
        **identity(hook),
        "memories": memories,
        "residuals": residuals,
        "gauges": copy.deepcopy(hook.panel.state_dict()),
        "sums": copy.deepcopy(_sums(hook.panel.gauges)),
        "steps": [b.steps, b.kept],
        "total": b.total,
        "levels": hook.levels,
        "values": dict(hook.values),
        "rows": copy.deepcopy(hook.rows),
        "lr": hook.lr,
        "traffic": [hook.earlier.floats, hook.earlier.bytes],
        "meter": hook.world.meter.state_dict(),
        "pace": hook.pace.state_dict(),
        "logged": {} if hook.journal is None else hook.journal.state_dict(),
        "seconds": {} if hook.journal is None else dict(b.clock.seconds),
    }


def within(hook: Stateful) -> bool:
    """Can the state be saved within a unit? The norm's sums can, no other gauge's."""
    return hook.panel.gauges.keys() <= {"norms"}


@dataclass(frozen=True)
class Fitted:
    """A state that fits a hook.

    Attributes:
        state: what has a place for each layer has that of the hook's layers.
        levels: the level of each.
        news: one sentence of what was new or left out, if anything was.
    """

    state: dict[str, Any]
    levels: list[str]
    news: str | None


def restore(hook: Stateful, fitted: Fitted) -> list[str]:
    """Continue from a state; returns the levels, which are left to the caller."""
    state, device, b = fitted.state, hook.world.device, hook.buckets
    hook.reducer.load_state_dict(state["memories"], state["residuals"])
    hook.reducer.to(device)
    b.units = [1.0] * len(hook.layers)
    b.restart()
    b.clock.seconds |= state.get("seconds", {})
    b.steps, b.kept = state["steps"]
    b.total = state.get("total", sum(row["steps"] for row in state["rows"]) + b.steps)
    hook.panel.load_state_dict(state["gauges"])
    sums = _sums(hook.panel.gauges)
    sums.clear()
    sums.update({name: [t.to(device) for t in tensors] for name, tensors in state["sums"].items()})
    hook.rows, hook.lr = state["rows"], state["lr"]
    hook.world.meter.load_state_dict(state.get("meter", NOTHING))
    hook.earlier = Traffic(*state["traffic"])
    hook.pace.load_state_dict(state.get("pace", {}))
    if hook.journal is not None:
        hook.journal.leave()
        hook.journal.load_state_dict(state.get("logged", {}))
    if fitted.news is not None and hook.world.rank == 0:
        warnings.warn(fitted.news, stacklevel=3)
    return fitted.levels


def identity(hook: Stateful) -> dict[str, Any]:
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
