"""Sources of images (scikit-learn, torchvision, folders), and the balanced order of samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from regimes.base.config import DataConfig
from regimes.base.errors import DataError, require, suggest_nearest
from regimes.base.seeding import make_generator
from regimes.data.cache import cache_root, data_root, user_path
from regimes.data.image_folder import Arrays, load_tree

logger = logging.getLogger(__name__)
DIGITS_TRAIN = 1000  # of 1,797; the rest is the test set
TEXTS = ("wikitext-2", "text", "stdlib")  # read elsewhere
IMAGES = ("digits", "cifar10", "cifar100", "folder")
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


class Availability(NamedTuple):
    """Holds one row of `regimes doctor`."""

    name: str
    available: bool
    where: str


def read_images(config: DataConfig) -> Arrays:
    """Read the complete data set of a configuration, as it is stored."""
    sources = dict(zip(IMAGES, (_read_digits, _read_cifar, _read_cifar, _read_folder), strict=True))
    known = (*sources, *TEXTS)
    if config.name not in sources:
        raise DataError(f"Unknown data set {config.name!r}: {suggest_nearest(config.name, known)}")
    for field in ("resize", "test_share", "split_seed"):
        value, expected = getattr(config, field), 'none, it is for data.name = "folder"'
        require(value is None or config.name == "folder", f"data.{field}", value, expected)
    for field in ("windows", "tokenizer", "vocabulary"):
        value = getattr(config, field)
        require(value is None, f"data.{field}", value, "none, the data are images")
    unused = config.path is None or config.name != "digits"
    require(unused, "data.path", config.path, 'none for digits; data.name = "folder" reads images')
    return sources[config.name](config)


def find_data(root: str | Path | None = None) -> list[Availability]:
    """List the data sets available under `root` (default: `data_root` and `cache_root`)."""
    base = Path(root) if root else data_root()
    text, decoded = base / "wikitext-2", Path(root) if root else cache_root()
    return [
        Availability("digits", True, "embedded in scikit-learn"),
        *(Availability(n, (base / f).is_dir(), str(base / f)) for n, f in CIFAR_FOLDERS.items()),
        Availability("wikitext-2", (text / "wiki.train.tokens").is_file(), str(text)),
        *(Availability("folder", True, str(file)) for file in sorted(decoded.glob("*.npz"))),
    ]


def _read_digits(config: DataConfig) -> Arrays:
    """1,797 handwritten digits of 8x8 pixels with values 0..16, embedded in scikit-learn. The test
    set is the rest after training and validation."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = np.round(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    y = raw.target.astype(np.int64)
    held = config.validation_size or 0
    size = DIGITS_TRAIN if config.train_size is None else config.train_size + held
    train, test = np.split(balanced_order(y, 10, size, "digits"), [size])
    return Arrays(x[train], y[train], x[test], y[test], tuple(map(str, raw.target_names)))


def _read_folder(config: DataConfig) -> Arrays:
    if config.path is None:
        raise DataError('data.name = "folder" needs data.path: an image folder or an archive.')
    path = user_path(config.path)
    return load_tree(path, config.resize, config.test_share, config.split_seed)


def limit_sizes(config: DataConfig, raw: Arrays) -> DataConfig:
    """Take sizes out of a configuration that exceed a user's folder; a warning names them."""
    if config.name != "folder":
        return config
    train = len(raw.train_y) - (config.validation_size or 0)
    for name, count in (("test_size", len(raw.test_y)), ("train_size", train)):
        size = getattr(config, name)
        if size is not None and size > count > 0:
            message = "data.%s = %d, and %s has %d: all are taken"
            logger.warning(message, name, size, config.path, count)
            everything: dict[str, Any] = {name: None}
            config = replace(config, **everything)
    return config


def _read_cifar(config: DataConfig) -> Arrays:
    """CIFAR-10 or -100 in the standard python layout; torchvision verifies each file's MD5."""
    datasets = torchvision_datasets()
    kind = datasets.CIFAR10 if config.name == "cifar10" else datasets.CIFAR100
    root = user_path(config.path) if config.path else data_root()
    folder = root / CIFAR_FOLDERS[config.name]
    try:
        with one_at_a_time(root) if config.download else nullcontext():
            train, test = (kind(root, train=t, download=config.download) for t in (True, False))
    except (OSError, RuntimeError) as error:
        if config.download:
            raise DataError(f"{config.name} could not be downloaded to {root}: {error}.") from error
        state = "is corrupt or incomplete in" if folder.exists() else "is missing:"
        raise DataError(
            f"{config.name} {state} {folder}; set data.download = true, or read image files with "
            'data.name = "folder" and data.path = a folder or archive.'
        ) from error
    x = [np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)) for part in (train, test)]
    y = [np.asarray(part.targets, dtype=np.int64) for part in (train, test)]
    return Arrays(x[0], y[0], x[1], y[1], tuple(train.classes))


@contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Hold a lock between processes: the first one downloads, the others wait and use its files."""
    import fcntl

    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".download.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def torchvision_datasets() -> Any:
    """Import `torchvision.datasets`, even if torchvision was compiled against another torch.

    PyPI's torchvision cannot load its compiled operators on a CPU-only torch, and its import fails
    where it describes two of them. Declaring these two lets the import pass; they are never called.
    """
    try:
        import torchvision.datasets
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", arguments)
        import torchvision.datasets
    return torchvision.datasets


def balanced_order(y: np.ndarray, classes: int, size: int | None, what: str) -> np.ndarray:
    """Return indices in a fixed random order that takes the classes in turn: any prefix is
    balanced.

    The order depends on the class numbers `y` [n] and on `what`, the split's name, not on a run's
    seed. DataError unless a prefix of `size` can hold the classes in shares equal to within 1.
    """
    counts = np.bincount(y, minlength=classes)
    if size is not None:
        share = size // classes + (np.arange(classes) < size % classes)
        if size < 1 or (share > counts).any():
            worst, first = int((counts - share).argmin()), what.partition(",")[0]
            field = first if first in ("test", "validation") else "train"
            raise DataError(
                f"{what}: {size} images of {classes} classes need {share[worst]} of class {worst}, "
                f"which has {counts[worst]}: set another data.{field}_size, or none for all."
            )
    return _in_turn(torch.randperm(len(y), generator=make_generator("subset", what)).numpy(), y)


def hold_out(y: np.ndarray, classes: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a training set ``y`` [n] into (training, validation), as indices; ``size`` are held
    out.

    The last of each class in the order of `balanced_order` are held out: they depend neither on the
    seed nor on the training size, and a training subset is the same with and without validation.

    Raises:
        DataError: ``size`` images cannot hold equal shares, or nothing is left to train on.
    """
    balanced_order(y, classes, size, "validation")  # raises if it is too small
    if size == len(y):
        raise DataError(f"data.validation_size = {size} takes all images of the training set")
    order = balanced_order(y, classes, None, "train")
    held = _in_turn(order[::-1], y)[:size]
    return order[~np.isin(order, held)], held


def _in_turn(order: np.ndarray, y: np.ndarray) -> np.ndarray:
    """An order rearranged to take the classes in turn, each class in its own order."""
    counts = np.bincount(y)
    grouped = order[np.argsort(y[order], kind="stable")]
    rank = np.arange(len(y)) - np.repeat(counts.cumsum() - counts, counts)  # within its class
    return grouped[np.lexsort((y[grouped], rank))]
