"""W logical workers hosted by P processes; here by one, or by processes without a group.

Everything that crosses workers goes through a ``World``, and ``regimes.collectives.comm`` counts
it. A world of one process computes plain means of tensors; ``regimes.collectives.processes`` has
the same methods among processes, so that on any P a run is the same but for rounding: equal to
1e-12 in float64, equal in distribution in float32.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regimes.base.errors import ConfigError, require
from regimes.collectives import agreement
from regimes.collectives.layers import NO_LAYER, Layer
from regimes.collectives.meter import Meter

FEW = 1 << 16  # numbers; to copy fewer costs less than a launch
Collective: TypeAlias = "partial[None]"  # of torch.distributed, with its tensors


@dataclass(frozen=True)
class Evaluators:
    """Says which batches of an evaluation this process takes, and joins the results. A ``World``
    has the same three attributes.

    Attributes:
        processes, rank: how many divide the batches, and this process's place among them.
        gather_object: each one's value, in rank order.
    """

    processes: int
    rank: int
    gather_object: Callable[[Any], list[Any]]


class World:
    """Hosts W workers on this one process (simulated). ``ProcessWorld`` spreads them over several.
    ``ProcessWorld`` spreads them over several.

    With ``processes`` it stands in for one process of several: it hosts its own workers alone, and
    the others count as copies of its first one.

    Attributes:
        workers: W, fixed by the run's configuration.
        processes, rank: P and this process's place among them: one replica's after the other.
        hosted: the workers of this process, consecutive ones.
        meter: the traffic so far, except within ``counting_apart``.
        instruments: the traffic within ``counting_apart``.
        shards, shard: how many processes hold one worker together, each some rows of every layer,
            and which one this is.
        node: the processes of a worker have whole layers and gradients of their own each, whose
            mean is the worker's: its rows are made and joined by ``regimes.collectives.node``.
        divided: layers are also divided among processes of another group (tensor parallel).
        lockstep: something travels, so that layers are exchanged together, not one by one.
        listener: gets each collective on tensors, in place of its being performed.
    """

    lockstep = False
    listener: Callable[[Collective], None] | None = None
    divided = False
    node = False

    def __init__(self, workers: int, *, processes: int = 1, rank: int = 0, shards: int = 1) -> None:
        replicas = processes // shards
        shared = workers >= 1 and workers % replicas == 0
        require(shared, "workers", workers, f"a multiple of the number of processes, {replicas}")
        self.workers, self.processes, self.rank = workers, processes, rank
        self.shards, (replica, self.shard) = shards, divmod(rank, shards)
        count = workers // replicas
        self.hosted = range(replica * count, (replica + 1) * count)
        self.meter = Meter(torch.float32, workers)
        self.instruments = Meter(torch.float32, workers)
        # Seconds in collectives that have ended, and when the current one began. A tuple, because
        # other threads read both.
        self._clock: tuple[float, float | None] = 0.0, None
        self._marks: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Return the seconds that the host has waited in collectives so far, the current one
        included."""
        spent, since = self._clock
        return spent if since is None else spent + time.perf_counter() - since

    def take_marks(self) -> list[tuple[Any, Any]]:
        """Return the events before and after each collective for which the host has not waited,
        since the last call."""
        marks, self._marks = self._marks, []
        return marks

    @property
    def hosted_count(self) -> int:
        """Return L, the number of hosted workers."""
        return len(self.hosted)

    @property
    def evaluators(self) -> Evaluators:
        """Return who divides the batches of an evaluation: all processes."""
        return Evaluators(self.processes, self.rank, self.gather_object)

    # -- collectives: `Comm` counts what it asks of them ------------------------------------------

    @contextlib.contextmanager
    def counting_apart(self) -> Iterator[None]:
        """Count the traffic inside in ``instruments``."""
        own, self.meter = self.meter, self.instruments
        try:
            yield
        finally:
            self.meter = own

    def mean_over_workers(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means over all workers: each ``[L, ...] -> [...]``."""
        if all(t.shape[0] == 1 for t in tensors):
            return [t[0] for t in tensors]
        # On a GPU small tensors are joined first: a launch for one mean is dearer than a copy.
        means = {
            i: t[0] if len(t) == 1 else t.mean(0)
            for i, t in enumerate(tensors)
            if len(t) == 1 or t.device.type != "cuda" or t.numel() >= FEW
        }
        for dtype in {t.dtype for t in tensors}:
            rest = {i: t for i, t in enumerate(tensors) if t.dtype == dtype and i not in means}
            if rest:
                joined = torch.cat([t.reshape(len(t), -1) for t in rest.values()], dim=1).mean(0)
                pieces = joined.split([t[0].numel() for t in rest.values()])
                for i, piece in zip(rest, pieces, strict=True):
                    means[i] = piece.view(rest[i].shape[1:])
        return [means[i] for i in range(len(tensors))]

    def all_gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return all workers' rows, in worker order: each ``[L, ...] -> [W, ...]``."""
        if self.processes == 1:
            return tensors
        return [t[:1].expand(self.workers, *t.shape[1:]).contiguous() for t in tensors]

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return all workers' parts for each hosted worker: each ``[L, W, ...] -> [L, W, ...]``."""
        if self.processes == 1:
            return [t.transpose(0, 1).contiguous() for t in tensors]
        return tensors

    # -- shards of a worker: here there is one -------------------------------------------------

    def local_layers(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return what this process holds of each layer."""
        if self.shards == 1:
            return list(layers)
        return [layer.on(self.shard, self.shards) for layer in layers]

    def sum_shards(self, tensors: list[Tensor], chunks: Sequence[int] = ()) -> list[Tensor]:
        """Return this shard's shares of sums over the shards of workers: each ``[L, k] -> [L,
        share]``.

        Args:
            chunks: numbers of the first shard's share, by default as rows are divided.
        """
        return tensors

    def join_shards(
        self, parts: list[Tensor], chunks: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Join the parts of all shards of a worker, end to end: each ``[part] -> [size]``. The
        first shard's part has ``chunk`` numbers."""
        return parts

    def add_shards(self, tensor: Tensor) -> Tensor:
        """Return a small tensor's sum over the shards of a worker, the same on each shard."""
        return tensor

    def whole_norms(self, norms: Tensor) -> Tensor:
        """Return the norms of whole layers, ``[layers]``, from the norms of this process's
        parts."""
        return norms

    def min_count(self, count: int) -> int:
        """Return the least count among the processes that divide layers (tensor parallel)."""
        return count

    def take_meter(self, count: int) -> Meter:
        """Return the counts of a whole worker since the last call, for ``count`` layers; with
        several shards all processes call this."""
        return self.meter.take_counts()

    def explain_loss(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Wrap what may contain torch's own collectives: raise TrainingError if one of them
        fails."""
        return contextlib.nullcontext()

    # -- plain services ----------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every process's tensors with those of worker 0: one collective per type,
        counted for no layer. The shards of a worker send them once, so that the first one counts
        them."""
        for ids in by_type(tensors):
            flat = torch.cat([tensors[i].detach().flatten() for i in ids])
            if self.shard == 0:
                self.meter.count_request(NO_LAYER, "broadcast", flat[None], convention=False)
            self._broadcast(flat)
            overwrite([tensors[i] for i in ids], flat)

    def _broadcast(self, flat: Tensor) -> None:
        """Overwrite every process's tensor."""

    def gather_object(self, value: Any) -> list[Any]:
        """Return every process's value (plain JSON types), in rank order."""
        return [value]

    def barrier(self) -> None:
        """Wait for all processes."""
        self.gather_object(None)

    def check_agreement(
        self, weights: agreement.WeightsReport | None = None, /, **facts: Any
    ) -> None:
        """Check that all processes hold the same facts (nested plain types), and the same weights.

        Args:
            weights: what this process says of its own; they travel with the facts.

        Raises:
            ConfigError: naming the first fields that differ, their values, and the process; or
                parameters that are not those that were attached.
            TrainingError: the weights differ.
        """
        said: list[Any] = [agreement.digest(facts)]
        if weights is not None:
            said += [weights.fingerprint, list(weights.strangers)]
        gathered = self.gather_object(said)
        # All see the same digests, so that all of them or none enter the second collective.
        if len({theirs[0] for theirs in gathered}) > 1:
            differ = agreement.describe_difference(self.gather_object(facts))
            raise ConfigError(
                f"{differ}: start all processes with the same configuration, code and data"
            )
        if weights is not None:
            parts = 1 if self.node else self.shards
            agreement.check_weights(weights, [theirs[1:] for theirs in gathered], parts)

    def abort(self) -> None:
        """Wait for no other process from here on: called before ``close``, after an error."""

    def close(self) -> None:
        """Leave the group of processes."""


def by_type(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the places of the tensors that can travel together, in the same order on all
    processes."""
    found = {t.dtype for t in tensors}
    if len(found) == 1:
        return [[*range(len(tensors))]]
    kinds = sorted(found, key=str)  # a set's order differs between processes
    return [[i for i, t in enumerate(tensors) if t.dtype == kind] for kind in kinds]


def overwrite(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the numbers of one vector into tensors, one after the other."""
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(piece.view(tensor.shape))
