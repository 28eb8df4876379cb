"""The weights and the state that a training ends with: a name and a digest of each value.

Names say what a value is (model, optimizer, residual, memory), of which layer and which worker, not
where a checkpoint keeps it. The same file reads the states of both trees: a new layout of a saved
state gets its reader here, under the same names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write(folder: Path, rank: int | str, state: Mapping[str, Any]) -> None:
    """Leave the digests of a nested state in the folder of a case."""
    found = dict(sorted(leaves(state)))
    if not any(name.startswith("model/") for name in found):
        raise ValueError("a state without weights")
    (folder / f"weights-{rank}.json").write_text(json.dumps(found, indent=0))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(name, digest) of each tensor and number; what is None is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, str(i)))
    elif value is not None:
        yield "/".join(path), digest(value)


def digest(value: Any) -> str:
    """The first half of a SHA-256 of dtype, shape and bytes of a tensor; of other values the
    text."""
    if hasattr(value, "to_local"):  # of a sharded one this process's part
        value = value.to_local()
    if not isinstance(value, Tensor):
        return repr(value)
    about = f"{value.dtype} {list(value.shape)} ".encode()
    plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(about + plain.numpy().tobytes()).hexdigest()[:32]


# -- readers ------------------------------------------------------------------------------------


def of_run(folder: Path) -> dict[str, Any]:
    """The state in the last checkpoint of a run, of any number of processes."""
    from regimes.training import checkpoint

    loaded = checkpoint.load(folder)
    if loaded is None:
        raise ValueError(f"no checkpoint in {folder}")
    state = loaded[1]
    parts = state["parts"]
    found: dict[str, Any] = {
        "model": state["model"],
        "optimizer": state["optimizer"],
        "memory": column(state, "memory"),
        "residual": by_worker(parts, [column(part, "residual") for part in parts]),
    }
    for part in parts:
        for worker, own in zip(part["workers"], part.get("replicas", []), strict=False):
            found[f"worker {worker}"] = dict(own)
        for worker, own in zip(part["workers"], part.get("hidden", []), strict=False):
            found[f"hidden {worker}"] = own
        moved = part.get("outer", {}).get("movements", [])
        for worker, own in zip(part["workers"], moved, strict=False):
            found[f"worker {worker}"]["movements"] = own
    if outer := state.get("outer"):
        left = {key: value for key, value in outer.items() if key != "layers"}
        between = any(f["since"] or f["left"] is not None for f in outer["fragments"])
        found["outer"] = {**left, "memories": column(outer, "memory"), "since": int(between)}
        owed = [column(part["outer"], "residual") for part in parts]
        found["outer residual"] = by_worker(parts, owed)
    return found


def column(place: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One entry of each layer."""
    return {name: layer[key] for name, layer in place["layers"].items()}


def by_worker(
    files: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Rows of each layer by their worker, or by the file where one row serves all its workers."""
    found: dict[str, dict[str, Tensor]] = {}
    for number, (file, part) in enumerate(zip(files, parts, strict=True)):
        for layer, rows in part.items():
            if rows is None:
                continue
            alone = len(rows) == len(file["workers"])
            names = file["workers"] if alone else [f"file {number}"]
            found.setdefault(layer, {}).update(zip(map(str, names), rows, strict=True))
    return found


def of_job(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a hook or of local steps, as its ``state_dict`` gives it."""
    (part,) = saved["parts"]
    outer = saved.get("outer")
    place = (saved, part) if outer is None else (outer, part["outer"])
    found = {"memory": column(place[0], "memory"), "residual": column(place[1], "residual")}
    if outer is not None:
        synced = [layer["synced"] for layer in saved["layers"].values()]
        found["common"] = [*synced, *saved["buffers"]]
        found |= {"outer": outer["optimizer"], "fragments": outer["fragments"]}
        found["movements"] = part["outer"]["movements"]
    return found
