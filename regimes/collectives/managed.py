"""The replicas of a torchft quorum as a world: they may be others in every step.

torchft's ``Manager`` says who takes part in a step (``start_quorum``) and whether the step counts
(``should_commit``). Collectives go over the manager's process group, which it makes anew for each
quorum. A collective that fails ends the step, not the job: the group is left at once, so that the
other replicas' collectives fail as well and do not wait for the timeout.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from regimes.collectives import agreement
from regimes.collectives.processes import GATHER, ProcessWorld
from regimes.collectives.world import World
from regimes.errors import ConfigError, unexpected

BEGIN = "call optimizer.zero_grad() of torchft.Optimizer before each forward pass"


class StepLost(Exception):
    """A replica has left during a step, which no longer counts; the others go on with the next."""


class NoGuard:
    """Stands in for a ``CallGuard`` and checks nothing: replicas that join make other calls than
    those that are present, and the quorum brings them together."""

    done: Callable[[], int] = staticmethod(lambda: 0)

    def enter(self, call: str, patience: float | None = None) -> None:
        """Nothing to wait for."""


class ManagedWorld(ProcessWorld):
    """One worker for each replica that has something to exchange in the quorum of this step.

    Attributes:
        first: as of ``GroupWorld``.
        members: by identity, the residual's norm of each replica when all last agreed.
        contributors: ranks of the replicas whose tensors are averaged. One that has joined between
            two synchronisations of local steps takes part in the collectives and has none.
        changes: who has joined and left since ``take_changes``, with the norm of the residual that
            left with them.
        healed: the state of another replica was loaded since the last agreement.
        dropped: norm of the residual that this replica gave up by it.
    """

    first = 0

    def __init__(self, manager: Any, device: torch.device) -> None:
        self.manager = _checked(manager)
        # Until the first quorum the least that it may have: formulas of costs need a number.
        World.__init__(self, max(2, manager._min_replica_size))
        self.hosted = range(1)
        self.device, self.guard = device, NoGuard()
        name = manager._replica_id or "replica"
        self.name = f"{name}/{uuid.uuid4().hex[:8]}"  # of this life: a replica may come back
        self.members: dict[str, float] = {}
        self.contributors: list[int] = [0]
        self.changes: list[dict[str, Any]] = []
        self.met: int | None = None  # the quorum that has agreed
        self.facts: dict[str, Any] = {}
        self.healed, self.dropped = True, 0.0

    # -- the quorum of a step ----------------------------------------------------------------

    def enter(self) -> bool:
        """A quorum was started; returns whether its replicas must agree first.

        Raises:
            ConfigError: none was started.
        """
        manager = self.manager
        if manager._quorum_future is None:
            raise ConfigError(f"manager: there is no quorum: {BEGIN}")
        self.processes, rank = manager.num_participants(), manager.participating_rank()
        self.rank = 0 if rank is None else rank
        if self.met == manager._quorum_id and not self.healed:
            return False
        self._contribute(range(self.processes))
        return True

    def meet(self, residual: float, moved: bool = True, **facts: Any) -> None:
        """The replicas of a new quorum agree on the same facts, and on whose tensors count.

        Args:
            residual: the norm of this replica's residual.
            moved: whether it has anything to exchange.

        Raises:
            ConfigError: this replica has joined with other facts, or replicas that were there have.
            StepLost: another one has joined with other facts, which ends that one.
        """
        facts = {**self.facts, **facts}
        card = {
            "name": self.name,
            "new": self.healed,
            "moved": moved,
            "residual": residual,
            "dropped": self.dropped,
            "facts": agreement.digest(facts),
        }
        cards = self.gather_object(card)
        self._compare(cards, facts)
        self._contribute([i for i, card in enumerate(cards) if card["moved"]])
        self._note_changes(cards)
        self.members = {card["name"]: card["residual"] for card in cards}
        self.met, self.healed, self.dropped = self.manager._quorum_id, False, 0.0

    def heal(self, members: Mapping[str, float], dropped: float) -> None:
        """Another replica's state was loaded.

        Args:
            members: that replica's.
            dropped: norm of the residual that this replica had.
        """
        self.healed, self.members, self.dropped = True, dict(members), dropped

    def _contribute(self, ranks: Sequence[int]) -> None:
        self.contributors = list(ranks)
        self.workers = self.meter.workers = max(1, len(self.contributors))
        place = self.contributors.index(self.rank) if self.rank in self.contributors else 0
        self.hosted = range(place, place + 1)

    def _compare(self, cards: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        if len({card["facts"] for card in cards}) == 1:
            return
        everyone = self.gather_object(facts)
        before = [i for i, card in enumerate(cards) if not card["new"]]
        if not before or len({cards[i]["facts"] for i in before}) > 1:
            raise ConfigError(
                f"{agreement.difference(everyone)}: start all replicas with the same arguments"
            )
        if cards[self.rank]["facts"] != cards[before[0]]["facts"]:
            differ = agreement.difference([everyone[before[0]], facts])
            raise ConfigError(
                f"{differ}: process 1 is this replica, process 0 one that it joins: start it with "
                "the same arguments"
            )
        self.give_up("a replica has joined with another configuration")

    def _note_changes(self, cards: Sequence[Mapping[str, Any]]) -> None:
        names = {card["name"] for card in cards}
        left = [{"replica": n, "residual": r} for n, r in self.members.items() if n not in names]
        healed = [card for card in cards if card["new"] and card["name"] in self.members]
        left += [{"replica": card["name"], "residual": card["dropped"]} for card in healed]
        joined = [card["name"] for card in cards if card["new"]] if self.members else []
        if left or joined or not self.members:
            change = {"step": self.manager.current_step(), "replicas": len(cards)}
            self.changes.append(change | {"joined": joined, "left": left})

    def take_changes(self) -> list[dict[str, Any]]:
        """The changes since the last call."""
        taken, self.changes = self.changes, []
        return taken

    def agree(self, **facts: Any) -> None:
        """Outside of a step there is no quorum to ask: the next ``meet`` compares these facts."""
        self.facts |= facts

    def give_up(self, why: str) -> NoReturn:
        """End the step on this replica and, by leaving the group, on the others."""
        self.manager.report_error(RuntimeError(why))
        self.manager._pg.abort()
        raise StepLost(why)

    # -- collectives -------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[Any, int]:
        return None, self.workers

    def _wait(self, collective: Any, *args: Any, **options: Any) -> None:
        """Call a collective of the manager's group and wait.

        Raises:
            StepLost: it has failed, or one before it in this step.
        """
        if (failed := self.manager.errored()) is not None:
            raise StepLost(str(failed.original_exception))
        spent, start = self._clock[0], time.perf_counter()
        self._clock, why = (spent, start), ""
        try:
            splits = {k: v for k, v in options.items() if k.endswith("split_sizes")}
            CALLS[collective](self.manager._pg, *args, **splits).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).splitlines()[0]  # its traceback would keep the group
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._clock = spent + time.perf_counter() - start, None
        if why:
            self.give_up(why)

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.rank not in self.contributors:
            tensors = [torch.zeros_like(t) for t in tensors]
        return super().mean(tensors)

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        everyone, self.workers = self.workers, self.processes
        try:
            rows = super().gather(tensors)
        finally:
            self.workers = everyone
        if everyone == self.processes:
            return rows
        return [row[self.contributors] for row in rows]

    def exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        wires = [t.contiguous().view(self.workers, -1).view(torch.uint8) for t in tensors]
        flat = torch.cat(wires, dim=1)  # [W, bytes]: a row for each contributor
        here = self.rank in self.contributors
        splits = [int(here and i in self.contributors) for i in range(self.processes)]
        received = torch.zeros_like(flat)
        rows = slice(None) if here else slice(0)
        options = {"output_split_sizes": splits, "input_split_sizes": splits}
        self._wait(dist.all_to_all_single, received[rows], flat[rows], **options)
        pieces = received.split([w.shape[1] for w in wires], dim=1)
        return [
            p.clone(memory_format=torch.contiguous_format).view(t.dtype).view(t.shape)
            for p, t in zip(pieces, tensors, strict=True)
        ]

    def _broadcast(self, flat: Tensor) -> None:
        self._wait(dist.broadcast, flat, 0)

    def gather_object(self, value: Any) -> list[Any]:
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.empty(self.processes, 1, dtype=torch.int64)
        self._wait(getattr(dist, GATHER), sizes, torch.tensor([[len(own)]]))
        padded = own.new_zeros(1, int(sizes.max()))
        padded[0, : len(own)] = own
        everyone = own.new_empty(self.processes, padded.shape[1])
        self._wait(getattr(dist, GATHER), everyone, padded)
        sized = zip(everyone, sizes.flatten().tolist(), strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in sized]

    def collect(self, value: Any) -> list[Any] | None:
        """Refused, like ``scatter``."""
        raise ConfigError(
            "full_state_dict: with a manager a replica that joins gets the state by itself; to "
            "start all of them again, each saves and loads hook.state_dict()"
        )

    scatter = collect

    # -- a job without a process group -------------------------------------------------------

    def claim(self, what: str) -> None:
        """There is one group."""

    def claimants(self, what: str) -> list[int]:
        """This group: there is no other."""
        return [self.first]

    def close(self) -> None:
        """The manager is the user's."""

    abort = close


def _gather(group: Any, out: Tensor, own: Tensor, **_: Any) -> Any:
    return group.allgather([list(out.split(1))], [own], AllgatherOptions())


def _exchange(group: Any, out: Tensor, own: Tensor, **splits: list[int]) -> Any:
    sizes = splits["output_split_sizes"], splits["input_split_sizes"]
    return group.alltoall_base(out, own, *sizes, dist.AllToAllOptions())


def _broadcast(group: Any, tensor: Tensor, root: int, **_: Any) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([tensor], options)


CALLS: dict[Any, Callable[..., Any]] = {  # torch's functions need a group that is registered
    dist.all_reduce: lambda group, t, **_: group.allreduce([t], dist.AllreduceOptions()),
    getattr(dist, GATHER): _gather,
    dist.all_to_all_single: _exchange,
    dist.broadcast: _broadcast,
}


def _checked(manager: Any) -> Any:
    """The manager; ConfigError unless its replicas can share a compressed mean."""
    if not all(callable(getattr(manager, n, None)) for n in ("start_quorum", "should_commit")):
        raise unexpected("manager", manager, "a Manager of torchft")
    if manager._use_async_quorum:
        raise ConfigError(
            "manager: with an asynchronous quorum a replica that joins sends nothing in its first "
            "step, and compressed means need the data of all: Manager(..., use_async_quorum=False)"
        )
    if manager._replica_world_size_mode.name != "DYNAMIC":
        raise ConfigError(
            "manager: spare replicas send zeros, which a compressed mean would count: leave out "
            "world_size_mode"
        )
    if manager._group_world_size != 1:
        raise ConfigError(
            f"manager: its replica has {manager._group_world_size} processes: a replica of "
            "several, such as a sharded model, is not supported, start one process for each"
        )
    if "gloo" not in (kind := str(manager._pg.getBackendName())):
        raise ConfigError(
            f"manager: its process group is {kind}: compressed means over a quorum go over gloo, "
            "Manager(pg=torchft.ProcessGroupGloo(...), ...)"
        )
    return manager
