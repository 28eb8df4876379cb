"""The replicas of a torchft quorum as a world: they may be others in every step.

torchft's ``Manager`` says who takes part in a step (``start_quorum``) and whether the step counts
(``should_commit``). Its ``ManagedProcessGroup`` has the group that the manager makes anew for each
quorum. Only public names of both are used. These do not say whether a quorum is new, so replicas
ask each other once per step, with a sum of one number.

A collective that fails ends the step, not the job: the group is left at once, so that the other
replicas' collectives fail as well and do not wait for the timeout.
"""

from __future__ import annotations

import pickle
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from regimes.collectives import agreement
from regimes.collectives.call_guard import CallGuard
from regimes.collectives.processes import ProcessWorld, from_bytes, without_gaps
from regimes.collectives.world import World
from regimes.errors import ConfigError, unexpected

USED = ("start_quorum", "is_participating", "report_error", "should_commit")  # of a manager


class StepLost(Exception):
    """A replica has left during a step, which no longer counts; the others go on with the next."""


class QuorumWorld(World):
    """One worker for each replica that has something to exchange in the quorum of this step.

    Attributes:
        processes, rank: replicas of the quorum, and this one's place among them.
        contributors: ranks of the replicas whose tensors are averaged. One that has joined between
            two synchronisations of local steps takes part in the collectives and has none.
        members: by identity, the residual's norm of each replica when all last agreed.
        changes: who has joined and left, with the norm of the residual that left with them.
        healed: the state of another replica was loaded since the last agreement.
        dropped: norm of the residual that this replica gave up by it.
    """

    lockstep = True
    everyone = None  # no group lasts

    def __init__(self, manager: Any, device: torch.device) -> None:
        """
        Raises:
            ConfigError: it is no manager, or its group is not of gloo.
        """
        if not all(callable(getattr(manager, name, None)) for name in USED):
            raise unexpected("manager", manager, "a Manager of torchft")
        super().__init__(2)  # until the first quorum, because formulas of costs need a number
        self.hosted = range(1)
        self.manager, self.device = manager, device
        # Compares no calls: replicas that join make others, and the quorum brings all together.
        self.guard = CallGuard(dist.HashStore(), 0, 1, 0.0)
        if "gloo" not in (kind := str(self._group().getBackendName())):
            raise ConfigError(
                f"manager: its process group is {kind}: compressed means over a quorum go over "
                "gloo, Manager(pg=torchft.ProcessGroupGloo(...), ...)"
            )
        # of this life: a replica may come back
        self.name = f"{socket.gethostname()}/{uuid.uuid4().hex[:8]}"
        self.contributors: list[int] = [0]
        self.members: dict[str, float] = {}
        self.changes: list[dict[str, Any]] = []
        self.healed, self.dropped = True, 0.0
        self._facts: dict[str, Any] = {}
        self._agreed: tuple[int, int] | None = None  # processes and rank at that time

    @property
    def quorum(self) -> QuorumWorld:
        """What only a world of a quorum has."""
        return self

    def _group(self) -> Any:
        """The manager's group, as it is in this quorum."""
        from torchft.process_group import ManagedProcessGroup

        return ManagedProcessGroup(self.manager)

    # -- the quorum of a step ----------------------------------------------------------------

    def enter(self) -> None:
        """A quorum was started: count its replicas.

        Raises:
            ConfigError: none was started, or this replica does not take part in it.
        """
        manager = self.manager
        if not (count := manager.num_participants()):
            raise ConfigError(
                "manager: there is no quorum: call optimizer.zero_grad() of torchft.Optimizer "
                "before each forward pass"
            )
        if not manager.is_participating():
            self.leave(why := "this replica would send nothing in its first step")
            raise ConfigError(
                f"manager: {why} (an asynchronous quorum, or a spare), and compressed means need "
                "the data of all: Manager(..., use_async_quorum=False), without world_size_mode"
            )
        self.processes, self.rank = count, manager.participating_rank()
        self._contribute(range(count))

    def must_meet(self, wanted: bool) -> bool:
        """Whether some replica wants all to agree, or others are here than when they last did."""
        wanted |= self.healed or self._agreed != (self.processes, self.rank)
        self._sum(count := torch.tensor([float(wanted)]))
        return bool(count)

    def meet(self, residual: float, moved: bool = True, **facts: Any) -> None:
        """The replicas of a quorum agree on the same facts, and on whose tensors count.

        Args:
            residual: the norm of this replica's residual.
            moved: whether it has anything to exchange.

        Raises:
            ConfigError: this replica has joined with other facts, or replicas that were there have.
            StepLost: another one has joined with other facts, which ends that one.
        """
        facts = {**self._facts, **facts}
        card = {
            "name": self.name,
            "new": self.healed,
            "moved": moved,
            "residual": residual,
            "dropped": self.dropped,
            "facts": agreement.digest(facts),
        }
        cards = self.gather_object(card)
        if len({card["facts"] for card in cards}) > 1:
            self._refuse(cards, facts)
        self._contribute([i for i, card in enumerate(cards) if card["moved"]])
        self._note_changes(cards)
        self.members = {card["name"]: card["residual"] for card in cards}
        self._agreed, self.healed, self.dropped = (self.processes, self.rank), False, 0.0

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
        place = self.contributors.index(self.rank) if self.contributes else 0
        self.hosted = range(place, place + 1)

    @property
    def contributes(self) -> bool:
        """Whether this replica's tensors are averaged."""
        return self.rank in self.contributors

    def _refuse(self, cards: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> NoReturn:
        """Some replica has other facts: one that joins with them ends, the others go on."""
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
        new = {card["name"]: card["dropped"] for card in cards if card["new"]}
        left = {name: norm for name, norm in self.members.items() if name not in names}
        left |= {name: norm for name, norm in new.items() if name in self.members}
        joined = [*new] if self.members else []
        if left or joined or not self.members:
            gone = [{"replica": name, "residual": norm} for name, norm in left.items()]
            change = {"step": self.manager.current_step(), "replicas": len(cards)}
            self.changes.append(change | {"joined": joined, "left": gone})

    def agree(self, **facts: Any) -> None:
        """Outside of a step there is no quorum to ask: each ``meet`` compares these facts."""
        self._facts |= facts

    def leave(self, why: str) -> None:
        """This step does not count; the others need not wait for this replica."""
        self.manager.report_error(RuntimeError(why))
        self._group().abort()

    def give_up(self, why: str) -> NoReturn:
        """End the step on this replica and, by leaving the group, on the others."""
        self.leave(why)
        raise StepLost(why)

    # -- collectives: a replica has one row --------------------------------------------------

    def _wait(self, start: Callable[..., Any], *args: Any) -> None:
        """Start a collective and wait.

        Raises:
            StepLost: it has failed, or one before it in this step.
        """
        if (failed := self.manager.errored()) is not None:
            raise StepLost(str(failed.original_exception))
        spent, begun = self._clock[0], time.perf_counter()
        self._clock, why = (spent, begun), ""
        try:
            start(*args).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).splitlines()[0]  # its traceback would keep the group
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._clock = spent + time.perf_counter() - begun, None
        if why:
            self.give_up(why)

    def _sum(self, flat: Tensor) -> None:
        """Overwrite a tensor with the sum over all replicas of the quorum."""
        # ``Manager.allreduce`` would hand each call to a thread that watches its time
        self._wait(self._group().parent.allreduce, [flat], dist.AllreduceOptions())

    def _rows(self, own: Tensor) -> list[Tensor]:
        """The tensors of all replicas of the quorum."""
        rows = [torch.empty_like(own) for _ in range(self.processes)]
        self._wait(self._group().allgather, [rows], [own], AllgatherOptions())
        return rows

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        answers: dict[int, Tensor] = {}
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            same = {i: t for i, t in enumerate(tensors) if t.dtype == dtype}
            flat = torch.cat([t.flatten() for t in same.values()])
            if not self.contributes:
                flat.zero_()
            if len(flat):
                self._sum(flat)
            flat /= self.workers
            pieces = flat.split([t.numel() for t in same.values()])
            answers |= {i: p.view(same[i].shape[1:]) for i, p in zip(same, pieces, strict=True)}
        return [answers[i] for i in range(len(tensors))]

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        wires = [without_gaps(t.flatten()).view(torch.uint8) for t in tensors]
        rows = self._rows(torch.cat(wires))
        everyone = torch.stack([rows[i] for i in self.contributors])  # [W, bytes]
        pieces = zip(everyone.split([len(w) for w in wires], dim=1), tensors, strict=True)
        return [from_bytes(p, t.dtype, (self.workers, *t.shape[1:])) for p, t in pieces]

    def exchange(self, tensors: list[Tensor]) -> list[Tensor]:
        wires = [without_gaps(t.reshape(self.workers, -1)).view(torch.uint8) for t in tensors]
        sent = torch.cat(wires, dim=1)  # [W, bytes]: a row for each contributor
        received, some = torch.zeros_like(sent), slice(None if self.contributes else 0)
        sizes = [int(self.contributes and i in self.contributors) for i in range(self.processes)]
        options = dist.AllToAllOptions()
        self._wait(self._group().alltoall_base, received[some], sent[some], sizes, sizes, options)
        pieces = zip(received.split([w.shape[1] for w in wires], dim=1), tensors, strict=True)
        return [from_bytes(p, t.dtype, t.shape) for p, t in pieces]

    def gather_object(self, value: Any) -> list[Any]:
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._rows(torch.tensor([len(own)]))]
        padded = torch.cat([own, own.new_zeros(max(sizes) - len(own))])
        rows = zip(self._rows(padded), sizes, strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in rows]

    def collect(self, value: Any) -> NoReturn:
        """Refused, like ``scatter``."""
        raise ConfigError(
            "full_state_dict: with a manager a replica that joins gets the state by itself; to "
            "start all of them again, each saves and loads hook.state_dict()"
        )

    scatter = collect


JobWorld = ProcessWorld | QuorumWorld  # of a user's job
