"""Whether an optimiser has applied what a backward pass exchanged.

A pass is thrown away where its gradients are cleared before a step: a generator's loss through the
discriminator, the first pass of SAM, the trial closures of L-BFGS. What compression has held back
of them must not come later. ``ddp.steps`` then takes the pass back.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

UNKNOWN = (
    "gradients were exchanged and then cleared, and no optimiser has stepped in between: what "
    "compression held back of them will be sent with later steps. Pass the optimiser, attach(..., "
    "optimizer=optimizer), and the hook takes such a pass back; or run it under model.no_sync()"
)


class AppliedSteps:
    """Sees the steps of all optimisers of torch that hold a model's parameters.

    Attributes:
        known: layers that one of these optimisers steps.
        stepped: layers that were stepped since ``begin``.
    """

    def __init__(self, parameters: Collection[nn.Parameter], optimizer: Any = None) -> None:
        """
        Args:
            parameters: one for each layer.
            optimizer: steps its parameters; others are known from their first step on.
        """
        self.parameters: Sequence[Any] = list(parameters)
        self._layers = {id(p): i for i, p in enumerate(self.parameters)}
        self.known: set[int] = set()
        self.stepped: set[int] = set()
        self._marks: list[tuple[int, int] | None] = []
        self._versions: list[int] = []
        # ``Optimizer.__init__`` wraps the class's step, without which no hook is called
        for one in getattr(optimizer, "optimizers", [optimizer]):
            if isinstance(one, Optimizer) and getattr(type(one).step, "hooked", False):
                self.known |= self._of(one).keys()
        me = weakref.ref(self)
        before = register_optimizer_step_pre_hook(lambda *call: _tell(me, _before, *call))
        after = register_optimizer_step_post_hook(lambda *call: _tell(me, _after, *call))
        weakref.finalize(self, remove, [before, after])

    def begin(self) -> None:
        """A pass has been exchanged; ``.grad`` has what will be applied."""
        self.stepped = set()
        self._marks = [_mark(p.grad) for p in self.parameters]
        self._versions = [p._version for p in self.parameters]

    def cleared(self, layers: Collection[int], arriving: int | None = None) -> set[int]:
        """Those of some layers whose gradient is no longer that of ``begin``: it is None, or was
        overwritten with zeros. On a GPU the host waits only if one was overwritten.

        Args:
            arriving: a layer whose new gradient has replaced the old one, or was added to it; it
                was cleared if all others were.
        """
        others = [i for i in layers if i != arriving]
        found, written = set(), {}
        for i in others:
            gradient = self.parameters[i].grad
            if gradient is None or not _local(gradient).numel():
                found.add(i)
            elif _mark(gradient) != self._marks[i]:
                written[i] = _local(gradient)
        if written:
            sizes = torch.stack(torch._foreach_norm([*written.values()], torch.inf)).tolist()
            found |= {i for i, size in zip(written, sizes, strict=True) if size == 0}
        if others and len(found) == len(others):
            return set(layers)
        return {i for i in found if self.parameters[i].grad is None or i in written}

    def moved(self, layers: Collection[int]) -> bool:
        """Has anything written to one of these parameters since ``begin``, such as a step written
        by hand? (Fused optimisers leave no such trace.)"""
        return any(self.parameters[i]._version != self._versions[i] for i in layers)

    def _of(self, optimizer: Any) -> dict[int, Any]:
        """The layers of an optimiser, and their parameters."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        return {self._layers[id(p)]: p for p in held if id(p) in self._layers}


def _before(applied: AppliedSteps, optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step: some optimisers clear the gradients in it. A closure makes its own."""
    if len(args) < 2 and kwargs.get("closure") is None:
        _after(applied, optimizer, args, kwargs)


def _after(applied: AppliedSteps, optimizer: Any, args: Any, kwargs: Any) -> None:
    """A step has been taken of all parameters that have a gradient."""
    own = applied._of(optimizer)
    applied.known |= own.keys()
    applied.stepped |= {i for i, p in own.items() if p.grad is not None}


def _tell(who: weakref.ref[AppliedSteps], what: Any, *call: Any) -> None:
    if (applied := who()) is not None:
        what(applied, *call)


def _local(gradient: Any) -> Tensor:
    """The part of a gradient that is on this process."""
    part: Tensor = getattr(gradient, "_local_tensor", gradient)
    return part


def _mark(gradient: Any) -> tuple[int, int] | None:
    """Changes if a gradient is replaced or written to."""
    if gradient is None:
        return None
    part = _local(gradient)
    return part.data_ptr(), part._version


def remove(handles: Sequence[RemovableHandle]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()
