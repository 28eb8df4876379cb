"""Which images of a folder train, and which test.

A tree is ``train/<class>/*`` and ``test/<class>/*``, or plain, ``<class>/*``. In a plain tree each
class gives a share of its images to the test set: those with the smallest hash of seed and name. So
adding or removing an image moves no other image, and neither does moving the tree.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from regimes.base.errors import DataError
from regimes.data.tree import SPLITS, SUFFIXES, subfolders

TEST_SHARE = 0.2  # of the images, where a folder has no test set of its own
SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation"}


class ImagePlace(NamedTuple):
    """Says where an image stands in the data set."""

    split: str
    label: str
    name: str  # from the split or the class on


def split_places(names: Iterable[str], nested: bool) -> dict[str, ImagePlace]:
    """Return the places of the images below ``train/<class>/`` and ``test/<class>/``, by name.

    Args:
        nested: the two may lie in further folders, as in many archives.
    """
    places = {}
    for name in names:
        parts = name.split("/")
        start = next((i for i, part in enumerate(parts) if part in SPLITS), len(parts))
        if len(parts) >= start + 3 and (nested or start == 0):
            places[name] = ImagePlace(parts[start], parts[start + 1], "/".join(parts[start:]))
    return places


def plain_places(
    names: Collection[str], root: Path, test_share: float | None, seed: int
) -> dict[str, ImagePlace]:
    """Choose the place of each image of a plain tree, by name; folders that hold all images are no
    class.

    Raises:
        DataError: a class has no two images, images lie outside class folders, or these are
            named like splits.
    """
    parts = [name.split("/") for name in names]
    shared = len(Path(os.path.commonpath(names)).parts) if names else 0
    skip = max(0, min([shared, *(len(path) - 2 for path in parts)]))
    below = {name: "/".join(path[skip:]) for name, path in zip(names, parts, strict=True)}
    classes: dict[str, list[str]] = {}
    for name, path in below.items():
        label, slash, _ = path.partition("/")
        classes.setdefault(label if slash else "", []).append(name)
    loose = sorted(classes.pop("", []))
    suffixes = ", ".join(sorted(SUFFIXES))
    if not classes:
        raise DataError(
            f"it has no images in folders, and {len(loose)} outside: expected train/<class>/ and "
            f"test/<class>/, or <class>/ alone, with files {suffixes}"
        )
    if len(classes) > 1 and {label.lower() for label in classes} <= SPLIT_NAMES:
        raise DataError(
            f"{' and '.join(sorted(classes))} are no classes: name them train and test, and put "
            "a folder of each class into each"
        )
    if loose:
        raise DataError(
            f"{loose[0]} lies outside the class folders: move it into one, or elsewhere"
        )
    for folder in subfolders(root.joinpath(*parts[0][:skip])):
        if (count := len(classes.get(folder.name, ()))) < 2:
            raise DataError(
                f"{folder.relative_to(root)} has {('no images', 'one image')[count]} ({suffixes}): "
                "a class needs two, one to train and one to test; remove a folder that is no "
                "class"
            )
    places = {}
    for label, members in classes.items():
        tests = min(max(1, round((test_share or TEST_SHARE) * len(members))), len(members) - 1)
        hashes = {
            name: hashlib.sha256(f"{seed}\0{below[name]}".encode(errors="surrogateescape")).digest()
            for name in members
        }
        for i, name in enumerate(sorted(members, key=hashes.__getitem__)):
            places[name] = ImagePlace("test" if i < tests else "train", label, below[name])
    return places
