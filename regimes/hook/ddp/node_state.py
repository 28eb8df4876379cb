"""The state of a hook whose workers are nodes of several devices: each device has its rows of the
residuals; in the state of all processes (``Hook.full_state_dict``) each worker has its whole
ones, so that any number of nodes and devices continues from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regimes.collectives.layers import Layer, Shard
from regimes.collectives.meter import Meter
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.bucket import restart_memories
from regimes.job.fit_state import refuse_state
from regimes.job.state import Part, State, by_layer, get_column, own_part, with_column


def devices_of(world: World) -> int:
    """Return how many devices a worker has whose layers are whole on each device."""
    return world.shards if world.node else 1


def check_devices(state: Mapping[str, Any], world: World) -> None:
    """Raise ConfigError if a worker is a node in the state and a process here, or reversed."""
    saved, here = state.get("devices", 1), devices_of(world)
    if saved == 1 < here:
        refuse_state(
            "each process was a worker when it was saved, and here a node is one: continue with "
            "attach(..., nodes=False)"
        )
    if here == 1 < saved:
        refuse_state(
            f"a node of {saved} devices was a worker when it was saved, and here each process is "
            f"one: continue with attach(..., nodes={max(2, world.processes // saved)})"
        )


def join_devices(state: State) -> State:
    """Turn a state of all processes with a part for each device into one with a part for each
    worker."""
    each = state.get("devices", 1)
    if each == 1:
        return state
    shapes, parts = get_column(state["layers"], "shape"), state["parts"]
    if any(part["sums"].keys() - {"update"} for part in parts):
        refuse_state(
            "it was saved within an epoch, when each device had its part of the sums for the "
            "norm's signal: load a state that was saved right after epoch_end"
        )
    joined = [
        _join_parts(parts[first : first + each], first // each, shapes)
        for first in range(0, len(parts), each)
    ]
    return {**state, "processes": len(joined), "parts": joined}


def _join_parts(parts: Sequence[Part], worker: int, shapes: Mapping[str, Sequence[int]]) -> Part:
    owed = {}
    for name in shapes:
        rows = [part["layers"][name]["residual"] for part in parts]
        known = [tensor for tensor in rows if tensor is not None]  # none where no row is
        owed[name] = torch.cat(known, dim=1) if known else None
    sums = {}
    if "update" in parts[0]["sums"]:
        by_layer_parts = zip(*(part["sums"]["update"] for part in parts), strict=True)
        whole = zip(by_layer_parts, shapes.values(), strict=True)
        sums["update"] = [torch.cat(rows).view(*shape) for rows, shape in whole]
    return {
        **parts[0],
        "process": worker,
        "layers": by_layer(residual=owed),
        "sums": sums,
        "devices": [
            {"memory": get_column(part["layers"], "memory")}
            | {key: part[key] for key in ("traffic", "meter")}
            for part in parts
        ],
    }


def divide_devices(
    state: State, world: World, layers: Sequence[Layer], compressors: Sequence[Compressor]
) -> State:
    """Return this device's part of the state of its worker."""
    each, own = devices_of(world), own_part(state)
    table, first = state["layers"], world.shard == 0
    saved = own.pop("devices", [{key: own[key] for key in ("traffic", "meter")}])
    part = {**own, "process": world.rank}
    if each == len(saved):
        part |= {key: saved[world.shard][key] for key in ("traffic", "meter")}
    else:
        traffic = [sum(x) for x in zip(*(x["traffic"] for x in saved), strict=True)]
        part |= {"traffic": traffic if first else [0.0, 0], "meter": sum_meters(saved, first)}
    known = get_column(table, "memory")
    memories = [x.get("memory", known) for x in saved]
    table = with_column(table, "memory", shard_memories(memories, world, layers, compressors))
    if each > 1:
        here = {layer.name: layer.on(world.shard, each).shard for layer in layers}
        owed = get_column(own["layers"], "residual")
        part["layers"] = by_layer(
            residual={
                name: rows if rows is None else rows[:, _rows(here, name)].contiguous()
                for name, rows in owed.items()
            }
        )
        names = get_column(table, "shape")
        part["sums"] = {
            key: [rows[_rows(here, name)].clone() for name, rows in zip(names, sums, strict=True)]
            for key, sums in own["sums"].items()
        }
    return {
        **state,
        "devices": each,
        "processes": world.processes,
        "workers": world.workers,
        "layers": table,
        "parts": [part],
    }


def _rows(here: Mapping[str, Shard | None], name: str) -> slice:
    """A device's rows of a layer; all of one that the model does not have."""
    shard = here.get(name)
    return slice(None) if shard is None else shard.here


def sum_meters(parts: Sequence[Mapping[str, Any]], first: bool) -> dict[str, Any]:
    """Return a meter for one of another number of shards of a worker: for the first shard what the
    worker has sent, once, and nothing for the others."""
    total, meter = Meter(torch.float32, 1), parts[0]["meter"]
    for part in parts if first else ():
        own = Meter(torch.float32, 1)
        own.load_state_dict(part["meter"])
        total.add_counts(own)
    counts = total.state_dict()  # the same kinds on all, which are added up
    return counts | {
        "calls": meter["calls"],
        "sent": dict.fromkeys(meter["sent"], 0) | counts["sent"],
    }


def shard_memories(
    saved: Sequence[Mapping[str, Any]],
    world: World,
    layers: Sequence[Layer],
    compressors: Sequence[Compressor],
) -> dict[str, Any]:
    """Return the memories of this shard, by layer, from those of all shards of a worker. If the
    number of shards has changed, layers whose shards are compressed by themselves get empty
    memories that count on."""
    if len(saved) == world.shards:
        return dict(saved[world.shard])
    memories, fresh = dict(saved[0]), {}
    for layer, compressor in zip(world.local_layers(layers), compressors, strict=True):
        if layer.name in memories and not compressor.joins_shards:
            fresh[layer.name] = compressor.init(layer, 0).shared_state()
    memories |= restart_memories(memories, fresh)
    for name in fresh:  # random numbers must not be drawn again
        memories[name]["step"] = max(shard[name]["step"] for shard in saved)
    return memories
