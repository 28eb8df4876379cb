"""BatchNorm as each worker has it, in whichever pass the gradients are computed.

Each worker normalises with its own batch; the running statistics follow worker 0, as
DistributedDataParallel's broadcast of buffers does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

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
    """Training-mode BatchNorm of ``groups`` interleaved batches, as one of groups * C channels
    (for contiguous input the reshape is free)."""
    groups, channels = mode.groups, bn.num_features
    grouped = x.reshape(len(x) // groups, groups * channels, *x.shape[2:])
    weight = None if bn.weight is None else bn.weight.repeat(groups)
    bias = None if bn.bias is None else bn.bias.repeat(groups)
    if not mode.update or bn.running_mean is None:
        return F.batch_norm(grouped, None, None, weight, bias, True, 0.0, bn.eps).reshape(x.shape)
    running = bn.running_mean, cast(Tensor, bn.running_var)
    count = cast(Tensor, bn.num_batches_tracked).add_(1)
    factor = 1.0 / float(count) if bn.momentum is None else bn.momentum  # None: cumulative mean
    mean, var = (statistic.repeat(groups) for statistic in running)
    y = F.batch_norm(grouped, mean, var, weight, bias, True, factor, bn.eps)
    for statistic, new in zip(running, (mean, var), strict=True):
        statistic.copy_(new[:channels])
    return y.reshape(x.shape)
