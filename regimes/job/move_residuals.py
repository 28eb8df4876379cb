"""Residuals of a saved state on other workers and processes.

Error feedback has yet to send the mean over workers of their residuals, so that mean is preserved:
the saved workers are equal parts of [0, 1), and so are the new ones; a new worker's residual is the
mean of the saved residuals over its part. On as many workers each has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from regimes.job.fit_state import refuse_state
from regimes.job.state import Part, State, owed_table, place_state, with_owed

Residuals = dict[str, Tensor | None]  # by layer, [rows, ...]


def residuals_for(
    workers: Sequence[int],
    count: int,
    parts: Sequence[Part],
    saved: int,
    names: Iterable[str],
    *,
    mean: bool = False,
) -> Residuals:
    """Return the residuals by layer of some of ``count`` workers, a row for each.

    Args:
        parts: with the residuals of ``saved`` workers; a worker may be missing if its part of
            [0, 1) overlaps with none of ``workers``.
        mean: one row for all, their mean, which is all that a linear compressor depends on.

    Raises:
        LookupError: ``parts`` lack a worker or a layer.
    """
    return {
        name: _rows_for(
            [*workers], count, [(p["workers"], _residual_of(p, name)) for p in parts], saved, mean
        )
        for name in names
    }


def _residual_of(part: Part, name: str) -> Tensor | None:
    found: Tensor | None = part["layers"][name]["residual"]
    return found


def _rows_for(
    workers: list[int],
    count: int,
    held: Sequence[tuple[list[int], Tensor | None]],
    saved: int,
    mean: bool,
) -> Tensor | None:
    if all(rows is None for _, rows in held):
        return None
    for theirs, rows in held if count == saved else ():
        if theirs == workers and rows is not None and len(rows) == (1 if mean else len(workers)):
            return rows
    row = {
        worker: None if rows is None else rows[i if len(rows) == len(theirs) else 0]
        for theirs, rows in held
        for i, worker in enumerate(theirs)
    }
    if count == saved:
        own = [row[worker] for worker in workers]
    else:
        needed = {old for worker in workers for old in overlaps(worker, count, saved)}
        if lacking := needed - row.keys():
            raise LookupError(f"no residual of worker {min(lacking)}")
        old = [row.get(worker) for worker in range(saved)]
        own = [residual_of(worker, count, old) for worker in workers]
    known = [tensor for tensor in own if tensor is not None]
    if len(known) < len(own):
        return None
    stack = torch.stack(known)
    return stack.mean(0, keepdim=True) if mean else stack


def residual_of(worker: int, workers: int, old: Sequence[Tensor | None]) -> Tensor | None:
    """Return the residual of one of ``workers`` new workers, from the old workers' residuals; None
    is zero."""
    known = next((tensor for tensor in old if tensor is not None), None)
    if known is None:
        return None
    parts = overlaps(worker, workers, len(old))
    # a part inside one old part has weight 1: a copy, bit for bit
    unit = math.gcd(*parts.values())
    total = torch.zeros_like(known)
    for i, overlap in parts.items():
        if (tensor := old[i]) is not None:
            total.add_(tensor, alpha=overlap // unit)
    return total.div_(len(old) // unit)


def overlaps(worker: int, workers: int, old: int) -> dict[int, int]:
    """Return from which ``old`` workers one of ``workers`` new ones takes over residuals, and how
    much of each. The interval [0, 1) is cut into ``old * workers`` ticks. The part of an old worker
    has ``workers`` ticks, and the part of a new worker has ``old``; parts that overlap share."""
    start, stop = worker * old, (worker + 1) * old
    first, last = start // workers, (stop - 1) // workers
    return {
        i: min(stop, (i + 1) * workers) - max(start, i * workers) for i in range(first, last + 1)
    }


def on_processes(state: State, count: int) -> list[State]:
    """Divide the state of all processes into the states of ``count`` processes with a worker each.

    Raises:
        ConfigError: its statistics cannot be divided.
    """
    return [on_process(state, process, count) for process in range(count)]


def on_process(state: State, process: int, count: int) -> State:
    """Return the state of one of ``count`` processes, like ``on_processes``. A part of the saved
    state may lack residuals from which this process takes nothing over."""
    parts = state["parts"]
    if len(parts) == count:
        return {**state, "parts": [parts[process]]}
    if any(part["sums"].keys() - {"update"} for part in parts):
        refuse_state(
            f"it was saved within an epoch, when each of {len(parts)} processes had its own "
            f"sums for the norm's signal; this job has {count}: on another number of "
            "processes load a state that was saved right after epoch_end"
        )
    own = _of_local_steps(state) if "outer" in parts[0] else {}
    owed = [{"workers": part["workers"], "layers": owed_table(part)} for part in parts]
    residuals = residuals_for([process], count, owed, len(parts), state["layers"])
    moved = {**state, "workers": count, "parts": [{**parts[0], **own}]}
    return with_owed(place_state(moved, process, count, [process]), residuals)


def _of_local_steps(state: State) -> Part:
    """What a process of local steps has of its own, on another number of processes.

    Raises:
        ConfigError: processes had steps that they had not shared yet.
    """
    if any(f["since"] or f["left"] is not None for f in state["outer"]["fragments"]):
        refuse_state(
            "it was saved between two synchronisations, when each process had a model of its own: "
            "on another number of processes load a state that was saved right after one"
        )
    parts = state["parts"]
    losses = [part.get("losses", [0.0, 0]) for part in parts]
    mean = sum(total for total, _ in losses) / len(parts)  # each has logged as many
    outer = {**parts[0]["outer"], "movements": [{"sent": {}, "older": {}}]}
    return {"outer": outer, "losses": [mean, losses[0][1]]}


# -- from a row for each worker to one for all, and back --------------------------------------


def average_residuals(parts: Sequence[Part], *, to_one: bool) -> None:
    """Replace each worker's residual by the mean over all workers; each process has as many.

    Args:
        to_one: by one row for all workers of a process, their own mean.
    """
    for name in parts[0]["layers"]:
        rows = [tensor for part in parts if (tensor := _residual_of(part, name)) is not None]
        if len(rows) < len(parts):
            continue
        means = [tensor.mean(0, keepdim=True) for tensor in rows]
        every = torch.cat(means).mean(0, keepdim=True)
        for part, own in zip(parts, means, strict=True):
            repeated = every.repeat(len(part["workers"]), *[1] * (every.ndim - 1))
            part["layers"][name] = {"residual": own if to_one else repeated}
