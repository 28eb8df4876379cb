"""A run whose launched processes are islands: a worker is divided among the processes of one, by
FSDP2.

What the processes of an island ask of each other, and what travels between islands, is that of the
hook (``islands``); here is what a trainer needs besides: groups of its own, sums within the model,
evaluation, whole tensors for checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from regimes.collectives import processes
from regimes.collectives.group import _alive
from regimes.collectives.islands import Islands
from regimes.collectives.launcher import check_islands, launched
from regimes.collectives.processes import _abort_nccl
from regimes.collectives.requests import JoinShards, Shard
from regimes.collectives.world import Meter, World
from regimes.errors import ConfigError

_SIGNS = re.compile(r"gloo|nccl|connection|timed out", re.IGNORECASE)  # of a collective of FSDP2


class LaunchedIslands(Islands):
    """The launched processes as islands, each of which hosts W / islands workers.

    Attributes:
        mesh: the processes of this island, for ``fully_shard``.
    """

    def __init__(
        self,
        workers: int,
        device: torch.device,
        store: dist.Store | None = None,
        nccl_limit: float | None = None,
        *,
        shards: int,
    ) -> None:
        count, rank = dist.get_world_size(), dist.get_rank()
        island, self.shard = divmod(rank, shards)
        World.__init__(self, workers, processes=count // shards, rank=island)
        self.processes, self.rank, self.shards = count, rank, shards
        self.device, self.store = device, store
        self._kind = "gloo" if nccl_limit is None else "nccl"
        if store is not None and nccl_limit is not None:
            self._watch(store, nccl_limit)
        asked = self.gather_object(shards)  # before groups are made, in which others would wait
        if {*asked} != {shards}:
            raise ConfigError(f"--shards: the processes ask for {asked}, expected one number")
        place = torch.arange(count).view(-1, shards)
        # All processes make all groups. The thread of the buckets, FSDP2 and the model's layers
        # have one each: on a shared one their collectives would mix in another order on each
        # process.
        self._inside, self._layers = (_own_group(place) for _ in range(2))
        self._across = _own_group(place.T)
        names = ("replicate", "shard")
        self.mesh = init_device_mesh(device.type, tuple(place.shape), mesh_dim_names=names)["shard"]

    def divide(self, module: nn.Module) -> None:
        """Let FSDP2 divide a module's parameters, but for those of parts that are divided already.
        They are whole during its passes alone: one of an evaluation has no backward to end it."""
        from torch.distributed.fsdp import fully_shard  # its import is slow

        fully_shard(module, mesh=self.mesh, reshard_after_forward=True)

    @contextlib.contextmanager
    def contact(self, where: str) -> Iterator[None]:
        failed: RuntimeError | None = None
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not _SIGNS.search(str(error)):
                raise
            failed = error
        if failed is not None:  # outside of the handler: a chained error would keep the group
            raise self._lost(where, failed)

    @property
    def evaluators(self) -> World:
        return _OneForEach(self)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """An island sends them once, and so they are counted by its first process."""
        meter = self.meter
        if self.shard:
            self.meter = Meter(meter.dtype, meter.workers)
        super().broadcast(tensors)
        self.meter = meter

    def sum_in_model(self, tensor: Tensor) -> Tensor:
        """The sum over an island within a forward pass; its gradient is summed in the same way."""
        summed: Tensor = _SumInModel.apply(tensor, self)
        return summed

    def sum_of_layer(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor that the model's layers compute, not counted as traffic."""
        total = tensor.contiguous().clone()
        self._wait(dist.all_reduce, total, group=_alive(self._layers), async_op=True)
        return total

    def whole_rows(self, tensor: Tensor, rows: int) -> Tensor:
        """A tensor whose dimension 1 is divided as the rows of a layer, ``[L, rows here, ...]``, as
        one, on the CPU."""
        mine = tensor.transpose(0, 1).contiguous()  # [rows here, L, ...]
        width, chunk = math.prod(mine.shape[1:]), Shard(0, self.shards, rows).chunk
        (joined,) = self.join_shards([JoinShards(mine.flatten(), chunk * width, rows * width)])
        return joined.view(rows, *mine.shape[1:]).transpose(0, 1).cpu().contiguous()

    def abort_communicators(self) -> None:
        super().abort_communicators()
        for group in (self._across, self._inside, self._layers):
            _abort_nccl(group())


class _OneForEach(World):
    """The islands as processes of an evaluation: those of one take the same batches, because they
    run a sharded model together."""

    def __init__(self, world: LaunchedIslands) -> None:
        islands = world.processes // world.shards
        super().__init__(world.workers, processes=islands, rank=world.rank // world.shards)
        self.world = world

    def gather_object(self, value: Any) -> list[Any]:
        return self.world.gather_object(value)[:: self.world.shards]


class _SumInModel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: LaunchedIslands) -> Tensor:
        ctx.world = world
        return world.sum_of_layer(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum_of_layer(gradients[0]), None


def connect(workers: int, device: torch.device, timeout: float, shards: int = 1) -> World:
    """The world of this process (``processes.connect``); with shards the launched processes are
    islands of so many, whose model FSDP2 divides.

    Raises:
        ConfigError: also where the processes are no islands that share the workers.
    """
    if shards == 1:
        return processes.connect(workers, device, timeout)
    check_islands(launched().count, shards, workers)
    make = functools.partial(LaunchedIslands, shards=shards)
    return processes.connect(workers, device, timeout, make)


def _own_group(places: Tensor) -> weakref.ref[Any]:
    """The group of the row of ranks that has this process."""
    made = [dist.new_group(ranks) for ranks in places.tolist()]
    mine = [dist.get_rank() in ranks for ranks in places.tolist()].index(True)
    return weakref.ref(made[mine])
