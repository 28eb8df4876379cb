"""The states of all processes in one, from which any number of processes can continue.

Most of a state is the same on all processes and is copied to each new one: compressor memories,
rows of past units, levels. Residuals differ. Error feedback has yet to send their mean over
workers, so that mean is preserved: the old workers are equal parts of [0, 1), and so are the new
ones; a new worker's residual is the mean of the old residuals over its part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regimes.ddp.job import on_all_processes
from regimes.ddp.state import Fitted, HookState, StateCodec, damage_refused, refuse

OWN = ("worker", "residuals", "sums", "traffic")  # keys of a state that differ between processes


def collect(codec: StateCodec, levels: Mapping[str, str]) -> dict[str, list[dict[str, Any]]] | None:
    """See ``Hook.full_state_dict``; ``levels`` are those of the layers now."""
    world = codec.job.world
    mine = on_all_processes(world, lambda: _on_cpu(codec.save(levels)))
    parts = world.collect(mine if world.rank == 0 else {key: mine[key] for key in OWN})
    if parts is None:
        return None
    return {"processes": [{**parts[0], **own} for own in parts]}


def scatter(codec: StateCodec, full: Mapping[str, Any] | None) -> Fitted:
    """This process's part of the full state of process 0, see ``Hook.load_full_state_dict``."""
    world = codec.job.world
    parts = on_all_processes(
        world, lambda: redistribute(full, world.workers) if world.rank == 0 else None
    )
    mine = world.scatter(parts)
    return on_all_processes(world, lambda: codec.fit(mine))


def redistribute(full: Any, workers: int) -> list[HookState]:
    """One state for each of ``workers`` processes; the saved ones if there were as many.

    Raises:
        ConfigError: it is no full state, or its statistics cannot be divided.
    """
    with damage_refused():
        saved = _processes(full)
        if len(saved) == workers:
            return saved
        if any(part["sums"].keys() - {"update"} for part in saved):
            refuse(
                f"it was saved within an epoch, when each of {len(saved)} processes had its own "
                f"sums for the norm's signal, and here are {workers}: on another number of "
                "processes load a state that was saved right after epoch_end"
            )
        residuals = {
            name: [part["residuals"][name] for part in saved] for name in saved[0]["residuals"]
        }
        return [
            {
                **saved[0],
                "worker": worker,
                "workers": workers,
                "residuals": {
                    name: residual_of(worker, workers, old) for name, old in residuals.items()
                },
            }
            for worker in range(workers)
        ]


def residual_of(worker: int, workers: int, old: Sequence[Tensor | None]) -> Tensor | None:
    """The residual of one of ``workers`` new workers, from those of the old ones; None is zero."""
    known = next((tensor for tensor in old if tensor is not None), None)
    if known is None:
        return None
    # Whole numbers: [0, 1) has len(old) * workers ticks, an old part ``workers`` of them, a new
    # part len(old).
    count, start = len(old), worker * len(old)
    ends = [(i * workers, (i + 1) * workers) for i in range(count)]
    overlaps = [max(0, min(start + count, end) - max(start, begin)) for begin, end in ends]
    unit = math.gcd(*overlaps)  # a part inside one old part has weight 1: a copy, bit for bit
    total = torch.zeros_like(known)
    for overlap, tensor in zip(overlaps, old, strict=True):
        if overlap and tensor is not None:
            total.add_(tensor, alpha=overlap // unit)
    return total.div_(count // unit)


def _processes(full: Any) -> list[HookState]:
    """The states in a full one."""
    if full is None:
        refuse("process 0 must pass what hook.full_state_dict() gave there")
    if not isinstance(full, Mapping) or not full.get("processes"):
        one = isinstance(full, Mapping) and "residuals" in full
        hint = ": it is that of one process, for hook.load_state_dict()" if one else ""
        refuse(f"it is not what hook.full_state_dict() gave on process 0{hint}")
    states = list(full["processes"])
    order = [(part["worker"], part["workers"]) for part in states]
    if order != [(i, len(states)) for i in range(len(states))]:
        refuse("it is not that of all processes, in their order")
    return states


def _on_cpu(value: Any) -> Any:
    """The same with all tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(x) for key, x in value.items()}
    return [_on_cpu(x) for x in value] if isinstance(value, list) else value
