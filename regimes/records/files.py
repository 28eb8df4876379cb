"""Whole files, replaced in one step. Nothing but a regular file is ever replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from regimes import inputs
from regimes.errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

ODD = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def check_regular(path: Path) -> None:
    """Only a regular file, or none yet, may be written to.

    Raises:
        OSError: the path is a folder, a pipe, a device or a link, named in ``strerror``.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = next((words for test, words in ODD if test(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file or none", str(path))


def opened_to_append(path: Path) -> BinaryIO:
    """A regular file, made if there is none; no link is followed, and nothing is waited for.

    Raises:
        OSError: as ``check_regular``, or the file is not writable.
    """
    check_regular(path)  # with the words for it; what takes its place now is refused by the system
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def opened_to_read(path: Path) -> BinaryIO:
    """A regular file, perhaps by a link; a pipe would be waited for, and a device has no end.

    Raises:
        OSError: it is none, or cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def make_folder(path: Path) -> None:
    """Make a folder where there is none; what is written to it stays in its parent.

    Raises:
        OSError: it is a symbolic link or a file, or cannot be made.
    """
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ENOTDIR, f"{path} is a symbolic link, expected a folder or none")


def append(path: Path, content: bytes) -> None:
    """At the end of a file, synced; what was there is intact if it fails.

    Raises:
        OSError: as ``opened_to_append``, or the disk is full.
    """
    with opened_to_append(path) as file:
        start = file.tell()
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, start)
            raise


def _sync_folder(folder: Path) -> None:
    """So that a rename outlives a loss of power; not every file system can."""
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)


def write_atomically(path: Path, content: bytes) -> None:
    """To a new file, synced, then renamed over ``path``: a reader sees the old or the new whole.

    A symbolic link is refused too, even to a regular file: to write through it would change a file
    that nobody has named (a link may come out of an archive), to replace it would leave unchanged
    the file that a user meant. The file's mode is that of any new file, by the umask.

    Raises:
        OSError: ``path`` exists and is no regular file, or the disk is full or not writable; what
            was there is intact.
    """
    check_regular(path)
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    file = temporary.open("xb")  # O_CREAT | O_EXCL: neither an existing file nor a link is opened
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        raise


def check_output(path: Path) -> None:
    """Every file that a user asks for goes through here before it is written.

    Raises:
        RecordError: it would replace a file of a record, its checkpoints among them, or one that
            the command has read.
    """
    part = path.name in ("run.json", ".lock") or path.suffix == ".jsonl"
    records = [path.parent] * part
    records += [folder.parent for folder in path.parents if folder.name == "checkpoints"]
    for folder in records:
        if (folder / "run.json").is_file():
            raise RecordError(f"cannot write {path}: it is a file of the record in {folder}")
    if inputs.was_read(path):
        raise RecordError(f"cannot write {path}: the command has read it; choose another name")


def write_output(path: Path, content: str | bytes) -> None:
    """A file that a user asked for: as ``write_atomically``, with its folder made where missing."""
    check_output(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """A frame as CSV in full precision, without its index."""
    write_output(path, frame.to_csv(index=False, lineterminator="\n"))
