"""BatchNorm as each worker has it, in whichever pass the gradients are computed.

Each worker normalises with its own batch; the running statistics follow worker 0, as
DistributedDataParallel's broadcast of buffers does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass
class NormalisationMode:
    """How the BatchNorm layers of one model behave during the current pass.

    Attributes:
        groups: how many workers' samples the batch interleaves (sample i: worker i mod groups).
        update: whether the running statistics follow the first of them.
    """

    groups: int = 1
    update: bool = True


def per_worker_batchnorm(model: nn.Module) -> NormalisationMode:
    """Let every BatchNorm layer of ``model`` obey the returned mode in training; evaluation and
    the state dictionary stay as they are."""
    mode = NormalisationMode()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            original = module.forward

            def forward(x: Tensor, bn: _BatchNorm = module, original: Any = original) -> Tensor:
                return _normalise(bn, x, mode) if bn.training else original(x)

            module.forward = forward  # type: ignore[method-assign, assignment]
    return mode


def _normalise(bn: _BatchNorm, x: Tensor, mode: NormalisationMode) -> Tensor:
    """Training-mode BatchNorm of ``groups`` interleaved batches, as one of groups * C channels."""
    groups, channels = mode.groups, bn.num_features
    grouped = _merge(x, groups)
    weight = None if bn.weight is None else bn.weight.repeat(groups)
    bias = None if bn.bias is None else bn.bias.repeat(groups)
    if not mode.update or bn.running_mean is None:
        y = F.batch_norm(grouped, None, None, weight, bias, True, 0.0, bn.eps)
        return _part(y, x)
    running = bn.running_mean, cast(Tensor, bn.running_var)
    count = cast(Tensor, bn.num_batches_tracked).add_(1)
    factor = 1.0 / float(count) if bn.momentum is None else bn.momentum  # None: cumulative mean
    mean, var = (statistic.repeat(groups) for statistic in running)
    y = F.batch_norm(grouped, mean, var, weight, bias, True, factor, bn.eps)
    for statistic, new in zip(running, (mean, var), strict=True):
        statistic.copy_(new[:channels])
    return _part(y, x)


def _merge(x: Tensor, groups: int) -> Tensor:
    """``[n * groups, C, ...] -> [n, groups * C, ...]``: free for contiguous input; one copy, of
    whole pixels, for channels_last, which it stays."""
    if not _channels_last(x):
        return x.reshape(len(x) // groups, -1, *x.shape[2:])
    pixels = x.permute(0, 2, 3, 1).unflatten(0, (-1, groups))  # [n, groups, h, w, C], a view
    return pixels.permute(0, 2, 3, 1, 4).flatten(3).permute(0, 3, 1, 2)


def _part(y: Tensor, x: Tensor) -> Tensor:
    """The inverse, for ``x`` as it was."""
    if not _channels_last(x):
        return y.reshape(x.shape)
    pixels = y.permute(0, 2, 3, 1).unflatten(3, (-1, x.shape[1]))  # [n, h, w, groups, C]
    return pixels.permute(0, 3, 1, 2, 4).flatten(0, 1).permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> bool:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return last and not x.is_contiguous()
