"""The outer step of local steps (DiLoCo): one update of all workers by their pseudo-gradients.

The pseudo-gradient of a worker is the last synchronised parameters less its own. Any compressor
reduces it with error feedback, like a gradient; the result is the gradient of an outer SGD
(Reddi et al., "Adaptive federated optimization", 2021; DiLoCo: Douillard et al., 2023). Without
compression, at rate 1 and without momentum, that is the mean of the workers' parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.reducer import Reducer
from regimes.config import OuterConfig
from regimes.training.replicas import Replicas


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

    def pseudo_gradients(
        self,
        replicas: Replicas,
        out: Sequence[Float[Tensor, "rows ..."]],
        layers: Iterable[int],
    ) -> None:
        """Write the pseudo-gradient of each hosted worker in these layers, synchronised less own
        parameters, into ``out[layer]``, ``[L, *shape]``."""
        for i in layers:
            torch.sub(self.parameters[i].data, replicas.stacks[i], out=out[i])

    def step_outer(
        self,
        updates: Mapping[int, Tensor],
        replicas: Replicas,
        *,
        buffers: bool,
    ) -> None:
        """Step the synchronised parameters of some layers by the shared pseudo-gradients
        ``[*shape]``, which are left as they are; the workers go on from them, with the optimisers'
        states as configured.

        Args:
            buffers: average the floating-point buffers, too.
        """
        # torch's foreach SGD with Nesterov adds momentum x velocity to .grad in place, and
        # instruments read the updates when the last fragment has come back.
        given = {i: u.clone() for i, u in updates.items()} if self.config.nesterov else updates
        for i, parameter in enumerate(self.parameters):
            parameter.grad = given.get(i)
        self.optimizer.step()
        if buffers:
            replicas.set_buffers(replicas.buffer_means(self.reducer.world))
        replicas.receive_synced(updates, self.config.mixing)
        replicas.settle_states(self.config.states, self.reducer.world)
