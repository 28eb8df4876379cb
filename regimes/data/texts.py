"""Texts as bytes, each in three parts: any file or folder, the standard library.

The split does not depend on a seed:

- a folder with wiki.{train,valid,test}.tokens: these three files;
- other folders, and the standard library: the files in the order of the SHA-256 of their relative
  paths. The first, until they have a twentieth of the bytes, are the test part, the next, likewise,
  the validation part, the rest the training part;
- one or two files: by position, 18 twentieths for training, one for validation, one for testing.
  No cut falls inside a character of UTF-8.

A folder is read with its subfolders, without links, hidden files, ``__pycache__``, empty files, and
binary files: a zero among the first 8,000 bytes, which is git's rule. Nothing is decoded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regimes.base import inputs
from regimes.base.config import DataConfig
from regimes.base.errors import DataError
from regimes.data.cache import user_path

STANDARD = {name: f"wiki.{name[:5]}.tokens" for name in ("train", "validation", "test")}
SHARE = 20  # one of so many parts is for validation, one for testing
BINARY = 8000  # first bytes of a file, searched for a zero
STDLIB_BYTES = 8_000_000  # of Python's library that are read at most
EXCLUDED = {
    *("test", "tests", "idle_test", "encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
}


@dataclass(frozen=True)
class Parts:
    """Holds a text in three parts, and entries for the record's header on its source."""

    train: bytes
    validation: bytes
    test: bytes
    facts: dict[str, Any]


def read_text(config: DataConfig) -> Parts:
    """Read the complete text of a configuration.

    Raises:
        DataError: it is missing, empty or cannot be read.
    """
    return _read_stdlib() if config.name == "stdlib" else _read_files(config)


def _read_stdlib() -> Parts:
    """The Python sources of the standard library without tests and tables of characters: complete
    files in the order of the split, up to 8 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    contents, total = [], 0
    for path in _split_in_order(_sources(root), root):
        content = _read_content(path)
        if total + len(content) > STDLIB_BYTES:
            break
        total += len(content)
        contents.append(content)
    if len(contents) < 3:
        raise DataError(
            f"{root} holds no Python sources: this Python has no standard library there"
        )
    return by_file(contents, {"python": platform.python_version()})


def _sources(root: Path) -> Iterator[Path]:
    paths = _walk_files(root, lambda name: name in EXCLUDED or name.startswith("config-"))
    generated = "_sysconfigdata"  # of this machine's compiler
    return (path for path in paths if path.suffix == ".py" and generated not in path.name)


def _read_files(config: DataConfig) -> Parts:
    if config.path is None:
        raise DataError('data.name = "text" needs data.path: a file or a folder.')
    path = user_path(config.path)
    if path.is_file():
        return by_position(_read_content(path))
    if not path.is_dir():
        raise DataError(f"{path} does not exist: data.path must be a text file or a folder.")
    if all((path / name).is_file() for name in STANDARD.values()):
        standard = {split: _read_content(path / name) for split, name in STANDARD.items()}
        return Parts(**standard, facts={"files": len(standard)})
    paths = _walk_files(path, lambda name: name.startswith(".") or name == "__pycache__")
    visible = (
        p for p in paths if not p.name.startswith(".") and p.is_file() and not p.is_symlink()
    )
    contents = [_read_content(file) for file in _split_in_order(visible, path)]
    texts = [c for c in contents if c and 0 not in c[:BINARY]]
    if not texts:
        raise DataError(f"{path} has no text: all its files are empty, binary or hidden.")
    return by_file(texts, {}) if len(texts) >= 3 else by_position(b"".join(texts))


def _walk_files(root: Path, excluded: Callable[[str], bool]) -> Iterator[Path]:
    """All files below a folder, but for folders of excluded names."""
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not excluded(name)]
        yield from (Path(folder, name) for name in names)


def _raise(error: OSError) -> None:
    """A folder that is left out in silence would make another text."""
    raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _read_content(path: Path) -> bytes:
    try:
        inputs.add_input(path)
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _split_in_order(files: Iterable[Path], root: Path) -> list[Path]:
    """Files sorted by the SHA-256 of their paths below ``root``."""

    def key(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()

    return sorted(files, key=key)


def by_file(contents: list[bytes], facts: dict[str, Any]) -> Parts:
    """Divide three or more files into three parts of at least one file."""
    least, parts, end = sum(map(len, contents)) / SHARE, [], 0
    for parts_left in (2, 1):
        start, size = end, 0
        while end < len(contents) - parts_left and (size < least or end == start):
            size += len(contents[end])
            end += 1
        parts.append(b"".join(contents[start:end]))
    test, validation = parts
    return Parts(b"".join(contents[end:]), validation, test, {"files": len(contents), **facts})


def by_position(content: bytes) -> Parts:
    """Divide one text by position: 18 twentieths train, one validates, one tests."""
    first, second = (
        _next_boundary(content, len(content) * n // SHARE) for n in (SHARE - 2, SHARE - 1)
    )
    return Parts(content[:first], content[first:second], content[second:], {})


def _next_boundary(content: bytes, start: int) -> int:
    """The first position from ``start`` on that is not inside a character of UTF-8."""
    for end in range(start, start + 4):  # a character has at most four bytes
        if end >= len(content) or content[end] & 0xC0 != 0x80:
            return end
    return start
