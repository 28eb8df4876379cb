"""Synchronises workers that have stepped locally, by an outer step along their mean movement.

The pseudo-gradient of a worker is the last synchronised parameters less its own. Any compressor
reduces it with error feedback, like a gradient; the result is the gradient of an outer SGD
(Reddi et al., "Adaptive federated optimization", 2021; DiLoCo: Douillard et al., 2023). Without
compression, at rate 1 and without momentum, that is the mean of the workers' parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import NO_LAYER
from regimes.compression.reducer import Reducer
from regimes.config import Level, OuterConfig
from regimes.training.replicas import Replicas


def pseudo_gradients(
    start: Sequence[Tensor], rows: Sequence[Tensor], out: Sequence[Tensor]
) -> None:
    """``start [*shape] - rows [L, *shape]`` per layer, into ``out [L, *shape]``."""
    for synced, own, into in zip(start, rows, out, strict=True):
        torch.sub(synced, own, out=into)


class OuterStep:
    """The outer optimiser, over the synchronised parameters, and the reducer of pseudo-gradients,
    which has memories of its own."""

    def __init__(self, parameters: Iterable[Tensor], reducer: Reducer, config: OuterConfig) -> None:
        self.parameters, self.reducer, self.config = list(parameters), reducer, config
        self.optimizer = torch.optim.SGD(
            self.parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            foreach=True,
        )

    def reduce(
        self,
        stacks: Sequence[Float[Tensor, "rows ..."]],
        levels: Sequence[Level],
        losses: Float[Tensor, "rows steps"],
    ) -> tuple[list[Tensor], Float[Tensor, " steps"]]:
        """The shared pseudo-gradient ``[*shape]`` per layer, and the workers' mean losses
        ``[steps]``, which are sent with it."""
        means: dict[int, Tensor] = {}
        for bucket in self.reducer.buckets:
            means.update(self.reducer.reduce(bucket, stacks, levels, losses))
        return [means[i] for i in range(len(levels))], means[NO_LAYER]

    def step(self, updates: Sequence[Tensor], replicas: Replicas) -> None:
        """Step the synchronised parameters and copy them to the workers; average buffers, and the
        optimisers' states as configured."""
        world, states = self.reducer.world, self.config.states
        for parameter, update in zip(self.parameters, updates, strict=True):
            parameter.grad = update
        self.optimizer.step()
        replicas.restart()
        replicas.average_buffers(world)
        if states == "average":
            replicas.average_states(world)
        elif states == "reset":
            replicas.reset_states()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))
