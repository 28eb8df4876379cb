"""The gradients of a model that ``fully_shard`` (FSDP2) has divided within a replica (HSDP).

FSDP2 reduces a gradient over the processes of a replica and calls the hooks of the sharded
parameter. There each process has its rows of the replica's mean; the exchange between replicas is
ours. ``.grad`` is overwritten with the aggregated gradient before backward ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import all_reduce_hook, set_all_reduce_hook, uncompiled
from regimes.collectives.layers import Layer
from regimes.collectives.process_group import Group
from regimes.collectives.sharded_models import (
    PresentParameters,
    all_param_groups,
    describe_sharding,
    divided_dimension,
    local_part,
    mesh_fault,
    reduce_everywhere,
    reduce_within,
)
from regimes.hook.ddp.source import plain_names
from regimes.hook.fsdp.own_hooks import BUCKET, DividedGradients
from regimes.hook.fsdp.replicas_state import ShardedState

WRITE = (
    'mesh = init_device_mesh(device, (replicas, gpus), mesh_dim_names=("replicate", "shard")), '
    'fully_shard(model, mesh=mesh["shard"]), regimes.attach_replicas(model, mesh["replicate"])'
)


DIVIDED = ("rows", "S(")  # how a parameter is divided: along its first or another dimension
ALL_REDUCE = (
    "set_requires_all_reduce(False) holds for some modules and not for others in this backward "
    "pass: replicas exchange all layers together, so call it on the whole model"
)


class ShardedGradients(DividedGradients):
    """Takes the gradients of the rows that this process holds."""

    advice = (
        "shard a module around all of its calls with fully_shard, or use "
        "set_requires_gradient_sync(False) for all but the last"
    )

    def __init__(self, model: nn.Module, replicas: Any) -> None:
        """
        Args:
            replicas: the mesh dimension between replicas.

        Raises:
            ConfigError: the hook cannot serve the model, or it has a hook already.
        """
        network = uncompiled(model)
        if (got := mesh_fault(replicas)) is not None:
            raise ConfigError(
                f'the mesh of replicas: got {got}, expected one dimension, mesh["replicate"]: '
                f"{WRITE}"
            )
        parameters = _sharded_parameters(network, replicas)
        mesh, local = _one_mesh(parameters), [rows_of(p, p) for p in parameters.values()]
        layers = [Layer(name, _shape(p)) for name, p in parameters.items()]
        super().__init__(network, parameters, layers, local, replicas, mesh)
        check_rows(parameters, self.local, self.mesh)
        self.bucket_bytes = BUCKET * self.mesh.size()
        self.param_groups = all_param_groups(network)
        self.present = PresentParameters(self.param_groups, parameters)

    def refuse_columns(self) -> None:
        """Raise ConfigError unless each parameter is divided by its rows, over a mesh of one
        dimension, as the movements of local steps need."""
        for name, parameter in self.parameters.items():
            if describe_sharding(parameter)[1] not in (["rows"], ["copies"]):  # type: ignore[index]
                raise ConfigError(
                    f"parameter {name!r} is not divided by its rows, over one dimension of a mesh, "
                    'as local steps need: fully_shard(model, mesh=mesh["shard"])'
                )

    def start_alike(self) -> None:
        super().start_alike()
        for group in self.param_groups:  # which average by themselves since an earlier ``close``
            if isinstance(hook := all_reduce_hook(group), BetweenReplicas):
                set_all_reduce_hook(group, hook.own)

    def make_state(self, hook: Any, branch: bool, saved: Any) -> ShardedState:
        return ShardedState(hook, branch, saved)

    def connect_receiver(self, receiver: Any) -> None:
        super().connect_receiver(receiver)
        self.native = reduce_within(self.param_groups)
        self._multiply_sums()
        self.handle = self.network.register_forward_pre_hook(
            lambda *_: None if torch.compiler.is_compiling() else self._begin_forward()
        )

    def _begin_forward(self) -> None:
        """Before each pass: a script may set a factor, and other parameters, at any time."""
        self._multiply_sums()
        if self.present.follow():
            self._hook_parameters()
            self.receiver.follow([[p] for p in self.parameters.values()])

    def close(self) -> None:
        super().close()
        self.handle.remove()
        reduce_everywhere(self.native)
        native = {id(group) for group, *_ in self.native}
        for group in self.param_groups:
            hook = all_reduce_hook(group)
            if id(group) in native:  # whose replicas torch's HSDP averages again
                set_all_reduce_hook(group, hook.own if isinstance(hook, BetweenReplicas) else hook)
                continue
            if not isinstance(hook, BetweenReplicas):
                hook = BetweenReplicas(group, self._replicas)
                set_all_reduce_hook(group, hook)
            hook.averages = True

    def detach(self) -> None:
        """Let replicas exchange no gradients any more."""
        for group in self.param_groups:
            if isinstance(hook := all_reduce_hook(group), BetweenReplicas):
                set_all_reduce_hook(group, hook.own)

    def _multiply_sums(self) -> None:
        """Where the user has set what a sum of gradients is divided by, FSDP2 divides the sum of
        one replica by it. The sum of all replicas is their mean, which is exchanged, times their
        number."""
        for group in self._divided_by_factor():
            set_all_reduce_hook(group, BetweenReplicas(group, self._replicas))

    def _divided_by_factor(self) -> list[Any]:
        """The groups with a factor whose gradients are not multiplied yet."""
        return [
            group
            for group in self.param_groups
            if getattr(group, "gradient_divide_factor", None) is not None
            and not isinstance(all_reduce_hook(group), BetweenReplicas)
        ]

    def _begin_pass(self, now: int) -> None:
        if self._divided_by_factor():
            raise ConfigError(
                "set_gradient_divide_factor or set_all_reduce_hook was called between the forward "
                "and the backward pass, or in a compiled model after attach: call it before attach"
            )
        super()._begin_pass(now)

    def is_postponed(self) -> bool:
        """Return whether this pass reduces within replicas alone, as after
        ``set_requires_all_reduce(False)``."""
        kinds = {x.all_reduce_grads for x in self.param_groups if x.reduce_grads}
        if len(kinds) > 1:
            raise ConfigError(ALL_REDUCE)
        return kinds == {False}

    def shared_facts(self) -> dict[str, Any]:
        kinds = [str(p.dtype) for p in self.parameters.values()]
        return {"islands": {"shards": self.mesh.size(), "types": sorted({*kinds})}}

    def local_gradient(self, parameter: Any) -> Tensor:
        """Return this process's rows of a gradient that FSDP2 has reduced within the replica."""
        return rows_of(parameter.grad, parameter)


def rows_of(tensor: Any, parameter: Any) -> Tensor:
    """Return this process's part of a parameter, or of its gradient, as rows: the dimension along
    which it is divided comes first."""
    return local_part(tensor).movedim(divided_dimension(parameter), 0)


def _shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole layer, whose rows are divided."""
    divided, shape = divided_dimension(parameter), tuple(parameter.shape)
    return (shape[divided], *shape[:divided], *shape[divided + 1 :])


class BetweenReplicas:
    """Receives a group's gradient from FSDP2 once it is reduced within the replica, before it is
    added to ``.grad``: an all-reduce hook (``set_all_reduce_hook``), which calls the user's own
    first.

    Attributes:
        own: the user's.
        averages: no job exchanges gradients any more: they are summed here, as torch's HSDP does.
    """

    averages = False

    def __init__(self, group: Any, replicas: Any) -> None:
        self.group, self.replicas, self.own = ref(group), replicas, all_reduce_hook(group)

    def __call__(self, output: Tensor) -> None:
        if self.own is not None:
            self.own(output)
        if self.averages:
            Group.of_torch(self.replicas.get_group()).all_reduce(output).wait()
        # the sum of one replica is divided by the factor; a mean is exchanged
        group, count = self.group(), self.replicas.size()
        summed = group is not None and group.gradient_divide_factor is not None
        if summed != self.averages:
            output.mul_(count if summed else 1 / count)
        if output.is_cuda:
            # With such a hook FSDP2 works on in another stream than that of the reduce-scatter,
            # which has allocated the memory and would use it again too early.
            output.record_stream(torch.cuda.current_stream(output.device))


def named_trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by their names in the bare model; one that several
    modules share appears once. Raise ConfigError if there is none."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("the model has no parameter to train: there is nothing to exchange")
    plain = plain_names(named)
    return {plain[name].replace(CHECKPOINT, ""): p for name, p in named.items()}


def _sharded_parameters(network: nn.Module, replicas: Any) -> dict[str, nn.Parameter]:
    """`named_trainable`, of a model that is divided within replicas.

    Raises:
        ConfigError: it is not, or otherwise than by ``fully_shard`` over one dimension of a mesh.
    """
    parameters = named_trainable(network)
    for name, parameter in parameters.items():
        found = describe_sharding(parameter)
        if found is None:
            raise ConfigError(
                f"parameter {name!r} is not sharded: call fully_shard on the whole model as well, "
                f"after its blocks, and attach before the first step: {WRITE}"
            )
        mesh, ways = found
        if len(ways) == 2 and ways[0] == "copies" and ways[1].startswith(DIVIDED):
            between = Group.of_torch(mesh.get_group(0)).ranks
            if mesh.mesh_dim_names is None or between != Group.of_torch(replicas.get_group()).ranks:
                raise ConfigError(
                    f"parameter {name!r} is sharded over a mesh of two dimensions, of which the "
                    f"first must be the one between replicas, by name: write {WRITE}"
                )
            continue
        if ways == ["copies"] and mesh.size() > 1:
            raise ConfigError(
                f"parameter {name!r} has copies on {mesh.size()} processes, between which replicate"
                "() exchanges uncompressed: give it a mesh dimension of size 1, "
                'mesh = init_device_mesh(device, (processes, 1), mesh_dim_names=("replicate", '
                '"shard")), replicate(model, mesh=mesh["shard"]), '
                'regimes.attach_replicas(model, mesh["replicate"])'
            )
        if mesh.ndim > 1:
            raise ConfigError(
                f"parameter {name!r} is divided over {mesh.ndim} dimensions of a mesh, as by "
                "tensor parallelism within a replica, which the hook does not serve: divide it by "
                "fully_shard alone, or use tensor parallelism with DistributedDataParallel: "
                f"{WRITE}"
            )
        if ways != ["copies"] and not (len(ways) == 1 and ways[0].startswith(DIVIDED)):
            raise ConfigError(
                f"parameter {name!r} is divided as {', '.join(ways)}: the hook needs its rows "
                "divided over one dimension of a mesh, as fully_shard does by default"
            )
    return parameters


CHECKPOINT = "_checkpoint_wrapped_module."  # of torch's checkpoint_wrapper


def _one_mesh(parameters: Mapping[str, nn.Parameter]) -> Any:
    """The mesh within a replica, which all parameters share."""
    meshes: dict[str, Any] = {}
    for name, parameter in parameters.items():
        meshes[name] = mesh = (describe_sharding(parameter) or [None])[0]
        if mesh is not None and mesh.ndim > 1:  # HSDP's: within a replica it is the second one
            meshes[name] = mesh[mesh.mesh_dim_names[1]]
    first = next(iter(meshes.values()))
    for name, mesh in meshes.items():
        if mesh != first:
            raise ConfigError(
                f"parameter {name!r} is sharded over another mesh than {next(iter(meshes))!r}: "
                "use one mesh for all modules"
            )
    return first


def check_rows(parameters: Mapping[str, nn.Parameter], local: Sequence[Tensor], mesh: Any) -> None:
    """Raise ConfigError unless a hook can handle what this process holds of the parameters."""
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
