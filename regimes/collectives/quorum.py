"""The replicas of a torchft quorum, who may be others in every step, as a value of a world.

torchft's ``Manager`` says who takes part in a step (``start_quorum``) and whether the step counts
(``should_commit``). Its ``ManagedProcessGroup`` has the group that the manager makes anew for each
quorum. Only public names of both are used.

A collective that fails ends the step, not the job.
"""

from __future__ import annotations

import pickle
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from regimes.collectives import agreement
from regimes.collectives.faults import Faults
from regimes.collectives.process_group import Group
from regimes.collectives.world import World
from regimes.errors import ConfigError, unexpected_value

_USED = ("start_quorum", "is_participating", "report_error", "should_commit")  # of a manager


class StepLost(Exception):
    """A replica has left during a step, which no longer counts; the others go on with the next."""


class ManagedGroup(Group):
    """The replicas of the quorum of this step.

    Tensors come from the replicas that have something to exchange, ``ranks``. A replica that has
    joined between two synchronisations of local steps takes part in the collectives without one.

    Attributes:
        replicas, rank: of the quorum, and this one's place among them.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__((0,))
        self.manager, self.replicas, self.rank = manager, 1, 0

    @property
    def contributes(self) -> bool:
        """Whether this replica has something to exchange."""
        return self.rank in self.ranks

    @property
    def index(self) -> int:
        return self.rank

    @property
    def torch_group(self) -> Any:
        from torchft.process_group import ManagedProcessGroup

        return ManagedProcessGroup(self.manager)

    def leave_step(self, why: str) -> None:
        """This step does not count; the others need not wait for this replica."""
        self.manager.report_error(RuntimeError(why))
        self.torch_group.abort()  # or the others would wait in their collectives until the timeout

    def all_reduce(self, flat: Tensor, **options: Any) -> Any:
        if not self.contributes:  # the others' collective waits for this replica as well
            flat.zero_()
        # ``Manager.allreduce`` would hand each call to a thread that watches its time
        return self.torch_group.parent.allreduce([flat], dist.AllreduceOptions())

    def all_gather(self, everyone: Tensor, flat: Tensor) -> None:
        rows = self._gather_rows(flat)
        torch.cat([rows[i] for i in self.ranks], out=everyone)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        received.zero_()
        some = slice(None if self.contributes else 0)
        sizes = [int(self.contributes and i in self.ranks) for i in range(self.replicas)]
        options = dist.AllToAllOptions()
        return self.torch_group.alltoall_base(received[some], sent[some], sizes, sizes, options)

    def all_gather_object(self, everyone: list[Any], value: Any) -> None:
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather_rows(torch.tensor([len(own)]))]
        padded = torch.cat([own, own.new_zeros(max(sizes) - len(own))])
        rows = zip(self._gather_rows(padded), sizes, strict=True)
        everyone[:] = [pickle.loads(row[:size].numpy().tobytes()) for row, size in rows]

    def _gather_rows(self, own: Tensor) -> list[Tensor]:
        """The tensors of all replicas of the quorum."""
        rows = [torch.empty_like(own) for _ in range(self.replicas)]
        self.torch_group.allgather([rows], [own], AllgatherOptions()).wait()
        return rows


class StepFaults(Faults):
    """A collective that fails ends the step. No calls are compared: replicas that join make others,
    and the quorum brings all together."""

    def __init__(self, group: ManagedGroup) -> None:
        super().__init__(0, 1)
        self.group = group

    def raise_failure(self) -> None:
        """Raise StepLost: a collective of this step has failed."""
        if (failed := self.group.manager.errored()) is not None:
            raise StepLost(str(failed.original_exception))

    def explain_loss(self, name: str, error: RuntimeError) -> StepLost:
        self.group.leave_step(why := str(error).splitlines()[0])
        return StepLost(why)


class Quorum:
    """Who takes part in a step, and what they agree on. A replica is one worker.

    Attributes:
        members: by identity, the residual's norm of each replica when all last agreed.
        changes: who has joined and left, with the norm of the residual that left with them.
        healed: the state of another replica was loaded since the last agreement.
        dropped: norm of the residual that this replica gave up by it.
    """

    def __init__(self, manager: Any) -> None:
        """
        Raises:
            ConfigError: it is no manager, or its group is not of gloo.
        """
        if not all(callable(getattr(manager, name, None)) for name in _USED):
            raise unexpected_value("manager", manager, "a Manager of torchft")
        self.manager, self.group = manager, ManagedGroup(manager)
        if "gloo" not in (kind := str(self.group.torch_group.getBackendName())):
            raise ConfigError(
                f"manager: its process group is {kind}: compressed means over a quorum go over "
                "gloo, Manager(pg=torchft.ProcessGroupGloo(...), ...)"
            )
        # of this life: a replica may come back
        self.name = f"{socket.gethostname()}/{uuid.uuid4().hex[:8]}"
        self.members: dict[str, float] = {}
        self.changes: list[dict[str, Any]] = []
        self.healed, self.dropped = True, 0.0
        self._facts: dict[str, Any] = {}
        self._agreed: tuple[int, int] | None = None  # replicas and rank at that time

    @property
    def contributors(self) -> Sequence[int]:
        """Ranks of the replicas that contribute tensors to a mean."""
        return self.group.ranks

    @property
    def contributes(self) -> bool:
        """Whether this replica does."""
        return self.group.contributes

    def enter_quorum(self, world: World) -> None:
        """Take over the replicas of a quorum that was started; they are the world's from now on.

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
            self.group.leave_step(why := "this replica would send nothing in its first step")
            raise ConfigError(
                f"manager: {why} (an asynchronous quorum, or a spare), and compressed means need "
                "the data of all: Manager(..., use_async_quorum=False), without world_size_mode"
            )
        self.group.replicas, self.group.rank = count, manager.participating_rank()
        self._set_contributors(world, range(count))

    def must_agree(self, world: World, wanted: bool) -> bool:
        """Whether some replica wants all to agree, or others are here than when they last did."""
        wanted |= self.healed or self._agreed != (world.processes, world.rank)
        # No public name of torchft says whether a quorum is new, so the replicas ask each other.
        (share,) = world.mean_over_workers([torch.tensor([[float(wanted)]])])
        return bool(share)

    def agree_on_facts(
        self, world: World, residual: float, moved: bool = True, **facts: Any
    ) -> None:
        """Let the replicas of a quorum agree on the same facts, and on who contributes tensors.

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
        cards = world.gather_object(card)
        if len({card["facts"] for card in cards}) > 1:
            self._refuse_other_facts(world, cards, facts)
        self._set_contributors(world, [i for i, card in enumerate(cards) if card["moved"]])
        self._note_changes(cards)
        self.members = {card["name"]: card["residual"] for card in cards}
        self._agreed = world.processes, world.rank
        self.healed, self.dropped = False, 0.0

    def note_loaded_state(self, members: Mapping[str, float], dropped: float) -> None:
        """Note that another replica's state was loaded.

        Args:
            members: that replica's.
            dropped: norm of the residual that this replica had.
        """
        self.healed, self.members, self.dropped = True, dict(members), dropped

    def _set_contributors(self, world: World, ranks: Sequence[int]) -> None:
        self.group.ranks = tuple(ranks)
        place = self.group.ranks.index(self.group.rank) if self.contributes else 0
        world.set_processes(self.group.replicas, self.group.rank, max(1, len(ranks)), place)

    def _refuse_other_facts(
        self, world: World, cards: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
    ) -> NoReturn:
        """Some replica has other facts: one that joins with them ends, the others go on."""
        everyone = world.gather_object(facts)  # all come here: all have the same cards
        before = [i for i, card in enumerate(cards) if not card["new"]]
        if not before or len({cards[i]["facts"] for i in before}) > 1:
            differ = agreement.describe_difference(everyone)
            raise ConfigError(f"{differ}: start all replicas with the same arguments")
        if cards[world.rank]["facts"] != cards[before[0]]["facts"]:
            differ = agreement.describe_difference([everyone[before[0]], facts])
            raise ConfigError(
                f"{differ}: process 1 is this replica, process 0 one that it joins: start it with "
                "the same arguments"
            )
        self.group.leave_step(why := "a replica has joined with another configuration")
        raise StepLost(why)

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

    def remember_facts(self, facts: Mapping[str, Any]) -> None:
        """Outside of a step there is no quorum to ask: each ``agree_on_facts`` compares these
        facts."""
        self._facts |= facts

    def refuse_collecting(self) -> NoReturn:
        """Raise ConfigError: outside of a step none knows the others."""
        raise ConfigError(
            "full_state_dict: with a manager a replica that joins gets the state by itself; to "
            "start all of them again, each saves and loads hook.state_dict()"
        )
