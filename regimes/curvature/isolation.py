"""Restores, bit for bit, what a measurement may change.

Instruments run in the middle of training. Inside `preserved(model)` they may run forward passes
that update BatchNorm statistics, call `model.eval()`, fill `.grad` and draw random numbers, and the
run still ends in the same bits as one without them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def random_states() -> tuple[Any, ...]:
    """The global random streams: torch (and every CUDA device in use), numpy, Python."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002


def same_random_states(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether no tensor or array was drawn at random between the two.

    Python's own stream is left out: run-time type checkers and loggers draw from it.
    """
    cuda = all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=False))
    numpy = np.array_equal(a[2][1], b[2][1]) and a[2][2:] == b[2][2:]
    return torch.equal(a[0], b[0]) and cuda and numpy


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restores the model and the global random streams on exit, also after an error.

    Inside, every `.grad` is None. Restored are parameters and buffers, `.grad` (the same tensor
    objects), `requires_grad`, the train/eval flag of every submodule, and the random streams of
    torch, numpy and Python. Not covered: attributes of the model that are neither parameters nor
    buffers.
    """
    cpu, cuda, numpy, python = random_states()
    flags = [(module, module.training) for module in model.modules()]
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    values = [(t, t.detach().clone()) for t in chain(model.parameters(), model.buffers())]
    slots = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
    for p, _, _ in parameters:
        p.grad = None
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
        for module, name, buffer in slots:
            module._buffers[name] = buffer
        for p, grad, requires_grad in parameters:
            p.grad = grad
            p.requires_grad_(requires_grad)
        for tensor, before in values:
            # Only where they differ: a copy raises the tensor's version, and a graph that was
            # retained for products would then refuse to run.
            if not _same_bits(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of the bits: NaN equals itself, -0.0 is not 0.0."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        # of the same size: a tensor of no dimension, or of strides, has no other view
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.detach().view(integer), b.view(integer)
    return torch.equal(a, b)
