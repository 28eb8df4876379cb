"""The gradients of a model that ``fully_shard`` (FSDP2) has divided within an island.

FSDP2 reduces a gradient over the processes of an island and calls the hooks of the sharded
parameter. There each process has its rows of the island's mean; the exchange between islands is
ours. ``.grad`` is overwritten with the aggregated gradient before backward ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from regimes.collectives.group import GroupWorld
from regimes.collectives.islands import IslandWorld, local_part, mesh_dimension, sharding
from regimes.ddp.refit import several
from regimes.ddp.source import Receiver, after_backward, plain_names
from regimes.errors import ConfigError

BUCKET = 25 * 2**20  # bytes of a shard, as DDP's; a bucket's collectives share a launch
WRITE = (
    'mesh = init_device_mesh(device, (islands, gpus), mesh_dim_names=("replicate", "shard")), '
    'fully_shard(model, mesh=mesh["shard"]), and here replicas=mesh["replicate"]'
)
_attached: WeakSet[nn.Module] = WeakSet()


class ShardedGradients:
    """The gradients of the rows that this process holds; a ``Source`` (``ddp.source``).

    Attributes:
        arrived: layers whose gradient this backward pass has completed.
        idle: layers that no process has used in it.
    """

    def __init__(self, model: nn.Module, replicas: Any) -> None:
        """
        Args:
            replicas: the mesh dimension between islands.

        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        network = getattr(model, "_orig_mod", model)
        if (got := mesh_dimension(replicas)) is not None:
            raise ConfigError(
                f'replicas: got {got}, expected one dimension of a mesh, mesh["replicate"]: {WRITE}'
            )
        self._network, self._replicas = ref(network), replicas
        self.parameters = trainable(network)
        self.local = [local_part(p) for p in self.parameters.values()]
        self.names = list(self.parameters)
        self.mesh = _one_mesh(self.parameters)
        self.device = self.local[0].device
        _check(network, self.parameters, self.local, self.mesh)
        if network in _attached:
            raise ConfigError("this model has a hook already: attach it once")
        self.bucket_bytes = BUCKET * self.mesh.size()
        self.arrived: set[int] = set()
        self.idle: set[int] = set()
        self.missing: set[int] = set()
        self.backward = -1  # the autograd engine's number of the pass under way

    @property
    def network(self) -> nn.Module:
        network: nn.Module | None = self._network()
        assert network is not None
        return network

    def world(self, timeout: float, call: str = "attach()") -> GroupWorld:
        replicas, island = self._replicas.get_group(), self.mesh.get_group()
        self._world = IslandWorld(replicas, island, self.device, timeout, call)
        return self._world

    def facts(self) -> dict[str, Any]:
        kinds = [str(p.dtype) for p in self.parameters.values()]
        return {"islands": {"shards": self.mesh.size(), "types": sorted({*kinds})}}

    def start_alike(self) -> None:
        """Make the islands' models the same; from now on this model has a hook."""
        state = [*self.network.parameters(), *self.network.buffers()]  # frozen parameters, too
        self._world.copy_first([local_part(t) for t in state])
        _attached.add(self.network)

    def connect(self, receiver: Receiver) -> None:
        """Make the islands' models the same, and take their gradients from now on; the hooks live
        as long as the parameters."""
        self.start_alike()
        self.receiver = receiver
        for i, parameter in enumerate(self.parameters.values()):
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: self._receive(i, p))

    @torch.no_grad()
    def _receive(self, layer: int, parameter: Any) -> None:
        """A gradient is complete: FSDP2 has reduced it within the island."""
        now = torch._C._current_graph_task_id()
        if now != self.backward or not self.arrived:
            self._begin(now)
        if layer in self.arrived:
            raise ConfigError(
                f"the gradient of {self.names[layer]!r} came twice in one backward pass, because "
                "its module is called several times in a step: shard a module around all of its "
                "calls with fully_shard, or use set_requires_gradient_sync(False) for all but the "
                "last"
            )
        self.arrived.add(layer)
        self.receiver.add({layer: local_part(parameter.grad)})

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


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by their names in the bare model; one that several modules
    share appears once."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("the model has no parameter to train: there is nothing to exchange")
    plain = plain_names(named)
    parameters = {plain[name].replace(CHECKPOINT, ""): p for name, p in named.items()}
    for name, parameter in parameters.items():
        found = sharding(parameter)
        if found is None:
            raise ConfigError(
                f"parameter {name!r} is not sharded: call fully_shard on the whole model as well, "
                f"after its blocks, and attach before the first step: {WRITE}"
            )
        mesh, ways = found
        if "copies" in ways and len(ways) > 1:
            raise ConfigError(
                f"parameter {name!r} is sharded over a mesh of {mesh.ndim} dimensions, where FSDP2 "
                f"exchanges between islands itself, uncompressed: write {WRITE}"
            )
        if ways == ["copies"] and mesh.size() > 1:
            raise ConfigError(
                f"parameter {name!r} has copies on {mesh.size()} processes, between which replicate"
                "() exchanges uncompressed: give it a dimension of one process, "
                'mesh = init_device_mesh(device, (processes, 1), mesh_dim_names=("replicate", '
                '"shard")), replicate(model, mesh=mesh["shard"]), and here replicas='
                'mesh["replicate"]'
            )
        if ways not in (["rows"], ["copies"]):
            raise ConfigError(
                f"parameter {name!r} is divided as {', '.join(ways)}: the hook needs its rows "
                "divided over one dimension of a mesh, which is what fully_shard does by itself"
            )
    return parameters


CHECKPOINT = "_checkpoint_wrapped_module."  # of torch's checkpoint_wrapper


def _one_mesh(parameters: Mapping[str, nn.Parameter]) -> Any:
    """The island's mesh, which all parameters share."""
    meshes = {name: (sharding(p) or [None])[0] for name, p in parameters.items()}
    first = next(iter(meshes.values()))
    for name, mesh in meshes.items():
        if mesh != first:
            raise ConfigError(
                f"parameter {name!r} is sharded over another mesh than {next(iter(meshes))!r}: "
                "use one mesh for all modules"
            )
    return first


def _check(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], local: Sequence[Tensor], mesh: Any
) -> None:
    for name, parameter in parameters.items():
        if parameter.device.type == "meta":
            raise ConfigError(
                f"parameter {name!r} is on the device meta: attach after model.to_empty() and the "
                "initialisation"
            )
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"parameter {name!r} is of type {parameter.dtype}: the hook needs float32, float64 "
                "or bfloat16, use MixedPrecisionPolicy for other types"
            )
    if {t.device for t in local} != {local[0].device} or local[0].device.type != mesh.device_type:
        raise ConfigError(
            f"parameters are on {local[0].device} and the mesh is of {mesh.device_type}: the hook "
            "does not serve CPUOffloadPolicy"
        )
