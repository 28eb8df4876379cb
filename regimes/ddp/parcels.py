"""How a model's gradients are divided for travelling, and read from DDP's buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


def divide(parameters: Sequence[nn.Parameter], cap: int) -> list[list[int]]:
    """Layers from last to first, cut before a parcel of more than ``cap`` bytes, and where the
    type changes."""
    parcels: list[list[int]] = []
    room, dtype = -1, None
    for i in reversed(range(len(parameters))):
        size = parameters[i].numel() * parameters[i].element_size()
        if size > room or parameters[i].dtype != dtype:
            parcels.append([])
            room, dtype = cap, parameters[i].dtype
        parcels[-1].append(i)
        room -= size
    return parcels


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
