"""Everything that a bit-exact resume needs, safe against a kill at any byte.

A checkpoint is a folder ``checkpoints/epoch-0012`` (12 epochs are done): one file per process with
its workers' residuals, process 0's with the shared rest, and ``manifest.json`` with their SHA-256,
written last. The folder is made under another name and renamed when complete; the last two are
kept. Files hold tensors and plain types only and are read with ``weights_only=True``.
Random streams are functions of their keys (``seeding``) and policies of the record, so neither
needs saving.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from regimes.collectives.world import World
from regimes.errors import RecordError
from regimes.records import write_atomically
from regimes.records.files import make_folder, opened_to_read

log = logging.getLogger(__name__)
KEEP = 2
NAME, PART = re.compile(r"epoch-\d{4,}"), re.compile(r"process-\d+\.pt")


def save(
    folder: Path, epochs: int, shared: dict[str, Any], own: dict[str, Any], world: World
) -> None:
    """Write the checkpoint after ``epochs`` epochs; every process calls this together.

    Args:
        shared: state that is the same on all processes; process 0 writes it.
        own: state of this process's workers.

    Raises:
        RecordError: the disk is full or not writable; earlier checkpoints are intact.
    """
    final = folder / "checkpoints" / f"epoch-{epochs:04d}"
    partial = final.with_suffix(".partial")
    state = {"own": own, "workers": list(world.hosted)}
    if world.rank == 0:
        state["shared"] = shared
    reports = world.gather_object(_write(partial, f"process-{world.rank}.pt", state))
    failed = next((e for *_, e in reports if e), None)
    if world.rank == 0:
        failed = failed or _publish(partial, final, epochs, {n: d for n, d, _ in reports})
    failed = world.gather_object(failed)[0]
    if failed:
        raise RecordError(
            f"cannot write the checkpoint {final}: {failed}; the record and earlier checkpoints "
            "are intact, continue with --resume when there is room"
        )


def _write(partial: Path, name: str, state: dict[str, Any]) -> list[str | None]:
    """[name, SHA-256, what went wrong] of one process's file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    try:
        partial.parent.parent.mkdir(parents=True, exist_ok=True)
        for part in (partial.parent, partial):
            make_folder(part)
        write_atomically(partial / name, content)
    except OSError as error:
        return [name, "", error.strerror or str(error)]
    return [name, hashlib.sha256(content).hexdigest(), None]


def _publish(partial: Path, final: Path, epochs: int, files: dict[str, str]) -> str | None:
    """Complete the folder and drop old ones; returns what went wrong."""
    try:
        manifest = json.dumps({"epochs": epochs, "files": files}, indent=1)
        write_atomically(partial / "manifest.json", manifest.encode())
        for left in partial.iterdir():  # by a kill, when the same epoch was saved before
            if left.name not in {*files, "manifest.json"}:
                left.unlink()
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        for old in _all(final.parent)[:-KEEP]:
            if not old.is_symlink():
                shutil.rmtree(old)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _all(folder: Path) -> list[Path]:
    """Checkpoints, oldest first; nothing else that lies there, a copy of one for example."""
    whole = (p for p in folder.glob("epoch-*") if NAME.fullmatch(p.name))
    return sorted(whole, key=_epochs)


def _epochs(path: Path) -> int:
    return int(path.name.removeprefix("epoch-"))


def load(folder: Path) -> tuple[int, list[dict[str, Any]]] | None:
    """The newest whole checkpoint: epochs done and the files' states, or None if there is none.

    A damaged one is passed over, with a warning in the log, for the one before.

    Raises:
        RecordError: checkpoints exist, but none is whole.
    """
    candidates = _all(folder / "checkpoints")
    for path in reversed(candidates):
        try:
            return _read(path)
        except Exception as error:  # what a foreign file makes torch and json raise has no end
            reason = str(error).partition("\n")[0] or type(error).__name__
            log.warning("checkpoint %s is damaged and passed over: %s", path, reason)
    if candidates:
        raise RecordError(f"no checkpoint of {folder} is whole: train anew in another folder")
    return None


def _content(path: Path) -> bytes:
    with opened_to_read(path) as file:
        return file.read()


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    manifest = json.loads(_content(path / "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("epochs") != _epochs(path):
        raise ValueError(f"its manifest is not that of {_epochs(path)} epochs")
    states: list[dict[str, Any]] = []
    for name, digest in manifest["files"].items():
        if not PART.fullmatch(name):
            raise ValueError(f"{name} is no file of a checkpoint")
        content = _content(path / name)
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{name} does not match its checksum")
        states.append(torch.load(io.BytesIO(content), weights_only=True, map_location="cpu"))
    if any(set(state) - {"shared"} != {"own", "workers"} for state in states):
        raise ValueError("a file has other parts than a process saves")
    if sum("shared" in state for state in states) != 1:
        raise ValueError("what all processes share is not in one file of it")
    return manifest["epochs"], states
