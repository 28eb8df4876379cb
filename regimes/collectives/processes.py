"""W workers on several processes of torch.distributed, and the shards of a worker.

A worker (a replica) may be divided among processes: each holds some rows of every layer
(``Shard``). Means and gathers then go between the processes with the same rows (``across``),
``sum_shards`` and ``join_shards`` between the processes of one replica (``within``). Other
collectives (checks of agreement, the guard of calls) use all processes.

PowerSGD compresses a matrix with divided rows as one: sums over shards are reduce-scattered first,
and each process then sends only its part to other replicas. So a replica sends each number once,
whatever its number of shards.

Worlds differ in values alone: ``connect`` makes the world of launched processes, ``group`` the
worlds of a user's process groups. Processes of a node that have whole layers each are one worker,
too (``node``): their gradients' mean is divided among them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives.layers import NO_LAYER, Traffic
from regimes.collectives.lost_processes import Faults
from regimes.collectives.meter import Meter
from regimes.collectives.process_group import Group
from regimes.collectives.world import World, by_type, overwrite

_SIGNS = re.compile(r"gloo|nccl|connection|timed out", re.IGNORECASE)  # of a collective of FSDP2


@dataclass(frozen=True)
class TensorParallel:
    """Describes layers that are also divided among the processes of another group (tensor
    parallel).

    Attributes:
        group: these processes.
        shares: of each layer, how much of the group's sum of squares is the layer's: 1, or
            1 / processes where each process has a copy.
    """

    group: Group
    shares: Tensor


class Owner(Protocol):
    """Has made the groups of a world, and ends them."""

    def abort(self) -> None:
        """Leave the groups at once, and wait for no other process from here on."""

    def close(self) -> None:
        """Leave the groups."""


@final
class ProcessWorld(World):
    """Spreads W workers over P processes (gloo or NCCL).

    Python objects travel over gloo in both cases: over NCCL they would need a GPU, and torch takes
    the current one of whichever thread asks.

    Attributes:
        everyone: all processes, one replica's after the other.
        across: the processes that hold the same rows, one of each replica.
        within: the processes of this replica; None: each process holds whole layers.
        mesh: all processes, where ``fully_shard`` divides a model among them.
        tensor: None without tensor parallelism.
        guard: of the calls that all processes make.
    """

    lockstep = True

    def __init__(
        self,
        workers: int,
        device: torch.device,
        everyone: Group | None = None,
        *,
        across: Group | None = None,
        within: Group | None = None,
        mesh: Any = None,
        node: bool = False,
        tensor: TensorParallel | None = None,
        faults: Faults | None = None,
        owner: Owner | None = None,
    ) -> None:
        """
        Args:
            everyone: None: torch's default group.
            across: None: everyone.
            owner: None: the groups are the caller's.
        """
        everyone = everyone or Group.of_default()
        count, rank, shards = len(everyone), everyone.index, 1 if within is None else len(within)
        super().__init__(workers, processes=count, rank=rank, shards=shards)
        self.device, self.everyone, self.across = device, everyone, across or everyone
        self.within, self.mesh, self.tensor, self.node = within, mesh, tensor, node
        self.faults, self.owner = faults or Faults(rank, count), owner
        self.guard, self.divided = self.faults.guard, tensor is not None

    # -- requests ----------------------------------------------------------------------------

    def mean_over_workers(self, tensors: list[Tensor]) -> list[Tensor]:
        answers: list[Tensor] = [torch.empty(0)] * len(tensors)
        for ids in by_type(tensors):
            own = [tensors[i] for i in ids]
            if self.hosted_count > 1:
                own = [mean[None] for mean in super().mean_over_workers(own)]
            flat = torch.cat([part.reshape(-1) for part in own])
            if len(flat):  # a share may be empty, on all peers alike
                self._wait_for(self.across.all_reduce, flat)
            flat /= len(self.across)
            pieces = flat.split_with_sizes([part.numel() for part in own])  # split is slow Python
            for i, piece, part in zip(ids, pieces, own, strict=True):
                answers[i] = piece if part.ndim == 2 else piece.view(part.shape[1:])
        return answers

    def all_gather(self, tensors: list[Tensor]) -> list[Tensor]:
        wires = [without_gaps(t.reshape(self.hosted_count, -1)).view(torch.uint8) for t in tensors]
        flat = torch.cat(wires, dim=1)  # [L, bytes]
        everyone = flat.new_empty((self.workers, flat.shape[1]))
        self._wait_for(self.across.all_gather, everyone, flat)
        pieces = everyone.split([w.shape[1] for w in wires], dim=1)
        return [
            from_bytes(p, t.dtype, (self.workers, *t.shape[1:]))
            for p, t in zip(pieces, tensors, strict=True)
        ]

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        """Exchange workers' parts as ``World.all_to_all`` does. The parts for one process, of all
        its workers and tensors, travel together."""
        shape = self.hosted_count, self.workers, -1
        wires = [without_gaps(t.reshape(shape)).view(torch.uint8) for t in tensors]
        flat = torch.cat(wires, dim=2)  # [L, W, bytes]
        flat = flat.unflatten(1, (len(self.across), self.hosted_count)).transpose(0, 1).contiguous()
        received = torch.empty_like(flat)  # [P, L of the sender, L of ours, bytes]
        self._wait_for(self.across.all_to_all, received, flat)
        everyone = received.flatten(0, 1).transpose(0, 1)  # [L, W, bytes]
        pieces = everyone.split([w.shape[2] for w in wires], dim=2)
        return [from_bytes(p, t.dtype, t.shape) for p, t in zip(pieces, tensors, strict=True)]

    # -- among the shards of a worker ---------------------------------------------------------

    def sum_shards(self, tensors: list[Tensor], chunks: Sequence[int] = ()) -> list[Tensor]:
        if self.within is None:
            return tensors
        shares: dict[int, Tensor] = {}
        chunks = chunks or [-(-tensor.shape[1] // self.shards) for tensor in tensors]
        for ids in by_type(tensors):
            columns = [_pad_shards(tensors[i], chunks[i], self.shards) for i in ids]
            whole = torch.cat(columns, dim=1)  # [shards, numbers]
            if self.within.backend == "gloo":
                # The Work of gloo's reduce_scatter never becomes completed, for which we poll.
                self._wait_for(self.within.all_reduce, whole)
                mine = whole[self.shard]
            else:
                mine = whole.new_empty(whole.shape[1])
                self._wait_for(self.within.reduce_scatter, mine, whole.flatten())
            pieces = mine.split([len(tensors[i]) * chunks[i] for i in ids])
            for i, piece in zip(ids, pieces, strict=True):
                n, k = tensors[i].shape
                here = min(chunks[i], max(0, k - self.shard * chunks[i]))
                shares[i] = piece.view(n, chunks[i])[:, :here]
        return [shares[i] for i in range(len(tensors))]

    def join_shards(
        self, parts: list[Tensor], chunks: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        if self.within is None:
            return super().join_shards(parts, chunks, sizes)
        joined: dict[int, Tensor] = {}
        for ids in by_type(parts):
            mine = torch.cat([_pad_to(parts[i], chunks[i]) for i in ids])
            everyone = mine.new_empty((self.shards, len(mine)))
            self._wait_for(self.within.all_gather, everyone.view(-1), mine)
            pieces = everyone.split([chunks[i] for i in ids], dim=1)
            for i, piece in zip(ids, pieces, strict=True):
                joined[i] = piece.reshape(-1)[: sizes[i]]
        return [joined[i] for i in range(len(parts))]

    def add_shards(self, tensor: Tensor) -> Tensor:
        return tensor if self.within is None else self.sum_over(self.within, tensor.clone())

    def sum_over(self, group: Group, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with its sum over a group, and return it."""
        self._wait_for(group.all_reduce, tensor)
        return tensor

    def take_meter(self, count: int) -> Meter:
        meter = self.meter.take_counts()
        if self.within is None:
            return meter
        layers = [NO_LAYER, *range(count)]
        counts = [x for i in layers for x in (meter.layers[i].floats, meter.layers[i].bytes)]
        # float64 holds whole numbers up to 2^53
        tables = (meter.sent, meter.dense)  # sorted below: the shards add up equal kinds
        numbers = [*counts, *(float(table[kind]) for table in tables for kind in sorted(table))]
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        sums = iter(self.add_shards(total).tolist())
        for i in layers:
            meter.layers[i] = Traffic(next(sums), int(next(sums)))
        for table in tables:
            table.update({kind: int(next(sums)) for kind in sorted(table)})
        return meter

    def broadcast_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite all replicas' tensors with the first replica's, not counted as traffic."""
        for ids in by_type(tensors):
            flat = torch.cat([tensors[i].detach().flatten() for i in ids])
            self._wait_for(self.across.broadcast, flat)
            overwrite([tensors[i] for i in ids], flat)

    # -- norms of whole layers ------------------------------------------------------------------

    def whole_norms(self, norms: Tensor) -> Tensor:
        if self.tensor is not None:
            squares = norms.square() * self.tensor.shares.to(norms.dtype)
            return self.sum_over(self.tensor.group, squares).sqrt()
        return norms if self.shards == 1 else self.add_shards(norms.square()).sqrt()

    def min_count(self, count: int) -> int:
        if self.tensor is None:
            return count
        least = torch.tensor([count], device=self.device)
        self._wait_for(self.tensor.group.all_reduce, least, op=dist.ReduceOp.MIN)
        return int(least)

    # -- all processes ---------------------------------------------------------------------------

    def _broadcast(self, flat: Tensor) -> None:
        self._wait_for(self.everyone.broadcast, flat)

    def gather_object(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.processes
        self._wait_for(self.everyone.all_gather_object, everyone, value)
        return everyone

    def gather_to_first(self, value: Any) -> list[Any] | None:
        """Return every process's value on process 0, in rank order, and None on the others."""
        everyone = [None] * self.processes if self.rank == 0 else None
        self._wait_for(self.everyone.gather_object, everyone, value)
        return everyone

    def scatter_from_first(self, values: Sequence[Any] | None) -> Any:
        """Return this process's entry of the values that process 0 passes, one for each process."""
        mine = [None]
        self._wait_for(self.everyone.scatter_object, mine, values)
        return mine[0]

    def abort(self) -> None:
        self.faults.close()
        if self.owner is not None:
            self.owner.abort()

    def close(self) -> None:
        self.faults.close()
        if self.owner is not None:
            self.owner.close()

    # -- waiting ---------------------------------------------------------------------------------

    def _wait_for(self, collective: Any, *args: Any, **options: Any) -> None:
        """Call a collective, a method of a ``Group``, and wait: the host, or with NCCL the current
        stream alone."""
        if self.listener is not None:
            self.listener(partial(self._perform, collective, *args, **options))
            return
        self._perform(collective, *args, **options)

    def _perform(self, collective: Any, *args: Any, **options: Any) -> None:
        self.faults.raise_failure()
        on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in args)
        if self.faults.watcher is not None and on_gpu:
            self._launch_in_stream(collective, *args, **options)
            return
        spent, start = self._clock[0], time.perf_counter()
        self._clock = spent, start
        work: Any = None
        try:
            work = collective(*args, **options)
            if work is not None:
                self.faults.wait_for_work(work)
        except torch.OutOfMemoryError:
            raise  # also a RuntimeError, but of this process alone
        except RuntimeError as error:
            # The traceback of what is raised holds this frame, and a failed work holds the group.
            del work
            self._clock = spent + time.perf_counter() - start, None
            raise self.faults.explain_loss(collective.__name__, error) from error.with_traceback(
                None
            )
        if self.device.type == "cuda":
            # A sync point of this thread's stream alone: else waiting would count as computing.
            torch.cuda.current_stream(self.device).synchronize()
        self._clock = spent + time.perf_counter() - start, None

    def _launch_in_stream(self, collective: Any, *args: Any, **options: Any) -> None:
        """Call a collective of NCCL: later work in the current stream waits for it."""
        start = self._record_event()
        try:
            work = collective(*args, **options)
            work.wait()  # of the stream, not of the host
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.faults.raise_failure()  # where the watcher has aborted it, it knows why
            raise self.faults.explain_loss(collective.__name__, error) from error.with_traceback(
                None
            )
        end = self._record_event()
        watcher = self.faults.watcher
        assert watcher is not None
        watcher.follow_collective(work, end, collective.__name__, id(collective.__self__))
        self._marks.append((start, end))

    def _record_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def explain_loss(self, where: str) -> Iterator[None]:
        failed: RuntimeError | None = None
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.mesh is None or not _SIGNS.search(str(error)):
                raise
            failed = error
        if failed is not None:  # outside of the handler: a chained error would keep the group
            raise self.faults.explain_loss(where, failed)


def without_gaps(t: Tensor) -> Tensor:
    """Return the tensor, or a copy without gaps."""
    if t.is_contiguous() and t.stride(-1) == 1:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def from_bytes(wire: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Make a tensor from its bytes: a copy, because a view as another dtype needs aligned
    storage."""
    return wire.clone(memory_format=torch.contiguous_format).view(dtype).view(shape)


def _pad_shards(tensor: Tensor, chunk: int, shards: int) -> Tensor:
    """``[L, k]`` with zeros at the end of k, as ``[shards, L * chunk]``: for each shard its share
    of each row."""
    if (room := shards * chunk - tensor.shape[1]) > 0:
        tensor = torch.nn.functional.pad(tensor, (0, room))
    rows = len(tensor)
    return tensor.view(rows, shards, chunk).transpose(0, 1).reshape(shards, rows * chunk)


def _pad_to(tensor: Tensor, size: int) -> Tensor:
    """A tensor as one vector of a size, with zeros at its end."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, size - len(flat))) if len(flat) < size else flat
