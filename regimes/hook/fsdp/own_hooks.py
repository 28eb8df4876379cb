"""Gradients that the parameters' own hooks hand over, where no DistributedDataParallel collects
them in buckets: of a replica that several processes hold together (``fsdp.replicas``).

``.grad`` is overwritten with the aggregated gradient before backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import current_backward
from regimes.collectives.group import on_mesh
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.sharded_models import local_part
from regimes.hook.ddp.applied import remove_hooks
from regimes.hook.ddp.source import after_backward
from regimes.hook.ddp.steps import HookSteps

BUCKET = 25 * 2**20  # bytes, as DDP's, of a shard if there are several
ATTACHED = "this model has a hook already: attach it once, or call close() of the first one before"
EARLY = (
    "an optimiser has stepped within the backward pass, or a hook has cleared a gradient there, "
    "before replicas have exchanged it: step after backward()"
)
EVERYONE = 1 - 1e-3  # a share of all processes, as it is rounded
attached_models: WeakSet[nn.Module] = WeakSet()


class HookedModel:
    """Holds a model weakly, which has one hook at most.

    Raises:
        ConfigError: the model has a hook already.
    """

    def __init__(self, network: nn.Module) -> None:
        if network in attached_models:
            raise ConfigError(ATTACHED)
        self._network = ref(network)

    @property
    def network(self) -> nn.Module:
        network: nn.Module | None = self._network()
        assert network is not None
        return network

    def claim(self) -> None:
        """Note that this model has a hook from now on."""
        attached_models.add(self.network)

    def release(self) -> None:
        """Note that this model has no hook from now on."""
        if (network := self._network()) is not None:
            attached_models.discard(network)

    def detach(self) -> None:
        """Do nothing more: nothing of the hook is left."""


def after_modules(finish: Callable[[], None]) -> None:
    """Call this after the backward pass, and after the callbacks of all FSDP2 modules: they may
    complete gradients, and the last are queued during backward. So it is queued twice."""
    after_backward(lambda: after_backward(finish))


class DividedGradients(HookedModel):
    """Takes the gradients of replicas of several processes, each of which has its rows of every
    layer. These are the parts of a ``GradientSource`` (``ddp.source``) that do not depend on what
    divides the model.

    Attributes:
        advice: what to do when a gradient comes twice in one backward pass.
        arrived: layers with a gradient that this backward pass has completed.
        idle: layers that no process has used in it.
        missing: layers without a gradient on this process, by the rows that it hands over instead:
            zeros, or what ``.grad`` has from passes before.
        waiting: layers whose ``.grad`` has what passes without an exchange have added to it.
    """

    ignored: Collection[str] = ()
    replicated = follows = True
    advice: str
    _world: ProcessWorld

    def __init__(
        self,
        network: nn.Module,
        parameters: dict[str, nn.Parameter],
        layers: list[Layer],
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
        super().__init__(network)
        self.parameters, self.local = parameters, local
        self._replicas, self.mesh = replicas, mesh
        self.layers = layers
        self.names, self.device = list(parameters), local[0].device
        self.config: dict[str, Any] = {}
        self.handles: list[RemovableHandle] = []
        self.arrived: set[int] = set()
        self.idle: set[int] = set()
        self.missing: dict[int, Tensor] = {}
        self.waiting: set[int] = set()
        self.postponed = (-1, False)  # the last pass, and whether a later one exchanges
        self.backward = -1  # the autograd engine's number of the pass under way

    def make_world(self, timeout: float, call: str = "attach()") -> ProcessWorld:
        groups = self._replicas.get_group(), self.mesh.get_group()
        self._world = on_mesh(*groups, self.device, timeout, call)
        return self._world

    def local_gradient(self, parameter: Any) -> Tensor:
        """Return this process's part of a gradient that is complete."""
        raise NotImplementedError

    def is_postponed(self) -> bool:
        """Return whether a later pass exchanges what this one adds to ``.grad``. This is asked in
        each pass."""
        return False

    def start_alike(self) -> None:
        """Make the replicas' models the same, and note that this model has a hook."""
        state = [*self.network.parameters(), *self.network.buffers()]  # frozen parameters, too
        self._world.broadcast_first([local_part(t) for t in state])
        self.claim()

    def connect_receiver(self, receiver: HookSteps) -> None:
        """Make the replicas' models the same, and take their gradients from now on. The hooks of
        torch live as long as the parameters, until ``close``."""
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
        now = current_backward()
        if now != self.postponed[0]:
            self.postponed = now, self.is_postponed()
            if self.postponed[1]:  # before .grad becomes the sum of several passes
                self.receiver.on_backward_start(layer)
        if self.postponed[1]:
            self.waiting.add(layer)
            return
        if now != self.backward or not self.arrived:
            self.receiver.on_backward_start(layer)
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
        after_modules(self._finish_pass)
        self.backward, self.arrived, self.idle, self.missing = now, set(), set(), {}
        self.receiver.begin_step()

    @torch.no_grad()
    def _finish_pass(self) -> None:
        if self.receiver.applied.stepped:
            raise ConfigError(EARLY)
        self.end_exchange()
        self.arrived = set()
        self.receiver.settle_step()

    def end_exchange(self) -> None:
        """Wait, at the end of backward, until the aggregated gradients are in ``.grad``."""
        rest, parameters = {*range(len(self.names))} - self.arrived, [*self.parameters.values()]
        self.missing = {}
        for i in rest - self.waiting:  # what this process hands over of layers it has not used
            unused = parameters[i].grad is None
            rows = torch.zeros_like(self.local[i]) if unused else self.local_gradient(parameters[i])
            self.missing[i] = (rows if unused else rows.clone())[None]
        if rest:  # all processes exchange all layers, used or not
            own = {i: self.local_gradient(parameters[i])[None] for i in rest & self.waiting}
            self.receiver.add_gradients(own | self.missing)
        self.waiting = set()
        self.receiver.finish_step()

    def release_gradients(self) -> None:
        pass

    def mark_unused(self, layers: Sequence[int]) -> Tensor | None:
        marks = torch.zeros(len(layers), dtype=self._world.meter.dtype, device=self.device)
        for place, i in enumerate(layers):
            if i in self.missing:
                marks[place].fill_(1.0)  # a list would have to be copied to a GPU
        return marks

    @torch.no_grad()
    def note_unused(self, shares: Mapping[int, float]) -> None:
        """Use the shared gradient of a layer that another replica has used and this one has not, as
        an expert that had tokens there alone: its own gradient counts as zero."""
        self.idle |= {i for i, x in shares.items() if x > EVERYONE}
        parameters = [*self.parameters.values()]
        for i, rows in self.missing.items():
            if i not in self.idle:
                parameter = parameters[i]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.local_gradient(parameter).copy_(rows[0])

    def unwritten_layers(self) -> set[int]:
        return self.idle

    def close(self) -> None:
        """Receive no more gradients."""
        remove_hooks(self.handles)
        self.release()
