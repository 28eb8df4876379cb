"""The image files of a tree ``train/<class>/*``, ``test/<class>/*``, or of a plain one,
``<class>/*``: a folder, or an archive that is read in memory and never unpacked to disk.

A folder and each archive of it have the same images: what a link leads to is read in both, and
what cannot be read is an error, since images that are lost silently are another experiment.
"""

from __future__ import annotations

import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from regimes import inputs
from regimes.records.archive import Member

SPLITS = ("train", "test")
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
HIDDEN = (".", "__MACOSX")
LARGEST_IMAGE = 2**28  # bytes of one file
LINKS = 40  # that lead to each other, at most, as on Linux
UNREADABLE = (  # what the standard library raises on a truncated or foreign archive
    OSError,
    EOFError,
    RuntimeError,  # zip: encrypted, or an unknown compression
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
Place = tuple[str, str, str]  # split, class, path below the split's parent


Placing = Callable[[str], Place | None]


def members(path: Path, plain: bool = False) -> Iterator[tuple[Place, str, bytes]]:
    """Place, full name and content of each image file, in the order that is cheap to read. A name
    may come again: the last one counts.

    Args:
        plain: of all images, with no place yet but their path; False: of those below a split.

    Raises:
        UNREADABLE: the archive or a file of it cannot be read, or a link leads nowhere.
    """
    placed = _anywhere if plain else _place
    if path.is_dir():
        for file in files(path, plain):
            name = file.relative_to(path).as_posix()
            if place := placed(name):
                yield place, name, _content(file)
    elif path.suffix.lower() == ".zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir() and (place := placed(name := _name(info))):
                    _check_size(name, info.file_size)
                    yield place, os.path.normpath(name), archive.read(info)
    else:
        with tarfile.open(path, tarinfo=Member) as tar:
            yield from _of_tar(tar, placed)


def folders(path: Path, beside: str) -> set[str]:
    """The names of the folders directly in one, `beside`, of a folder or an archive, "" or with a
    slash at its end: those without an image too, but for hidden ones."""
    if path.is_dir():
        names = [f"{beside}{each.name}/" for each in (path / beside).iterdir() if each.is_dir()]
    elif path.suffix.lower() == ".zip":
        with zipfile.ZipFile(path) as archive:
            entries = [(_name(info), info.is_dir()) for info in archive.infolist()]
            names = [os.path.normpath(name) + "/" * folder for name, folder in entries]
    else:
        with tarfile.open(path, tarinfo=Member) as tar:
            names = [os.path.normpath(member.name) + "/" * member.isdir() for member in tar]
    below = (name.removeprefix(beside).partition("/") for name in names if name.startswith(beside))
    return {first for first, slash, _ in below if slash and not first.startswith(HIDDEN)}


def _name(info: zipfile.ZipInfo) -> str:
    """Of a member: many write UTF-8 without the flag that says so, and `zipfile` takes it for the
    letters of DOS."""
    try:
        return info.filename.encode("cp437").decode()
    except UnicodeError:  # it was flagged, or is of DOS
        return info.filename


def _of_tar(tar: tarfile.TarFile, placed: Placing) -> Iterator[tuple[Place, str, bytes]]:
    latest: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        name = os.path.normpath(member.name)
        latest[name] = member
        if member.isreg() and (place := placed(member.name)):
            yield place, name, _read(tar, member.name, member)
    _check_end(tar)
    for name, member in latest.items():
        if member.isreg() or member.isdir():
            continue
        target = _target(name, latest)
        below = placed is _anywhere or not set(name.split("/")).isdisjoint(SPLITS)
        if place := placed(member.name):
            yield place, name, _read(tar, member.name, target)
        elif target is not None and target.isdir() and below:
            raise tarfile.ReadError(
                f"{member.name} is a link to a folder: pack it with tar --dereference"
            )


def _target(name: str, known: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """What a name of an archive stands for, in the end; None if a link leads nowhere."""
    member = known.get(name)
    for _ in range(LINKS):
        if member is None or not (member.islnk() or member.issym()):
            return member
        beside = "" if member.islnk() else os.path.dirname(member.name)
        member = known.get(os.path.normpath(os.path.join(beside, member.linkname)))
    return None


def _read(tar: tarfile.TarFile, name: str, member: tarfile.TarInfo | None) -> bytes:
    if member is None or not member.isreg():
        raise tarfile.ReadError(f"{name} is no regular file, nor a link to one in the archive")
    _check_size(name, member.size)
    content = tar.extractfile(member)
    assert content is not None  # it is a file
    return content.read()


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise unless the archive is whole: `tarfile` takes a missing tail for the end."""
    stream = tar.fileobj
    assert stream is not None
    if stream.tell() < tar.offset + tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it ends before its end-of-archive block")
    while stream.read(1 << 20):  # the padding; makes gzip and xz compare their checksums
        pass


def _content(file: Path) -> bytes:
    """Of a regular file; a pipe or a device is not waited for."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{file} is no regular file, nor a link to one")
    _check_size(str(file), status.st_size)
    inputs.add(file)
    return file.read_bytes()


def _check_size(name: str, size: int) -> None:
    if size > LARGEST_IMAGE:
        raise OSError(f"{name} is too large for an image: {size} bytes")


def files(path: Path, plain: bool = False) -> list[Path]:
    """All files below the splits of a folder, links to folders followed; or, of a plain one, all
    images.

    Raises:
        OSError: a folder cannot be read, a link leads to a folder that it lies in, or two ways
            lead to one folder of a class, whose images would count twice.
    """
    found = []
    for start in [path] if plain else [path / split for split in SPLITS]:
        ways: dict[tuple[str, Path], str] = {}  # by class and what is there
        for folder, below, names in os.walk(start, onerror=_missing, followlinks=True):
            if Path(folder).is_symlink() and Path(folder) != path:
                _check_loop(Path(folder))
            inside = "" if plain else next(iter(Path(folder).relative_to(start).parts), "")
            first = ways.setdefault((inside, Path(folder).resolve()), folder)
            if first != folder:
                raise OSError(f"{folder} is {first} once more, through a link")
            below.sort()  # what is said of two ways is the same on every disk
            if plain:
                below[:] = [name for name in below if not name.startswith(HIDDEN)]
                names = [name for name in names if _anywhere(name)]
            found += [Path(folder, name) for name in names]
    return sorted(found)


def has_splits(path: Path) -> bool:
    """Does a folder have an image below ``train/<class>/`` or ``test/<class>/``?"""
    return any(_place(file.relative_to(path).as_posix()) for file in files(path))


def _missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _check_loop(link: Path) -> None:
    if link.resolve() in link.parent.resolve().joinpath("_").parents:
        raise OSError(f"{link} is a link to a folder that it lies in")


def _place(name: str) -> Place | None:
    """(split, class, path) of a member, or None if it is no image of the tree."""
    whole = name.removeprefix("./").split("/")
    start = next((i for i, part in enumerate(whole) if part in SPLITS), len(whole))
    parts = whole[start:]  # archives often hold the tree in one more folder
    if len(parts) < 3 or not _anywhere(name):
        return None
    return parts[0], parts[1], "/".join(parts)


def _anywhere(name: str) -> Place | None:
    """Its path alone, or None if it is hidden or no image by its suffix."""
    path = name.removeprefix("./")
    hidden = any(part.startswith(HIDDEN) for part in path.split("/"))
    if hidden or os.path.splitext(name)[1].lower() not in SUFFIXES:
        return None
    return "", "", path
