"""Many records as one small file: packed into a ``.tar.xz``, and read from it as from a folder."""

from __future__ import annotations

import contextlib
import io
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from regimes import inputs
from regimes.errors import RecordError, RegimesError
from regimes.records.files import check_output, check_regular, write_atomically
from regimes.records.lines import content
from regimes.records.reader import Record, find, load
from regimes.records.scratch import scratch_folder
from regimes.records.selection import gathered

LARGEST_ARCHIVE, LARGEST_ABOUT = 2**33, 2**20  # bytes, unpacked
ABOUT = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Member(tarfile.TarInfo):
    """One of an archive. What stands before it about it (a long name, a comment) is read whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        found = super().frombuf(buf, encoding, errors)
        if found.type in ABOUT and found.size > LARGEST_ABOUT:
            raise tarfile.TarError(f"it has {found.size} bytes about a member")
        return found


@contextlib.contextmanager
def opened(place: str | Path) -> Iterator[Path]:
    """The folder itself; of an archive that ``pack`` has made, a scratch folder with its runs."""
    place = Path(place)
    if not place.is_file():
        yield place
        return
    inputs.add(place)
    with scratch_folder() as scratch:
        try:
            with tarfile.open(place, tarinfo=Member) as archive:
                archive.extractall(scratch, filter=_Sparing(place))
        except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
            why = str(error).partition("\n")[0].rstrip(":")
            raise RecordError(f"{place} is no archive of records: {why}") from None
        try:
            yield scratch
        except RegimesError as error:  # by the name that the user knows
            raise type(error)(str(error).replace(str(scratch), str(place))) from None


class _Sparing:
    """What ``extractall`` asks of each member: that all of them fit in a scratch folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.size = place, 0

    def __call__(self, member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        self.size += member.size
        if self.size > LARGEST_ARCHIVE:
            raise RecordError(f"{self.place} is too large: more than {LARGEST_ARCHIVE} bytes")
        return tarfile.data_filter(member, path)


def load_all(*folders: str | Path, where: Sequence[str] = ()) -> list[Record]:
    """Every run in or under some folders, or in archives that ``pack`` has made.

    Runs of one name that are not seeds of the same experiment get names of their own; see
    `experiment.separate`.

    Args:
        where: only runs of which this is true, e.g. ``["optimizer.lr=0.4"]``; see `select`.

    Raises:
        RecordError: a folder without a run, a damaged record, no run that is asked for, or two of
            one experiment and seed.
    """
    runs: list[Record] = []
    for folder in map(_path, folders):
        with opened(folder) as root:  # of an archive, a record's folder is its name in the archive
            found = [replace(load(p), folder=folder / p.relative_to(root)) for p in find(root)]
        if not found:
            raise RecordError(f"no run in or under {folder}")
        runs += found
    return gathered(runs, where)


def _path(place: object) -> Path:
    """A RecordError names what is no path."""
    if not isinstance(place, str | Path):
        raise RecordError(f"{place!r} is neither a folder of runs nor an archive")
    return Path(place)


def _own_content(path: Path) -> bytes:
    """A file of a record; behind a link out of a stranger's could be any file of the user's."""
    try:
        check_regular(path)
    except OSError as error:
        raise RecordError(f"cannot pack {path}: {error.strerror}") from None
    return content(path)


def pack(folder: str | Path, archive: str | Path) -> int:
    """Write the records under a folder, without checkpoints, to a ``.tar.xz``; returns how many.

    The same records give the same bytes.
    """
    folder, runs = Path(folder), find(folder)
    check_output(Path(archive))
    if not runs:
        raise RecordError(f"no run in or under {folder}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for run in runs:
            for path in sorted([run / "run.json", *run.glob("*.jsonl")]):
                text = _own_content(path)
                member = tarfile.TarInfo(path.relative_to(folder).as_posix())
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    try:
        write_atomically(Path(archive), buffer.getvalue())
    except OSError as error:
        raise RecordError(f"cannot write {archive}: {error.strerror}") from None
    return len(runs)
