"""The states of all processes of a job in one, on process 0, and back on any number of
processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from regimes.collectives.processes import ProcessWorld
from regimes.job.job import on_all_processes
from regimes.job.move_residuals import on_processes
from regimes.job.recorder import JobRecorder
from regimes.job.refit import damage_refused, refuse_state
from regimes.job.saved_units import with_recorded_units
from regimes.job.state import State, check_format, join_states


def collect_full_state(world: ProcessWorld, save: Callable[[], State]) -> State | None:
    """What ``save`` gives on each process, in one; None but on process 0."""
    mine = on_all_processes(world, lambda: _on_cpu(save()))
    states = world.gather_to_first(mine if world.rank == 0 else {"parts": mine["parts"]})
    return None if states is None else join_states(states)


def divide_full_state(
    world: ProcessWorld, recorder: JobRecorder | None, full: Any, whose: str = "hook."
) -> Any:
    """This process's part of the full state of process 0.

    Args:
        whose: what the script calls the job, with a point.

    Raises:
        ConfigError: on all processes: it is no such state, or cannot be divided among as many.
    """
    return world.scatter_from_first(
        on_all_processes(
            world, lambda: _split_states(world, recorder, full, whose) if world.rank == 0 else None
        )
    )


def _split_states(
    world: ProcessWorld, recorder: JobRecorder | None, full: Any, whose: str
) -> list[State]:
    """One state for each process, from the full state."""
    single = f": it is the state of one process, load it with {whose}load_state_dict()"
    if full is None:
        refuse_state(f"process 0 must pass the value that {whose}full_state_dict() returned there")
    with damage_refused():
        check_format(full)
        if not isinstance(full, Mapping) or not full.get("parts"):
            refuse_state(f"it was not returned by {whose}full_state_dict() on process 0")
        saved = [part["process"] for part in full["parts"]]
        if saved != [*range(full["processes"])]:
            if len(saved) == 1:
                refuse_state(
                    f"it was not returned by {whose}full_state_dict() on process 0{single}"
                )
            refuse_state("it does not hold the states of all processes in their order")
        state = with_recorded_units(dict(full), recorder)
        each = on_processes(state, world.workers)
        # several processes hold one worker: each divides what it has by itself
        return [each[rank // world.shards] for rank in range(world.processes)]


def _on_cpu(value: Any) -> Any:
    """A nested value, with all its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(x) for key, x in value.items()}
    return [_on_cpu(x) for x in value] if isinstance(value, list) else value
