"""Texts as bytes, each in three parts: any file or folder, the standard library, a Markov chain.

The split is by a fixed rule, which no seed changes:

- a folder with wiki.{train,valid,test}.tokens: these three files;
- other folders, and the standard library: the files in the order of the SHA-256 of their relative
  paths; the first are the test part, up to the file that fills a twentieth of the bytes, the next
  the validation part, likewise, and all others the training part;
- a single file, or fewer than three: by position, 18 twentieths for training, one for validation,
  one for testing, in this order. No cut falls inside a character of UTF-8.

Of a folder all files are read, in its subfolders too, but links, hidden ones (a name that begins
with a dot), ``__pycache__``, empty ones, and binary ones: a zero among the first 8,000 bytes, which
is git's rule. Nothing is decoded.

Stands under `regimes.data.tokens`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes import inputs
from regimes.data.cache import user_path
from regimes.data.markov import Chain
from regimes.errors import DataError

if TYPE_CHECKING:
    from regimes.config import DataConfig

STANDARD = {
    "train": "wiki.train.tokens",
    "validation": "wiki.valid.tokens",
    "test": "wiki.test.tokens",
}
SHARE = 20  # one of so many parts is for validation, one for testing
BINARY = 8000  # first bytes of a file that tell
STDLIB_BYTES = 8_000_000
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
MARKOV_BYTES = 2**20


@dataclass(frozen=True)
class Parts:
    """A text in three parts, and what a record's header says of where it comes from."""

    train: bytes
    validation: bytes
    test: bytes
    facts: dict[str, Any]


def read(config: DataConfig) -> Parts:
    """The text that a configuration names, whole.

    Raises:
        DataError: it is missing, empty or cannot be read.
    """
    return {"text": _text, "stdlib": _stdlib, "synthetic-text": _markov}[config.name](config)


def _markov(config: DataConfig) -> Parts:
    chain = Chain()
    floor = {"entropy_rate": chain.entropy_rate, "floor": chain.floor(config.sequence)}
    return by_position(chain.text(MARKOV_BYTES), floor)


def _stdlib(config: DataConfig) -> Parts:
    """The Python sources of the standard library, but tests and tables of characters, up to 8 MB:
    whole files, in the order of the split. The digest tells versions apart."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found, total = [], 0
    for path in in_order(_sources(root), root):
        content = _content(path)
        if total + len(content) > STDLIB_BYTES:
            break
        total += len(content)
        found.append(content)
    if len(found) < 3:
        raise DataError(
            f"{root} holds no Python sources: this Python has no standard library there"
        )
    return by_file(found, {"python": platform.python_version()})


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in LEFT_OUT and not f.startswith("config-")]
        generated = "_sysconfigdata"  # of this machine's compiler
        yield from (Path(folder, n) for n in names if n.endswith(".py") and generated not in n)


def _text(config: DataConfig) -> Parts:
    if config.path is None:
        raise DataError('data.name = "text" needs data.path: a file or a folder.')
    path = user_path(config.path)
    if path.is_file():
        return by_position(_content(path), {})
    if not path.is_dir():
        raise DataError(f"{path} does not exist: data.path must be a text file or a folder.")
    if all((path / name).is_file() for name in STANDARD.values()):
        standard = {split: _content(path / name) for split, name in STANDARD.items()}
        return Parts(**standard, facts={"files": len(standard)})
    contents = [_content(file) for file in in_order(_files(path), path)]
    found = [c for c in contents if c and 0 not in c[:BINARY]]
    if not found:
        raise DataError(f"{path} has no text: all its files are empty, binary or hidden.")
    return by_file(found, {}) if len(found) >= 3 else by_position(b"".join(found), {})


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _content(path: Path) -> bytes:
    try:
        inputs.add(path)
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def in_order(files: Iterable[Path], root: Path) -> list[Path]:
    """Files by the SHA-256 of their paths below ``root``."""

    def key(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()

    return sorted(files, key=key)


def by_file(contents: list[bytes], facts: dict[str, Any]) -> Parts:
    """Three or more files in three parts: see the module. Each part has at least one."""
    least, ends = sum(map(len, contents)) / SHARE, [0]
    for still in (2, 1):  # parts after this one
        end, filled = ends[-1], 0
        while end < len(contents) - still and (filled < least or end == ends[-1]):
            filled += len(contents[end])
            end += 1
        ends.append(end)
    test, validation = (b"".join(contents[a:b]) for a, b in ((0, ends[1]), (ends[1], ends[2])))
    train = b"".join(contents[ends[2] :])
    return Parts(train, validation, test, {"files": len(contents), **facts})


def by_position(content: bytes, facts: dict[str, Any]) -> Parts:
    """One text in three parts: see the module."""
    first, second = (_whole(content, len(content) * n // SHARE) for n in (SHARE - 2, SHARE - 1))
    return Parts(content[:first], content[first:second], content[second:], facts)


def _whole(content: bytes, place: int) -> int:
    """The place, or the next that is not inside a character of UTF-8."""
    for shift in range(4):  # a character has at most four bytes
        if place + shift >= len(content) or content[place + shift] & 0xC0 != 0x80:
            return place + shift
    return place
