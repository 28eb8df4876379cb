"""Models that FSDP2 divides by rows over a dimension of a mesh: their DTensors and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from regimes.collectives.requests import Shard
from regimes.errors import ConfigError


def divide(module: nn.Module, mesh: Any) -> None:
    """Let FSDP2 divide a module's parameters, but for those of parts that are divided already.
    They are whole during its passes alone: one of an evaluation has no backward to end it."""
    from torch.distributed.fsdp import fully_shard  # its import is slow

    fully_shard(module, mesh=mesh, reshard_after_forward=True)


def mesh_fault(mesh: Any) -> str | None:
    """Describes what was passed instead of a one-dimensional DeviceMesh; None if it is one."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        return f"a {type(mesh).__name__}"
    return None if mesh.ndim == 1 else f"a mesh of {mesh.ndim} dimensions"


def sharding(tensor: Tensor) -> tuple[Any, list[str]] | None:
    """The mesh of a sharded parameter (a DTensor) and how each of its dimensions divides it, like
    "rows" or "copies"; None of a plain tensor."""
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor import Shard as Rows

    if not isinstance(tensor, DTensor):
        return None
    names: dict[Placement, str] = {Rows(0): "rows"}
    places = tensor.placements
    return tensor.device_mesh, [
        names.get(p, "copies" if p.is_replicate() else f"{p}") for p in places
    ]


def local_part(tensor: Any) -> Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_tensor(rows: Tensor, mesh: Any, shape: Sequence[int]) -> Tensor:
    """A DTensor of a whole shape, of which this process holds some rows."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Rows

    full = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        rows, mesh, [Rows(0)], run_check=False, shape=full.shape, stride=full.stride()
    )


def as_gradient(parameter: Tensor, rows: Tensor) -> Tensor:
    """This process's gradient rows in the form of ``.grad``: a DTensor if the parameter is one."""
    if not hasattr(parameter, "to_local"):
        return rows
    placed: Any = parameter
    return sharded_tensor(rows, placed.device_mesh, parameter.shape)


def as_stored(parameter: Tensor, whole: Tensor) -> Tensor:
    """A tensor of a parameter's shape as the parameter is stored: of a sharded one this process's
    rows, in memory of their own."""
    if not hasattr(parameter, "to_local"):
        return whole
    mesh = (placed := cast("Any", parameter)).device_mesh
    rows = Shard(mesh.get_local_rank(), mesh.size(), parameter.shape[0]).here
    return sharded_tensor(whole[rows].to(placed.device, copy=True), mesh, parameter.shape)


def as_whole(tensor: Any) -> Tensor:
    """The full tensor of a DTensor (``full_tensor()``, a collective: all processes of the island
    must call it); any other tensor as it is."""
    with torch.no_grad():
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def as_reduced(total: Tensor, op: Any, count: int) -> Tensor:
    """A sum over so many processes as an operation of torch wants it; changes the sum in place.

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


def divided(model: nn.Module) -> tuple[nn.Module, Any]:
    """What FSDP2 has divided of a model, and over which mesh: the model, or the only part of it
    that has parameters; the mesh is None if no parameter is divided."""
    found = filter(None, map(sharding, model.parameters()))
    mesh = next((mesh for mesh, _ in found), None)
    while not any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        parts = [part for part in model.children() if any(True for _ in part.parameters())]
        if (
            mesh is None
            or len(parts) != 1
            or next(model.parameters(recurse=False), None) is not None
        ):
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
    """The names of all that a checkpoint of ``torch.distributed.checkpoint`` holds.

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
