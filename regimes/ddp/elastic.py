"""The state of all processes in one, which any number of processes can continue from.

What all have alike (the compressor's memories, past epochs, levels) goes to each new process as it
is. Residuals are what differs. The mean over workers of what they owe is what error feedback has
yet to send, so that mean is kept: old workers are equal pieces of [0, 1), and so are the new ones;
each takes the mean of the old residuals over its piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from regimes.collectives.group import GroupWorld
from regimes.ddp import state
from regimes.ddp.fitting import fit, intact, refuse
from regimes.ddp.state import Fitted, Stateful
from regimes.errors import ConfigError

OWN = ("worker", "residuals", "sums", "traffic")  # of a state: all else is the same on all
T = TypeVar("T")


def collect(hook: Stateful) -> dict[str, Any] | None:
    """See ``Hook.full_state_dict``."""
    mine = _on_all(hook.world, lambda: _on_cpu(state.save(hook)))
    first = hook.world.rank == 0
    everyone = hook.world.collect(mine if first else {key: mine[key] for key in OWN})
    if everyone is None:
        return None
    return {"processes": [{**everyone[0], **own} for own in everyone]}


def deal(hook: Stateful, full: Mapping[str, Any] | None) -> Fitted:
    """This process's part of what process 0 gives, see ``Hook.load_full_state_dict``."""
    world = hook.world
    parts = _on_all(world, lambda: divide(full, world.workers) if world.rank == 0 else None)
    mine = world.scatter(parts)
    return _on_all(world, lambda: fit(hook, mine))


def divide(full: Any, workers: int) -> list[dict[str, Any]]:
    """The states of so many processes, as they were saved if there were as many.

    Raises:
        ConfigError: it is no full state, or its statistics cannot be divided.
    """
    with intact():
        saved = _processes(full)
        if len(saved) == workers:
            return saved
        split = sorted({name for part in saved for name in part["sums"]} - {"update"})
        if split:
            refuse(
                f"it was saved within an epoch, when each of {len(saved)} processes had its own "
                f"sums for the norm's signal, and here are {workers}: on another number of "
                "processes load a state that was saved right after epoch_end"
            )
        names = saved[0]["residuals"]
        owed = {name: [part["residuals"][name] for part in saved] for name in names}
        return [
            {
                **saved[0],
                "worker": worker,
                "workers": workers,
                "residuals": {name: share(owed[name], worker, workers) for name in names},
            }
            for worker in range(workers)
        ]


def share(owed: Sequence[Tensor | None], worker: int, workers: int) -> Tensor | None:
    """The residual of one of so many workers, from those of the old ones; None: nothing is owed."""
    known = next((tensor for tensor in owed if tensor is not None), None)
    if known is None:
        return None
    old, start = len(owed), worker * len(owed)  # in units of which an old piece has ``workers``
    ends = [(i * workers, (i + 1) * workers) for i in range(old)]
    pieces = [max(0, min(start + old, end) - max(start, begin)) for begin, end in ends]
    unit = math.gcd(*pieces)  # so that a copy is one, bit for bit
    total = torch.zeros_like(known)
    for piece, tensor in zip(pieces, owed, strict=True):
        if piece and tensor is not None:
            total.add_(tensor, alpha=piece // unit)
    return total.div_(old // unit)


def _processes(full: Any) -> list[dict[str, Any]]:
    """The states in a full one."""
    if full is None:
        refuse("process 0 must pass what hook.full_state_dict() gave there")
    if not isinstance(full, Mapping) or not full.get("processes"):
        one = isinstance(full, Mapping) and "residuals" in full
        hint = ": it is that of one process, for hook.load_state_dict()" if one else ""
        refuse(f"it is not what hook.full_state_dict() gave on process 0{hint}")
    found = list(full["processes"])
    if [(part["worker"], part["workers"]) for part in found] != [
        (i, len(found)) for i in range(len(found))
    ]:
        refuse("it is not that of all processes, in their order")
    return found


def _on_all(world: GroupWorld, action: Callable[[], T]) -> T:
    """The result of what every process does; where it fails on one, all hear of it."""
    failure, result = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    heard = world.gather_object(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for sentence in heard:
        if sentence is not None:
            raise ConfigError(sentence)
    return result  # type: ignore[return-value]


def _on_cpu(value: Any) -> Any:
    """The same with all tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(x) for key, x in value.items()}
    return [_on_cpu(x) for x in value] if isinstance(value, list) else value
