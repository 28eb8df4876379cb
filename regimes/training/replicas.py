"""The hosted workers' own parameters, buffers and optimisers while each steps by itself.

``training.local_rounds`` synchronises them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regimes.collectives.comm import Comm
from regimes.collectives.sharded_models import local_part
from regimes.collectives.world import World
from regimes.training.optimizers import Optimizers


class Replicas:
    """Keeps L models, and the one of the last synchronisation.

    One module serves all workers: it has the tensors of one worker after the other, and in between
    the tensors of the last synchronisation.

    Attributes:
        parameters: of the module, or of each this process's part.
        keys: the module's parameters that key the optimisers' states.
        synced_tensors: parameters, then buffers, of the last synchronisation, ``[*shape]`` each.
        stacks: the workers' own, in the same order, ``[L, *shape]`` each.
        optimizers: one per hosted worker, all over the module's parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        optimizers: Sequence[Optimizers],
        *,
        in_place: bool = False,
        keys: Sequence[nn.Parameter] | None = None,
    ) -> None:
        """
        Args:
            keys: of parameters that are divided among processes (DTensors); else ``parameters``.
            in_place: the module holds the parameters of the only hosted worker, as in a user's
                own loop, and the synchronised copy is separate; otherwise reversed.
        """
        self.parameters, self.optimizers = list(parameters), list(optimizers)
        self.keys: list[Any] = list(parameters if keys is None else keys)
        self._all = [*parameters, *buffers]
        data, count = [t.data for t in self._all], len(optimizers)
        self.synced_tensors = [t.clone() for t in data] if in_place else data
        self.stacks = [t[None] if in_place else t.new_empty(count, *t.shape) for t in data]
        self._rows = [[stack[row] for stack in self.stacks] for row in range(len(self.stacks[0]))]
        for tensor, stack in zip(self.synced_tensors, self.stacks, strict=True):
            stack.copy_(tensor.expand_as(stack))

    @property
    def synced_parameters(self) -> list[Tensor]:
        """Return the parameters of the last synchronisation, ``[*shape]`` per layer."""
        return self.synced_tensors[: len(self.parameters)]

    def each_worker(self) -> Iterator[Optimizers]:
        """Yield the optimiser of each hosted worker in turn, while the module holds its tensors."""
        try:
            for row, optimizer in zip(self._rows, self.optimizers, strict=True):
                self._set_module(row)
                yield optimizer
                # a step that gave a tensor other memory (``p.data = ...``) is the worker's, too
                for tensor, own in zip(self._all, row, strict=True):
                    if tensor.data_ptr() != own.data_ptr():
                        own.copy_(tensor.data)
        finally:
            self._set_module(self.synced_tensors)

    def _set_module(self, tensors: Sequence[Tensor]) -> None:
        for tensor, data in zip(self._all, tensors, strict=True):
            tensor.data = data

    def receive_synced(self, layers: Iterable[int], mixing: float) -> None:
        """Let every worker go on from these synchronised parameters, mixed with its own."""
        for i in layers:
            synced, stack = self.synced_tensors[i], self.stacks[i]
            if mixing:
                stack.lerp_(synced.expand_as(stack), 1 - mixing)
            else:
                stack.copy_(synced.expand_as(stack))

    def buffer_means(self, world: World) -> dict[int, Tensor]:
        """Average all workers' floating-point buffers, by their places in ``stacks``."""
        first, stop = len(self.parameters), len(self._all)
        floating = [i for i in range(first, stop) if self.stacks[i].is_floating_point()]
        means = Comm(world).mean([self.stacks[i] for i in floating])
        return dict(zip(floating, means, strict=True))

    def follow(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Take the parameters and buffers that the module has now, where ``in_place``.

        An optimiser's step may have given a parameter another memory (``p.data = ...``), and a
        forward pass may have replaced a buffer (``self.mean = ...``). A buffer of another shape or
        type stays out, because a mean over workers needs the same everywhere.

        Args:
            parameters: as many as there were, of the same shapes and types.
        """
        first = len(self.parameters)
        for i, parameter in enumerate(parameters):
            self._follow(i, parameter)
        if len(buffers) != len(self._all) - first:
            return
        for i, buffer in enumerate(buffers, start=first):
            before = self._all[i]
            same = (buffer.shape, buffer.dtype) == (before.shape, before.dtype)
            if same and buffer.device == before.device:
                self._follow(i, buffer)

    def _follow(self, i: int, tensor: Tensor) -> None:
        own = tensor.data
        stack = self.stacks[i][0]
        if (own.data_ptr(), own.stride()) != (stack.data_ptr(), stack.stride()):
            self._all[i], self.stacks[i], self._rows[0][i] = tensor, own[None], own
            if i < len(self.parameters):
                self.parameters[i] = tensor

    def set_buffers(self, mean_of: Mapping[int, Tensor]) -> None:
        """Let every worker go on from these means."""
        first, stop = len(self.parameters), len(self._all)
        for i in range(first, stop):  # integers, counts of batches, are the same on all workers
            self.synced_tensors[i].copy_(mean_of.get(i, self.stacks[i][0]))
        self.receive_synced(range(first, stop), 0.0)

    # -- optimisers --------------------------------------------------------------------------

    def copy_state(self, optimizer: Optimizers) -> None:
        """Let every worker's optimiser continue from the state of this one."""
        for other in self.optimizers:
            if other is not optimizer:
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def settle_states(self, rule: str, world: World) -> None:
        """Reset the states of the workers' optimisers, average them, or keep them as they are
        (``OuterConfig.states``)."""
        if rule == "reset":
            for part in (part for optimizer in self.optimizers for part in optimizer.parts):
                part.state.clear()
        elif rule == "average":
            self._average_states(world)

    def _average_states(self, world: World) -> None:
        """The optimisers' momenta become their means over all workers, counted as traffic of their
        layers. Of a parameter that a worker has not stepped yet each keeps its own."""
        here = [self._momenta(optimizer) for optimizer in self.optimizers]
        common = [place for place in here[0] if all(place in other for other in here)]
        known = [{*theirs} for theirs in world.gather_object(common)]
        places = [place for place in common if all(place in theirs for theirs in known)]
        # within one process one after the other: stacks of all would take the model's memory again
        parts, calls = [places] if world.lockstep else [[place] for place in places], set[Any]()
        for part in parts:
            states = [
                [local_part(o.parts[i].state[self.keys[layer]][key]) for o in self.optimizers]
                for layer, i, key in part
            ]
            comm = Comm(world, [layer for layer, *_ in part], calls=calls)
            means = comm.mean([torch.stack(own) for own in states])
            for own, mean in zip(states, means, strict=True):
                for state in own:
                    state.copy_(mean)

    def _momenta(self, optimizer: Optimizers) -> list[tuple[int, int, str]]:
        """The layers, parts of an optimiser and names of the momenta that it has."""
        return [
            (layer, part, key)
            for layer, parameter in enumerate(self.keys)
            for part, one in enumerate(optimizer.parts)
            for key, value in one.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.ndim and value.is_floating_point()
        ]

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """Return, per hosted worker, its tensors and its optimiser's state."""
        return [
            {"tensors": list(row), "optimizer": optimizer.state_dict()}
            for row, optimizer in zip(self._rows, self.optimizers, strict=True)
        ]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what ``state_dict`` has returned."""
        for row, optimizer, state in zip(self._rows, self.optimizers, states, strict=True):
            for tensor, saved in zip(row, state["tensors"], strict=True):
                tensor.copy_(saved)
            optimizer.load_state_dict(state["optimizer"])
