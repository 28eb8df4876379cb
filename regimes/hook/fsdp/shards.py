"""Models of FSDP2 in which the hook replaces reduce-scatter and all-gather by compressed ones:
without replicas, and within the replicas of `ShardedGradients`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import uncompiled
from regimes.collectives.group import on_group
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.sharded_models import (
    PresentParameters,
    all_param_groups,
    describe_sharding,
    is_divided,
    local_part,
    mesh_fault,
)
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import WeightGather, WithinReplicas
from regimes.hook.ddp.source import layers_of
from regimes.hook.fsdp.collectives import ModuleSteps, replace_collectives, restore_collectives
from regimes.hook.fsdp.groups import FlatLayout, ParameterGroup, check_root, divided_modules
from regimes.hook.fsdp.own_hooks import HookedModel
from regimes.hook.fsdp.reductions import QuantisedReduction, WholeReduction
from regimes.hook.fsdp.replicas import ShardedGradients, check_rows, named_trainable
from regimes.hook.fsdp.shards_state import DividedState

_WRITE = (
    "mesh = init_device_mesh(device, (gpus,)), fully_shard(block, mesh=mesh) for each block, "
    "fully_shard(model, mesh=mesh), regimes.attach_shards(model, mesh)"
)


class FSDPModules(HookedModel):
    """Shows a hook the model that ``fully_shard`` (FSDP2) has divided, with a layer for each call.

    Attributes:
        groups: what each call of ``fully_shard`` divides: a group of parameters.
        trained: the groups with a parameter that is trained.
        layers: one for each trained group, of shape ``[processes, elements of a process]``.
        layouts: the places of a group's parameters in its layer, for each layer.
        mesh: the processes that divide the parameters.
    """

    ignored: Collection[str] = ()
    replicated = False
    follows = True

    def __init__(self, model: nn.Module, shards: Any, weights: WeightGather) -> None:
        """
        Args:
            shards: the mesh of one dimension that was given to ``fully_shard``.

        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        network = uncompiled(model)
        if (got := mesh_fault(shards)) is not None:
            raise ConfigError(f"mesh: got {got}, expected a mesh of one dimension: {_WRITE}")
        if shards.size() < 2:
            raise ConfigError("mesh: it has one process, which exchanges nothing")
        if not isinstance(network, nn.Module):
            raise ConfigError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        super().__init__(network)
        _check_divided(network, shards)
        check_root(network)
        self.mesh, self.weights = shards, weights
        self.groups, self.trained, self.layouts, self.layers = divided_modules(
            network, shards.size()
        )
        self.parameters = named_trainable(network)
        self._present = PresentParameters(all_param_groups(network), self.parameters)
        check_rows(self.parameters, [*map(local_part, self.parameters.values())], shards)
        names = {id(p): name for name, p in self.parameters.items()}
        self._members = [[names[id(p)] for p in one.trained] for one in self.trained]
        self.local: list[Tensor] = [local_part(members[0]) for members in self.members]
        self.device = self.local[0].device
        self.config: dict[str, Any] = {"gather": weights.table()}

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each layer."""
        return [[self.parameters[name] for name in names] for names in self._members]

    def follow(self) -> bool:
        """Find the present parameters; return True if one has been replaced."""
        return self._present.follow()

    @property
    def member_names(self) -> dict[str, list[str]]:
        """Return by layer the names of its parameters in the network."""
        names = {id(p): name for name, p in self.network.named_parameters()}
        pairs = zip(self.layers, self.members, strict=True)
        return {layer.name: [names[id(p)] for p in members] for layer, members in pairs}

    def make_world(self, timeout: float) -> ProcessWorld:
        group = self.mesh.get_group()
        # each process sees its part of a module's reduced gradient; a norm is of all parts
        parts = group, [1.0] * len(self.layers)
        return on_group(group, self.device, timeout, tensor=parts, mesh=self.mesh)

    def shared_facts(self) -> dict[str, Any]:
        kinds = {str(p.dtype) for p in self.parameters.values()}
        return {"shards": {"types": sorted(kinds), **_describe_modules(self.groups), **self.config}}

    def make_reductions(
        self, reducer: Reducer
    ) -> Sequence[QuantisedReduction] | Sequence[WholeReduction]:
        """Make a reduction for each of the trained groups."""
        return _make_reductions(self.trained, self.layouts, reducer)

    def make_state(self, hook: Any, branch: bool, saved: Any) -> DividedState:
        return DividedState(hook, branch, saved)

    def connect_receiver(self, receiver: ModuleSteps) -> None:
        """Replace torch's collectives."""
        self.claim()
        replace_collectives(self.groups, receiver, self.weights)

    def close(self) -> None:
        """Give torch its own collectives back."""
        restore_collectives(self.groups)
        self.release()


class FSDPParameters(FSDPModules):
    """Shows a hook the model that ``fully_shard`` has divided, with a layer for each parameter.

    Whole gradients are then compressed and exchanged, as under DDP. `FSDPModules` explains the
    attributes.
    """

    def __init__(self, model: nn.Module, shards: Any, weights: WeightGather) -> None:
        super().__init__(model, shards, weights)
        places = {name: i for i, name in enumerate(self.parameters)}
        self._held = [
            ([places[x] for x in names], layout)
            for names, layout in zip(self._members, self.layouts, strict=True)
        ]
        self.layers, self._members = layers_of(self.parameters), [[x] for x in self.parameters]
        self.local = [local_part(p) for p in self.parameters.values()]
        of_layer = {
            i: layout.only([at]) for held, layout in self._held for at, i in enumerate(held)
        }
        self.layouts = [of_layer[i] for i in places.values()]

    def make_reductions(self, reducer: Reducer) -> Sequence[WholeReduction]:
        pairs = zip(self.trained, self._held, strict=True)
        return [WholeReduction(held, group, layout, reducer) for group, (held, layout) in pairs]


class ShardedReplicas(ShardedGradients):
    """Takes the gradients of replicas whose processes reduce-scatter and all-gather compressed.

    Attributes:
        inside: how they do.
        modules: the layers within a replica: of each group with a trained parameter ``[ranks,
            numbers of a rank]``.
        within: the processes of this replica, once ``world`` is made.
    """

    within: ProcessWorld

    def __init__(self, model: nn.Module, replicas: Any, inside: WithinReplicas) -> None:
        """
        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        super().__init__(model, replicas)
        if self.mesh.size() < 2:
            raise ConfigError(
                "scatter, gather: one process holds a whole replica, which exchanges nothing "
                "within: leave them out"
            )
        self.inside, count = inside, self.mesh.size()
        self.groups, self.trained, self.layouts, self.modules = divided_modules(self.network, count)
        self.config = {"within": inside.table()}

    def make_world(self, timeout: float, call: str = "attach()") -> ProcessWorld:
        world = super().make_world(timeout, call)
        # FSDP2's streams and the thread of the buckets need a communicator each
        group = self.mesh.get_group()
        self.within = on_group(group, self.device, timeout, call, mesh=self.mesh)
        self.within.meter.dtype = world.meter.dtype
        return world

    def shared_facts(self) -> dict[str, Any]:
        return {
            **super().shared_facts(),
            "within": {**_describe_modules(self.groups), **self.config["within"]},
        }

    def make_reductions(self, reducer: Reducer) -> list[QuantisedReduction]:
        """Make a reduction for each module within the replica."""
        return _make_reductions(self.trained, self.layouts, reducer)

    def connect_receiver(self, receiver: Any) -> None:
        """Replace torch's collectives, make the replicas' models the same, and take their
        gradients."""
        super().connect_receiver(receiver)
        replace_collectives(self.groups, receiver, self.inside.weights)

    def close(self) -> None:
        super().close()
        restore_collectives(self.groups)


def _make_reductions(
    groups: list[ParameterGroup], layouts: list[FlatLayout], reducer: Reducer
) -> list[QuantisedReduction]:
    """A reduction of a layer for each module."""
    pairs = enumerate(zip(groups, layouts, strict=True))
    return [QuantisedReduction(i, group, layout, reducer) for i, (group, layout) in pairs]


def _describe_modules(groups: list[ParameterGroup]) -> dict[str, Any]:
    """The modules, with how many parameters each trains and has frozen."""
    return {"modules": {group.name: [len(group.trained), len(group.frozen)] for group in groups}}


def _check_divided(network: nn.Module, shards: Any) -> None:
    """Raise ConfigError unless ``fully_shard`` has divided all parameters over this mesh."""
    sharded = is_divided(network)
    for name, parameter in network.named_parameters():
        if (found := describe_sharding(parameter)) is None:
            if not sharded:
                break
            raise ConfigError(
                f"parameter {name!r} is whole on each process: leave no parameter to "
                f"ignored_params, and attach before the first step: {_WRITE}"
            )
        mesh, ways = found
        if mesh.ndim > 1:
            raise ConfigError(
                f"parameter {name!r} is divided over a mesh of {mesh.ndim} dimensions, and "
                "attach_shards is for one; for replicas let fully_shard divide the model over "
                'mesh["shard"] alone, attach_replicas(model, mesh["replicate"])'
            )
        if ways == ["copies"]:
            raise ConfigError(
                f"parameter {name!r} has copies on all processes: attach_shards compresses what "
                f"fully_shard exchanges: {_WRITE}"
            )
        if mesh.mesh.tolist() != shards.mesh.tolist():  # its names are nothing to us
            raise ConfigError(
                f"parameter {name!r} is divided among other processes than those of the mesh: "
                "use one for all modules, and give it to attach_shards"
            )
    if not sharded:
        raise ConfigError(
            f"attach_shards needs a model of fully_shard (FSDP2), got {type(network).__name__}: "
            f"call fully_shard on the whole model as well, after its blocks: {_WRITE}"
        )
