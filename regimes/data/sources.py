"""Where data sets come from: scikit-learn, torchvision, image folders; and the balanced order.

Stands between `data.image_folder` (folders and archives) and `data.images` (tensors and batches).
Each source gives `Arrays`, the data as it was stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regimes.config import Registry, offered
from regimes.data.cache import cache_root, data_root, given
from regimes.data.image_folder import Arrays, load_tree
from regimes.data.plain_tree import Prepared
from regimes.errors import DataError, nearest, require
from regimes.seeding import stream

if TYPE_CHECKING:
    from regimes.config import DataConfig

logger = logging.getLogger(__name__)
DIGITS_TRAIN = 1000  # of 1,797; the rest is the test set
TEXTS = ("wikitext-2", "text", "stdlib", "synthetic-text")  # read elsewhere
TASKS = Registry("data set", offered("regimes.tasks"))  # likewise, by other packages
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@dataclass(frozen=True)
class Found:
    """One row of `regimes doctor`."""

    name: str
    available: bool
    where: str


def read(config: DataConfig) -> Arrays:
    """The data set that a configuration names, whole."""
    sources = {"digits": _digits, "cifar10": _cifar, "cifar100": _cifar, "folder": _folder}
    known = (*sources, *TEXTS, *TASKS)
    if config.name not in sources:
        raise DataError(f"Unknown data set {config.name!r}: {nearest(config.name, known)}")
    for field in ("resize", "test_share", "split_seed"):
        value = getattr(config, field)
        require(
            value is None or config.name == "folder",
            f"data.{field}",
            value,
            'none, it is for data.name = "folder"',
        )
    return sources[config.name](config)


def find(root: str | Path | None = None) -> list[Found]:
    """Which data sets are at hand under `root` (default: `$REGIMES_DATA` or ``data/cache``)."""
    base = Path(root) if root else data_root()
    rows = [Found("digits", True, "embedded in scikit-learn")]
    rows += [Found(n, (base / f).is_dir(), str(base / f)) for n, f in CIFAR_FOLDERS.items()]
    text = base / "wikitext-2"
    rows.append(Found("wikitext-2", (text / "wiki.train.tokens").is_file(), str(text)))
    decoded = sorted((Path(root) if root else cache_root()).glob("*.npz"))
    return rows + [Found("folder", True, str(file)) for file in decoded]


def _digits(config: DataConfig) -> Arrays:
    """1,797 handwritten digits of 8x8 pixels with values 0..16, embedded in scikit-learn.

    The test set is what training and validation leave.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = np.round(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    y = raw.target.astype(np.int64)
    held = config.validation_size or 0
    size = DIGITS_TRAIN if config.train_size is None else config.train_size + held
    train, test = np.split(balanced(y, 10, size, "digits"), [size])
    return Arrays(x[train], y[train], x[test], y[test], tuple(map(str, raw.target_names)))


def _folder(config: DataConfig) -> Arrays:
    if config.path is None:
        raise DataError('data.name = "folder" needs data.path: an image folder or an archive.')
    how = Prepared(config.resize, config.test_share, config.split_seed)
    return load_tree(given(config.path), how)


def at_most(config: DataConfig, raw: Arrays) -> DataConfig:
    """Of somebody's own folder, which may have fewer images than a preset asks for, all it has."""
    if config.name != "folder":
        return config
    has = {
        "train_size": len(raw.train_y) - (config.validation_size or 0),
        "test_size": len(raw.test_y),
    }
    sizes = {name: getattr(config, name) for name in has}
    small = {name for name, size in sizes.items() if size is not None and size > has[name] > 0}
    for name in sorted(small):
        logger.warning(
            "data.%s = %d, and %s has %d: all are taken", name, sizes[name], config.path, has[name]
        )
    none: dict[str, Any] = dict.fromkeys(small)
    return replace(config, **none)


def _cifar(config: DataConfig) -> Arrays:
    """CIFAR-10 or -100 in the standard python layout; torchvision verifies each file's MD5."""
    datasets = torchvision_datasets()
    kind = datasets.CIFAR10 if config.name == "cifar10" else datasets.CIFAR100
    root = given(config.path) if config.path else data_root()
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
    """Of several processes told to download, the first does and the others find it done."""
    import fcntl

    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".download.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def torchvision_datasets() -> Any:
    """`torchvision.datasets`, on a torch that torchvision was not compiled against too.

    The wheel of PyPI beside a CPU-only torch cannot load its compiled operators, and then fails on
    import because it describes two of them. Naming these two lets the import pass; nothing here
    calls them.
    """
    try:
        import torchvision.datasets
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", arguments)
        import torchvision.datasets
    return torchvision.datasets


def balanced(y: np.ndarray, classes: int, size: int | None, what: str) -> np.ndarray:
    """Indices in a fixed random order that takes the classes in turn: any prefix is balanced.

    The order depends on the class numbers `y` [n] and on `what` (the split's name) only, not on a
    run's seed. DataError unless the prefix of `size`, if any, can hold equal shares (the first
    classes one more where it does not divide).
    """
    counts = np.bincount(y, minlength=classes)
    if size is not None:
        share = size // classes + (np.arange(classes) < size % classes)
        if size < 1 or (share > counts).any():
            worst, first = int((counts - share).argmin()), what.partition(",")[0]
            field = first if first in ("test", "validation") else "train"
            raise DataError(
                f"{what}: {size} images of {classes} classes take {share[worst]} of class {worst}, "
                f"which has {counts[worst]}: set another data.{field}_size, or none for all."
            )
    return _in_turn(torch.randperm(len(y), generator=stream("subset", what)).numpy(), y)


def hold_out(y: np.ndarray, classes: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation): indices of a training set ``y`` [n], of which ``size`` are held out.

    Those are the last of each class in the order of `balanced`, so they depend neither on a run's
    seed nor on how much is trained on, and a training subset is the same one with and without a
    validation split that leaves room for it. The first part is the rest of that order.

    Raises:
        DataError: ``size`` images cannot hold equal shares, or nothing is left to train on.
    """
    balanced(y, classes, size, "validation")  # can it hold equal shares?
    if size == len(y):
        raise DataError(f"data.validation_size = {size} takes all images of the training set")
    order = balanced(y, classes, None, "train")
    held = _in_turn(order[::-1], y)[:size]
    return order[~np.isin(order, held)], held


def _in_turn(order: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The indices of an order with the classes in turn, each class's in the order given."""
    counts = np.bincount(y)
    grouped = order[np.argsort(y[order], kind="stable")]
    rank = np.arange(len(y)) - np.repeat(counts.cumsum() - counts, counts)  # within its class
    return grouped[np.lexsort((y[grouped], rank))]
