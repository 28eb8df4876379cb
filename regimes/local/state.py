"""The state of local steps in one process: tensors and plain types."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from regimes.collectives.group import GroupWorld
from regimes.collectives.requests import Layer, Traffic
from regimes.ddp.journal import Journal
from regimes.ddp.pace import Pace
from regimes.errors import ConfigError
from regimes.instruments.gradient_norm import NormsGauge
from regimes.instruments.panel import Panel
from regimes.local.recording import UnitClock
from regimes.training.outer import OuterStep
from regimes.training.replicas import Replicas


@runtime_checkable
class Stateful(Protocol):
    """What the state of local steps is taken from."""

    world: GroupWorld
    layers: list[Layer]
    replicas: Replicas
    outer: OuterStep
    panel: Panel
    pace: Pace
    journal: Journal | None
    rows: list[dict[str, Any]]
    total: int
    since: int
    rounds: int
    period: int
    clock: UnitClock
    earlier: Traffic


def save(local: Stateful) -> dict[str, Any]:
    """See ``LocalSteps.state_dict``."""
    if local.journal is not None:
        local.journal.fill()
    memories, residuals = local.outer.reducer.state_dict()
    return copy.deepcopy(
        {
            **_identity(local),
            "common": local.replicas.met,
            "outer": local.outer.state_dict(),
            "memories": memories,
            "residuals": residuals,
            "round": [local.total, local.since, local.rounds, local.period],
            "rows": local.rows,
            "sums": _sums(local.panel),
            "pace": local.pace.state_dict(),
            "traffic": [local.earlier.floats, local.earlier.bytes],
            "meter": local.world.meter.state_dict(),
            "logged": {} if local.journal is None else local.journal.state_dict(),
            "seconds": [local.clock.seconds, local.clock.clocked],
        }
    )


def check(local: Stateful, saved: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the state is of this process and model."""
    for what, mine in _identity(local).items():
        if saved.get(what) != mine:
            raise ConfigError(
                f"load_state_dict: the state has another {what}: {saved.get(what)} in place of "
                f"{mine}"
            )


def restore(local: Stateful, saved: Mapping[str, Any]) -> None:
    """Continue from a state; it is left as it is."""
    device, saved = local.world.device, copy.deepcopy(dict(saved))
    for tensor, value in zip(local.replicas.met, saved["common"], strict=True):
        tensor.copy_(value)
    local.outer.load_state_dict(saved["outer"])
    local.outer.reducer.load_state_dict(saved["memories"], saved["residuals"])
    local.outer.reducer.to(device)
    local.total, local.since, local.rounds, local.period = saved["round"]
    local.rows, local.earlier = saved["rows"], Traffic(*saved["traffic"])
    local.panel.steps = local.rounds
    sums = {name: [t.to(device) for t in tensors] for name, tensors in saved["sums"].items()}
    _sums(local.panel).update(sums)
    local.pace.load_state_dict(saved["pace"])
    local.clock = UnitClock(local.world)
    if "seconds" in saved:
        local.clock.seconds, local.clock.clocked = saved["seconds"]
    local.world.meter.load_state_dict(saved["meter"])
    if local.journal is not None:
        local.journal.leave()
        local.journal.load_state_dict(saved["logged"])


def _identity(local: Stateful) -> dict[str, Any]:
    return {
        "process": [local.world.rank, local.world.workers],
        "layers": [[layer.name, list(layer.shape)] for layer in local.layers],
    }


def _sums(panel: Panel) -> dict[str, list[Tensor]]:
    """The movement of the unit so far."""
    norms = panel.gauges.get("norms")
    return norms.sums if isinstance(norms, NormsGauge) else {}
