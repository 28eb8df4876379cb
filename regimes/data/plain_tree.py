"""A tree without ``train/`` and ``test/``: ``<class>/*``, split by a rule.

Stands beside `tree`, which finds the files, and under `image_folder`. Which images test is a
function of a seed and their names: each class gives its share, those whose hash is smallest. So one
image more or less changes nothing for the others, and neither does where the tree lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from regimes.data.tree import SUFFIXES, Place
from regimes.errors import DataError, require

SHARE = 0.2
PARTS = {"train", "training", "test", "testing", "val", "valid", "validation"}  # no classes


class Prepared(NamedTuple):
    """How a folder's images are made a data set.

    Attributes:
        resize: pixels of the shorter side, then the middle is cropped; None: as they are.
        share: of each class's images, which test; None: ``SHARE``. Of a plain tree, like:
        seed: of the choice; None: 0.
    """

    resize: int | None = None
    share: float | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be."""
        size, share = self.resize, self.share
        require(size is None or size >= 1, "data.resize", size, "a number of pixels from 1 up")
        good = share is None or 0 < share < 1
        require(good, "data.test_share", share, "a share between 0 and 1")


def places(names: Iterable[str], how: Prepared) -> dict[str, Place]:
    """The place of each image of a plain tree, by its name; folders that all lie in are no class.

    Raises:
        DataError: there is no class, one has a single image, or they are named like splits.
    """
    parts = {name: tuple(name.split("/")) for name in names}
    while len({p[0] for p in parts.values()}) == 1 and all(len(p) > 2 for p in parts.values()):
        parts = {name: p[1:] for name, p in parts.items()}
    classes: dict[str, list[str]] = {}
    for name, found in parts.items():
        if len(found) > 1:
            classes.setdefault(found[0], []).append(name)
    _check(parts, classes)
    result = {}
    for label, members in classes.items():
        share, seed = how.share or SHARE, how.seed or 0
        count = min(max(1, round(share * len(members))), len(members) - 1)
        order = sorted(members, key=lambda name: _hash(seed, "/".join(parts[name])))
        for i, name in enumerate(order):
            result[name] = ("test" if i < count else "train", label, "/".join(parts[name]))
    return result


def _check(names: Collection[str], classes: Mapping[str, Sequence[str]]) -> None:
    if not classes:
        raise DataError(
            f"it has no images in folders, and {len(names)} beside them: expected train/<class>/ "
            f"and test/<class>/, or <class>/ alone, with files {', '.join(sorted(SUFFIXES))}"
        )
    if len(classes) > 1 and {label.lower() for label in classes} <= PARTS:
        raise DataError(
            f"{' and '.join(sorted(classes))} are no classes: name them train and test, and put "
            "a folder of each class into each"
        )
    if loose := sorted({*names} - {name for members in classes.values() for name in members}):
        raise DataError(
            f"{loose[0]} lies beside the classes: put it into one of them, or elsewhere"
        )
    for label, members in classes.items():
        if len(members) < 2:
            raise DataError(
                f"the class {label!r} has one image, {members[0]}: one must train and one test"
            )


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="surrogateescape")).digest()
