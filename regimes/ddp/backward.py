"""One backward pass of DDP: what is known of it, when it ends, how its gradients lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from regimes.compression.base import State
from regimes.config import Level


@dataclass
class Step:
    """One backward pass in the making; dictionaries are keyed by layer."""

    levels: Sequence[Level]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # in the buckets; later the updates
    states: dict[int, State] = field(default_factory=dict)  # as they will be
    pending: list[tuple[Future[Tensor], Tensor]] = field(default_factory=list)  # and their buffers
    scale: float = 0.0
    finite: bool = True
    failed: bool = False


def after_backward(callback: Callable[[], None]) -> None:
    """Callbacks run in the order in which they were asked for; DDP asks for its own when the last
    bucket is full."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_memory_order(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A parameter's share of the bucket, ``[*shape]``. It lies there in the parameter's own memory
    order where that has no gaps, which ``bucket.gradients()`` does not say."""
    if parameter.is_contiguous():
        return flat
    extent = sum(s * (n - 1) for s, n in zip(parameter.stride(), parameter.shape, strict=True)) + 1
    if extent != parameter.numel():
        return flat
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
