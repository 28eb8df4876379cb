"""Which images of a tree train and which test, and of which class each is, by their names.

A tree is ``train/<class>/*`` and ``test/<class>/*``, or plain, ``<class>/*``. In a plain tree each
class gives a share of its images to the test set: those with the smallest hash of seed and name. So
adding or removing an image moves no other image, and neither does moving the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from regimes.data.tree import SPLITS, SUFFIXES
from regimes.errors import DataError

TEST_SHARE = 0.2
SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation"}


class Place(NamedTuple):
    """Where an image stands in the data set."""

    split: str
    label: str
    name: str  # from the split or the class on


def split_places(names: Iterable[str], nested: bool) -> dict[str, Place]:
    """The places of the images below ``train/<class>/`` and ``test/<class>/``, by name.

    Args:
        nested: the two may lie in further folders, as in many archives.
    """
    places = {}
    for name in names:
        parts = name.split("/")
        start = next((i for i, part in enumerate(parts) if part in SPLITS), len(parts))
        if len(parts) >= start + 3 and (nested or start == 0):
            places[name] = Place(parts[start], parts[start + 1], "/".join(parts[start:]))
    return places


def plain_places(names: Collection[str], test_share: float | None, seed: int) -> dict[str, Place]:
    """The place of each image of a plain tree, by name; folders that hold all images are no class.

    Raises:
        DataError: there is no class, one has a single image, or they are named like splits.
    """
    parts = {name: tuple(name.split("/")) for name in names}
    while len({p[0] for p in parts.values()}) == 1 and all(len(p) > 2 for p in parts.values()):
        parts = {name: p[1:] for name, p in parts.items()}
    below = {name: "/".join(p) for name, p in parts.items()}
    classes: dict[str, list[str]] = {}
    for name, path in parts.items():
        if len(path) > 1:
            classes.setdefault(path[0], []).append(name)
    _check(names, classes)
    places = {}
    for label, members in classes.items():
        tests = min(max(1, round((test_share or TEST_SHARE) * len(members))), len(members) - 1)
        for i, name in enumerate(sorted(members, key=lambda name: _hash(seed, below[name]))):
            places[name] = Place("test" if i < tests else "train", label, below[name])
    return places


def _check(names: Collection[str], classes: Mapping[str, Sequence[str]]) -> None:
    if not classes:
        raise DataError(
            f"it has no images in folders, and {len(names)} beside them: expected train/<class>/ "
            f"and test/<class>/, or <class>/ alone, with files {', '.join(sorted(SUFFIXES))}"
        )
    if len(classes) > 1 and {label.lower() for label in classes} <= SPLIT_NAMES:
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
