"""Workers whose layers are divided among the processes of an island: the process groups of a
sharded model, and their collectives.

An island (a machine, or a few with fast links between them) holds one replica, each of its
processes some rows of every layer (``Shard``). Islands are the W workers: means and gathers go
between the processes that hold the same rows, ``sum_shards`` and ``join_shards`` go between the
processes of an island. Other collectives (checks of agreement, the guard of calls) use all
processes.

A matrix whose rows are divided is compressed as one (PowerSGD): sums over shards are
reduce-scattered first, and each process then sends only its part between islands, so that an island
sends each number once, whatever its number of shards.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives.group import GroupWorld, _alive, _store
from regimes.collectives.processes import GATHER, ProcessWorld
from regimes.collectives.requests import NO_LAYER, JoinShards, Layer, Shard, Traffic
from regimes.collectives.world import Meter
from regimes.errors import ConfigError, TrainingError

_made = itertools.count()  # the same on all processes, which make their worlds in one order
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


class Islands(ProcessWorld):
    """W workers, each divided among the processes of an island.

    Attributes:
        shard: this process's place in its island.
        rank: its place among all, ``island * shards + shard``.
    """

    shard: int
    _across: weakref.ref[Any]  # the group of the processes that hold the same rows
    _inside: weakref.ref[Any]  # the group of this island
    _kind: str

    @property
    def peers(self) -> tuple[Any, int]:
        return _alive(self._across), self.processes // self.shards

    @property
    def inside(self) -> Any:
        """The group of this island. Not to be stored."""
        return _alive(self._inside)

    # -- among the shards of a worker ---------------------------------------------------------

    def sum_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        shares: dict[int, Tensor] = {}
        for ids in _by_type(tensors):
            chunks = [-(-tensors[i].shape[1] // self.shards) for i in ids]
            columns = [
                _padded(tensors[i], chunk, self.shards)
                for i, chunk in zip(ids, chunks, strict=True)
            ]
            whole = torch.cat(columns, dim=1)  # [shards, numbers]
            if self._kind == "gloo":
                # The Work of gloo's reduce_scatter never becomes completed, which `_finish` polls.
                self._wait(dist.all_reduce, whole, group=self.inside, async_op=True)
                mine = whole[self.shard]
            else:
                mine, flat = whole.new_empty(whole.shape[1]), whole.flatten()
                self._wait(getattr(dist, SCATTER), mine, flat, group=self.inside, async_op=True)
            rows = [len(tensors[i]) for i in ids]
            pieces = mine.split([n * chunk for n, chunk in zip(rows, chunks, strict=True)])
            for i, n, piece in zip(ids, rows, pieces, strict=True):
                here = Shard(self.shard, self.shards, tensors[i].shape[1]).here
                shares[i] = piece.view(n, -1)[:, : here.stop - here.start]
        return [shares[i] for i in range(len(tensors))]

    def join_shards(self, parts: Sequence[JoinShards]) -> list[Tensor]:
        joined: dict[int, Tensor] = {}
        tensors = [part.tensor for part in parts]
        for ids in _by_type(tensors):
            chunks = [parts[i].chunk for i in ids]
            mine = torch.cat([_filled(tensors[i], parts[i].chunk) for i in ids])
            everyone = mine.new_empty((self.shards, len(mine)))
            self._wait(
                getattr(dist, GATHER), everyone.view(-1), mine, group=self.inside, async_op=True
            )
            for i, piece in zip(ids, everyone.split(chunks, dim=1), strict=True):
                joined[i] = piece.reshape(-1)[: parts[i].size]
        return [joined[i] for i in range(len(tensors))]

    def parts(self, layers: Sequence[Layer]) -> list[Layer]:
        several = self.shards > 1
        return [layer.on(self.shard, self.shards) if several else layer for layer in layers]

    def add_shards(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        self._wait(dist.all_reduce, total, group=self.inside, async_op=True)
        return total

    def whole_norms(self, norms: Tensor) -> Tensor:
        return norms if self.shards == 1 else self.add_shards(norms.square()).sqrt()

    def take_meter(self, count: int) -> Meter:
        meter = self.meter.take()
        layers = [NO_LAYER, *range(count)]
        counts = [x for i in layers for x in (meter.layers[i].floats, meter.layers[i].bytes)]
        # float64 holds whole numbers up to 2^53
        numbers = [*counts, *(float(meter.sent[kind]) for kind in sorted(meter.sent))]
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        sums = iter(self.add_shards(total).tolist())
        for i in layers:
            meter.layers[i] = Traffic(next(sums), int(next(sums)))
        meter.sent.update({kind: int(next(sums)) for kind in sorted(meter.sent)})
        return meter


class IslandWorld(Islands, GroupWorld):
    """One island for each worker. All its processes must create it."""

    def __init__(
        self, replicas: Any, island: Any, device: torch.device, timeout: float, call: str
    ) -> None:
        """
        Args:
            replicas: the process group of those processes, one of each island, that hold the same
                rows.
            island: the process group of the processes that hold one replica together.
        """
        across = dist.get_process_group_ranks(replicas)
        inside = dist.get_process_group_ranks(island)
        ranks = _all_ranks(across, inside, timeout, call)
        GroupWorld.__init__(self, replicas, device, timeout, call, ranks)
        self.workers, self.shards = len(across), len(inside)
        here, self.shard = divmod(self.rank, self.shards)
        self.hosted, self.meter.workers = range(here, here + 1), self.workers
        self._source = across[0]
        self._across = self._make(across, self._kind)
        self._inside = self._make(inside, self._kind)

    def _all_groups(self) -> list[weakref.ref[Any]]:
        return [*super()._all_groups(), self._across, self._inside]

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of all islands with those of the first, not counted as traffic."""
        for ids in _by_type(tensors):
            flat = torch.cat([tensors[i].detach().flatten() for i in ids])
            self._wait(dist.broadcast, flat, self._source, group=self.peers[0], async_op=True)
            pieces = flat.split([tensors[i].numel() for i in ids])
            for i, piece in zip(ids, pieces, strict=True):
                tensors[i].detach().copy_(piece.view(tensors[i].shape))


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


def _by_type(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of the tensors that can travel together, the same order on all processes."""
    kinds = sorted({t.dtype for t in tensors}, key=str)
    return [[i for i, t in enumerate(tensors) if t.dtype == kind] for kind in kinds]


def _padded(tensor: Tensor, chunk: int, shards: int) -> Tensor:
    """``[L, k]`` with zeros at the end of k, as ``[shards, L * chunk]``: for each shard its share
    of each row."""
    if (room := shards * chunk - tensor.shape[1]) > 0:
        tensor = torch.nn.functional.pad(tensor, (0, room))
    return tensor.view(-1, shards, chunk).transpose(0, 1).reshape(shards, -1)


def _filled(tensor: Tensor, size: int) -> Tensor:
    """A tensor as one vector of a size, with zeros at its end."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, size - len(flat))) if len(flat) < size else flat


def _all_ranks(
    across: Sequence[int], inside: Sequence[int], timeout: float, call: str
) -> list[int]:
    """The ranks of all islands, one island after the other. Each process posts the ranks that hold
    the same rows as it, and reads the posts of the other processes of its island."""
    store = _store(f"islands/{next(_made)}/{'-'.join(map(str, inside))}")
    store.set(str(dist.get_rank()), json.dumps(list(across)))
    columns = []
    for rank in inside:
        try:
            store.wait([str(rank)], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TrainingError(
                f"process {dist.get_rank()} has waited {timeout:.0f} s in {call} for process "
                f"{rank}: all processes must call it"
            ) from error.with_traceback(None)
        columns.append(json.loads(store.get(str(rank))))
    ranks = [rank for island in zip(*columns, strict=False) for rank in island]
    alike = len({*map(len, columns)}) == 1
    if not alike or len({*ranks}) < len(ranks) or set(inside) - set(ranks):
        raise ConfigError(
            f"replicas: the processes {sorted({*across})} hold the same rows as process "
            f"{dist.get_rank()}, and {sorted({*inside})} are in its island: `replicas` "
            'must be the mesh\'s other dimension, replicas=mesh["replicate"] of a model sharded '
            'over mesh["shard"]'
        )
    return ranks
