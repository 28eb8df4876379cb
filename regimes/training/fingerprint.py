"""A hash of the weights, compared between processes once per unit.

Every process applies the shared updates by itself. A single bit that one computes differently would
stay and grow until its decisions differ, and then its collectives no longer match the others'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from regimes.errors import TrainingError

ROW = 256  # words of 8 bytes that are added without weights; rows are weighted by their index
ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A 64-bit hash of the tensors (4 or 8 bytes per entry), computed on their device.

    Sums modulo 2^64 do not depend on the order of additions. A change of one entry always changes
    the hash, changes in several rows almost always; two changes in one row can cancel.
    """
    words = torch.cat([part for tensor in tensors for part in _words(tensor)])
    places = torch.arange(1, 2 * len(words), 2, device=words.device)
    return int((words * (places * ODD)).sum())


def check_same_weights(fingerprints: Sequence[int | None], unit: str, shards: int = 1) -> None:
    """Raise TrainingError unless all processes have the fingerprint of process 0, or of ``shards``
    that divide a model, all islands that of the first.

    Args:
        unit: what has just ended, e.g. "epoch 3".
    """
    ranks = enumerate(fingerprints)
    odd = [str(rank) for rank, theirs in ranks if theirs != fingerprints[rank % shards]]
    if odd:
        raise TrainingError(
            f"process {', '.join(odd)} holds other weights than "
            f"{'process 0' if shards == 1 else 'the first island'} at the end of {unit}: "
            "the replicas have drifted apart; the record up to there is intact, continue with "
            "--resume, on equal processors and with deterministic = true"
        )


def _words(tensor: Tensor) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rest"]]:
    """Sums of whole rows, and the rest word by word."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # where 8 bytes cannot be read at once
        flat = flat.clone()
    words = flat.view(torch.int32)
    whole = len(words) // (2 * ROW) * 2 * ROW
    return words[:whole].view(torch.int64).view(-1, ROW).sum(1), words[whole:].long()
