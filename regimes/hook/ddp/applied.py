"""Whether an optimiser has applied what a backward pass exchanged.

A pass is thrown away where its gradients are cleared before a step: a generator's loss through the
discriminator, the first pass of SAM, the trial closures of L-BFGS. Compression must not send later
what it has held back from such a pass. ``ddp.steps`` then takes the pass back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from regimes.base.torch_compat import foreach_norm, own_part, version_of

UNKNOWN = (
    "gradients were exchanged and then cleared, and no optimiser has stepped in between: what "
    "compression held back of them will be sent with later steps. Pass the optimiser, attach(..., "
    "optimizer=optimizer), and the hook takes such a pass back; or run it under model.no_sync() "
    "(FSDP2: set_requires_gradient_sync(False))"
)
SAMPLED = 8, 1024  # parameters, and numbers of each, that are kept to see whether they move


class AppliedSteps:
    """Sees the steps of all optimisers of torch that hold a model's parameters.

    Attributes:
        known: layers that one of these optimisers steps.
        stepped: layers that were stepped since ``begin_pass``: some optimisers step within the
            backward pass, as soon as a gradient is there.
        elsewhere: since ``note_exchange`` an optimiser has stepped that has none of these
            parameters: it may have copies of them.
        on_step: called with an optimiser that is about to step a layer.
    """

    def __init__(
        self, parameters: Collection[Sequence[nn.Parameter]], optimizer: Any = None
    ) -> None:
        """
        Args:
            parameters: of each layer.
            optimizer: steps its parameters; others are known from their first step on.
        """
        self.follow(parameters)
        self.known: set[int] = set()
        self.stepped: set[int] = set()
        self.elsewhere = False
        self.on_step: Callable[[Any], Any] = lambda optimizer: None
        self._marks: list[list[tuple[int, int] | None]] = []
        self._versions: list[list[int]] = []
        self._samples: list[tuple[int, Any, Tensor]] = []  # layer, parameter, some of its numbers
        # ``Optimizer.__init__`` wraps the class's step, without which no hook is called
        for one in getattr(optimizer, "optimizers", [optimizer]):
            if isinstance(one, Optimizer) and getattr(type(one).step, "hooked", False):
                self.known |= {layer for layer, _ in self._with_layers(one)}
        # torch calls these hooks for all optimisers, for ever: a strong reference would keep self
        me = weakref.ref(self)
        before = register_optimizer_step_pre_hook(
            lambda *call: _call_if_alive(me, _before_step, *call)
        )
        after = register_optimizer_step_post_hook(
            lambda *call: _call_if_alive(me, _after_step, *call)
        )
        self.stop_watching = weakref.finalize(self, remove_hooks, [before, after])

    def follow(self, parameters: Collection[Sequence[nn.Parameter]]) -> None:
        """Take these as the parameters of each layer from now on."""
        self.parameters: Sequence[Sequence[Any]] = list(parameters)
        self._layers = {id(p): i for i, several in enumerate(self.parameters) for p in several}

    def begin_pass(self) -> None:
        """Note that a pass begins which will be exchanged."""
        self.stepped = set()

    def note_exchange(self, asks: bool) -> None:
        """Note that a pass has been exchanged: ``.grad`` now holds what will be applied.

        Args:
            asks: ``has_moved`` may be asked before the next one.
        """
        self.elsewhere = False
        self._marks = [[_read_version(p.grad) for p in several] for several in self.parameters]
        self._versions = [[version_of(p) for p in several] for several in self.parameters]
        # of layers that no optimiser of torch is known to step; no other is asked for its numbers
        unknown = [i for i in range(len(self.parameters)) if asks and i not in self.known]
        every = [(i, p) for i in unknown for p in self.parameters[i]]
        few = every[:: -(-len(every) // SAMPLED[0])] if every else []
        self._samples = [(i, p, _first_numbers(p).clone()) for i, p in few]

    def find_cleared(self, layers: Collection[int], first_layer: int | None = None) -> set[int]:
        """Return the layers that have lost the gradients of the last exchange: each gradient is
        None, or was overwritten with zeros. On a GPU the host waits only if one was overwritten.

        Args:
            first_layer: the new gradient of this layer has replaced the old one, or was added to
                it; it was cleared if all others were.
        """
        others = [i for i in layers if i != first_layer]
        gone, written = dict[int, int](), dict[int, list[Tensor]]()
        for i in others:
            grads = [p.grad for p in self.parameters[i]]
            # those that are None, or have no number here
            gone[i] = sum(g is None or not own_part(g).numel() for g in grads)
            # those that were replaced or written to, as far as they are here
            marked = zip(grads, self._marks[i], strict=True)
            changed = [g for g, mark in marked if g is not None and _read_version(g) != mark]
            if parts := [own_part(g) for g in changed if own_part(g).numel()]:
                written[i] = parts
        flat = [tensor for tensors in written.values() for tensor in tensors]
        sizes = iter(torch.stack(foreach_norm(flat, torch.inf)).tolist() if flat else ())
        zeros = {i: sum(not next(sizes) for _ in tensors) for i, tensors in written.items()}
        found = {i for i in others if gone[i] + zeros.get(i, 0) == len(self.parameters[i])}
        if others and len(found) == len(others):
            return set(layers)
        return {i for i in found if i in zeros or any(p.grad is None for p in self.parameters[i])}

    def has_moved(self, layers: Collection[int]) -> bool:
        """Return whether anything has written to a parameter of these layers since
        ``note_exchange``, such as a step written by hand. Steps through ``p.data`` or numpy, and
        fused ones, leave no version: they show in some of the numbers."""
        written = any(
            version_of(p) != version
            for i in layers
            for p, version in zip(self.parameters[i], self._versions[i], strict=True)
        )
        return written or any(
            (now := _first_numbers(p)).dtype != before.dtype or not torch.equal(now, before)
            for i, p, before in self._samples
            if i in layers
        )

    def _with_layers(self, optimizer: Any) -> list[tuple[int, Any]]:
        """The parameters of an optimiser, each with its layer."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        return [(self._layers[id(p)], p) for p in held if id(p) in self._layers]


def _before_step(applied: AppliedSteps, optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step: some optimisers clear the gradients in it. A closure makes its own."""
    own = applied._with_layers(optimizer)
    if own:
        applied.on_step(optimizer)
    if not _has_closure(args, kwargs):
        _note_step(applied, own)


def _after_step(applied: AppliedSteps, optimizer: Any, args: Any, kwargs: Any) -> None:
    """A step has been taken."""
    if _has_closure(args, kwargs):
        _note_step(applied, applied._with_layers(optimizer))


def _has_closure(args: Any, kwargs: Any) -> bool:
    return len(args) > 1 or kwargs.get("closure") is not None


def _note_step(applied: AppliedSteps, own: Sequence[tuple[int, Any]]) -> None:
    """These parameters have been stepped, as far as they have a gradient."""
    applied.elsewhere |= not own
    applied.known |= {i for i, _ in own}
    applied.stepped |= {i for i, p in own if p.grad is not None}


def _call_if_alive(who: weakref.ref[AppliedSteps], what: Any, *call: Any) -> None:
    if (applied := who()) is not None:
        what(applied, *call)


def _first_numbers(parameter: Any) -> Tensor:
    """Some numbers of the part of a parameter that is on this process."""
    return own_part(parameter).detach().reshape(-1)[: SAMPLED[1]]


def _read_version(gradient: Any) -> tuple[int, int] | None:
    """Changes if a gradient is replaced or written to."""
    if gradient is None:
        return None
    part = own_part(gradient)
    return part.data_ptr(), version_of(part)


def remove_hooks(handles: Sequence[RemovableHandle]) -> None:
    """Remove hooks of torch."""
    for handle in handles:
        handle.remove()
