"""A state made to fit the hook that it is loaded into, or the sentence that says why it cannot."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from regimes.config import DENSE
from regimes.ddp.matching import Match, several
from regimes.ddp.state import NOTHING, Fitted, Stateful, identity
from regimes.ddp.validate import plain_names
from regimes.errors import ConfigError
from regimes.instruments.compression_loss import CompressionLossGauge
from regimes.records.kinds import (
    AMOUNT,
    AMOUNTS,
    COUNT,
    FREE,
    NUMBERS,
    SECONDS,
    STEPS,
    WHOLE,
    Each,
    Fields,
    Maybe,
    fault,
)

WAITING = Fields({"epoch": COUNT, "seconds": Each(SECONDS, dict), "details": FREE})
PLAIN = Fields(
    {},
    {  # what is counted; "total" and "pace" are younger than the others
        "steps": Each(COUNT),
        "total": COUNT,
        "traffic": AMOUNTS,
        "lr": Maybe(AMOUNT),
        "pace": Fields(
            {}, {"first": Maybe(AMOUNT), "epoch": Maybe(WHOLE), "groups": Maybe(NUMBERS)}
        ),
        "seconds": Each(SECONDS, dict),
        "logged": Fields({}, {"waiting": Each(WAITING)}),
        "rows": Each(Fields({"lr": AMOUNT, "next_lr": AMOUNT}, {"epoch": COUNT, "steps": STEPS})),
    },
)


def fit(hook: Stateful, state: Mapping[str, Any]) -> Fitted:
    """A copy of what ``save`` gave, made to fit the hook's layers.

    Raises:
        ConfigError: it is not this process's, or that of another model, compressor or policy.
    """
    with intact():
        _refuse_another_kind(hook, state)
        found = _as_now_named(hook, copy.deepcopy(dict(state)))
        _refuse_another(hook, found)
        match = Match(found["shapes"], hook.layers)
        if not match.same:
            found |= _matched(hook, match, found)
        return Fitted(found, [found["levels"][layer.name] for layer in hook.layers], match.news)


def _matched(hook: Stateful, match: Match, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has by layer, for the hook's layers.

    A layer that the state lacks has, in past epochs, the level that a policy gives it at the very
    start, and now the one that the policy gives it after these epochs.
    """
    fresh = {
        layer.name: compressor.init(layer, *_identity_of(hook, i)).shared_state()
        for i, (layer, compressor) in enumerate(
            zip(hook.layers, hook.reducer.compressors, strict=True)
        )
    }
    rows, levels = match.rows(state["rows"], hook.controller.decide([]).names), state["levels"]
    if match.lacking:
        levels = dict(zip(fresh, hook.controller.decide(rows).names, strict=True)) | levels
    return {
        "memories": {name: state["memories"].get(name, new) for name, new in fresh.items()},
        "residuals": {name: state["residuals"].get(name) for name in fresh},
        "gauges": _matched_gauges(hook, match, state["gauges"]),
        "sums": match.sums(state["sums"]),
        "levels": levels,
        "rows": rows,
        **_forget_layers(state),
    }


def _forget_layers(state: Mapping[str, Any]) -> dict[str, Any]:
    """The traffic of an epoch under way, without what each layer had: others count from here."""
    floats, sent = state["traffic"]
    counts = state.get("meter", NOTHING)["layers"].values()
    total = [floats + sum(f for f, _ in counts), sent + sum(b for _, b in counts)]
    return {"traffic": total, "meter": NOTHING}


def _matched_gauges(hook: Stateful, match: Match, gauges: dict[str, Any]) -> dict[str, Any]:
    """The one gauge of a hook that remembers something by layer is that of ``error:<level>``."""
    error = hook.panel.gauges.get("error")
    if not isinstance(error, CompressionLossGauge):
        return gauges
    seed, _ = _identity_of(hook, 0)
    return gauges | {
        "error": {
            level: match.values(
                memories, [error.compressor.init(x, seed).shared_state() for x in hook.layers]
            )
            for level, memories in gauges["error"].items()
        }
    }


def _identity_of(hook: Stateful, layer: int) -> tuple[int, int]:
    """The seed and the first worker of a layer's memory."""
    memory = hook.reducer.states[layer]
    return memory.key[0], memory.first_worker


def _as_now_named(hook: Stateful, state: dict[str, Any]) -> dict[str, Any]:
    """With the layers named as this version does, where the model has none of the saved name."""
    known = {layer.name for layer in hook.layers}
    plain = plain_names(name for name in state["shapes"] if name not in known)
    for key in ("shapes", "memories", "residuals", "levels"):
        state[key] = {plain.get(name, name): value for name, value in state[key].items()}
    return state


def _refuse_another_kind(hook: Stateful, state: Any) -> None:
    """Refuse what is no state, and that of another process."""
    mine = identity(hook)
    if not isinstance(state, Mapping) or not {*mine, "residuals", "rows"} <= state.keys():
        full = isinstance(state, Mapping) and "processes" in state
        hint = ": it is that of all processes, for hook.load_full_state_dict()" if full else ""
        refuse(f"it is not what hook.state_dict() gave{hint}")
    saved, here = (state["worker"], state["workers"]), (mine["worker"], mine["workers"])
    if saved != here:
        refuse(
            f"it was saved by process {saved[0]} of {saved[1]}, this is process {here[0]} of "
            f"{here[1]}: every process loads its own file, on the same number of processes, or "
            "what each still owes would be lost; what hook.full_state_dict() gives loads on any "
            "number"
        )


def _refuse_another(hook: Stateful, state: Mapping[str, Any]) -> None:
    """Refuse the state of another model, compressor or policy."""
    mine = identity(hook)
    ours, theirs = mine["shapes"], state["shapes"]
    if not ours.keys() & theirs.keys():
        refuse(
            "it is of another model, no layer of which is here: it has "
            f"{several(list(theirs))}, and here are {several(list(ours))}"
        )
    for name, shape in ours.items():
        if theirs.get(name, shape) != shape:
            refuse(
                f"it is of another model, in which layer {name!r} has shape {theirs[name]}, and "
                f"here it has shape {shape}"
            )
        owed = state["residuals"].get(name)
        if owed is not None and owed.numel() != math.prod(shape):
            raise ValueError(f"what is owed of layer {name!r} has shape {list(owed.shape)}")
    if state["compressor"] != mine["compressor"]:
        refuse(f"it is of {state['compressor']}, and here is {mine['compressor']}")
    if unknown := set(state["levels"].values()) - {*hook.values, DENSE}:
        refuse(f"it has a level {min(unknown)!r}, and here are {', '.join(hook.values) or 'none'}")
    for level, value in state.get("values", {}).items():
        if hook.values.get(level, value) != value:
            refuse(f"its level {level} is {value!r}, and here it is {hook.values[level]!r}")
    if found := fault({key: state[key] for key in PLAIN.known if key in state}, PLAIN):
        raise ValueError(found)
    for number, row in enumerate(state["rows"]):
        if row.get("epoch", number) != number:  # older states do not number them
            raise ValueError(f"unit {row['epoch']} stands where unit {number} was expected")
    if state["gauges"].keys() != hook.panel.gauges.keys():
        refuse("it is of a policy that reads other statistics")


@contextmanager
def intact() -> Iterator[None]:
    """Refuse a state that lacks something or has it in another form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        refuse(f"it is damaged ({type(error).__name__}: {str(error).partition(chr(10))[0]})")


def refuse(why: str) -> NoReturn:
    """Raise the ConfigError of a state that cannot be loaded."""
    raise ConfigError(f"cannot load the hook's state: {why}")
