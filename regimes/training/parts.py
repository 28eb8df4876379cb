"""Checks that a worker's batch can come in parts: accumulated micro-batches, a smaller last batch.

They try the model and the loss on training samples before any work, and leave both as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regimes.base import reduction
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError, unexpected_value
from regimes.base.precision import is_half
from regimes.base.reduction import Coupled, SampleMean
from regimes.base.torch_compat import BatchNorm
from regimes.data.models.copies import copy_model
from regimes.data.task import Batches, Task
from regimes.training.modes import training_copy

_TRIED = 16  # samples
_LOSS = "leave it out, or say in loss_weight of simulate what a batch's loss is divided by"
ONE_VALUE = "Expected more than 1 value per channel"  # how torch's sentence begins
ONE_SAMPLE = (
    "BatchNorm cannot normalise one value per channel, and a worker has {} of one sample: set "
    "data.drop_last = true, which leaves out the last, smaller batch of an epoch, or change "
    "batch_size"
)


def check_parts(config: RunConfig, task: Task, model: nn.Module, batches: Batches) -> None:
    """Raise ConfigError where a worker's batch is divided, and the losses of its parts do not give
    its loss. A loss is believed in what it says of itself (``reduction``); of any other it is tried
    whether it is a mean over samples."""
    more = [(k, n) for k, n in _batch_sizes(config).items() if n > config.batch_size]
    if not more:
        return
    joins = reduction.declared_reduction(task.loss)
    if joins is None:
        x, y = (t[0, :_TRIED] for t in next(iter(batches.epoch(0, [0]))))
        probe = copy_model(model)
        if is_half(batches.dtype):
            probe, x = probe.float(), x.float() if x.is_floating_point() else x
        joins = reduction.measure_reduction(task.loss, probe, x, y, [SampleMean()])
    if isinstance(joins, Coupled):
        (field, size), *_ = more
        expected = f"{config.batch_size}, one pass, with this loss: {joins.why}; {_LOSS}"
        raise unexpected_value(field, size, expected)


def check_batch_of_one(config: RunConfig, model: nn.Module, batches: Batches) -> None:
    """Raise ConfigError where a pass of a worker is of a single sample, and the model has a
    BatchNorm that cannot normalise it."""
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        return
    for size in {config.batch_size, *_batch_sizes(config).values()}:
        own = batches if size == config.batch_size else batches.rebatched(size)
        for step, what in ((0, "a batch"), (len(own) - 1, "a last batch")):
            x = next(iter(own.epoch(0, [0], step)))[0][0]
            if len(x) % config.batch_size == 1 or config.batch_size == 1:
                _try_one(model, x[:1], what if len(x) == 1 else f"{what[:-5]}micro-batch")


def _try_one(model: nn.Module, x: Tensor, what: str) -> None:
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            training_copy(model)(x)
        except Exception as error:  # any other the training itself raises
            if str(error).startswith(ONE_VALUE):
                raise ConfigError(ONE_SAMPLE.format(what)) from None


def _batch_sizes(config: RunConfig) -> dict[str, int]:
    """The batch sizes that a batch policy may choose, by field."""
    levels = config.batch_levels if config.batch_policy else {}
    return {f"batch_levels.{name}": size for name, size in levels.items()}
