"""Image folders and archives as arrays in memory, decoded once and kept in a cache.

Stands under `regimes.data.images`; knows files, not torch. A tree is ``train/<class>/*`` and
``test/<class>/*``, or plain, ``<class>/*`` (`plain_tree`), in a folder or in an archive, whose
members are read in memory and never unpacked to disk. Several processes may decode the same archive
at once (`regimes.data.cache`).
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from regimes.data.cache import cache_root, store, stored
from regimes.data.plain_tree import PARTS, Prepared, places
from regimes.data.tree import (
    SPLITS,
    SUFFIXES,
    UNREADABLE,
    Place,
    files,
    folders,
    has_splits,
    members,
)
from regimes.errors import DataError

logger = logging.getLogger(__name__)
FORMAT = "3"  # of the cache file, and what is read of a tree; part of its key
AS_THEY_ARE = Prepared()
GREY_MODES = {"1", "L", "LA"}
DEEP_MODES = {"F", "I", "I;16", "I;16B", "I;16L", "I;16N"}  # more than 8 bits: would be clipped


class Arrays(NamedTuple):
    """A data set as it was stored: 8-bit images and class numbers."""

    train_x: UInt8[np.ndarray, "train c h w"]
    train_y: Int64[np.ndarray, " train"]
    test_x: UInt8[np.ndarray, "test c h w"]
    test_y: Int64[np.ndarray, " test"]
    classes: tuple[str, ...]


class Picture(NamedTuple):
    """One decoded image and where it stood in the tree."""

    split: str
    label: str
    name: str
    pixels: UInt8[np.ndarray, "h w *rgb"]


def load_tree(path: str | Path, how: Prepared = AS_THEY_ARE) -> Arrays:
    """The images under a folder or in an archive, from the cache where it has them.

    The order is by split, class and file name, so the folder and each archive of it are the same
    data: links lead to their files in both, and of an archive's members with one name the last
    counts. A cache that cannot be read is rebuilt; one that cannot be written is done without.
    DataError if the tree is missing, unreadable, or not a set of equal-sized images.
    """
    path = Path(path)
    how.check()
    if not (path.is_dir() or path.is_file()):
        raise DataError(f"{path} does not exist: data.path must be an image folder or archive.")
    try:
        name = f"{path.name.split('.')[0]}-{_fingerprint(path, how)[:20]}.npz"
    except OSError as error:
        raise _unreadable(path, error) from error
    file = cache_root() / name
    arrays = _from_cache(file)
    if arrays is None:
        arrays = _assemble(path, _decode(path, how))
        _to_cache(file, arrays)
    return arrays


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
    return DataError(
        f"{path} is truncated or not a readable image folder or archive (.tar, .tar.gz, "
        f".tar.xz, .zip): {reason}."
    )


def _fingerprint(path: Path, how: Prepared) -> str:
    """SHA-256 over the resolved path, the size and time of each file in question, and what is made
    of them."""
    path = path.resolve()  # however it was spelt
    asked = "" if how == AS_THEY_ARE else f"\0{how}"
    digest = hashlib.sha256(f"{FORMAT}\0{path}{asked}".encode())
    for file in files(path, not has_splits(path)) if path.is_dir() else [path]:
        status = file.stat()
        digest.update(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _from_cache(file: Path) -> Arrays | None:
    """What an earlier call stored, or None."""
    found = stored(file, Arrays._fields)
    if found is None:
        return None
    train_x, train_y, test_x, test_y, classes = found
    arrays = Arrays(train_x, train_y, test_x, test_y, tuple(classes.tolist()))
    if not _is_sound(arrays, classes):
        logger.warning("the cache file %s has other arrays than it should and is rebuilt", file)
        return None
    return arrays


def _is_sound(arrays: Arrays, classes: np.ndarray) -> bool:
    """Can these arrays be a data set?"""
    shapes = {x.shape[1:] for x in (arrays.train_x, arrays.test_x)}
    return (
        classes.ndim == 1
        and classes.dtype.kind == "U"
        and len(shapes) == 1
        and all(
            x.ndim == 4
            and x.dtype == np.uint8
            and y.dtype == np.int64
            and y.shape == x.shape[:1]
            and len(y) > 0
            and y.min() >= 0
            and y.max() < len(classes)
            for x, y in ((arrays.train_x, arrays.train_y), (arrays.test_x, arrays.test_y))
        )
    )


def _to_cache(file: Path, arrays: Arrays) -> None:
    store(file, arrays._asdict(), "decoded images")


def _decode(path: Path, how: Prepared) -> list[Picture]:
    """All pictures of the tree, sorted; of several members with one name the last."""
    found: dict[tuple[Place, str], np.ndarray] = {}
    try:
        for place, name, content in members(path):
            found[place, name] = _pixels(path, place[2], content, how.resize)
        if not found:  # no splits
            plain = {
                name: _pixels(path, place[2], content, how.resize)
                for place, name, content in members(path, plain=True)
            }
            where = _places(path, plain, how)
            found = {(where[name], name): plain[name] for name in where}
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    return [Picture(*place, found[place, name]) for place, name in sorted(found)]


def _places(path: Path, names: Iterable[str], how: Prepared) -> dict[str, Place]:
    try:
        where = places(names, how)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    name, (_, _, below) = next(iter(where.items()))
    beside = name.removesuffix(below)
    empty = folders(path, beside) - {label for _, label, _ in where.values()}
    if empty:
        raise DataError(
            f"{path}: {beside}{min(empty)} has no images ({', '.join(sorted(SUFFIXES))}): a class "
            "needs two, one to train and one to test; a folder that is none has no place here"
        )
    return where


def _pixels(path: Path, name: str, content: bytes, size: int | None) -> np.ndarray:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode in DEEP_MODES:
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel")
            mode = "L" if image.mode in GREY_MODES else "RGB"
            held = image if size is None else ImageOps.exif_transpose(image)  # as the camera was
            plain = held if held.mode == mode else held.convert(mode)
            if size is not None:  # the shorter side, the middle of the longer one
                plain = ImageOps.fit(plain, (size, size), method=Image.Resampling.BICUBIC)
            return np.asarray(plain)
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: {name} cannot be decoded: it is no image.") from error
    except Exception as error:  # Pillow raises a dozen kinds, SyntaxError among them
        raise DataError(f"{path}: {name} cannot be decoded as an image ({error}).") from error


def _assemble(path: Path, pictures: list[Picture]) -> Arrays:
    for split in SPLITS:
        if not any(picture.split == split for picture in pictures):
            raise DataError(
                f"{path} has no images in {split}/<class>/, and {len(pictures)} elsewhere: "
                "expected train/<class>/ and test/<class>/, or <class>/ alone, which is split."
                + "".join(f" If {name}/ is to test, name it test." for name in _unread(path))
            )
    classes = tuple(sorted({p.label for p in pictures if p.split == "train"}))
    if len(classes) < 2:
        raise DataError(f"{path} has only one class, {classes[0]!r}; at least two are needed.")
    first = pictures[0]
    for picture in pictures:
        if picture.label not in classes:
            raise DataError(f"{path}: the class of {picture.name} has no images in train/.")
        if picture.pixels.shape[:2] != first.pixels.shape[:2]:
            one, other = (
                "{0} is {2}x{1}".format(p.name, *p.pixels.shape) for p in (picture, first)
            )
            raise DataError(
                f"{path}: {one}, but {other}; all images must have one size: set data.resize = 32, "
                "or another size."
            )
    colour = any(picture.pixels.ndim == 3 for picture in pictures)
    parts = ([p for p in pictures if p.split == split] for split in SPLITS)
    train, test = (_stack(part, classes, colour) for part in parts)
    return Arrays(*train, *test, classes)


def _unread(path: Path) -> list[str]:
    """Folders by whose names others would test."""
    return sorted(name for name in folders(path, "") - {*SPLITS} if name.lower() in PARTS)


def _stack(
    pictures: list[Picture], classes: tuple[str, ...], colour: bool
) -> tuple[UInt8[np.ndarray, "n c h w"], Int64[np.ndarray, " n"]]:
    """Contiguous arrays; in a set with colour, grey images get three equal channels."""
    labels = np.array([classes.index(p.label) for p in pictures], dtype=np.int64)
    pixels = [p.pixels for p in pictures]
    if not colour:
        return np.stack(pixels)[:, None], labels
    rgb = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in pixels]
    return np.ascontiguousarray(np.stack(rgb).transpose(0, 3, 1, 2)), labels
