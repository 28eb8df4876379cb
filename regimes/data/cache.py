"""Folders of data sets, and a cache of arrays.

A file is written under a temporary name and then renamed, so several processes may write the same
one at once and none reads half of it. A damaged file is rebuilt. In a read-only folder nothing is
cached, and the arrays are computed anew each time.
"""

from __future__ import annotations

import hashlib
import logging
import lzma
import os
import secrets
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

# What the standard library raises on a truncated archive, or a file of another format.
UNREADABLE = (
    *(OSError, EOFError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error),
    RuntimeError,  # zip: encrypted, or an unknown compression
)


def data_root() -> Path:
    """Return the folder of data sets: `$REGIMES_DATA`, else ``data/cache`` in the working
    directory."""
    return Path(os.environ.get("REGIMES_DATA") or Path("data", "cache"))


def user_path(path: str) -> Path:
    """Expand the ~ in a path of a configuration, because shells do not expand the one of ``--set
    data.path=~/pets``."""
    return Path(os.path.expanduser(path))


def cache_root() -> Path:
    """Return the folder of cached arrays: `$REGIMES_CACHE`, else `data_root()`."""
    return Path(os.environ.get("REGIMES_CACHE") or data_root())


def load_arrays(file: Path, names: Sequence[str]) -> list[np.ndarray] | None:
    """Load the arrays of a file; None if it is missing, damaged or not from `store_arrays`."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = [stored[name] for name in names]
            if str(stored["checksum"]) == _digest_arrays(arrays):
                return arrays
        logger.warning("the cache file %s does not match its checksum and is rebuilt", file)
    except FileNotFoundError:
        pass
    except (*UNREADABLE, KeyError, ValueError) as error:
        logger.warning("the cache file %s cannot be read and is rebuilt (%s)", file, error)
    return None


def _digest_arrays(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def store_arrays(file: Path, arrays: Mapping[str, np.ndarray], what: str) -> None:
    """Write arrays for `load_arrays`; a failure only logs a warning, which calls the arrays
    ``what``."""
    temporary = file.with_suffix(f".{secrets.token_hex(4)}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as handle:
                # allow_pickle is of numpy 2
                np.savez(handle, **arrays, checksum=_digest_arrays(arrays.values()))  # type: ignore[arg-type]
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s are not cached in %s (%s)", what, file.parent, error)
