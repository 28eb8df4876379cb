"""States that earlier versions saved, in the present form (``job.state``).

What depends on the job that loads a state is left to it: names of a compiled model's layers, fields
that its compressor did not have yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regimes.errors import ConfigError
from regimes.job.state import FORMAT, State, by_layer, join_states

EMPTY_METER: dict[str, Any] = {"layers": {}, "calls": {}, "sent": {}}
_OWN = ("sums", "traffic", "meter")  # of a process, in states of hooks and local steps
_OF_RUN = {"model", "optimizer", "momentum", "gauges", "union", "memories", "local"}


def upgrade_state(saved: Any) -> Any:
    """A state of any version in the present form; what is no state, as it is.

    Raises:
        ConfigError: a later version has saved it.
        LookupError, TypeError, ValueError: it is damaged.
    """
    if not isinstance(saved, Mapping):
        return saved
    if "format" in saved:
        if saved["format"] != FORMAT:
            raise ConfigError(
                f"the state has the format {saved['format']!r}, this version reads {FORMAT} and "
                "what came before: load it with the version that has saved it, or a later one"
            )
        return dict(saved)
    if "own" in saved:
        return _of_run(saved)
    if "shards" in saved:
        return _of_sharded_hook(saved)
    if saved.get("processes"):
        return join_states([_of_hook(part) for part in saved["processes"]])
    if "common" in saved:
        return _of_local_steps(saved)
    return _of_hook(saved) if {"worker", "residuals", "rows"} <= saved.keys() else saved


def _of_run(file: Mapping[str, Any]) -> State:
    """A process's file in a checkpoint of a run."""
    own = file["own"]
    part = {
        "workers": file["workers"],
        "layers": by_layer(residual=own["residuals"]),
        "hidden": own.get("hidden", []),
    }
    if "local" in own:
        workers = own["local"]["workers"]
        moved = [worker["movements"] for worker in workers if "movements" in worker]
        part["outer"] = {
            "layers": by_layer(residual=own["local"]["residuals"]),
            "movements": moved,
        }
        part["replicas"] = [
            {key: value for key, value in worker.items() if key != "movements"}
            for worker in workers
        ]
    state: State = {"format": FORMAT, "parts": [part]}
    if (shared := file.get("shared")) is None:
        return state
    beside = {key: value for key, value in shared.items() if key not in _OF_RUN}
    state |= {
        **{key: shared[key] for key in ("model", "optimizer", "momentum") if key in shared},
        "layers": by_layer(memory=shared["memories"]),
        "gauges": shared["gauges"],
        "union": bool(shared.get("union")),
        # up to version 0.3 they stood beside the other parts
        "interventions": beside.get("interventions", beside),
    }
    if "local" in shared:
        local = shared["local"]
        fragments = {"fragments": [whole_round(local.get("period"), local["since"])]}  # 0.2
        left = {k: v for k, v in local.items() if k not in ("memories", "since", "period")}
        layers = {"layers": by_layer(memory=local["memories"])}
        state["outer"] = {"begun": True} | fragments | left | layers
    return state


def _of_hook(saved: Mapping[str, Any]) -> State:
    """The state of one process of a hook."""
    defaults: State = {"values": {}, "pace": {}, "logged": {}, "seconds": {}, "branched": None}
    own = {"meter": EMPTY_METER} | {key: saved[key] for key in _OWN if key in saved}
    moved = {"worker", "workers", "shapes", "memories", "residuals", "levels", *_OWN}
    state = {
        "format": FORMAT,
        "processes": saved["workers"],
        "workers": saved["workers"],
        "layers": by_layer(shape=saved["shapes"], memory=saved["memories"], level=saved["levels"]),
        **defaults,
        **{key: value for key, value in saved.items() if key not in moved},
        "parts": [
            {
                "process": saved["worker"],
                "workers": [saved["worker"]],
                "layers": by_layer(residual=saved["residuals"]),
                **own,
            }
        ],
    }
    if "total" not in state:
        state["total"] = sum(row["steps"] for row in state["rows"]) + state["steps"][0]
    return state


def _of_sharded_hook(saved: Mapping[str, Any]) -> State:
    """The bytes in a checkpoint of ``torch.distributed.checkpoint``. Memories are lists with an
    entry per shard; so, since 0.3, are meters and traffic."""
    shards, by_shard = saved["shards"], isinstance(saved.get("meter"), list)
    none = dict.fromkeys(saved["shapes"])
    plain = {**saved, "residuals": none, "memories": none, "sums": {}}
    state = _of_hook({key: value for key, value in plain.items() if key != "shards"})
    state["layers"] = by_layer(shape=saved["shapes"], level=saved["levels"])
    (first,) = state["parts"]
    parts = []
    for shard, memories in enumerate(saved["memories"]):
        own = {key: saved[key][shard] if by_shard else first[key] for key in ("meter", "traffic")}
        parts.append({**first, "process": shard, "layers": by_layer(memory=memories), **own})
    workers = saved["workers"] // shards
    more = {"workers": workers, "shards": shards, "summed": saved["sums"], "parts": parts}
    return {**state, **more}


def _of_local_steps(saved: Mapping[str, Any]) -> State:
    """The state of one process of local steps."""
    process, processes = saved["process"]
    shapes = dict(saved["layers"])
    if "fragments" in saved:
        total, rounds = saved["round"]
        fragments = {"begun": saved.get("begun", True), "fragments": saved["fragments"]}
    else:  # version 0.2
        total, since, rounds, period = saved["round"]
        fragments = {"begun": True, "fragments": [whole_round(period, since)]}
    synced = dict(zip(shapes, saved["common"], strict=False))
    own = {key: saved[key] for key in (*_OWN, "seconds", "losses") if key in saved}
    return {
        "format": FORMAT,
        "processes": processes,
        "layers": by_layer(shape=shapes, synced=synced),
        "buffers": list(saved["common"][len(shapes) :]),
        "outer": {
            "layers": by_layer(memory=saved["memories"]),
            "optimizer": saved["outer"],
            **fragments,
        },
        "round": [total, rounds],
        **{key: saved[key] for key in ("rows", "recorded", "pace", "logged") if key in saved},
        "parts": [
            {
                "process": process,
                "outer": {
                    "layers": by_layer(residual=saved["residuals"]),
                    "movements": saved.get("movements", []),
                },
                **own,
            }
        ],
    }


def whole_round(period: int | None, since: int) -> dict[str, Any]:
    """A single fragment without a delay, as version 0.2 saved its round."""
    return {"period": period, "since": since, "left": None, "updates": {}}
