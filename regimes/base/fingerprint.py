"""A hash of tensors that one changed bit shows in: whether weights are equal, or have changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

_ROW = 256  # words of 8 bytes that are added without weights; rows are weighted by their index
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """Compute a 64-bit hash of the tensors (2, 4 or 8 bytes per entry) on their device.

    Sums modulo 2^64 do not depend on the order of additions. A change of one entry always changes
    the hash, and changes in several rows almost always do; two changes in one row can cancel.
    """
    words = torch.cat([part for tensor in tensors for part in _row_sums(tensor)])
    places = 1 + 2 * torch.arange(len(words), device=words.device)  # odd: no word is lost
    return int((words * (places * _ODD)).sum())


def _row_sums(tensor: Tensor) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rest"]]:
    """Sums of whole rows, and the rest word by word."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # where 8 bytes cannot be read at once
        flat = flat.clone()
    if flat.element_size() == 2:  # an odd number of them is no whole number of words
        words = flat.view(torch.int16).to(torch.int32)
    else:
        words = flat.view(torch.int32)
    whole = len(words) // (2 * _ROW) * 2 * _ROW
    return words[:whole].view(torch.int64).view(-1, _ROW).sum(1), words[whole:].long()
