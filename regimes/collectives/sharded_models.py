"""Models that FSDP2 divides by rows over a dimension of a mesh: their DTensors and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import fsdp_state, mesh_infos, param_groups, place_of, was_gathered
from regimes.collectives.layers import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh  # for signatures elsewhere


def mesh_fault(mesh: Any) -> str | None:
    """Describe what was passed instead of a one-dimensional DeviceMesh; None if it is one."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        return f"a {type(mesh).__name__}"
    return None if mesh.ndim == 1 else f"a mesh of {mesh.ndim} dimensions"


def describe_sharding(tensor: Tensor) -> tuple[Any, list[str]] | None:
    """Return the mesh of a sharded parameter (a DTensor), and how each of its dimensions divides
    it, like "rows" or "copies"; None for a plain tensor."""
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor import Shard as Rows

    if not isinstance(tensor, DTensor):
        return None
    names: dict[Placement, str] = {Rows(0): "rows"}
    places = tensor.placements
    return tensor.device_mesh, [
        names.get(p, "copies" if p.is_replicate() else f"{p}") for p in places
    ]


def divided_dimension(tensor: Tensor) -> int:
    """Return the dimension along which a DTensor is divided; 0 if it is not divided."""
    places: Any = getattr(tensor, "placements", ())
    return next((place.dim for place in places if place.is_shard()), 0)


def reduce_within(groups: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Let FSDP2 reduce gradients among the shards of a replica alone, in parameter groups whose
    mesh has replicas, too (HSDP). Returns what `reduce_everywhere` puts back."""
    of_shards, of_replicas = mesh_infos()
    kept = []
    for group in groups:
        info, after = group.mesh_info, group.post_forward_mesh_info
        if isinstance(info, of_replicas):
            inside = of_shards(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
            separate = getattr(info, "reduce_scatter_process_group", None)
            if separate is not None:
                inside.reduce_scatter_process_group = separate
            kept.append((group, info, after))
            # torch compares both, to know where weights are gathered again
            group.post_forward_mesh_info = inside if after is info else after
            group.mesh_info = inside
    return kept


def reduce_everywhere(kept: Sequence[tuple[Any, Any, Any]]) -> None:
    """Undo ``reduce_within``."""
    for group, info, after in kept:
        group.mesh_info, group.post_forward_mesh_info = info, after


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, which a mesh divides or copies."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_tensor(rows: Tensor, mesh: Any, shape: Sequence[int]) -> Tensor:
    """Make a DTensor of a whole shape, of which this process holds ``rows``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Rows

    full = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        rows, mesh, [Rows(0)], run_check=False, shape=full.shape, stride=full.stride()
    )


def is_divided(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` has been called on this module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def fully_shard_calls(model: nn.Module) -> list[tuple[Any, list[str], Any]]:
    """List the calls of ``fully_shard`` that have divided a model, in the order of the modules:
    each call's state, the names of its modules ("" names the model), and its first module."""
    found: dict[int, tuple[Any, list[str], Any]] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        if is_divided(module):
            state = fsdp_state(module)
            found.setdefault(id(state), (state, [], module))[1].append(path)
    return list(found.values())


def all_param_groups(model: nn.Module) -> list[Any]:
    """Return the parameter groups of all calls of ``fully_shard`` that have divided a model."""
    return [group for state, *_ in fully_shard_calls(model) for group in param_groups(state)]


def current_parameter(fsdp_param: Any) -> Any:
    """Return a parameter of a group as its module has it.

    Until the first step torch's group keeps the parameter that ``fully_shard`` made, even where
    another has taken its place: a library does that which loads weights into a model that was
    divided on the meta device.
    """
    return getattr(*place_of(fsdp_param))


def has_gradient(group: Any, fsdp_param: Any) -> bool:
    """Return whether a trained parameter of a group will be in its next reduce-scatter. This is
    asked before the reduce-scatter, and after the parameter's part of the backward pass."""
    if not was_gathered(fsdp_param):
        return False
    grads = fsdp_param.unsharded_accumulated_grad, fsdp_param.unsharded_param.grad
    return grads != (None, None) or getattr(group, "reduce_scatter_unused_params", False)


def optimizer_rows(fsdp_param: Any) -> Any:
    """Return the rows of a parameter that the optimiser steps. After a forward pass without a
    backward pass its module still has the gathered weights instead."""
    is_sharded = fsdp_param.sharded_state.name == "SHARDED"
    return current_parameter(fsdp_param) if is_sharded else fsdp_param.sharded_param


class PresentParameters:
    """Follows the parameters of a divided model, in whose places a script may put others, as
    ``load_state_dict(..., assign=True)`` does.

    Attributes:
        parameters: by name, as they are now; changed in place.
    """

    def __init__(self, groups: Sequence[Any], parameters: dict[str, Any]) -> None:
        """``groups``: the parameter groups of FSDP2."""
        self.parameters = parameters
        names = {id(p): name for name, p in parameters.items()}
        rows = [row for group in groups for row in group.fsdp_params]
        found = [(names.get(id(optimizer_rows(row))), row) for row in rows]
        self._rows = [(name, row) for name, row in found if name is not None]

    def follow(self) -> bool:
        """Find the present parameters; return True if one has been replaced."""
        moved = False
        for name, row in self._rows:
            if (now := optimizer_rows(row)) is not self.parameters[name]:
                self.parameters[name], moved = now, True
        return moved


def join_rows(parts: Sequence[Any], count: Callable[[Tensor, int], None]) -> list[Tensor]:
    """Copy whole tensors from DTensors that one dimension of their mesh divides, by one all-gather
    for each type of numbers. All processes of that dimension call it.

    Args:
        count: called with what this process sends in each, and the number of processes that get it.
    """
    from regimes.collectives.process_group import Group

    mesh, places = parts[0].device_mesh, parts[0].placements
    divider = next((i for i, place in enumerate(places) if place.is_shard()), None)
    local = [local_part(part).detach() for part in parts]
    if divider is None or mesh.size(divider) == 1:
        return [rows.clone() for rows in local]
    ranks, joined = mesh.size(divider), dict[int, Tensor]()
    group = Group.of_torch(mesh.get_group(divider))
    for kind in sorted({rows.dtype for rows in local}, key=str):
        ids = [i for i, rows in enumerate(local) if rows.dtype == kind]
        dims = [parts[i].placements[divider].dim for i in ids]
        # FSDP2 gives each rank ceil(n / ranks) rows while there are any: an all-gather, whose parts
        # are equal, pads those of the last ranks
        chunks = [-(-parts[i].shape[dim] // ranks) for i, dim in zip(ids, dims, strict=True)]
        sizes = [
            chunk * parts[i].numel() // max(1, parts[i].shape[dim])
            for i, dim, chunk in zip(ids, dims, chunks, strict=True)
        ]
        mine = local[ids[0]].new_zeros(sum(sizes))
        for i, room in zip(ids, mine.split(sizes), strict=True):
            room[: local[i].numel()].view(local[i].shape).copy_(local[i])
        everyone = mine.new_empty(ranks, len(mine))
        count(mine, ranks - 1)
        group.all_gather(everyone.view(-1), mine).wait()
        columns = everyone.split(sizes, dim=1)
        for i, dim, column in zip(ids, dims, columns, strict=True):
            rest, rows = parts[i].shape, list[Tensor]()
            for rank in range(ranks):
                here = Shard(rank, ranks, parts[i].shape[dim]).here
                shape = [*rest[:dim], here.stop - here.start, *rest[dim + 1 :]]
                rows.append(column[rank][: math.prod(shape)].view(shape))
            joined[i] = torch.cat(rows, dim)
    return [joined[i] for i in range(len(parts))]


def mean_over(mesh: Any, flat: Tensor) -> Tensor:
    """Return the mean of a tensor over all processes of a mesh, which all call this."""
    from regimes.collectives.process_group import Group

    total = flat.clone()
    for dim in range(mesh.ndim):
        Group.of_torch(mesh.get_group(dim)).all_reduce(total).wait()
    return total / mesh.size()


def as_reduced(total: Tensor, op: Any, count: int) -> Tensor:
    """Turn a sum over so many processes into what an operation of torch asks for. This changes the
    sum in place.

    Raises:
        ConfigError: it is neither a sum nor a mean.
    """
    from torch.distributed import ReduceOp

    if op == ReduceOp.SUM:
        return total
    if op == ReduceOp.AVG:
        return total.div_(count)
    if op == ReduceOp.PREMUL_SUM:
        return total.mul_(op.__getstate__()[1])  # by its factor
    raise ConfigError(f"reduce-scatter: torch asks for {op}, expected a sum or a mean")


def find_divided(model: nn.Module) -> tuple[nn.Module, Any]:
    """Find what FSDP2 has divided, and over which mesh: the model, or its only part with
    parameters. The mesh is None if no parameter is divided."""
    found = filter(None, map(describe_sharding, model.parameters()))
    mesh = next((mesh for mesh, _ in found), None)
    while not is_divided(model):
        parts = [part for part in model.children() if any(True for _ in part.parameters())]
        has_own = next(model.parameters(recurse=False), None) is not None
        if mesh is None or len(parts) != 1 or has_own:
            break
        (model,) = parts
    return model, mesh


def save_parts(parts: dict[str, Any], folder: str | Path) -> None:
    """Save a checkpoint of ``torch.distributed.checkpoint``; all processes call this.

    Args:
        parts: tensors or objects with a ``state_dict``, by name.
    """
    from torch.distributed import checkpoint

    checkpoint.save(parts, checkpoint_id=folder)


def load_parts(parts: dict[str, Any], folder: str | Path) -> None:
    """Load into the parts what ``save_parts`` saved; all processes call this.

    Raises:
        ConfigError: it cannot be read, or a part refuses it.
    """
    from torch.distributed import checkpoint

    try:
        checkpoint.load(parts, checkpoint_id=folder)
    except checkpoint.CheckpointException as error:
        why = next(iter(error.failures.values()))[0]
        raise ConfigError(f"torch cannot read it ({why})") from None


def saved_names(saved: Any) -> list[str]:
    """List the names of all that a checkpoint of ``torch.distributed.checkpoint`` holds.

    Args:
        saved: its folder, or a ``StorageReader``.

    Raises:
        ConfigError: it cannot be read.
    """
    from torch.distributed.checkpoint import FileSystemReader

    try:
        reader = saved if hasattr(saved, "read_metadata") else FileSystemReader(saved)
        return list(reader.read_metadata().state_dict_metadata)
    except Exception as error:  # of any storage
        raise ConfigError(f"saved: {saved} cannot be read as a checkpoint ({error})") from None
