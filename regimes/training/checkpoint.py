"""Checkpoints on disk: all that a bit-exact resume needs, safe if the process is
killed at any point of writing.

A checkpoint is a folder ``checkpoints/epoch-0012`` (12 epochs are done): one file per process with
its workers' residuals, the shared state in process 0's file, and ``manifest.json`` with the SHA-256
of each. The folder is written under another name and renamed when complete. The last two
stay, and those that ``checkpoint_keep`` asks for: their manifests say so, and no later run of the
record removes them. Files hold tensors and plain types only and are read with
``weights_only=True``. Random numbers depend only on their keys (``seeding``), and policies only on
the record, so neither is saved.
"""

from __future__ import annotations

import errno
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

from regimes.base.errors import ConfigError, RecordError
from regimes.collectives.world import World
from regimes.job.state import State, check_format, join_states
from regimes.records import write_atomically
from regimes.records.files import make_folder, opened_to_read

log = logging.getLogger(__name__)
_KEEP = 2  # checkpoints: if the newest is damaged, the run goes on from the one before
_PART_ALONE = ("format", "parts")  # keys of the files of processes other than 0
# Errors of a file that may be whole: rights, a device or a network that fails, too many open files.
_FOR_NOW = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EIO", "ESTALE", "ETIMEDOUT", "EMFILE", "ENFILE", "ENOMEM")
    if hasattr(errno, name)
}
_NAME, _PART = re.compile(r"epoch-\d{4,}"), re.compile(r"process-\d+\.pt")


_Keep = str | tuple[int, ...] | None  # ``checkpoint_keep`` of a configuration


def is_asked(keep: _Keep, epochs: int) -> bool:
    """Answer whether the checkpoint after ``epochs`` epochs is in a list of those to write and
    keep."""
    return isinstance(keep, tuple) and epochs in keep


def save_checkpoint(
    folder: Path,
    epochs: int,
    state: State,
    world: World,
    keep: _Keep = None,
) -> None:
    """Write the checkpoint after ``epochs`` epochs; every process calls this together.

    Args:
        state: this process's. Process 0 saves what all have alike.

    Raises:
        RecordError: the disk is full or not writable; earlier checkpoints are intact.
    """
    final = folder / "checkpoints" / f"epoch-{epochs:04d}"
    partial = final.with_suffix(".partial")
    # Failures are gathered, not raised: if one process raised here, the others would wait for it
    # in the collective.
    # The first gather also ensures that all files are there before process 0 renames the folder.
    parts = {"format": state["format"], "parts": state["parts"]}
    content = state if world.rank == 0 else parts
    report = _write_file(partial, f"process-{world.rank}.pt", content)
    reports = world.gather_object(report)
    failure = next((why for *_, why in reports if why), None)
    if world.rank == 0:
        digests = {name: digest for name, digest, _ in reports if name}
        manifest = {"epochs": epochs, "files": digests}
        if keep == "all" or is_asked(keep, epochs):
            manifest["kept"] = True
        failure = failure or _publish_folder(partial, final, manifest)
    failure = world.gather_object(failure)[0]
    if failure:
        raise RecordError(
            f"cannot write the checkpoint {final}: {failure}; the record and earlier checkpoints "
            "are intact, continue with --resume when there is room"
        )


def _write_file(partial: Path, name: str, state: State) -> list[str | None]:
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


def _publish_folder(partial: Path, final: Path, manifest: dict[str, Any]) -> str | None:
    """Complete the folder and drop old ones; returns what went wrong."""
    try:
        write_atomically(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
        for file in partial.iterdir():
            # left by a kill during an earlier save of this epoch, by more processes
            if file.name not in {*manifest["files"], "manifest.json"}:
                file.unlink()
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        for old in _list_folder(final.parent)[:-_KEEP]:
            if not old.is_symlink() and not _is_kept(old):
                shutil.rmtree(old)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_kept(path: Path) -> bool:
    """Was it written to stay? No if its manifest cannot be read."""
    try:
        return bool(json.loads(_read_content(path / "manifest.json")).get("kept"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _list_folder(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; other files there, such as copies, are ignored.
    OSError if there is a folder that cannot be read: its checkpoints are not gone."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=_epochs_of)


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first; RecordError if their folder cannot be read."""
    place = folder / "checkpoints"
    try:
        return _list_folder(place)
    except OSError as error:
        raise _unreadable(place, error) from None


def _unreadable(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"cannot read {path}: {error.strerror or error}; nothing was changed, continue when it "
        "can be read"
    )


def _epochs_of(path: Path) -> int:
    return int(path.name.removeprefix("epoch-"))


def load(folder: Path) -> tuple[int, State] | None:
    """Load the newest complete checkpoint: epochs done and the content of its files; None without
    one.

    A damaged one is skipped, with a warning in the log, for the one before.

    Raises:
        RecordError: checkpoints exist, but none is complete, or one cannot be read now.
        ConfigError: it has the layout of another version.
    """
    candidates = list_checkpoints(folder)
    for path in reversed(candidates):
        try:
            return _read_file(path)
        except OSError as error:
            if error.errno in _FOR_NOW:  # it may be whole, and a run must not go back behind it
                raise _unreadable(path, error) from None
            log.warning("checkpoint %s is damaged and passed over: %s", path, error)
        except ConfigError:
            raise
        except Exception as error:  # torch and json raise anything for a file of unknown content
            reason = str(error).partition("\n")[0] or type(error).__name__
            log.warning("checkpoint %s is damaged and passed over: %s", path, reason)
    if candidates:
        raise RecordError(
            f"no checkpoint of {folder} is complete: start a new run in another folder"
        )
    return None


def load_at(folder: Path, epochs: int) -> State:
    """Load the content of the checkpoint after ``epochs`` epochs.

    Raises:
        RecordError: there is none, or it is damaged.
        ConfigError: it has the layout of another version.
    """
    there = {_epochs_of(path): path for path in list_checkpoints(folder)}
    if epochs not in there:
        has = ", ".join(map(str, there)) or "none"
        raise RecordError(
            f"{folder} has no checkpoint before unit {epochs} (it has {has}): train it in another "
            f"folder with checkpoint_keep = [{epochs}]"
        )
    try:
        return _read_file(there[epochs])[1]
    except ConfigError:
        raise
    except Exception as error:  # torch and json raise anything for a file of unknown content
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecordError(f"the checkpoint {there[epochs]} is damaged: {reason}") from None


def _read_content(path: Path) -> bytes:
    with opened_to_read(path) as file:
        return file.read()


def _read_file(path: Path) -> tuple[int, State]:
    manifest = json.loads(_read_content(path / "manifest.json"))
    if not isinstance(manifest, dict) or manifest.get("epochs") != _epochs_of(path):
        raise ValueError(f"its manifest is not of a checkpoint after {_epochs_of(path)} epochs")
    states: list[State] = []
    for name, digest in manifest["files"].items():
        if not _PART.fullmatch(name):  # nor may a name lead out of the folder
            raise ValueError(f"{name} is no file of a checkpoint")
        content = _read_content(path / name)
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{name} does not match its checksum")
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        check_format(state, f"the checkpoint {path}")
        if not isinstance(state, dict) or len(state.get("parts", ())) != 1:
            raise ValueError("a process file has unexpected keys")
        states.append(state)
    if [len(state) > len(_PART_ALONE) for state in states].count(True) != 1:
        raise ValueError("expected the shared state in exactly one process file")
    whole = next(state for state in states if len(state) > len(_PART_ALONE))
    return manifest["epochs"], {**whole, "parts": join_states(states)["parts"]}
