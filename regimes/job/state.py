"""The saved state of a job: one nested dictionary, whether of a run, a hook or local steps, of one
process or all, in a file or in a checkpoint of ``torch.distributed.checkpoint``::

    {
        "format": 4,
        "processes": 2, "workers": 2,
        "layers": {NAME: {"shape": [n, m], "memory": {...}, ...}},
        ...,                               # what else is the same on all processes
        "parts": [                         # what is a process's own
            {"process": 0, "workers": [0], "layers": {NAME: {"residual": rows}}, ...},
            {"process": 1, "workers": [1], "layers": {NAME: {"residual": rows}}, ...},
        ],
    }

``memory`` is what a compressor keeps (``State.shared_state``); ``rows`` are the residuals of a
part's workers, ``[rows, ...]``, or None. A single row for several workers is their mean. Lists
beside them have an entry for each of these workers. What local steps exchange, pseudo-gradients,
has memories and residuals of its own: entries "outer" of the state and of each part. The state of
one process has one part; the files of a run's other processes have nothing else.
``job.move_residuals`` moves residuals to other workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer

FORMAT = 4  # of a saved state; a new layout gets the next number
State = dict[str, Any]
Part = dict[str, Any]
_UP_TO_0_3 = {"own", "common", "shapes", "residuals"}  # keys of states without a format


def check_format(saved: Any, name: str = "the state") -> None:
    """Raise ConfigError if a state has the layout of another version; what is no state passes."""
    if not isinstance(saved, Mapping):
        return
    if "format" in saved:
        if saved["format"] != FORMAT:
            raise ConfigError(
                f"{name} has the format {saved['format']!r}, this version reads {FORMAT}: load it "
                "with the version that has saved it, or a later one"
            )
    elif _UP_TO_0_3 & saved.keys() or isinstance(saved.get("processes"), list):
        raise ConfigError(
            f"{name} was saved by version 0.3 or before: load it with version 0.4, which reads it, "
            "and save it there once more"
        )


def by_layer(**columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Join columns by layer to one table of a state.

    >>> by_layer(shape={"a": [2, 3]}, level={"a": "low"})
    {'a': {'shape': [2, 3], 'level': 'low'}}
    """
    names = next(iter(columns.values()), {})
    return {name: {key: column[name] for key, column in columns.items()} for name in names}


def get_column(table: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Take one entry of each layer from a saved state, by layer; layers without it are left out.

    Args:
        table: by the layer's name its entries, like "memory", "residual" and "shape".
        key: the entry.
    """
    return {name: values[key] for name, values in table.items() if key in values}


def with_column(
    table: Mapping[str, Mapping[str, Any]], key: str, values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the table with these values in a column, where there are some."""
    return {
        name: {**row, key: values[name]} if name in values else dict(row)
        for name, row in table.items()
    }


def layer_shapes(layers: Iterable[Layer]) -> dict[str, list[int]]:
    """Return the shape of each layer, by name."""
    return {layer.name: list(layer.shape) for layer in layers}


def join_states(states: Sequence[State]) -> State:
    """Join the states of several processes to one; the first has what all have alike."""
    parts = [part for state in states for part in state["parts"]]
    return {**states[0], "parts": parts}


def place_state(
    state: Mapping[str, Any], process: int, processes: int, workers: Sequence[int]
) -> State:
    """Return the state of one process, moved to another process with other workers of its own."""
    part = {**own_part(state), "process": process, "workers": list(workers)}
    return {**state, "processes": processes, "parts": [part]}


def on_cpu(value: Any) -> Any:
    """Copy a nested value, with all its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(x) for key, x in value.items()}
    return [on_cpu(x) for x in value] if isinstance(value, list) else value


def own_part(state: Mapping[str, Any]) -> Part:
    """Return the part of a state of one process.

    Raises:
        ValueError: it has another number of parts.
    """
    (part,) = state["parts"]
    return dict(part)


def owed_table(part: Part) -> dict[str, Any]:
    """Return the table of layers with what a part owes: gradients, or pseudo-gradients of local
    steps."""
    table: dict[str, Any] = part["outer"]["layers"] if "outer" in part else part["layers"]
    return table


def with_owed(state: State, residuals: Mapping[str, Any]) -> State:
    """Return the state of one process with these residuals, by layer."""
    part = own_part(state)
    names: dict[str, Any] = {name: {} for name in residuals}
    table = with_column(names | owed_table(part), "residual", residuals)
    own = {"outer": {**part["outer"], "layers": table}} if "outer" in part else {"layers": table}
    return {**state, "parts": [{**part, **own}]}


def of_workers(parts: Iterable[Part], key: str, workers: Iterable[int]) -> list[Any]:
    """Return these workers' entries in the lists ``key`` of all parts; empty if they have none."""
    found = {
        worker: entry
        for part in parts
        for worker, entry in zip(part["workers"], part.get(key, ()), strict=False)
    }
    return [found[worker] for worker in workers] if found else []
