"""The probe: what a curvature measurement is taken of, and the graph that a product runs through.

A probe is a model, a `loss(model, batch)` and a list of batches. This file has the types, the
checks of a probe, and two ways to turn one micro-batch's graph into a matrix-vector product, which
`operator.py` adds up over micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from regimes.errors import ConfigError

ProbeLoss = Callable[[nn.Module, Any], Tensor]  # mean loss of the model over one batch
ProcessMean = Callable[[Tensor], Tensor]  # mean of a flat tensor over all processes
Mode = str  # "eval" or "batch-statistics"; text, as it comes from configurations
Kind = str  # "hessian" or "gauss-newton"
Product = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]  # (vectors, layers)


@dataclass(frozen=True)
class Estimate:
    """A mean over random samples, with its standard error (0 for a single sample)."""

    value: float
    error: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Estimate:
        spread = stdev(samples) if len(samples) > 1 else 0.0
        return cls(fmean(samples), spread / len(samples) ** 0.5, len(samples))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The usual `loss`: mean cross-entropy of a batch of (inputs, targets)."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def batch_size(batch: Any) -> int:
    """Length of the first tensor in a batch (tuple, list, dict or tensor)."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return next(batch_size(x) for x in parts if isinstance(x, Tensor | tuple | list | dict))


def check_probe(model: nn.Module, samples: int, mode: Mode | None) -> dict[str, nn.Parameter]:
    """The trainable parameters by name.

    Raises:
        ConfigError: no sample, no trainable parameter; without a ``mode``, a module whose train
            flag makes the loss random or updates statistics.
    """
    if not samples:
        raise ConfigError("The probe set is empty; give at least one batch with a sample.")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError("No parameter of the model requires a gradient.")
    for name, module in model.named_modules() if mode is None else ():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(f"Dropout {name!r} is active; pass mode='eval' or call model.eval().")
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"Normalisation {name!r} is in train mode; choose mode='eval' (running "
                "statistics) or mode='batch-statistics' (the probe batch's own)."
            )
    return parameters


def hessian_product(gradient: list[Tensor], parameters: Sequence[Tensor]) -> Product:
    """Pearlmutter's product: the derivative of <gradient, v> by the chosen layers."""

    def product(v: Sequence[Tensor], layers: Sequence[int]) -> Sequence[Tensor]:
        # the gradient of a parameter that enters the loss linearly is a constant without a graph
        pairs = [
            (gradient[i], u) for i, u in zip(layers, v, strict=True) if gradient[i].requires_grad
        ]
        targets = [parameters[i] for i in layers]
        if not pairs:
            return [torch.zeros_like(p) for p in targets]
        outputs, cotangents = zip(*pairs, strict=True)
        return _vjp(outputs, targets, cotangents)

    return product


def gauss_newton_product(
    value: Tensor, outputs: list[Any], parameters: Sequence[Tensor]
) -> Product:
    """J' H_L J v. J v is the derivative of J' s by s (the double-backward trick)."""
    if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
        raise ConfigError("Gauss-Newton needs a loss that runs the model once, to one tensor.")
    z = outputs[0]
    s = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, parameters, s, create_graph=True)
    (slope,) = torch.autograd.grad(value, z, create_graph=True)

    def product(v: Sequence[Tensor], layers: Sequence[int]) -> Sequence[Tensor]:
        (pushed,) = _vjp([pulled[i] for i in layers], [s], v)
        (curved,) = _vjp([slope], [z], [pushed]) if slope.requires_grad else (torch.zeros_like(z),)
        return _vjp([z], [parameters[i] for i in layers], [curved])

    return product


def _vjp(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
    return torch.autograd.grad(
        outputs, inputs, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were created under it and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[Any, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                # A weak reference to the storage, not the tensor: views share it, and autograd
                # saves storages in new tensor objects.
                ref = StorageWeakRef(storage)
                self._storages[ref.cdata] = (ref, storage.nbytes())
        return out

    def held(self) -> int:
        return sum(size for ref, size in self._storages.values() if not ref.expired())
