"""Where data sets live, and arrays kept in files, so that they are made once.

A file is written beside its final name and moved there in one step: several processes may make the
same one at once and none sees half of it. One that cannot be read is made again; a folder that
cannot be written is done without.
"""

from __future__ import annotations

import logging
import lzma
import os
import secrets
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

UNREADABLE = (  # what numpy and the standard library raise on a truncated or foreign file
    OSError,
    EOFError,
    RuntimeError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
    KeyError,
    ValueError,
)


def data_root() -> Path:
    """Where data sets live: `$REGIMES_DATA`, else ``data/cache`` in the working directory."""
    return Path(os.environ.get("REGIMES_DATA") or Path("data", "cache"))


def given(path: str) -> Path:
    """A path as a configuration has it; ~ is the home folder, which shells leave to the reader of
    ``--set data.path=~/pets``."""
    return Path(os.path.expanduser(path))


def cache_root() -> Path:
    """Where arrays are kept: `$REGIMES_CACHE`, else `data_root()`."""
    return Path(os.environ.get("REGIMES_CACHE") or data_root())


def stored(file: Path, names: Sequence[str]) -> list[np.ndarray] | None:
    """The arrays of these names (zip's CRC-32 guards each), or None."""
    try:
        with np.load(file, allow_pickle=False) as found:
            return [found[name] for name in names]
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        logger.warning("the cache file %s cannot be read and is rebuilt (%s)", file, error)
        return None


def store(file: Path, arrays: Mapping[str, np.ndarray | Sequence[str]], what: str) -> None:
    """Keep arrays for `stored`; ``what`` they are, for the warning if that fails."""
    temporary = file.with_suffix(f".{secrets.token_hex(4)}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as handle:
                np.savez(handle, **arrays)  # type: ignore[arg-type] # allow_pickle is of numpy 2
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s are not cached in %s (%s)", what, file.parent, error)
