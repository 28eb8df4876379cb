"""Image folders and archives as arrays in memory, decoded once and stored in a cache.

`tree` lists the files and places them. Several processes may decode the same archive at once
(`cache`).
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from regimes.base import inputs
from regimes.base.errors import DataError, require
from regimes.data.cache import UNREADABLE, cache_root, load_arrays, store_arrays
from regimes.data.image_split import SPLIT_NAMES, ImagePlace, plain_places, split_places
from regimes.data.tree import SPLITS, check_size, find_images, subfolders, unpack_images

SEVERAL = 10_000  # images from which processes pay: each takes seconds to start
PART = 500  # images that a process decodes at once
FORMAT = "4"  # of the cache file, and what is read of a tree; part of its key
GREY_MODES = {"1", "L", "LA"}
DEEP_MODES = {"F", "I", "I;16", "I;16B", "I;16L", "I;16N"}  # more than 8 bits: would be clipped


class Arrays(NamedTuple):
    """Holds a data set as it was stored: 8-bit images and class numbers."""

    train_x: UInt8[np.ndarray, "train c h w"]
    train_y: Int64[np.ndarray, " train"]
    test_x: UInt8[np.ndarray, "test c h w"]
    test_y: Int64[np.ndarray, " test"]
    classes: tuple[str, ...]


class DecodedImage(NamedTuple):
    """Holds a decoded image and its place in the data set."""

    place: ImagePlace
    pixels: UInt8[np.ndarray, "h w c"]  # one channel, or three


def load_tree(
    path: str | Path,
    resize: int | None = None,
    test_share: float | None = None,
    split_seed: int | None = None,
) -> Arrays:
    """Load the images of a folder or an archive, from the cache if it has them.

    They are sorted by split, class and file name, so a folder and each archive of it are the same
    data. Of an archive's members with one name the last counts.

    Args:
        resize: pixels of the shorter side, then the middle is cropped; None: the size as it is.
        test_share: of each class, in a tree without ``train/`` and ``test/``; None: a fifth.
        split_seed: of the choice of these; None: 0.

    Raises:
        ConfigError: an option is out of range.
        DataError: the tree is missing, unreadable, or not a set of equal-sized images.
    """
    path = Path(path)
    require(resize is None or resize >= 1, "data.resize", resize, "a number of pixels from 1 up")
    is_share = test_share is None or 0 < test_share < 1
    require(is_share, "data.test_share", test_share, "a share between 0 and 1")
    if not (path.is_dir() or path.is_file()):
        raise DataError(f"{path} does not exist: data.path must be an image folder or archive.")
    try:
        key = _fingerprint(path, f"{resize} {test_share} {split_seed}")
        cached = cache_root() / f"{path.name.split('.')[0]}-{key[:20]}.npz"
        if stored := load_arrays(cached, Arrays._fields):
            train_x, train_y, test_x, test_y, classes = stored
            return Arrays(train_x, train_y, test_x, test_y, tuple(classes.tolist()))
        with unpack_images(path) as root:
            files = find_images(root, nested=path.is_file())
            places = split_places(files, nested=path.is_file())
            for name, value in (("test_share", test_share), ("split_seed", split_seed)):
                own = "none: the tree has folders train/ and test/ of its own"
                require(not places or value is None, f"data.{name}", value, own)
            places = places or plain_places(files, root, test_share, split_seed or 0)
            order = sorted(places, key=lambda name: (places[name], name))
            pixels = _decode_files([(name, files[name]) for name in order], resize)
            pictures = [DecodedImage(places[n], one) for n, one in zip(order, pixels, strict=True)]
            arrays = _assemble_arrays(pictures, root)
        classes = np.array(arrays.classes)
        store_arrays(cached, arrays._asdict() | {"classes": classes}, "decoded images")
        return arrays
    except UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise DataError(
            f"{path} is truncated or not a readable image folder or archive (.tar, .tar.gz, "
            f".tar.xz, .zip): {reason}."
        ) from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _fingerprint(path: Path, options: str) -> str:
    """SHA-256 of the resolved path, the options, and the size and time of each file."""
    path = path.resolve()
    digest = hashlib.sha256(_encoded(f"{FORMAT}\0{path}\0{options}"))
    for file in find_images(path).values() if path.is_dir() else [path]:
        inputs.add_input(file)
        status = file.stat()
        digest.update(_encoded(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}"))
    return digest.hexdigest()


def _encoded(text: str) -> bytes:
    """A text with names of files, which need not be UTF-8."""
    return text.encode(errors="surrogateescape")


def _decode_files(
    files: list[tuple[str, Path]], size: int | None
) -> list[UInt8[np.ndarray, "h w c"]]:
    """The pixels of many files, in their order; of very many in a process for each core."""
    if len(files) < SEVERAL:
        return _decode_part(files, size)
    from joblib import Parallel, delayed

    parts = [files[i : i + PART] for i in range(0, len(files), PART)]
    # Processes, because of a small image most of the time is Python's, which threads would share.
    with Parallel(n_jobs=-1, idle_worker_timeout=1, max_nbytes=None) as parallel:
        decoded = parallel(delayed(_decode_part)(part, size) for part in parts)
    return [one for part in decoded for one in part]


def _decode_part(
    files: list[tuple[str, Path]], size: int | None
) -> list[UInt8[np.ndarray, "h w c"]]:
    return [_decode_pixels(name, file, size) for name, file in files]


def _decode_pixels(name: str, file: Path, size: int | None) -> UInt8[np.ndarray, "h w c"]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    status = file.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device could block
        raise OSError(f"{file} is no regular file, nor a link to one")
    check_size(str(file), status.st_size)
    try:
        with Image.open(file) as image:
            if image.mode in DEEP_MODES:
                raise ValueError(f"mode {image.mode} has more than 8 bits per channel")
            mode = "L" if image.mode in GREY_MODES else "RGB"
            held = image if size is None else ImageOps.exif_transpose(image)  # as the camera was
            plain = held if held.mode == mode else held.convert(mode)
            if size is not None:  # the shorter side, the middle of the longer one
                plain = ImageOps.fit(plain, (size, size), method=Image.Resampling.BICUBIC)
            return np.atleast_3d(np.asarray(plain))
    except UnidentifiedImageError as error:
        raise DataError(f"{name} cannot be decoded: it is no image.") from error
    except Exception as error:  # Pillow raises a dozen kinds, SyntaxError among them
        raise DataError(f"{name} cannot be decoded as an image ({error}).") from error


def _assemble_arrays(pictures: list[DecodedImage], root: Path) -> Arrays:
    parts = {split: [p for p in pictures if p.place.split == split] for split in SPLITS}
    for split, part in parts.items():
        if not part:
            names = [f.name for f in subfolders(root) if f.name.lower() in SPLIT_NAMES - {*SPLITS}]
            raise DataError(
                f"it has no images in {split}/<class>/, and {len(pictures)} elsewhere: expected "
                "train/<class>/ and test/<class>/, or <class>/ alone, which is split."
                + "".join(f" If {name}/ is to test, name it test." for name in names)
            )
    classes = tuple(sorted({picture.place.label for picture in parts["train"]}))
    if len(classes) < 2:
        raise DataError(f"it has only one class, {classes[0]!r}; at least two are needed.")
    first = pictures[0]
    for place, pixels in pictures:
        if place.label not in classes:
            raise DataError(f"the class of {place.name} has no images in train/.")
        if pixels.shape[:2] != first.pixels.shape[:2]:
            sizes = [f"{x.shape[1]}x{x.shape[0]}" for x in (pixels, first.pixels)]
            raise DataError(
                f"{place.name} is {sizes[0]}, but {first.place.name} is {sizes[1]}; all images "
                "must have one size: set data.resize = 32, or another size."
            )
    channels = max(picture.pixels.shape[2] for picture in pictures)
    arrays: list[Any] = []
    for part in parts.values():
        # in a set with colour, grey images get three equal channels
        wide = [np.broadcast_to(p.pixels, (*p.pixels.shape[:2], channels)) for p in part]
        arrays.append(np.ascontiguousarray(np.stack(wide).transpose(0, 3, 1, 2)))
        labels = [classes.index(picture.place.label) for picture in part]
        arrays.append(np.array(labels, dtype=np.int64))
    train_x, train_y, test_x, test_y = arrays
    return Arrays(train_x, train_y, test_x, test_y, classes)
