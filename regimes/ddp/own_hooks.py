"""Gradients that the parameters' own hooks hand over, where no DistributedDataParallel collects
them in buckets: of sharded parameters (``ddp.sharded``), and of a bare model's.

``.grad`` is overwritten with the aggregated gradient before backward ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from regimes.collectives.quorum import QuorumWorld
from regimes.collectives.world import World
from regimes.ddp.source import Receiver, after_backward, check_parameters, plain_names
from regimes.errors import ConfigError
from regimes.job.refit import several

BUCKET = 25 * 2**20  # bytes, as DDP's, of a shard if there are several
_attached: WeakSet[nn.Module] = WeakSet()


class OwnHooks:
    """The gradients of a model's parameters; the parts of a ``Source`` (``ddp.source``) that do not
    depend on where they come from.

    Attributes:
        advice: what to do when a gradient comes twice in one backward pass.
        arrived: layers whose gradient this backward pass has completed.
        idle: layers that no process has used in it.
    """

    advice = "call it once in each backward pass"
    _world: World

    def __init__(
        self, network: nn.Module, parameters: dict[str, nn.Parameter], local: list[Tensor]
    ) -> None:
        """
        Raises:
            ConfigError: the model has a hook already.
        """
        if network in _attached:
            raise ConfigError("this model has a hook already: attach it once")
        self._network, self.parameters, self.local = ref(network), parameters, local
        self.names, self.device = list(parameters), local[0].device
        self.arrived: set[int] = set()
        self.idle: set[int] = set()
        self.missing: set[int] = set()
        self.paused = False  # gradients are added up, and not exchanged
        self.backward = -1  # the autograd engine's number of the pass under way

    @property
    def network(self) -> nn.Module:
        network: nn.Module | None = self._network()
        assert network is not None
        return network

    def gradient(self, parameter: Any) -> Tensor:
        """This process's part of a gradient that is complete."""
        gradient: Tensor = parameter.grad
        return gradient

    def mark_attached(self) -> None:
        """Note that this model has a hook."""
        _attached.add(self.network)

    def connect(self, receiver: Receiver) -> None:
        """Take the gradients from now on; the hooks live as long as the parameters."""
        self.receiver = receiver
        self.mark_attached()
        for i, parameter in enumerate(self.parameters.values()):
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: self._receive(i, p))

    @torch.no_grad()
    def _receive(self, layer: int, parameter: Any) -> None:
        """A gradient is complete."""
        if self.paused:
            return
        now = torch._C._current_graph_task_id()
        if now != self.backward or not self.arrived:
            self.receiver.approach(layer)
            self._begin(now)
        if layer in self.arrived:
            raise ConfigError(
                f"the gradient of {self.names[layer]!r} came twice in one backward pass, because "
                f"its module is called several times in a step: {self.advice}"
            )
        self.arrived.add(layer)
        self.receiver.add({layer: self.gradient(parameter)})

    def _begin(self, now: int) -> None:
        # Twice, so that it comes after the callbacks of all FSDP2 modules, the last of which are
        # queued during backward: they may complete gradients.
        after_backward(lambda: after_backward(self._finish))
        self.backward, self.arrived, self.idle, self.missing = now, set(), set(), set()
        self.receiver.begin()

    @torch.no_grad()
    def _finish(self) -> None:
        self.missing = set(range(len(self.names))) - self.arrived
        if self.missing:  # all processes exchange all layers, used or not
            self.receiver.add({i: torch.zeros_like(self.local[i]) for i in self.missing})
        self.receiver.finish()
        self.arrived = set()
        self.receiver.settle()

    def release(self) -> None:
        pass

    def unused(self, layers: Sequence[int]) -> Tensor | None:
        marks = torch.zeros(len(layers), dtype=self._world.meter.dtype, device=self.device)
        for place, i in enumerate(layers):
            if i in self.missing:
                marks[place].fill_(1.0)  # a list would have to be copied to a GPU
        return marks

    def note_unused(self, shares: Mapping[int, float]) -> None:
        some = [self.names[i] for i, x in shares.items() if 0 < x < 1]
        if some:
            raise ConfigError(
                f"some processes have used {several(some)} in this step and others have not: all "
                "take the same path through the model, or add 0 times its output to the loss"
            )
        self.idle |= {i for i, x in shares.items() if x > 0}

    def unwritten(self) -> set[int]:
        return self.idle


class BareGradients(OwnHooks):
    """The gradients of a bare model, one for each layer; a ``Source``, whose layers are whole. Its
    replicas come and go, as a manager of torchft says."""

    advice = (
        "call it through one module, or use hook.no_sync() for all backward passes but the last"
    )
    bucket_bytes = BUCKET

    def __init__(self, model: nn.Module, manager: Any) -> None:
        """
        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        network = getattr(model, "_orig_mod", model)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        kinds = {kind.__name__ for kind in type(network).__mro__}
        if found := kinds & {"DistributedDataParallel", "FSDPModule", "DataParallel"}:
            raise ConfigError(
                f"attach: {found.pop()} exchanges gradients by itself: with a manager give it the "
                "bare model"
            )
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not named:
            raise ConfigError("the model has no parameter to train: there is nothing to exchange")
        check_parameters(named)
        plain = plain_names(named)
        parameters = {plain[name]: p for name, p in named.items()}
        super().__init__(network, parameters, [p.data for p in parameters.values()])
        self.manager = manager

    def world(self, timeout: float) -> QuorumWorld:
        self._world = world = QuorumWorld(self.manager, self.device)
        return world

    def facts(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are added up and not exchanged."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
