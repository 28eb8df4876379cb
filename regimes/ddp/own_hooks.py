"""Gradients that the parameters' own hooks hand over, where no DistributedDataParallel collects
them in buckets: of a replica that several processes hold together (``ddp.sharded``).

``.grad`` is overwritten with the aggregated gradient before backward ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regimes.collectives.group import on_mesh
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.sharded_models import local_part
from regimes.ddp.applied import remove_hooks
from regimes.ddp.source import after_backward, layers_of
from regimes.ddp.steps import HookSteps
from regimes.errors import ConfigError
from regimes.job.refit import list_names

BUCKET = 25 * 2**20  # bytes, as DDP's, of a shard if there are several
ATTACHED = "this model has a hook already: attach it once, or call close() of the first one before"
EARLY = (
    "an optimiser has stepped within the backward pass, or a hook has cleared a gradient there, "
    "before replicas have exchanged it: step after backward()"
)
attached_models: WeakSet[nn.Module] = WeakSet()


class DividedGradients:
    """The gradients of replicas of several processes, each of which has its rows of every layer;
    the parts of a ``Source`` (``ddp.source``) that do not depend on what divides the model.

    Attributes:
        advice: what to do when a gradient comes twice in one backward pass.
        arrived: layers with a gradient that this backward pass has completed.
        idle: layers that no process has used in it.
    """

    ignored: Collection[str] = ()
    replicated = follows = True
    advice: str
    _world: ProcessWorld

    def __init__(
        self,
        network: nn.Module,
        parameters: dict[str, nn.Parameter],
        local: list[Tensor],
        replicas: Any,
        mesh: Any,
    ) -> None:
        """
        Args:
            replicas: the mesh dimension between replicas; ``mesh`` is the one within them.

        Raises:
            ConfigError: the model has a hook already.
        """
        if network in attached_models:
            raise ConfigError(ATTACHED)
        self._network, self.parameters, self.local = ref(network), parameters, local
        self._replicas, self.mesh = replicas, mesh
        self.layers = layers_of(parameters)
        self.names, self.device = list(parameters), local[0].device
        self.config: dict[str, Any] = {}
        self.handles: list[RemovableHandle] = []
        self.arrived: set[int] = set()
        self.idle: set[int] = set()
        self.missing: set[int] = set()
        self.backward = -1  # the autograd engine's number of the pass under way

    @property
    def network(self) -> nn.Module:
        network: nn.Module | None = self._network()
        assert network is not None
        return network

    def make_world(self, timeout: float, call: str = "attach()") -> ProcessWorld:
        groups = self._replicas.get_group(), self.mesh.get_group()
        self._world = on_mesh(*groups, self.device, timeout, call)
        return self._world

    def local_gradient(self, parameter: Any) -> Tensor:
        """This process's part of a gradient that is complete."""
        raise NotImplementedError

    def start_alike(self) -> None:
        """Make the replicas' models the same; from now on this model has a hook."""
        state = [*self.network.parameters(), *self.network.buffers()]  # frozen parameters, too
        self._world.broadcast_first([local_part(t) for t in state])
        attached_models.add(self.network)

    def connect_receiver(self, receiver: HookSteps) -> None:
        """Make the replicas' models the same, and take their gradients from now on; until ``close``
        the hooks live as long as the parameters."""
        self.start_alike()
        self.receiver = receiver
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        remove_hooks(self.handles)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda p, i=i: self._receive_gradient(i, p)
            )
            for i, parameter in enumerate(self.parameters.values())
        ]

    @torch.no_grad()
    def _receive_gradient(self, layer: int, parameter: Any) -> None:
        """A gradient is complete."""
        now = torch._C._current_graph_task_id()
        if now != self.backward or not self.arrived:
            self.receiver.approach_pass(layer)
            self._begin_pass(now)
        if layer in self.arrived:
            raise ConfigError(
                f"the gradient of {self.names[layer]!r} came twice in one backward pass, because "
                f"its module is called several times in a step: {self.advice}"
            )
        if parameter.grad is None:  # a hook that was registered before ours has cleared it
            raise ConfigError(EARLY)
        self.arrived.add(layer)
        self.receiver.add_gradients({layer: self.local_gradient(parameter)[None]})

    def _begin_pass(self, now: int) -> None:
        # Twice, so that it comes after the callbacks of all FSDP2 modules, the last of which are
        # queued during backward: they may complete gradients.
        after_backward(lambda: after_backward(self._finish_pass))
        self.backward, self.arrived, self.idle, self.missing = now, set(), set(), set()
        self.receiver.begin_step()

    @torch.no_grad()
    def _finish_pass(self) -> None:
        if self.receiver.applied.stepped:
            raise ConfigError(EARLY)
        self.end_exchange()
        self.arrived = set()
        self.receiver.settle_step()

    def end_exchange(self) -> None:
        """The end of backward: wait until the aggregated gradients are in ``.grad``."""
        self.missing = set(range(len(self.names))) - self.arrived
        if self.missing:  # all processes exchange all layers, used or not
            missing = {i: torch.zeros_like(self.local[i])[None] for i in self.missing}
            self.receiver.add_gradients(missing)
        self.receiver.finish_step()

    def release_gradients(self) -> None:
        pass

    def mark_unused(self, layers: Sequence[int]) -> Tensor | None:
        marks = torch.zeros(len(layers), dtype=self._world.meter.dtype, device=self.device)
        for place, i in enumerate(layers):
            if i in self.missing:
                marks[place].fill_(1.0)  # a list would have to be copied to a GPU
        return marks

    def note_unused(self, shares: Mapping[int, float]) -> None:
        some = [self.names[i] for i, x in shares.items() if 0 < x < 1]
        if some:
            raise ConfigError(
                f"some processes have used {list_names(some)} in this step and others have not: "
                "all take the same path through the model, or add 0 times its output to the loss"
            )
        self.idle |= {i for i, x in shares.items() if x > 0}

    def unwritten_layers(self) -> set[int]:
        return self.idle

    def close(self) -> None:
        """Receive no gradients any more."""
        remove_hooks(self.handles)
        self.release()

    def detach(self) -> None:
        """Nothing of the hook is left."""

    def release(self) -> None:
        """From now on this model has no hook."""
        if (network := self._network()) is not None:
            attached_models.discard(network)
