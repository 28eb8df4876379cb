"""BatchNorm as each worker has it, in whichever pass the gradients are computed.

Each worker normalises with its own batch; the running statistics follow worker 0, as
DistributedDataParallel's broadcast of buffers does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regimes.base.torch_compat import BatchNorm, foreach_add_, foreach_copy_

_KNOWN = (BatchNorm.forward, nn.SyncBatchNorm.forward)


class PerWorkerBatchNorm:
    """Normalises each worker's batch by itself, in the BatchNorm layers of one model in training;
    evaluation and the state dictionary do not change. Outside of ``set_pass`` a layer normalises
    one batch and updates nothing.

    Buffers for a pass of several workers are prepared for all layers at once: on a GPU each kernel
    launch costs more than the copy.
    """

    def __init__(self, model: nn.Module) -> None:
        # a class with a forward of its own normalises in another way
        found = [module for module in model.modules() if isinstance(module, BatchNorm)]
        self.layers = [bn for bn in found if type(bn).forward in _KNOWN]
        self.groups, self.update = 1, False
        self._recomputes = False
        self._scales: dict[BatchNorm, list[Tensor]] = {}  # weight and bias, once per worker
        # running mean and variance of all groups, [groups * C]; only worker 0's, the first C, count
        self._running: dict[BatchNorm, list[Tensor]] = {}
        self._first: dict[BatchNorm, list[Tensor]] = {}  # these first C, views
        self._used: list[BatchNorm] = []  # layers in this pass whose statistics are updated
        for layer in self.layers:
            original = layer.forward

            def forward(x: Tensor, bn: BatchNorm = layer, original: Any = original) -> Tensor:
                return self._normalise(bn, x) if bn.training else original(x)

            layer.forward = forward  # type: ignore[method-assign, assignment]

    @contextmanager
    def set_pass(self, groups: int, update: bool) -> Iterator[None]:
        """Set the mode of one forward pass, and of the backward pass after ``end_forward``.

        Args:
            groups: how many workers' samples the batch interleaves (sample i: worker i mod groups).
            update: whether the first worker's batch updates the running statistics.
        """
        self.groups, self.update = groups, update
        if groups > 1:
            self._scales = self._repeat_scales()
        if groups > 1 and update:
            # into the buffers that a pass of several workers updates
            tracked = [bn for bn in self.layers if bn.running_mean is not None]
            for bn in tracked:
                size = groups * bn.num_features
                if bn not in self._running or len(self._running[bn][0]) != size:
                    made = self._running[bn] = [t.new_zeros(size) for t in _running_tensors(bn)]
                    self._first[bn] = [t[: bn.num_features] for t in made]
            if tracked:
                foreach_copy_(self._of_worker_0(tracked), _all_running(tracked))
        try:
            yield
            self.end_forward()
        finally:
            self.groups, self.update, self._recomputes = 1, False, False
            self._scales, self._used = {}, []

    def end_forward(self) -> None:
        """Update the running statistics. Layers that are called after this, within ``set_pass``,
        repeat the forward pass in backward (activation checkpointing), and update nothing."""
        if self.update and not self._recomputes:
            used = list(dict.fromkeys(self._used))
            counted = [bn for bn in used if bn.momentum is not None]
            if counts := [cast(Tensor, bn.num_batches_tracked) for bn in counted]:
                foreach_add_(counts, 1)
            if self.groups > 1 and used:
                foreach_copy_(_all_running(used), self._of_worker_0(used))
        self._recomputes = True

    def _repeat_scales(self) -> dict[BatchNorm, list[Tensor]]:
        """Weight and bias once per worker, of layers with equally many channels together."""
        alike: dict[int, list[BatchNorm]] = {}
        for bn in self.layers:
            if bn.affine:
                alike.setdefault(bn.num_features, []).append(bn)
        scales: dict[BatchNorm, list[Tensor]] = {}
        for layers in alike.values():
            both: list[Tensor] = [*(bn.weight for bn in layers), *(bn.bias for bn in layers)]
            rows = torch.stack(both).repeat(1, self.groups).unbind()
            for bn, *pair in zip(layers, rows, rows[len(layers) :], strict=False):
                scales[bn] = pair
        return scales

    def _of_worker_0(self, layers: list[BatchNorm]) -> list[Tensor]:
        return [t for bn in layers for t in self._first[bn]]

    def _normalise(self, bn: BatchNorm, x: Tensor) -> Tensor:
        """BatchNorm of ``groups`` interleaved batches, as one of groups * C channels."""
        running: list[Any] = [None, None]
        factor = 0.0
        if self.update and bn.running_mean is not None:
            running = self._running[bn] if self.groups > 1 else _running_tensors(bn)
            # With the factor 0 a repeated pass updates nothing, but saves as many tensors for
            # backward as the first: checkpointing refuses any other number.
            if not self._recomputes:
                self._used.append(bn)
                if bn.momentum is None:  # the statistics are the mean over all batches so far
                    factor = 1.0 / float(cast(Tensor, bn.num_batches_tracked).add_(1))
                else:
                    factor = bn.momentum
        mean, var = running
        if self.groups == 1:
            return F.batch_norm(x, mean, var, bn.weight, bn.bias, True, factor, bn.eps)
        weight, bias = self._scales.get(bn, [None, None])
        grouped = _merge_groups(x, self.groups)
        return _split_groups(
            F.batch_norm(grouped, mean, var, weight, bias, True, factor, bn.eps), x
        )


def _running_tensors(bn: BatchNorm) -> list[Tensor]:
    return [cast(Tensor, bn.running_mean), cast(Tensor, bn.running_var)]


def _all_running(layers: list[BatchNorm]) -> list[Tensor]:
    return [t for bn in layers for t in _running_tensors(bn)]


def _merge_groups(x: Tensor, groups: int) -> Tensor:
    """``[n * groups, C, ...] -> [n, groups * C, ...]``: free for contiguous input; one copy, of
    whole pixels, for channels_last, which it stays."""
    if not _channels_last(x):
        return x.reshape(len(x) // groups, -1, *x.shape[2:])
    pixels = x.permute(0, 2, 3, 1).unflatten(0, (-1, groups))  # [n, groups, h, w, C], a view
    return pixels.permute(0, 2, 3, 1, 4).flatten(3).permute(0, 3, 1, 2)


def _split_groups(y: Tensor, x: Tensor) -> Tensor:
    """The inverse of `_merge_groups`; ``x`` is its input."""
    if not _channels_last(x):
        return y.reshape(x.shape)
    pixels = y.permute(0, 2, 3, 1).unflatten(3, (-1, x.shape[1]))  # [n, h, w, groups, C]
    return pixels.permute(0, 3, 1, 2, 4).flatten(0, 1).permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> bool:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return last and not x.is_contiguous()
