"""A model of plain FSDP2, whose own reduce-scatter and all-gather the hook replaces by compressed
ones. A layer is what one call of ``fully_shard`` has divided: a module's parameters, end to end.
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import ref

from torch import Tensor, nn

from regimes.collectives.group import on_group
from regimes.collectives.islands import local_part, mesh_fault, sharding
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.requests import Layer
from regimes.compression.scatter import Weights
from regimes.ddp.fsdp_groups import groups_of
from regimes.ddp.fsdp_steps import AllGather, ModuleSteps, ReduceScatter
from regimes.ddp.own_hooks import attached_models
from regimes.ddp.sharded import check_rows
from regimes.errors import ConfigError

WRITE = (
    "mesh = init_device_mesh(device, (gpus,)), fully_shard(block, mesh=mesh) for each block, "
    "fully_shard(model, mesh=mesh), regimes.attach(model, shards=mesh)"
)


class FSDPModules:
    """The modules of a sharded model, an ``Attached`` of a hook.

    Attributes:
        groups: all of them; ``layers`` are those with a trained parameter, each of shape ``[ranks,
            numbers of a rank]``.
        mesh: the processes among which they are divided.
    """

    def __init__(self, model: nn.Module, shards: Any, weights: Weights) -> None:
        """
        Args:
            shards: the mesh of one dimension that was given to ``fully_shard``.

        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        network = getattr(model, "_orig_mod", model)
        if (got := mesh_fault(shards)) is not None:
            raise ConfigError(f"shards: got {got}, expected a mesh of one dimension: {WRITE}")
        if shards.size() < 2:
            raise ConfigError("shards: the mesh has one process, which exchanges nothing")
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        if network in attached_models:
            raise ConfigError("this model has a hook already: attach it once")
        _check_divided(network, shards)
        self._network, self.mesh, self.weights = ref(network), shards, weights
        self.groups = groups_of(network)
        self.trained = [group for group in self.groups if group.trained]
        if not self.trained:
            raise ConfigError("the model has no parameter to train: there is nothing to exchange")
        count = shards.size()
        self.parameters = {
            f"{group.name}.{i}": p for group in self.trained for i, p in enumerate(group.trained)
        }
        every = [local_part(p) for p in self.parameters.values()]
        check_rows(self.parameters, every, shards)
        self.layers = [Layer(group.name, (count, group.part(count))) for group in self.trained]
        self.local: list[Tensor] = [local_part(group.trained[0]) for group in self.trained]
        self.device = self.local[0].device
        self.config: dict[str, Any] = {"gather": {"level": weights.level, "block": weights.block}}

    @property
    def network(self) -> nn.Module:
        network: nn.Module | None = self._network()
        assert network is not None
        return network

    def world(self, timeout: float) -> ProcessWorld:
        group = self.mesh.get_group()
        # each process sees its part of a module's reduced gradient; a norm is of all parts
        return on_group(group, self.device, timeout, tensor=(group, [1.0] * len(self.layers)))

    def facts(self) -> dict[str, Any]:
        kinds = {str(p.dtype) for p in self.parameters.values()}
        modules = {group.name: [len(group.trained), len(group.frozen)] for group in self.groups}
        return {"shards": {"types": sorted(kinds), "modules": modules, **self.config}}

    def connect(self, receiver: ModuleSteps) -> None:
        """Replace torch's collectives."""
        attached_models.add(self.network)
        for group in self.groups:
            group.module.set_custom_all_gather(AllGather(receiver, self.weights, group.gather))
        for i, group in enumerate(self.trained):
            scatter = ReduceScatter(i, receiver, group.scatter)
            group.module.set_custom_reduce_scatter(scatter)

    def close(self) -> None:
        """Give torch its own collectives back."""
        for group in self.groups:
            group.module.set_custom_all_gather(group.gather)
            group.module.set_custom_reduce_scatter(group.scatter)
        if (network := self._network()) is not None:
            attached_models.discard(network)

    def no_sync(self) -> NoReturn:
        raise ConfigError("no_sync: use set_requires_gradient_sync(False) of the sharded model")


def _check_divided(network: nn.Module, shards: Any) -> None:
    """Raise ConfigError unless ``fully_shard`` has divided all parameters over this mesh."""
    sharded = any(kind.__name__ == "FSDPModule" for kind in type(network).__mro__)
    for name, parameter in network.named_parameters():
        if (found := sharding(parameter)) is None:
            if not sharded:
                break
            raise ConfigError(
                f"parameter {name!r} is whole on each process: leave no parameter to "
                f"ignored_params, and attach before the first step: {WRITE}"
            )
        mesh, ways = found
        if mesh.ndim > 1:
            raise ConfigError(
                f"parameter {name!r} is divided over a mesh of {mesh.ndim} dimensions: shards= is "
                "for one; islands are attach(model, replicas=...) of a model that fully_shard has "
                'divided over mesh["shard"] alone'
            )
        if ways == ["copies"]:
            raise ConfigError(
                f"parameter {name!r} has copies on all processes: shards= compresses what "
                f"fully_shard exchanges: {WRITE}"
            )
        if mesh.mesh.tolist() != shards.mesh.tolist():  # its names are nothing to us
            raise ConfigError(
                f"parameter {name!r} is divided among other processes than those of shards=: "
                "use one mesh for all modules, and give it to attach"
            )
    if not sharded:
        raise ConfigError(
            f"attach needs a model of fully_shard (FSDP2), got {type(network).__name__}: call "
            f"fully_shard on the whole model as well, after its blocks: {WRITE}"
        )
