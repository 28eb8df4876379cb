"""Gradients of the hosted workers, stacked on a leading axis, by one of two passes.

- *Worker by worker*: one forward and backward pass for each hosted worker, ``[L, *shape]``.
- *Union*: one pass over all hosted workers' samples, which gives their mean, ``[1, *shape]``.
  Exact for a compressor that declares itself ``linear`` and a model without randomness, because
  BatchNorm still normalises each worker's samples by themselves (``batchnorm``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.base import reduction
from regimes.base.errors import ConfigError, TrainingError, unexpected_value
from regimes.base.precision import is_half
from regimes.base.reduction import CarryingLoss, Loss, SampleMean, Share
from regimes.base.seeding import derive_seed, seed_generators
from regimes.base.torch_compat import compile_errors, version_of
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.training.batch_sizes import ONE_SAMPLE, ONE_VALUE
from regimes.training.batchnorm import PerWorkerBatchNorm
from regimes.training.modes import modules_in_eval, set_training, training_copy
from regimes.training.replicas import Replicas


def draws_random_numbers(model: nn.Module, x: Tensor) -> bool:
    """Answer whether a training pass of ``model`` consumes random numbers (dropout, stochastic
    depth)."""
    probe = training_copy(model)
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        probe(x)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        return not all(map(torch.equal, before, after))


def carries_state(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> bool:
    """Answer whether one batch passes a hidden state on to the next."""
    if not isinstance(loss, CarryingLoss):
        return False
    with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []), torch.no_grad():
        return loss.carry(training_copy(model), x, y, None)[1] is not None


class Reduced(NamedTuple):
    """Holds what the exchange of a step's gradients has given.

    Attributes:
        updates: per layer, ``[*shape]``.
        loss: the mean.
        losses: of this process, ``[rows]``; NaN if a gradient is not finite.
        unused: layers that no worker of any process has used: their updates are zeros.
    """

    updates: list[Tensor]
    loss: Tensor
    losses: Tensor
    unused: Collection[int]


class Gradients:
    """Computes stacked gradients into one reused buffer.

    Attributes:
        stack: ``[G, N]``, all layers' gradients end to end; G is 1 in a union pass, else L. In
            float32 where the parameters are in half precision.
        layers: its views, ``[G, *shape]`` each, in parameter order.
        seeded: whether generators are seeded before each worker's pass; False where steps are
            captured, of a model that draws no random numbers.
        hidden: by row, the state that a language model carries from batch to batch.
        unused: by row, the layers to which no backward pass of the last step has added a gradient.
        replicas: the workers' own parameters while they step locally. Each worker then updates its
            own running statistics, and ``on_layer_complete`` is not called.
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
        self.reduction = reduction.declared_reduction(loss) or SampleMean()
        self.network: Any = torch.compile(model, dynamic=False) if compiled else model
        self.union, self.micro_batch, self.clip, self.autocast = union, micro_batch, clip, autocast
        self.hidden: dict[int, Any] = {}
        self.seeded = True
        self._in_eval = modules_in_eval(model)  # a user's choice, which outlasts evaluations
        set_training(model, self._in_eval)
        self._in_training = [module for module in model.modules() if module.training]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._final_backward = False  # is the last backward pass of a step in progress?
        self._complete: set[int] = set()  # layers whose gradient it has completed
        self.replicas: Replicas | None = None
        self.batchnorm = PerWorkerBatchNorm(model)
        # Backward adds to these, which are of the parameters' type.
        self._sum, self._summed = new_stack(self.parameters, 1 if union else world.hosted_count)
        self.stack, self.layers = self._sum, self._summed
        # What parameters have as ``.grad``, row by row. Not views of autograd, which would share
        # one version: an addition to one layer must show in its own.
        self._rows = [[part[row].data for part in self._summed] for row in range(len(self._sum))]
        self.unused: list[set[int]] = [set() for _ in self._rows]
        self._to_widen: set[int] = set()
        if is_half(self._sum.dtype):
            self.stack = self._sum.float()
            self.layers = _layer_views(self.stack, self.parameters)

    def on_layer_complete(self, callback: Callable[[Mapping[int, Tensor]], object]) -> None:
        """Call ``callback({layer: rows})`` from now on during the last backward pass of each step,
        as soon as a layer's gradient is final; never for a layer that the pass does not use.

        Raises:
            ConfigError: in that pass, the gradient of a layer comes in parts.
        """
        for i, parameter in enumerate(self.parameters):

            def accumulated(_: Tensor, layer: int = i) -> None:
                if self._final_backward:  # earlier passes are followed by another addition
                    if layer in self._complete:
                        raise ConfigError(
                            "bucket_mb: the gradient of a layer comes in parts (checkpointing has "
                            "use_reentrant = True): set bucket_mb so high that one bucket has all "
                            "layers"
                        )
                    self._complete.add(layer)
                    self._widen_layer(layer)
                    callback({layer: self.layers[layer]})

            parameter.register_post_accumulate_grad_hook(accumulated)

    def compute_gradients(
        self, x: Tensor, y: Tensor, epoch: int, step: int
    ) -> Float[Tensor, " rows"]:
        """Fill ``stack`` from a batch ``x [L, b, ...]``, ``y [L, b]``; returns the losses.

        ``x.transpose(0, 1)`` should be contiguous (as ``Batches`` yields it): then a union pass
        copies nothing. Parameters' ``.grad`` are left as views of the buffer. A batch larger than
        ``micro_batch`` is cut along b and accumulated, each part by its share of the batch's loss.
        """
        if not all(module.training for module in self._in_training):  # after an evaluation
            set_training(self.model, self._in_eval)
        self._sum.zero_()
        self._complete.clear()
        if self.stack is not self._sum:
            self._to_widen = {*range(len(self.layers))}
        if step == 0:
            self.hidden = {}
        # autograd counts a tensor's changes: where the count stays, nothing was added
        before = [[*map(version_of, row)] for row in self._rows]
        count = x.shape[1]
        size = self.micro_batch or count
        firsts = range(0, count, size)
        losses = self.stack.new_zeros(len(self.stack))
        for i, first in enumerate(firsts):
            part = slice(first, min(first + size, count))
            share = 1.0 if size >= count else self.reduction.share(y, part)
            key, last = (epoch, step * len(firsts) + i), i == len(firsts) - 1
            try:
                losses += self._add_micro_batch(x[:, part], y[:, part], share, key, last)
            except ValueError as error:
                if str(error).startswith(ONE_VALUE):
                    raise TrainingError(ONE_SAMPLE.format("a batch")) from None
                raise
        self._final_backward = False
        self.unused = [
            {i for i, tensor in enumerate(row) if version_of(tensor) == was[i]}
            for was, row in zip(before, self._rows, strict=True)
        ]
        for layer in [*self._to_widen]:
            self._widen_layer(layer)
        if self.clip is not None:
            own = torch.linalg.vector_norm(self.stack, dim=1, keepdim=True)
            norms = self.world.whole_norms(own)
            self.stack *= (self.clip / norms.clamp_min(1e-12)).clamp_max(1)
        return losses

    def _widen_layer(self, layer: int) -> None:
        """Copy a layer's final gradient from half precision to the stack, once in each step."""
        if layer in self._to_widen:
            self._to_widen.remove(layer)
            self.layers[layer].copy_(self._summed[layer])

    def _add_micro_batch(
        self, x: Tensor, y: Tensor, share: Share, key: tuple[int, int], last: bool
    ) -> Float[Tensor, " rows"]:
        """Add one micro-batch's gradient to ``stack``; returns its losses. ``key`` and the worker
        give the random numbers."""
        if self.union:
            self._final_backward = last
            mode = self.batchnorm.set_pass(len(x), update=0 in self.world.hosted)
            x, y = x.transpose(0, 1).flatten(0, 1), y.transpose(0, 1).flatten(0, 1)
            return self._forward_backward(0, x, y, share, mode)[None]  # of a mean over samples
        losses, local, hosted = [], self.replicas is not None, self.world.hosted
        each = hosted if self.replicas is None else self.replicas.each_worker()
        for row, (worker, _) in enumerate(zip(hosted, each, strict=True)):
            self._final_backward = last and row == len(x) - 1 and not local
            if self.seeded:
                seed_generators(derive_seed(self.seed, "dropout", *key, worker), x.device)
            mode = self.batchnorm.set_pass(1, update=local or worker == 0)
            own = share[row] if isinstance(share, Tensor) else share
            losses.append(self._forward_backward(row, x[row], y[row], own, mode))
        return torch.stack(losses)

    def _forward_backward(
        self, row: int, x: Tensor, y: Tensor, share: Share, mode: AbstractContextManager[None]
    ) -> Float[Tensor, ""]:
        """One pass, which adds its gradient to a row of ``stack``."""
        # backward adds to an existing .grad in place: as views, they accumulate in the buffer
        for parameter, gradient in zip(self.parameters, self._rows[row], strict=True):
            parameter.grad = gradient
        context: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            context = torch.autocast(x.device.type, self.autocast)
        with mode:
            with context:
                if isinstance(self.loss, CarryingLoss):
                    hidden = self.hidden.get(row)
                    loss, self.hidden[row] = self.loss.carry(self.network, x, y, hidden)
                else:
                    loss = self.loss(self.network, x, y)
            self.batchnorm.end_forward()
            loss = reduction.scale_loss(loss, share)
            # Without a target (a share of 0) a worker's gradient is 0. Of some losses backward
            # would make it NaN, and is left out. Others are not asked: a host would wait for it.
            if not isinstance(share, Tensor) or self.reduction.zero_of_nothing or bool(share):
                loss.backward()
        return loss.detach()

    def unused_by_all(self) -> set[int]:
        """Return the layers that no hosted worker has used in the last step."""
        return set.intersection(*self.unused)

    def check_compiles(self, x: Tensor, y: Tensor) -> None:
        """Raise ConfigError unless torch can compile a pass over a batch ``x [L, b, ...]``,
        ``y [L, b]``; nothing is changed."""
        groups = len(x) if self.union else 1
        x, y = (t.transpose(0, 1).flatten(0, 1) if self.union else t[0] for t in (x, y))
        try:
            gpus = [x.device] if x.device.type == "cuda" else []
            with torch.random.fork_rng(gpus), self.batchnorm.set_pass(groups, update=False):
                loss = self.loss(self.network, x, y)
                torch.autograd.grad(loss, self.parameters, allow_unused=True)
        except compile_errors() as error:
            reason = str(error).strip().splitlines()[0]
            raise unexpected_value(
                "compile", True, f"a model that torch can compile: {reason}"
            ) from None

    def hidden_states(self) -> list[Any]:
        """Return the state that each hosted worker's language model carries on; empty for other
        models."""
        states = [self.hidden[row] for row in sorted(self.hidden) if self.hidden[row] is not None]
        if not states or not self.union:
            return states
        # a union pass interleaves the workers' samples: sample i is worker i mod L's
        rows = [t.unflatten(1, (-1, self.world.hosted_count)) for t in states[0]]
        return [tuple(t[:, :, i].clone() for t in rows) for i in range(self.world.hosted_count)]

    def load_hidden_states(self, states: Sequence[Any]) -> None:
        """Restore what ``hidden_states`` has returned."""
        if self.union:
            parts = zip(*states, strict=True)
            states = [tuple(torch.stack(part, 2).flatten(1, 2) for part in parts)]
        self.hidden = dict(enumerate(states))


def new_stack(parameters: Sequence[Tensor], rows: int) -> tuple[Tensor, list[Tensor]]:
    """Make zeros ``[rows, N]`` for all parameters end to end, and their views ``[rows,
    *shape]``."""
    sizes = [p.numel() for p in parameters]
    stack = parameters[0].detach().new_zeros(rows, sum(sizes))
    return stack, _layer_views(stack, parameters)


def _layer_views(stack: Float[Tensor, "rows N"], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The layers of a stack, ``[rows, *shape]``."""
    parts = stack.split([p.numel() for p in parameters], dim=1)
    return [part.view(len(stack), *p.shape) for part, p in zip(parts, parameters, strict=True)]


def layer_table(model: nn.Module) -> list[Layer]:
    """List the trainable parameters, in order; a tensor shared by several modules appears once.

    Raises:
        ConfigError: there are none, or one is empty.
    """
    named = model.named_parameters()
    layers = [Layer(name, tuple(p.shape)) for name, p in named if p.requires_grad]
    if not layers:
        raise ConfigError(f"the model {type(model).__name__} has no parameter to train")
    for layer in layers:
        if 0 in layer.shape:
            raise ConfigError(
                f"the model's parameter {layer.name!r} of shape {list(layer.shape)} is empty: "
                "leave it out, or build it larger"
            )
    return layers


def set_gradients(
    parameters: Sequence[nn.Parameter], updates: Sequence[Tensor], unused: Collection[int] = ()
) -> None:
    """Set the updates as the gradients that the optimiser reads, in the parameters' types.

    Args:
        unused: layers that have none, so that the optimiser leaves them alone, without weight decay
            or momentum, as after a backward pass of torch that has not come to them.
    """
    for i, (parameter, update) in enumerate(zip(parameters, updates, strict=True)):
        parameter.grad = None if i in unused else update.to(parameter.dtype)
