"""The image files of a folder or of an archive.

A folder and each archive of it give the same images: links are followed in both, and a file that
cannot be read is an error, because images lost silently make another experiment.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regimes.records.archive import Member, filter_member, scratch_folder

SPLITS = ("train", "test")
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
HIDDEN = (".", "__MACOSX")
LARGEST_IMAGE = 2**28  # bytes of one file


def _is_hidden(name: str) -> bool:
    return any(part.startswith(HIDDEN) for part in name.removeprefix("./").split("/"))


def _is_image(name: str) -> bool:
    return not _is_hidden(name) and os.path.splitext(name)[1].lower() in SUFFIXES


@contextmanager
def unpack_images(path: Path) -> Iterator[Path]:
    """Yield a folder itself; of an archive, a scratch folder with its content.

    Raises:
        cache.UNREADABLE: the archive is truncated, damaged or none.
    """
    if path.is_dir():
        yield path
        return
    with scratch_folder() as root:
        try:
            _extract_archive(path, root)
            yield root
        except OSError as error:  # name the member, not the scratch file
            raise OSError(str(error).replace(f"{root}/", "")) from error


def _extract_archive(archive: Path, root: Path) -> None:
    if archive.suffix.lower() == ".zip":
        with zipfile.ZipFile(archive) as content:
            for info in content.infolist():
                # Many programs write UTF-8 without the flag that says so, and `zipfile` then
                # decodes it as DOS letters.
                with suppress(UnicodeError):  # it has the flag, or really is DOS
                    info.filename = info.filename.encode("cp437").decode()
                if info.is_dir() or _is_image(info.filename):
                    check_size(info.filename, info.file_size)
                    content.extract(info, root)
    else:
        with tarfile.open(archive, tarinfo=Member, errorlevel=2) as tar:
            tar.extractall(root, filter=_checked)
            _check_end(tar)


def check_size(name: str, size: int) -> None:
    """Raise OSError for a file of more bytes than an image may have."""
    if size > LARGEST_IMAGE:
        raise OSError(f"{name} is too large for an image: {size} bytes")


def _checked(member: tarfile.TarInfo, root: str) -> tarfile.TarInfo | None:
    """The filter of ``extractall``. All files pass: an image may be a link to any of them."""
    try:
        check_size(member.name, member.size)
        return filter_member(member, root)
    except tarfile.FilterError:  # a device, or a link out of the archive
        if _is_image(member.name):
            reason = "is no regular file, nor a link to one in the archive"
            raise tarfile.ReadError(f"{member.name} {reason}") from None
        return None


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise unless the archive is complete: `tarfile` takes a missing tail for the end."""
    stream = tar.fileobj
    assert stream is not None
    if stream.tell() < tar.offset + tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it ends before its end-of-archive block")
    while stream.read(1 << 20):  # the padding; makes gzip and xz compare their checksums
        pass


def find_images(root: Path, nested: bool = False) -> dict[str, Path]:
    """Find the images of a folder by name, links followed: those in ``train/<class>/`` and
    ``test/<class>/``, or all images if these have none.

    Args:
        nested: the two may lie in further folders, as in many archives.

    Raises:
        OSError: a folder cannot be read, a link leads to a folder that it lies in, or two paths
            lead to one folder of a class: its images would count twice.
    """
    splits = [folder for split in SPLITS for folder in root.glob("**/" * nested + split)]
    there = [s for s in splits if s.is_dir() and not _is_hidden(s.relative_to(root).as_posix())]
    classes = [folder for split in there for folder in subfolders(split)]
    files = [file for folder in classes for file in _walk_folders(folder, root)]
    files = files or _walk_folders(root, root)
    return {file.relative_to(root).as_posix(): file for file in sorted(files)}


def subfolders(parent: Path) -> list[Path]:
    """List the visible folders in a folder, sorted. Raises OSError for a link that leads nowhere,
    which might be a class."""
    visible = sorted(entry for entry in parent.iterdir() if not _is_hidden(entry.name))
    return [entry for entry in visible if stat.S_ISDIR(entry.stat().st_mode)]


def _walk_folders(start: Path, root: Path) -> list[Path]:
    files: list[Path] = []
    paths: dict[Path, Path] = {}  # of each folder on disk, the first path that led to it
    for name, below, names in os.walk(start, onerror=_raise, followlinks=True):
        folder = Path(name)
        is_link = folder.is_symlink() and folder != root
        if is_link and folder.resolve() in (folder.parent.resolve() / "_").parents:
            raise OSError(f"{folder} is a link to a folder that it lies in")
        first = paths.setdefault(folder.resolve(), folder)
        if first != folder:
            raise OSError(f"{folder} is {first} once more, through a link")
        # Sorted, so that the error above names the same two paths on every file system.
        below[:] = sorted(name for name in below if not _is_hidden(name))
        visible = [folder / name for name in names if not _is_hidden(name)]
        # A link that leads nowhere might be to a folder of images: reading it raises.
        files += [file for file in visible if _is_image(file.name) or not file.exists()]
    return files


def _raise(error: OSError) -> None:
    raise error
