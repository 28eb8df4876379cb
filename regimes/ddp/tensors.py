"""Reading gradients: from DDP's buckets, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


def health_of(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """0, or NaN where any entry is not finite."""
    return 0 * torch.stack([t.sum() for t in tensors]).sum()


def in_memory_order(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A parameter's share of the bucket, ``[*shape]``. It lies there in the parameter's own memory
    order where that has no gaps, which ``bucket.gradients()`` does not say."""
    if parameter.is_contiguous():
        return flat
    extent = sum(s * (n - 1) for s, n in zip(parameter.stride(), parameter.shape, strict=True)) + 1
    if extent != parameter.numel():
        return flat
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
