"""Whole files, replaced in one step. Only a regular file is ever replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from regimes.base import inputs
from regimes.base.errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

IRREGULAR = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder"}


def check_regular(path: Path) -> None:
    """Raise OSError, with the kind in ``strerror``, unless a path is a regular file or free."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = IRREGULAR.get(stat.S_IFMT(mode), "a pipe, socket or device")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file or none", str(path))


def opened_to_append(path: Path) -> BinaryIO:
    """Open a regular file, made if there is none. Links are not followed, and opening never
    blocks."""
    check_regular(path)  # for its words; the flags refuse what takes the file's place after it
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def opened_to_read(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one. OSError for others: reading one could block
    forever."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def make_folder(path: Path) -> None:
    """Make a folder where there is none; OSError for a link, which may lead out of its parent."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ENOTDIR, f"{path} is a symbolic link, expected a folder or none")


def _write_synced(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def append_synced(path: Path, content: bytes) -> None:
    """Append to a file, synced. On an OSError the file is as before."""
    file = opened_to_append(path)
    start = file.tell()
    try:
        with file:
            _write_synced(file, content)
    except OSError:
        os.truncate(path, start)  # after the close, which tries to write what is left once more
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a new file, synced, which is then renamed over ``path``: readers see the old or the
    new content.

    A symbolic link is refused: following it would change a file that the user did not name (a link
    may come out of an archive), and replacing it would not change the file that the user meant.

    Raises:
        OSError: ``path`` is no regular file, or cannot be written; the old content is intact.
    """
    check_regular(path)
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    file = temporary.open("xb")  # O_CREAT | O_EXCL: neither an existing file nor a link is opened
    try:
        with file:
            _write_synced(file, content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # so that the new name survives a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def record_folder(out: str | Path) -> Path:
    """Return the folder of a record, as a path.

    Raises:
        RecordError: an empty text, which would be the current folder; a name that no file can have.
    """
    try:
        os.lstat(out)
    except (OSError, ValueError) as error:  # a NUL, a name that is too long
        if not isinstance(error, FileNotFoundError) or not str(out):
            why = getattr(error, "strerror", None) or str(error)
            shown = f"{str(out)!r:.80}"
            raise RecordError(f"out = {shown}: expected the name of a folder ({why})") from None
    return Path(out)


def check_output(path: Path) -> None:
    """Raise RecordError if an output would replace a file of a record, a checkpoint, or a file that
    the command has read."""
    records = [folder.parent for folder in path.parents if folder.name == "checkpoints"]
    if path.name in ("run.json", ".lock") or path.suffix == ".jsonl":
        records.append(path.parent)
    for folder in records:
        if (folder / "run.json").is_file():
            raise RecordError(f"cannot write {path}: it is a file of the record in {folder}")
    if inputs.was_read(path):
        raise RecordError(f"cannot write {path}: the command has read it; choose another name")


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that a user asked for: ``write_atomically`` after `check_output`; makes its
    folder."""
    check_output(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as CSV in full precision, without its index."""
    write_output(path, frame.to_csv(index=False, lineterminator="\n"))


def in_use(folder: Path) -> bool:
    """Answer whether a process holds the record's lock. The test takes it, shared, for an
    instant."""
    if not (folder / ".lock").is_file():  # opening a pipe would block
        return False
    try:
        import fcntl

        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except ImportError:  # Windows: written to within the last minutes?
        return time.time() - (folder / "events.jsonl").stat().st_mtime < 600
    except OSError:
        return True
