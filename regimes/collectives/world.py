"""W logical workers hosted by P processes; here by one.

Everything that crosses workers goes through a ``World`` and is counted there. A world of one
process answers requests with plain tensor means; ``regimes.collectives.processes`` answers the
same requests among processes, so that a run has the same numbers on any P.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from regimes.collectives import agreement
from regimes.collectives.requests import (
    NO_LAYER,
    Batched,
    Collective,
    Exchange,
    Gather,
    JoinShards,
    Layer,
    Mean,
    Program,
    Request,
    SumShards,
    Traffic,
)
from regimes.errors import ConfigError, require

KINDS = ("mean", "gather", "broadcast")  # "exchange" joins them where one is asked for
KIND = {
    Mean: "mean",
    Gather: "gather",
    Exchange: "exchange",
    SumShards: "sum",
    JoinShards: "join",
}
WITHIN = ("sum", "join")  # among the shards of a worker; these have no place in a layer's traffic
Count = Callable[[int, Collective, int], str]  # a program's request in a round: its kind
FEW = 1 << 16  # numbers; to copy fewer costs less than a launch


@dataclass
class Meter:
    """What was passed to the collectives since the last ``take``.

    Attributes:
        layers: traffic per layer index; ``NO_LAYER`` has that of none (loss, buffers).
        calls: number of collectives, per kind ("mean", "gather", "broadcast", and where
            they are asked for "exchange"; between shards of a worker "sum" and "join").
        sent: bytes that one worker had for others, per kind (see `Traffic`); for "sum" and "join",
            that one shard had.
    """

    dtype: torch.dtype
    workers: int
    layers: dict[int, Traffic] = field(default_factory=lambda: defaultdict(lambda: Traffic(0, 0)))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def count(self, layer: int, kind: str, tensor: Tensor, convention: bool = True) -> None:
        """Count one request; ``tensor`` is stacked, its first row is one worker's share."""
        numbers = tensor.numel() // tensor.shape[0]
        if kind == "exchange":  # a worker keeps the part that is for itself
            numbers -= numbers // self.workers
        size = numbers * tensor.element_size()
        floats_sent = numbers if tensor.dtype == self.dtype else size / 4
        times = {"gather": self.workers, "exchange": 0}.get(kind, 1)
        floats = floats_sent * times if convention else 0
        self.layers[layer] = self.layers[layer] + Traffic(floats, size)
        self.sent[kind] = self.sent.get(kind, 0) + size
        self.calls["broadcast"] += kind == "broadcast"

    def count_within(self, kind: str, tensor: Tensor) -> None:
        """Count one request among the shards of a worker."""
        self.sent[kind] = self.sent.get(kind, 0) + tensor.numel() * tensor.element_size()

    def state_dict(self) -> dict[str, Any]:
        """The counts so far, in plain types."""
        layers = {i: [t.floats, t.bytes] for i, t in self.layers.items()}
        return {"layers": layers, "calls": dict(self.calls), "sent": dict(self.sent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; replaces the counts."""
        self.take()
        self.layers.update({i: Traffic(*counts) for i, counts in state["layers"].items()})
        self.calls.update(state["calls"])
        self.sent.update(state["sent"])

    def add(self, other: Meter) -> None:
        """Count what another one has counted."""
        for i, traffic in other.layers.items():
            self.layers[i] = self.layers[i] + traffic
        for own, more in ((self.calls, other.calls), (self.sent, other.sent)):
            for kind, count in more.items():
                own[kind] = own.get(kind, 0) + count

    def take(self) -> Meter:
        """Return the counts so far and start again from zero."""
        taken = Meter(self.dtype, self.workers, self.layers, self.calls, self.sent)
        fresh = Meter(self.dtype, self.workers)
        self.layers, self.calls, self.sent = fresh.layers, fresh.calls, fresh.sent
        return taken


class World:
    """W workers on this one process (simulated). ``ProcessWorld`` spreads them over several.

    Attributes:
        workers: W, fixed by the run's configuration; of simulated ones, how many are present.
        processes, rank: P and this process's place among them.
        hosted: the workers of this process, ``W / P`` consecutive ones, less those that are absent.
        meter: the traffic so far, without that of ``ask_apart``.
        instruments: that of ``ask_apart``.
        shards: processes that hold one worker together, each some rows of every layer.
        lockstep: programs run round by round, so that a round of all travels as one collective.
    """

    shards = 1
    lockstep = False

    def __init__(self, workers: int, *, processes: int = 1, rank: int = 0) -> None:
        shared = workers >= 1 and workers % processes == 0
        require(shared, "workers", workers, f"a multiple of the number of processes, {processes}")
        self.workers, self.processes, self.rank = workers, processes, rank
        count = workers // processes
        self.hosted = range(rank * count, (rank + 1) * count)
        self.meter = Meter(torch.float32, workers)
        self.instruments = Meter(torch.float32, workers)
        # one assignment, because other threads read it
        self._clock: tuple[float, float | None] = 0.0, None
        self._marks: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Time that the host has waited in collectives so far, the current one included."""
        spent, since = self._clock
        return spent if since is None else spent + time.perf_counter() - since

    def take_marks(self) -> list[tuple[Any, Any]]:
        """Events before and after each collective for which the host has not waited, since the
        last call."""
        return []

    @property
    def local(self) -> int:
        """L, the number of hosted workers."""
        return len(self.hosted)

    @property
    def leader(self) -> int:
        """The worker whose buffers all take over: the first one that is present."""
        return self.hosted[0] if self.rank == 0 else 0

    def set_present(self, workers: Sequence[int]) -> None:
        """Host only these workers from now on (ascending order); means are over them. Only in a
        world of one process."""
        # a tuple, as gaps have no range; only processes, whose workers are all there, read its ends
        self.hosted = cast("range", tuple(workers))
        self.workers = len(workers)
        self.meter.workers = self.workers

    # -- requests ----------------------------------------------------------------------------

    def drive(
        self,
        programs: Sequence[Program | Mean],
        layers: Sequence[int],
        *,
        signal: bool = False,
        batched: bool = False,
    ) -> list[Tensor]:
        """Run generators to their end; return their results.

        Between processes they run in lockstep: in each round all ``Mean`` requests of a type travel
        as one collective, all ``Gather`` requests as one, and all ``Exchange`` requests as one.
        Programs and layers have the same order on all processes, and so have the collectives. A
        world of one process has nothing to send and runs one generator after the other, so that a
        layer stays in the cache; it counts the same collectives.

        Args:
            programs: generators that yield requests and return a tensor; or a mean, whose answer is
                the result: a generator costs more than the mean of a small tensor.
            layers: the layer index that each one's traffic is counted for, or ``NO_LAYER``.
            signal: these are a detector's statistics: bytes, but no floats of the paper's count.
            batched: join ``Batched`` requests, in lockstep in any world. For a GPU: on a CPU all
                layers would pass through the cache once for each kernel.
        """
        collectives = set()  # the round, the kind, and the type that travels

        def count(i: int, request: Collective, turn: int) -> str:
            tensor, kind = request.tensor, KIND[type(request)]
            convention = layers[i] != NO_LAYER and not signal
            if kind in WITHIN:
                self.meter.count_within(kind, tensor)
            else:
                self.meter.count(layers[i], kind, tensor, convention)
            as_bytes = kind in ("gather", "exchange")
            collectives.add((turn, kind, torch.uint8 if as_bytes else tensor.dtype))
            return kind

        if batched or self.lockstep:
            results = self._run_in_lockstep(programs, batched, count)
        else:
            results = self._run_one_by_one(programs, count)
        made = [kind for _, kind, _ in collectives]
        for kind in KIND.values():  # a set's order, and so a record's bytes, differ between runs
            if kind in made:
                self.meter.calls[kind] = self.meter.calls.get(kind, 0) + made.count(kind)
        return results

    def _run_in_lockstep(
        self, programs: Sequence[Program | Mean], batched: bool, count: Count
    ) -> list[Any]:
        results: list[Any] = [None] * len(programs)
        plain = {i: x for i, x in enumerate(programs) if isinstance(x, Mean)}
        running = {i: x for i, x in enumerate(programs) if not isinstance(x, Mean)}
        answers: dict[int, Any] = dict.fromkeys(running)
        turn = 0
        while answers or plain:
            waiting: dict[str, dict[int, Any]] = {kind: {} for kind in KIND.values()}
            asked = {**plain, **_advance(running, answers, results, batched)}
            for i in sorted(asked):
                waiting[count(i, asked[i], turn)][i] = asked[i]
            answers = {}
            for kind, alike in waiting.items():  # in one order, which must be that of all processes
                if alike:
                    answers.update(zip(alike, self._answer(kind, [*alike.values()]), strict=True))
            for i in plain:
                results[i] = answers.pop(i)
            plain, turn = {}, turn + 1
        return results

    def _answer(self, kind: str, requests: Sequence[Any]) -> list[Tensor]:
        """Answers to requests of one kind."""
        if kind == "join":
            return self.join_shards(requests)
        collectives = {
            "mean": self.mean,
            "gather": self.gather,
            "exchange": self.exchange,
            "sum": self.sum_shards,
        }
        return collectives[kind]([request.tensor for request in requests])

    def _run_one_by_one(self, programs: Sequence[Program | Mean], count: Count) -> list[Any]:
        means = {i: program for i, program in enumerate(programs) if isinstance(program, Mean)}
        for i, mean in means.items():
            count(i, mean, 0)
        answers = iter(self.mean([mean.tensor for mean in means.values()]))
        return [
            next(answers) if isinstance(program, Mean) else self._run_one(i, program, count)
            for i, program in enumerate(programs)
        ]

    def _run_one(self, i: int, program: Program, count: Count) -> Any:
        """Run a single program: the bookkeeping for several would take twice as long."""
        turn, answer = 0, None
        while True:
            try:
                request = _next_collective(program, answer)
            except StopIteration as stop:
                return stop.value
            answer = self._answer(count(i, request, turn), [request])[0]
            turn += 1

    def ask(self, *requests: Request, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Answers to an instrument's requests, which travel in one round.

        Args:
            layers: which layer each is counted for; default none.
        """
        programs = [_single(request) for request in requests]
        return self.drive(programs, layers or [NO_LAYER] * len(programs), signal=True)

    def ask_apart(self, *requests: Request) -> list[Tensor]:
        """``ask`` for an instrument that only watches: a job without it would send none of this,
        so it is counted in ``instruments``."""
        own, self.meter = self.meter, self.instruments
        try:
            return self.ask(*requests)
        finally:
            self.meter = own

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Means over all workers: each ``[L, ...] -> [...]``."""
        if all(t.shape[0] == 1 for t in tensors):
            return [t[0] for t in tensors]
        means = {
            i: t[0] if len(t) == 1 else t.mean(0)
            for i, t in enumerate(tensors)
            if not _joins_others(t)
        }
        for dtype in {t.dtype for t in tensors}:
            rest = {i: t for i, t in enumerate(tensors) if t.dtype == dtype and i not in means}
            if rest:
                joined = torch.cat([t.reshape(len(t), -1) for t in rest.values()], dim=1).mean(0)
                pieces = joined.split([t[0].numel() for t in rest.values()])
                for i, piece in zip(rest, pieces, strict=True):
                    means[i] = piece.view(rest[i].shape[1:])
        return [means[i] for i in range(len(tensors))]

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """All workers' rows, in worker order: each ``[L, ...] -> [W, ...]``."""
        return tensors

    def exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        """All workers' parts for each hosted worker: each ``[L, W, ...] -> [L, W, ...]``."""
        return [t.transpose(0, 1).contiguous() for t in tensors]

    # -- shards of a worker: here there is one -------------------------------------------------

    def sum_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """This shard's shares of sums over the shards of workers: each ``[L, k] -> [L, share]``."""
        return tensors

    def join_shards(self, parts: Sequence[JoinShards]) -> list[Tensor]:
        """The parts of all shards of a worker, end to end: each ``[part] -> [size]``."""
        return [part.tensor for part in parts]

    def parts(self, layers: Sequence[Layer]) -> list[Layer]:
        """What this process holds of each layer."""
        return list(layers)

    def add_shards(self, tensor: Tensor) -> Tensor:
        """A small tensor's sum over the shards of a worker, the same on each."""
        return tensor

    @property
    def divided(self) -> bool:
        """Whether the norm of a layer is a sum over processes of other groups."""
        return False

    def fewest(self, count: int) -> int:
        """The least of the counts of the processes among which layers are divided."""
        return count

    def whole_norms(self, norms: Tensor) -> Tensor:
        """Norms of whole layers, ``[layers]``, from those of what this process holds of each."""
        return norms

    def take_meter(self, count: int) -> Meter:
        """The counts of a whole worker since the last time, of ``count`` layers; with several
        shards all processes call this."""
        return self.meter.take()

    def sum_in_model(self, tensor: Tensor) -> Tensor:
        """The sum over the shards of a worker within a forward pass, with its gradient."""
        return tensor

    def contact(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Around what may contain torch's own collectives: TrainingError where one fails."""
        return contextlib.nullcontext()

    @property
    def evaluators(self) -> World:
        """The world whose processes divide the batches of an evaluation."""
        return self

    # -- plain services ----------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every process's tensors with those of the leader: one collective per type,
        counted for no layer."""
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            same = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.flatten() for t in same])
            self.meter.count(NO_LAYER, "broadcast", flat[None], convention=False)
            self._broadcast(flat)
            for tensor, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def _broadcast(self, flat: Tensor) -> None:
        """Overwrite every process's tensor."""

    def gather_object(self, value: Any) -> list[Any]:
        """Every process's value (plain JSON types), in rank order."""
        return [value]

    def barrier(self) -> None:
        """Wait for all processes."""
        self.gather_object(None)

    def abort(self) -> None:
        """Before ``close``, after an error: wait for no other process from here on."""

    def close(self) -> None:
        """Leave the group of processes."""

    def agree(self, **facts: Any) -> None:
        """Check that all processes hold the same facts (nested plain types).

        Raises:
            ConfigError: naming the first fields that differ, their values, and the process.
        """
        if len({*self.gather_object(agreement.digest(facts))}) > 1:
            differ = agreement.difference(self.gather_object(facts))
            raise ConfigError(
                f"{differ}: start all processes with the same configuration, code and data"
            )


def _joins_others(tensor: Tensor) -> bool:
    """Is a launch for its mean alone dearer than copying it next to others?"""
    return len(tensor) > 1 and tensor.device.type == "cuda" and tensor.numel() < FEW


def _advance(
    programs: Mapping[int, Program], answers: dict[int, Any], results: list[Any], batched: bool
) -> dict[int, Collective]:
    """Run programs until each asks for a collective, or ends and leaves its result."""
    requests: dict[int, Collective] = {}
    while answers:
        calls: dict[Any, dict[int, tuple[Any, ...]]] = {}  # by kernel: the arguments by program
        for i in sorted(answers):
            program, answer = programs[i], answers[i]
            try:
                request = program.send(answer) if batched else _next_collective(program, answer)
            except StopIteration as stop:
                results[i] = stop.value
                continue
            if isinstance(request, Batched):
                calls.setdefault(request.kernel, {})[i] = request.arguments
            else:
                requests[i] = request
        answers = {}
        for kernel, arguments in calls.items():
            answers.update(zip(arguments, kernel(list(arguments.values())), strict=True))
    return requests


def _next_collective(program: Program, answer: Any) -> Collective:
    """Run a program, its ``Batched`` work included, until it asks for a collective.

    Raises:
        StopIteration: it has ended; ``value`` is its result.
    """
    request = program.send(answer)
    while isinstance(request, Batched):
        request = program.send(request.kernel([request.arguments])[0])
    return request


def _single(request: Request) -> Program:
    return (yield request)
