"""The hosted workers' own parameters, buffers and optimisers, while each steps by itself.

One module serves all workers: it is lent one worker's tensors after the other's. What it holds in
between is the model that all workers have met at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regimes.collectives.requests import NO_LAYER, Mean, Program
from regimes.collectives.world import World
from regimes.training.optimizers import Optimizers


class Replicas:
    """L models, and the one that all workers have met at last.

    Attributes:
        parameters, buffers: of the module.
        stacks: of both, in that order, ``[L, *shape]`` each.
        optimizers: one per hosted worker, all over the module's parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        optimizers: Sequence[Optimizers],
        *,
        theirs: bool = False,
    ) -> None:
        """
        Args:
            theirs: the module's memory is that of the only hosted worker, as in somebody's own
                loop, and what all have met at is kept beside it; else the other way round.
        """
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.optimizers, self._all = list(optimizers), [*parameters, *buffers]
        data = [t.data for t in self._all]
        self._common = [t.clone() for t in data] if theirs else data
        self.stacks = [t[None] if theirs else t.new_empty(len(optimizers), *t.shape) for t in data]
        self._rows = [[stack[row] for stack in self.stacks] for row in range(len(optimizers))]
        self._spread(0, len(self._all))

    @property
    def common(self) -> list[Tensor]:
        """The parameters that all have met at last, ``[*shape]`` per layer."""
        return self._common[: len(self.parameters)]

    @property
    def met(self) -> list[Tensor]:
        """The same, and the buffers."""
        return self._common

    @property
    def rows(self) -> list[Tensor]:
        """The workers' parameters, ``[L, *shape]`` per layer."""
        return self.stacks[: len(self.parameters)]

    def each(self) -> Iterator[Optimizers]:
        """One hosted worker after the other: the module is his, and this is his optimiser."""
        try:
            for row, optimizer in zip(self._rows, self.optimizers, strict=True):
                self._lend(row)
                yield optimizer
        finally:
            self._lend(self._common)

    def _lend(self, tensors: Sequence[Tensor]) -> None:
        for tensor, data in zip(self._all, tensors, strict=True):
            tensor.data = data

    def restart(self) -> None:
        """Every worker goes on from the common parameters."""
        self._spread(0, len(self.parameters))

    def _spread(self, first: int, stop: int) -> None:
        for common, stack in zip(self._common[first:stop], self.stacks[first:stop], strict=True):
            stack.copy_(common.expand_as(stack))

    def average_buffers(self, world: World) -> None:
        """Every worker's floating-point buffers become the mean of all workers'."""
        first, every = len(self.parameters), len(self._all)
        places = [i for i in range(first, every) if self.stacks[i].is_floating_point()]
        means = world.drive([_mean(self.stacks[i]) for i in places], [NO_LAYER] * len(places))
        found = dict(zip(places, means, strict=True))
        for i in range(first, every):  # counts are alike everywhere
            self._common[i].copy_(found.get(i, self.stacks[i][0]))
        self._spread(first, every)

    # -- optimisers --------------------------------------------------------------------------

    def take_over(self, optimizer: Optimizers) -> None:
        """Every worker's optimiser continues from the state of one."""
        for other in self.optimizers:
            if other is not optimizer:
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def reset_states(self) -> None:
        for optimizer in self.optimizers:
            optimizer.forget()

    def average_states(self, world: World) -> None:
        """The optimisers' momenta become their means over all workers, each layer's on its account;
        counts of steps are alike everywhere."""
        places = [
            (layer, part, key)
            for layer, parameter in enumerate(self.parameters)
            for part, chosen in enumerate(self.optimizers[0].parts)
            for key, value in chosen.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.ndim and value.is_floating_point()
        ]
        programs = [self._mean_state(*place) for place in places]
        world.drive(programs, [layer for layer, *_ in places])

    def _mean_state(self, layer: int, part: int, key: str) -> Program:
        states = [o.parts[part].state[self.parameters[layer]][key] for o in self.optimizers]
        mean = yield Mean(torch.stack(states))
        for state in states:
            state.copy_(mean)
        return mean

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each hosted worker: its tensors and its optimiser's state."""
        return [
            {"tensors": list(row), "optimizer": optimizer.state_dict()}
            for row, optimizer in zip(self._rows, self.optimizers, strict=True)
        ]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """The inverse."""
        for row, optimizer, state in zip(self._rows, self.optimizers, states, strict=True):
            for mine, saved in zip(row, state["tensors"], strict=True):
                mine.copy_(saved)
            optimizer.load_state_dict(state["optimizer"])


def _mean(stack: Tensor) -> Program:
    return (yield Mean(stack))
