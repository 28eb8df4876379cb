"""Many records as one small file: packed into a ``.tar.xz``, and read from it as from a folder."""

from __future__ import annotations

import contextlib
import fcntl
import io
import lzma
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from regimes.base import inputs
from regimes.base.console.progress import track_progress
from regimes.base.errors import RecordError, RegimesError
from regimes.records import chain, shown
from regimes.records.branches import trunk_of
from regimes.records.files import check_output, check_regular, write_output
from regimes.records.lines import collection_paused, read_content
from regimes.records.reader import Record, find_runs, load
from regimes.records.selection import select_and_separate

LARGEST_ARCHIVE, LARGEST_EXTENSION = 2**33, 2**20  # bytes, unpacked
DEEPEST = 100  # folders in folders: making and removing them recurses
PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENSIONS = (*PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
PREFIX, LOCK = "regimes-archive-", ".lock"  # of a scratch folder, and in it
LOCKED = fcntl.LOCK_EX | fcntl.LOCK_NB


class RunList(list[Record]):
    """Holds runs, as a list; a notebook shows a row for each schedule."""

    def _repr_html_(self) -> str:
        return shown.as_html(shown.of_schedules(self))


class Member(tarfile.TarInfo):
    """Reads a member of bounded extensions (a long name, a comment), because tarfile reads these at
    once."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type in EXTENSIONS and member.size > LARGEST_EXTENSION:
            raise tarfile.TarError(f"the header of a member has {member.size} bytes")
        return member


def filter_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Filter a member as ``tarfile.data_filter`` does; a name that no file can have is a TarError,
    too."""
    try:
        return tarfile.data_filter(member, path)
    except ValueError as error:  # a NUL in it
        raise tarfile.ReadError(f"{member.name!r:.80} is no name of a file: {error}") from None


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder, and remove it at the end. The folder survives a kill, its lock does
    not; the next process deletes it."""
    for abandoned in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), abandoned.open("rb") as file:
            fcntl.flock(file, LOCKED)
            shutil.rmtree(abandoned.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as made:
        place = Path(made)
        with (place / "being-made").open("xb") as lock:
            fcntl.flock(lock, LOCKED)  # before it has its name, by which other processes find it
            os.replace(place / "being-made", place / LOCK)
            (place / "content").mkdir()
            yield place / "content"


@contextlib.contextmanager
def unpack_records(place: str | Path) -> Iterator[Path]:
    """Yield a folder as it is; of an archive by `pack_records`, a scratch folder with its
    content."""
    place = Path(place)
    if not place.is_file():
        yield place
        return
    inputs.add_input(place)
    size = 0

    def check_size(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        nonlocal size
        size += member.size
        if size > LARGEST_ARCHIVE:
            raise RecordError(f"{place} is too large: more than {LARGEST_ARCHIVE} bytes")
        if len(PurePosixPath(member.name).parts) > DEEPEST:
            raise RecordError(f"{place} has folders in more than {DEEPEST} others")
        return filter_member(member, path)

    with scratch_folder() as scratch:
        try:
            with tarfile.open(place, tarinfo=Member) as archive:
                archive.extractall(scratch, filter=check_size)
        except (OSError, tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
            why = str(error).partition("\n")[0].rstrip(":")
            raise RecordError(f"{place} is no archive of records: {why}") from None
        try:
            yield scratch
        except RegimesError as error:  # errors name the archive, which the user knows
            raise type(error)(str(error).replace(str(scratch), str(place))) from None


def load_all(*folders: str | Path, where: Sequence[str] = ()) -> list[Record]:
    """Reads every run in or under some folders, or in archives that ``regimes pack`` wrote.

    If runs of one name are not seeds of the same experiment, they get names of their own; see
    `same_experiment.separate_experiments`.

    >>> runs = load_all("data/reference/smoke-resnet8.tar.xz")
    >>> sorted({run.name for run in runs})[:3]
    ['accordion', 'dense', 'high']

    Args:
        folders: Folders or archives.
        where: Conditions that a run fulfils, such as ``["optimizer.lr=0.4"]``; see `select`.

    Returns:
        The runs, as a list of `Record`.

    Raises:
        RecordError: there is no run, one is damaged, or two runs have one experiment and seed.
    """
    runs: list[Record] = []
    for place in folders:
        if not isinstance(place, str | Path):
            raise RecordError(f"{place!r} is neither a folder of runs nor an archive")
        folder = Path(place)
        # a record's folder is its path in the archive
        with unpack_records(folder) as root, collection_paused():
            there = [
                replace(load(path), folder=folder / path.relative_to(root))
                for path in track_progress(find_runs(root), "reading runs")
            ]
        if not there:
            missing = "" if folder.exists() else ", which does not exist"
            raise RecordError(f"no run in or under {folder}{missing}")
        runs += there
    return RunList(select_and_separate(runs, where))


def pack_records(folder: str | Path, archive: str | Path) -> int:
    """Write the records under a folder, without checkpoints, to a ``.tar.xz``, of the same bytes
    for the same records; returns how many. Of a chain it has the last states
    (`chain.shorten_chain`). RecordError if there is none, or a branch without its trunk."""
    folder, runs = Path(folder), find_runs(folder)
    check_output(Path(archive))  # now, not after the compression
    if not runs:
        raise RecordError(f"no run in or under {folder}")
    packed = {run.resolve() for run in runs}
    for run in runs:
        trunk = trunk_of(run)
        if trunk is not None and trunk.resolve() not in packed:
            raise RecordError(
                f"cannot pack {run} without its trunk {trunk}: pack a folder that holds both"
            )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        paths = [p for run in runs for p in sorted([run / "run.json", *run.glob("*.jsonl")])]
        for path in sorted(paths, key=lambda p: p.name):  # files of a kind compress best together
            try:
                check_regular(path)  # a link may lead to any file of the user's
            except OSError as error:
                raise RecordError(f"cannot pack {path}: {error.strerror}") from None
            text = (
                chain.shorten_chain(path.parent) if path.name == chain.CHAIN else read_content(path)
            )
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    write_output(Path(archive), buffer.getvalue())
    return len(runs)
