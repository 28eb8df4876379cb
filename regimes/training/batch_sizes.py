"""Checks that data, loss and model serve every batch size of a run, also where a worker's batch
comes in parts: accumulated micro-batches, a smaller last batch.

They try the model and the loss on training samples before any work, and leave both as they are.
Batch sizes come by field, first the usual one (`PlugIns.batch_sizes`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regimes.base import reduction
from regimes.base.errors import ConfigError, DataError, unexpected_value
from regimes.base.precision import is_half
from regimes.base.reduction import Coupled, Loss, SampleMean
from regimes.base.torch_compat import BatchNorm
from regimes.data.models.copies import copy_model
from regimes.data.task import Batches
from regimes.training.modes import training_copy

_TRIED = 16  # samples of the first batch, with which a model is tried
_LOSS = "leave it out, or say in loss_weight of simulate what a batch's loss is divided by"
ONE_VALUE = "Expected more than 1 value per channel"  # how torch's sentence begins
ONE_SAMPLE = (
    "BatchNorm cannot normalise one value per channel, and a worker has {} of one sample: set "
    "data.drop_last = true, which leaves out the last, smaller batch of an epoch, or change "
    "batch_size"
)


def check_samples(sizes: Mapping[str, int], workers: int, samples: int) -> None:
    """Raise DataError unless so many samples are enough for one step at every batch size."""
    for batch in sizes.values():
        if samples < workers * batch:
            raise DataError(
                f"{samples} training samples are too few for one step of {workers} workers x "
                f"{batch}: lower the batch size, or use more data if there are"
            )


def check_parts(sizes: Mapping[str, int], loss: Loss, model: nn.Module, batches: Batches) -> None:
    """Raise ConfigError where a worker's batch is divided, and the losses of its parts do not give
    its loss. A loss is believed in what it says of itself (``reduction``); of any other it is tried
    whether it is a mean over samples."""
    more = [(field, size) for field, size in sizes.items() if size > sizes["batch_size"]]
    if not more:
        return
    joins = reduction.declared_reduction(loss)
    if joins is None:
        x, y = (t[0, :_TRIED] for t in next(iter(batches.epoch(0, [0]))))
        probe = copy_model(model)
        if is_half(batches.dtype):
            probe, x = probe.float(), x.float() if x.is_floating_point() else x
        joins = reduction.measure_reduction(loss, probe, x, y, [SampleMean()])
    if isinstance(joins, Coupled):
        (field, size), *_ = more
        expected = f"{sizes['batch_size']}, one pass, with this loss: {joins.why}; {_LOSS}"
        raise unexpected_value(field, size, expected)


def check_batch_of_one(sizes: Mapping[str, int], model: nn.Module, batches: Batches) -> None:
    """Raise ConfigError where a pass of a worker is of a single sample, and the model has a
    BatchNorm that cannot normalise it."""
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        return
    micro = sizes["batch_size"]
    for size in {*sizes.values()}:
        own = batches if size == micro else batches.rebatched(size)
        for step, what in ((0, "a batch"), (len(own) - 1, "a last batch")):
            x = next(iter(own.epoch(0, [0], step)))[0][0]
            if len(x) % micro == 1 or micro == 1:
                _try_one(model, x[:1], what if len(x) == 1 else f"{what[:-5]}micro-batch")


def _try_one(model: nn.Module, x: Tensor, what: str) -> None:
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            training_copy(model)(x)
        except Exception as error:  # any other the training itself raises
            if str(error).startswith(ONE_VALUE):
                raise ConfigError(ONE_SAMPLE.format(what)) from None
