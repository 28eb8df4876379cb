"""Random streams keyed by what they are for, so that they need no saving and no synchronising.

A stream is a function of its key alone, e.g. ``(seed, "order", epoch)`` or
``(seed, "dropout", epoch, step, worker)``. Any process can make any stream, and a resumed run
makes the same ones again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Key = str | int


def derive(*key: Key) -> int:
    """A 63-bit seed that depends on the key alone (BLAKE2b of its text)."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def stream(*key: Key) -> torch.Generator:
    """A CPU generator for one purpose."""
    import torch

    return torch.Generator().manual_seed(derive(*key))
