"""The probe of a measurement: a model, a `loss(model, batch)` and batches. `preserve_model`
restores the model after it.

Instruments run in the middle of training. Inside `preserve_model(model)` they may run forward
passes that update BatchNorm statistics, fill `.grad` and draw random numbers, and the run still
ends in the same bits as one without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.reduction import tensors_in
from regimes.base.seeding import read_streams, write_streams
from regimes.base.torch_compat import Dropout, NormBase, buffer_table

ProbeLoss = Callable[[nn.Module, Any], Tensor]  # mean loss of the model over one batch
ProcessMean = Callable[[Tensor], Tensor]  # mean of a flat tensor over all processes
Mode = str  # "eval" or "batch-statistics"; text, as it comes from configurations


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over random samples, with its standard error (0 for a single sample)."""

    value: float
    error: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Estimate:
        spread = stdev(samples) if len(samples) > 1 else 0.0
        return cls(fmean(samples), spread / len(samples) ** 0.5, len(samples))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the usual `loss`: the mean cross-entropy of a batch of (inputs, targets)."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def batch_size(batch: Any) -> int:
    """Count the samples: the length that most tensors in a batch have (a tensor, or tuples, lists,
    mappings, objects with attributes that hold some).

    Raises:
        ConfigError: there is no tensor, or two lengths are as frequent.
    """
    lengths = Counter(len(tensor) for tensor in tensors_in(batch) if tensor.ndim)
    (length, most), (other, as_often), *_ = [*lengths.most_common(2), (0, 0), (0, 0)]
    if as_often == most:
        given = f"tensors of length {length} and {other}" if most else "no tensor with an axis"
        raise ConfigError(f"A batch has {given}: how many samples are in it cannot be seen.")
    return length


def check_probe(model: nn.Module, samples: int, mode: Mode | None) -> dict[str, nn.Parameter]:
    """Check that a model can be measured; returns the trainable parameters by name.

    Raises:
        ConfigError: no sample, no trainable parameter; without a ``mode``, a module in training
            mode with a loss that is random or updates statistics.
    """
    if not samples:
        raise ConfigError("The probe set is empty; give at least one batch with a sample.")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError("No parameter of the model requires a gradient.")
    for name, module in model.named_modules() if mode is None else ():
        if not module.training:
            continue
        if isinstance(module, Dropout) and module.p > 0:
            raise ConfigError(f"Dropout {name!r} is active; pass mode='eval' or call model.eval().")
        if isinstance(module, NormBase) and module.track_running_stats:
            raise ConfigError(
                f"Normalisation {name!r} is in train mode; choose mode='eval' (running "
                "statistics) or mode='batch-statistics' (the probe batch's own)."
            )
    return parameters


def check_loss(value: Any) -> None:
    """Raise ConfigError unless a loss is one real number, as a tensor."""
    got: object = type(value).__name__
    good = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    if isinstance(value, Tensor):
        got = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if not good:
        raise ConfigError(f"The loss returns {got}; expected one real number, as a tensor.")


def _gpu_streams() -> list[Tensor]:
    """Where the streams of every CUDA device in use are."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


@contextmanager
def no_random_draws() -> Iterator[None]:
    """Raise ConfigError if a tensor or array was drawn at random inside.

    Python's own stream is left out: run-time type checkers and loggers draw from it.
    """
    cuda, (cpu, numpy, _) = _gpu_streams(), read_streams()
    yield
    cuda_after, (cpu_after, numpy_after, _) = _gpu_streams(), read_streams()
    same = all(torch.equal(x, y) for x, y in zip(cuda, cuda_after, strict=False))
    same &= np.array_equal(numpy[1], numpy_after[1]) and numpy[2:] == numpy_after[2:]
    if not (same and torch.equal(cpu, cpu_after)):
        raise ConfigError("The loss draws random numbers; pass mode='eval'.")


@contextmanager
def preserve_model(model: nn.Module, mode: Mode | None = None) -> Iterator[None]:
    """Restore the model and the global random streams on exit, also after an error.

    Inside, every `.grad` is None, and with a ``mode`` the model is in eval mode. Restored are
    parameters and buffers, `.grad` (the same tensor objects), `requires_grad`, the train/eval flag
    of every submodule, and the random streams of torch, numpy and Python. Not covered: attributes
    of the model that are neither parameters nor buffers.
    """
    cuda, streams = _gpu_streams(), read_streams()
    flags = [(module, module.training) for module in model.modules()]
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    values = [(t, t.detach().clone()) for t in chain(model.parameters(), model.buffers())]
    slots = [(m, name, b) for m in model.modules() for name, b in buffer_table(m).items()]
    for p, _, _ in parameters:
        p.grad = None
    if mode is not None:
        model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
        for module, name, buffer in slots:
            buffer_table(module)[name] = buffer
        for p, grad, requires_grad in parameters:
            p.grad = grad
            p.requires_grad_(requires_grad)
        for tensor, before in values:
            # Only where they differ: a copy raises the tensor's version, and a graph that was
            # retained for products would then refuse to run.
            if not _same_bits(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)
        write_streams(streams)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of the bits: NaN equals itself, -0.0 is not 0.0."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        # an integer of the same size: only that view exists of a 0-d or strided tensor
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.detach().view(integer), b.view(integer)
    return torch.equal(a, b)
