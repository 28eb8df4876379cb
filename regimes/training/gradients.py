"""Gradients of the hosted workers, stacked on a leading axis, by one of two passes.

- *Worker by worker*: one forward and backward pass for each hosted worker, ``[L, *shape]``.
- *Union*: one pass over all hosted workers' samples, which gives their mean, ``[1, *shape]``.
  Exact for a compressor that declares itself ``linear`` and a model without randomness, because
  BatchNorm still normalises each worker's samples by themselves.

BatchNorm in both: each worker normalises with its own batch, the running statistics follow
worker 0 (what DistributedDataParallel's broadcast of buffers does).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.collectives.requests import Layer
from regimes.collectives.world import World
from regimes.errors import ConfigError, unexpected
from regimes.models.loss import CarryingLoss, Loss
from regimes.seeding import derive, seed_generators
from regimes.training.batchnorm import PerWorkerBatchNorm
from regimes.training.replicas import Replicas


def draws_random_numbers(model: nn.Module, x: Tensor) -> bool:
    """Does a training pass of ``model`` consume randomness (dropout, stochastic depth)?"""
    probe = copy.deepcopy(model).train()
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        on_device = torch.cuda.get_rng_state(x.device) if devices else before
        probe(x)
        after = torch.cuda.get_rng_state(x.device) if devices else before
        return not (torch.equal(before, torch.get_rng_state()) and torch.equal(on_device, after))


class Gradients:
    """Computes stacked gradients into one reused buffer.

    Attributes:
        stack: ``[G, N]``, all layers' gradients end to end; G is 1 in a union pass, else L.
        layers: its views, ``[G, *shape]`` each, in parameter order.
        replicas: where the workers' own parameters are, while they step locally: then each also
            follows its own running statistics, and nothing is announced.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        world: World,
        *,
        union: bool,
        seed: int,
        micro_batch: int | None = None,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
    ) -> None:
        self.model, self.loss, self.world, self.seed = model, loss, world, seed
        self.carrying = loss if isinstance(loss, CarryingLoss) else None
        self.network: Any = torch.compile(model, dynamic=False) if compiled else model
        self.union, self.micro_batch, self.clip, self.autocast = union, micro_batch, clip, autocast
        self.hidden: dict[int, Any] = {}  # per row, what a language model carries along
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.last = False  # is the last backward pass of a step under way?
        self.replicas: Replicas | None = None
        self.batchnorm = PerWorkerBatchNorm(model)
        like = self.parameters[0]
        rows = 1 if union else world.local
        self.stack = like.new_zeros(rows, sum(p.numel() for p in self.parameters))
        parts = self.stack.split([p.numel() for p in self.parameters], dim=1)
        self.layers = [
            part.view(rows, *p.shape) for part, p in zip(parts, self.parameters, strict=True)
        ]

    def on_layer_complete(self, complete: Callable[[Iterable[int]], None]) -> None:
        """From now on call ``complete`` during the last backward pass of a step, with each layer
        as soon as nothing is added to its gradients any more; not with one that is not used."""
        for i, parameter in enumerate(self.parameters):

            def added(_: Tensor, layer: int = i) -> None:
                if self.last:
                    complete([layer])

            parameter.register_post_accumulate_grad_hook(added)

    def compute(self, x: Tensor, y: Tensor, epoch: int, step: int) -> Float[Tensor, " rows"]:
        """Fill ``stack`` from a batch ``x [L, b, ...]``, ``y [L, b]``; returns the losses.

        ``x.transpose(0, 1)`` should be contiguous (``Batches`` gives it so): then a union pass
        copies nothing. Parameters' ``.grad`` are left pointing into the buffer. A batch larger
        than ``micro_batch`` is cut along b and accumulated, each part weighed by its share.
        """
        self.model.train()
        self.stack.zero_()
        if step == 0:
            self.hidden = {}
        size = self.micro_batch or x.shape[1]
        pieces = list(zip(x.split(size, 1), y.split(size, 1), strict=True))
        losses = torch.zeros_like(self.stack[:, 0])
        for i, (inputs, targets) in enumerate(pieces):
            share, last = inputs.shape[1] / x.shape[1], i == len(pieces) - 1
            losses += self._micro(inputs, targets, share, (epoch, step * len(pieces) + i), last)
        self.last = False
        if self.clip is not None:
            norms = torch.linalg.vector_norm(self.stack, dim=1, keepdim=True)
            self.stack *= (self.clip / norms.clamp_min(1e-12)).clamp_max(1)
        return losses

    def check_compiles(self, x: Tensor, y: Tensor) -> None:
        """Raise ConfigError unless torch can compile a pass over a batch ``x [L, b, ...]``,
        ``y [L, b]``; nothing is changed."""
        self.model.train()
        groups = len(x) if self.union else 1
        x, y = (t.transpose(0, 1).flatten(0, 1) if self.union else t[0] for t in (x, y))
        try:
            gpus = [x.device] if x.device.type == "cuda" else []
            with torch.random.fork_rng(gpus), self.batchnorm.during(groups, update=False):
                loss = self.loss(self.network, x, y)
                torch.autograd.grad(loss, self.parameters, allow_unused=True)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise unexpected("compile", True, f"a model that torch can compile: {reason}") from None

    def hidden_states(self) -> list[Any]:
        """What each hosted worker's language model carries along; empty if none does."""
        states = [self.hidden[row] for row in sorted(self.hidden) if self.hidden[row] is not None]
        if not states or not self.union:
            return states
        rows = [t.unflatten(1, (-1, self.world.local)) for t in states[0]]
        return [tuple(t[:, :, i].clone() for t in rows) for i in range(self.world.local)]

    def load_hidden_states(self, states: Sequence[Any]) -> None:
        """The inverse of ``carried``."""
        if self.union:
            parts = zip(*states, strict=True)
            states = [tuple(torch.stack(part, 2).flatten(1, 2) for part in parts)]
        self.hidden = dict(enumerate(states))

    def _micro(
        self, x: Tensor, y: Tensor, share: float, when: tuple[int, int], last: bool
    ) -> Tensor:
        """Add one micro-batch's gradient to ``stack``; its losses, ``[rows]``."""
        if self.union:
            self.last = last
            mode = self.batchnorm.during(len(x), update=0 in self.world.hosted)
            x, y = x.transpose(0, 1).flatten(0, 1), y.transpose(0, 1).flatten(0, 1)
            return self._pass(0, x, y, share, mode)[None]
        losses, alone = [], self.replicas is not None
        each = self.world.hosted if self.replicas is None else self.replicas.each()
        for row, (worker, _) in enumerate(zip(self.world.hosted, each, strict=True)):
            self.last = last and row == len(x) - 1 and not alone
            seed_generators(derive(self.seed, "dropout", *when, worker), x.device)
            mode = self.batchnorm.during(1, update=alone or worker == 0)
            losses.append(self._pass(row, x[row], y[row], share, mode))
        return torch.stack(losses)

    def _pass(
        self, row: int, x: Tensor, y: Tensor, share: float, mode: AbstractContextManager[None]
    ) -> Tensor:
        for parameter, layer in zip(self.parameters, self.layers, strict=True):
            parameter.grad = layer[row]
        context: Any = nullcontext()
        if self.autocast is not None:
            context = torch.autocast(x.device.type, self.autocast)
        with mode, context:
            if self.carrying is not None:
                loss, self.hidden[row] = self.carrying.carry(
                    self.network, x, y, self.hidden.get(row)
                )
            else:
                loss = self.loss(self.network, x, y)
        loss = loss * share
        loss.backward()
        return loss.detach()


def layer_table(model: nn.Module) -> list[Layer]:
    """The trainable parameters, in order; a tensor shared by several modules appears once.

    Raises:
        ConfigError: there is none, or one without an entry.
    """
    found = [Layer(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise ConfigError(f"the model {type(model).__name__} has no parameter to train")
    for layer in found:
        if 0 in layer.shape:
            raise ConfigError(
                f"the model's parameter {layer.name!r} of shape {list(layer.shape)} is empty: "
                "leave it out, or build it larger"
            )
    return found


def install(parameters: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> None:
    """Hand the updates to the optimiser as gradients."""
    for parameter, update in zip(parameters, updates, strict=True):
        parameter.grad = update
