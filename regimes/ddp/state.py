"""The saved state of a hook in one process: written, fitted to another hook, and restored.

It holds tensors and plain types, keyed by parameter name. States of earlier versions stay readable:
``_upgraded`` adds what they lack. A state that does not fit is refused in one sentence.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from torch import Tensor

from regimes.config import DENSE, Level
from regimes.ddp.job import JobState
from regimes.ddp.layer_match import LayerMatch, several
from regimes.ddp.model import plain_names
from regimes.errors import ConfigError
from regimes.instruments.compression_loss import CompressionLossGauge
from regimes.records import kinds
from regimes.records.kinds import Each, Fields, Maybe

if TYPE_CHECKING:
    from regimes.ddp.hook import Hook


class HookState(JobState):
    """What ``Hook.state_dict`` gives; dictionaries without another comment are by layer."""

    worker: int
    workers: int
    compressor: str
    shapes: dict[str, list[int]]
    memories: dict[str, Any]  # of compressors: the same on all processes
    residuals: dict[str, Tensor | None]  # this process's, in units of the unscaled loss
    gauges: dict[str, Any]  # by instrument
    steps: list[int]  # of the unit under way, and how many of them had a finite gradient
    total: int  # steps of the job
    levels: dict[str, str]
    values: dict[str, Level]  # by name of a level
    lr: float | None
    seconds: dict[str, float]  # of the unit under way, by clock


EMPTY_METER: dict[str, Any] = {"layers": {}, "calls": {}, "sent": {}}
CLOCKS = Each(kinds.SECONDS, dict)
PENDING = Fields({"epoch": kinds.COUNT, "seconds": CLOCKS, "details": kinds.FREE})
RATE = Maybe(kinds.AMOUNT)
ROW = Fields(
    {"lr": kinds.AMOUNT, "next_lr": kinds.AMOUNT}, {"epoch": kinds.COUNT, "steps": kinds.STEPS}
)
PLAIN = {  # what a damaged file may have in another form
    "steps": Each(kinds.COUNT),
    "total": kinds.COUNT,
    "traffic": kinds.AMOUNTS,
    "lr": RATE,
    "pace": Fields(
        {}, {"first": RATE, "epoch": Maybe(kinds.WHOLE), "groups": Maybe(kinds.NUMBERS)}
    ),
    "seconds": CLOCKS,
    "logged": Fields({}, {"waiting": Each(PENDING)}),
    "rows": Each(ROW),
}


# -- save and restore ------------------------------------------------------------------------


def save(hook: Hook) -> HookState:
    """See ``Hook.state_dict``."""
    b = hook.buckets
    if b.steps and not saves_within_unit(hook):
        steps = hook.schedule.steps
        raise ConfigError(
            f"state_dict: {', '.join(hook.panel.gauges)} cannot be saved within an epoch: "
            + (
                f"save with full_state_dict() after a multiple of {steps} steps"
                if steps
                else "call it right after epoch_end"
            )
        )
    memories, residuals = hook.reducer.state_dict()
    state = copy.deepcopy(
        {
            **_identity(hook),
            "memories": memories,
            "residuals": residuals,
            "gauges": hook.panel.state_dict(),
            "steps": [b.steps, b.finite_steps],
            "total": b.total,
            "levels": hook.levels,
            "values": dict(hook.values),
            "lr": hook.lr,
            "seconds": {} if hook.recorder is None else dict(b.clock.seconds),
            **hook._job_state(),
        }
    )
    for layer, scale in zip(hook.layers, b.scales, strict=True):
        residual = state["residuals"][layer.name]
        if residual is not None:
            residual /= scale
    return cast(HookState, state)


def saves_within_unit(hook: Hook) -> bool:
    """Whether the gauges can be saved within a unit: only the norm's sums can."""
    return hook.panel.gauges.keys() <= {"norms"}


class Fitted(NamedTuple):
    """A state that fits a hook."""

    state: HookState
    warning: str | None  # one sentence of layers that are new or left out, if there are any


def restore(hook: Hook, state: HookState) -> None:
    """Continue from a fitted state, but for the levels."""
    b = hook.buckets
    hook.reducer.load_state_dict(state["memories"], state["residuals"])
    hook.reducer.to(hook.world.device)
    b.scales = [1.0] * len(hook.layers)
    b.restart()
    b.clock.seconds |= state["seconds"]
    b.steps, b.finite_steps = state["steps"]
    b.total = state["total"]
    hook.panel.load_state_dict(state["gauges"])
    hook.lr = state["lr"]
    hook._restore_job(state)


# -- fit to a hook ---------------------------------------------------------------------------


def fit(hook: Hook, saved: Mapping[str, Any]) -> Fitted:
    """A copy of what ``save`` gave, made to fit the hook's layers.

    Raises:
        ConfigError: it is not this process's, or that of another model, compressor or policy.
    """
    with damage_refused():
        _check_process(hook, saved)
        state = _upgraded(hook, copy.deepcopy(dict(saved)))
        _check_kind(hook, state)
        match = LayerMatch(state["shapes"], hook.layers)
        if not match.same:
            state = cast(HookState, {**state, **_matched(hook, match, state)})
        return Fitted(state, match.warning)


def _upgraded(hook: Hook, state: dict[str, Any]) -> HookState:
    """With what earlier versions did not save, and layers named as now: earlier names of a compiled
    model had parts of its wrapper."""
    defaults = {"values": {}, "meter": EMPTY_METER, "pace": {}, "logged": {}, "seconds": {}}
    state = defaults | state
    if "total" not in state:
        state["total"] = sum(row["steps"] for row in state["rows"]) + state["steps"][0]
    known = {layer.name for layer in hook.layers}
    plain = plain_names(name for name in state["shapes"] if name not in known)
    for key in ("shapes", "memories", "residuals", "levels"):
        state[key] = {plain.get(name, name): value for name, value in state[key].items()}
    return cast(HookState, state)


def _matched(hook: Hook, match: LayerMatch, state: HookState) -> dict[str, Any]:
    """What a state has by layer, for the hook's layers.

    In past units a new layer has the level that the policy gives at the very start; now, the one
    that the policy gives it after these units.
    """
    parts = zip(hook.layers, hook.reducer.compressors, hook.reducer.states, strict=True)
    fresh = {x.name: c.init(x, old.key[0], old.first_worker).shared_state() for x, c, old in parts}
    rows, levels = match.rows(state["rows"], hook.controller.decide([]).names), state["levels"]
    if match.new:
        levels = dict(zip(fresh, hook.controller.decide(rows).names, strict=True)) | levels
    # The meter counts by a layer's place, which has changed: its counts become past traffic.
    floats, sent = state["traffic"]
    counts = state["meter"]["layers"].values()
    return {
        "memories": {name: state["memories"].get(name, new) for name, new in fresh.items()},
        "residuals": {name: state["residuals"].get(name) for name in fresh},
        "gauges": _matched_gauges(hook, match, state["gauges"]),
        "sums": match.sums(state["sums"]),
        "levels": levels,
        "rows": rows,
        "traffic": [floats + sum(f for f, _ in counts), sent + sum(b for _, b in counts)],
        "meter": EMPTY_METER,
    }


def _matched_gauges(hook: Hook, match: LayerMatch, gauges: dict[str, Any]) -> dict[str, Any]:
    """Of a hook's gauges only that of ``error:<level>`` has a memory per layer."""
    error = hook.panel.gauges.get("error")
    if not isinstance(error, CompressionLossGauge):
        return gauges
    seed = hook.reducer.states[0].key[0]
    fresh = [error.compressor.init(layer, seed).shared_state() for layer in hook.layers]
    levels = gauges["error"].items()
    return gauges | {"error": {level: match.values(saved, fresh) for level, saved in levels}}


# -- refuse ----------------------------------------------------------------------------------


def _identity(hook: Hook) -> dict[str, Any]:
    """What must be the same where the state is loaded."""
    kind = type(hook.compressor)
    fields = hasattr(kind, "__dataclass_fields__")  # then the text is the same on all processes
    return {
        "worker": hook.world.rank,
        "workers": hook.world.workers,
        "compressor": repr(hook.compressor) if fields else kind.__qualname__,
        "shapes": {layer.name: list(layer.shape) for layer in hook.layers},
    }


def _check_process(hook: Hook, state: Any) -> None:
    """Refuse what is no state, and that of another process."""
    here = _identity(hook)
    if not isinstance(state, Mapping) or not {*here, "residuals", "rows"} <= state.keys():
        full = isinstance(state, Mapping) and "processes" in state
        hint = ": it is that of all processes, for hook.load_full_state_dict()" if full else ""
        refuse(f"it is not what hook.state_dict() gave{hint}")
    if (state["worker"], state["workers"]) != (here["worker"], here["workers"]):
        refuse(
            f"it was saved by process {state['worker']} of {state['workers']}, this is process "
            f"{here['worker']} of {here['workers']}: every process loads its own file, on the same "
            "number of processes, or its residuals would be lost; what hook.full_state_dict() "
            "gives loads on any number"
        )


def _check_kind(hook: Hook, state: HookState) -> None:
    """Refuse the state of another model, compressor or policy, and damaged numbers."""
    here = _identity(hook)
    _check_shapes(here["shapes"], state)
    if state["compressor"] != here["compressor"]:
        refuse(f"it is of {state['compressor']}, and here is {here['compressor']}")
    if unknown := set(state["levels"].values()) - {*hook.values, DENSE}:
        refuse(f"it has a level {min(unknown)!r}, and here are {', '.join(hook.values) or 'none'}")
    for level, value in state["values"].items():
        if hook.values.get(level, value) != value:
            refuse(f"its level {level} is {value!r}, and here it is {hook.values[level]!r}")
    plain = {key: value for key, value in state.items() if key in PLAIN}
    if problem := kinds.fault(plain, Fields({}, PLAIN)):
        raise ValueError(problem)
    for number, row in enumerate(state["rows"]):
        if row.get("epoch", number) != number:  # rows of version 0.1 have no number
            raise ValueError(f"unit {row['epoch']} stands where unit {number} was expected")
    if state["gauges"].keys() != hook.panel.gauges.keys():
        refuse("it is of a policy that reads other statistics")


def _check_shapes(here: Mapping[str, list[int]], state: HookState) -> None:
    saved = state["shapes"]
    if not here.keys() & saved.keys():
        refuse(
            "it is of another model, no layer of which is here: it has "
            f"{several(list(saved))}, and here are {several(list(here))}"
        )
    for name, shape in here.items():
        if saved.get(name, shape) != shape:
            refuse(
                f"it is of another model, in which layer {name!r} has shape {saved[name]}, and "
                f"here it has shape {shape}"
            )
        residual = state["residuals"].get(name)
        if residual is not None and residual.numel() != math.prod(shape):
            raise ValueError(f"the residual of layer {name!r} has shape {list(residual.shape)}")


@contextmanager
def damage_refused() -> Iterator[None]:
    """Turn what a damaged state raises into the ConfigError of one that cannot be loaded."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        refuse(f"it is damaged ({type(error).__name__}: {str(error).partition(chr(10))[0]})")


def refuse(why: str) -> NoReturn:
    """Raise the ConfigError of a state that cannot be loaded."""
    raise ConfigError(f"cannot load the hook's state: {why}")
