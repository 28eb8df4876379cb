"""A hook, or local steps, whose replicas come and go: torchft decides which of them take part in a
step, and whether the step counts.

A replica that joins loads the others' state but for residuals, and begins with none. Policies see
the same history on all, so their decisions are the same. A replica that leaves takes its residual
with it; the others know its norm as of the last agreement, and the record has it.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from regimes.collectives.quorum import QuorumWorld, StepLost
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import costs_per_step
from regimes.errors import ConfigError, RecordError, TrainingError
from regimes.job.choices import Choice
from regimes.job.residuals import without_residuals
from regimes.job.state import State, own_part, placed
from regimes.job.upgrade import upgraded
from regimes.records.schema import Cost

if TYPE_CHECKING:
    from regimes.ddp.hook import Hook
    from regimes.job.job import Job
    from regimes.local.steps import LocalSteps

KEY = "regimes"  # of the state that a replica sends to one that joins


def inner(optimizer: Any) -> Any:
    """The optimiser that ``torchft.Optimizer`` wraps, or the optimiser itself."""
    return getattr(optimizer, "optim", optimizer)


@dataclass
class Attendance:
    """How many replicas took part in the steps of the unit under way.

    Attributes:
        counts: steps by their number of replicas.
        uncommitted: steps that did not count.
    """

    counts: dict[int, int] = field(default_factory=dict)
    uncommitted: int = 0
    changes: list[dict[str, Any]] = field(default_factory=list)

    def note(self, replicas: int) -> None:
        """A step has counted."""
        self.counts[replicas] = self.counts.get(replicas, 0) + 1

    def column(self) -> dict[str, Any]:
        """The column "replicas" of a row; see docs/how-to/sites.md."""
        steps = sum(self.counts.values())
        left = [one["residual"] for change in self.changes for one in change["left"]]
        return {
            "least": min(self.counts, default=0),
            "most": max(self.counts, default=0),
            "mean": sum(n * k for n, k in self.counts.items()) / max(1, steps),
            "joined": sum(len(change["joined"]) for change in self.changes),
            "left": len(left),
            "lost_residual": math.hypot(*left),
            "uncommitted": self.uncommitted,
            "changes": self.changes,
        }


class Membership(ABC):
    """What a manager adds to a job: who takes part in a step, whether it counts, and what a replica
    that joins gets."""

    def __init__(
        self, job: Job, world: QuorumWorld, optimizer: Any, reducer: Reducer, chosen: Choice
    ) -> None:
        """
        Args:
            reducer, chosen: what the job exchanges.
        """
        self.world, self.manager, self.optimizer = world, world.manager, inner(optimizer)
        self._job, self._reducer, self._chosen = job, reducer, chosen
        self.attendance = Attendance()
        self.manager.register_state_dict_fn(KEY, self.load, self.save)

    def take_column(self) -> dict[str, Any]:
        """The column "replicas" of the unit that ends."""
        ended, self.attendance = self.attendance, Attendance()
        return ended.column()

    def meet(self, place: Mapping[str, Any], begun: bool, moved: bool = True) -> None:
        """All replicas agree, in the thread that sends.

        Args:
            place: where this one is in the job.
            begun: the job has taken a step.
            moved: this replica has something to exchange.
        """
        job, world = self._job, self.world
        if world.rank:  # before the others may open the files
            self.write_or_wait()
        rates = job.schedule.all_rates()
        world.meet(self._reducer.residual_norm(), moved, state=place, lr=rates)
        if not begun and not job.rows:  # the header says how many replicas the job began with
            self._size_header(world.workers)
        self._reducer.place(world.workers, world.hosted[0])
        self.attendance.changes += world.changes
        world.changes = []
        self.write_or_wait()

    def _size_header(self, workers: int) -> None:
        header, chosen = self._job.header, self._chosen
        header["world"] |= {"workers": workers, "processes": workers}
        header["config"]["workers"] = workers
        costs = costs_per_step(chosen.compressor, self._job.layers, chosen.levels, workers)
        header["per_step"] = cast("dict[str, Cost]", costs)

    def write_or_wait(self) -> None:
        """The first replica of a quorum writes the record; one that no longer is lets go of the
        files. On separate disks each has all units from its first turn on.

        A replica that was only slow may still hold the files: the next unit tries again.

        Raises:
            RecordError: at the start of the job, if the record cannot be written.
        """
        job, recorder = self._job, self._job.recorder
        if recorder is None or recorder.closed:
            return
        if self.world.rank and recorder.writer is not None:
            recorder.suspend()
        elif not self.world.rank and recorder.writer is None:
            try:
                recorder.open(job.rows, job.continued or bool(job.rows))
            except RecordError as error:
                if not self.manager.current_step():
                    raise
                if not recorder.warned:
                    said = f"{error}; training goes on, rows are kept in memory"
                    warnings.warn(said, stacklevel=2)
                recorder.warned = True

    # -- a replica joins ---------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """For a replica that joins; called within ``start_quorum``, in a thread of the manager."""
        own, header = self._save(), self._job.header
        own["job"]["parts"] = [without_residuals(own_part(own["job"]))]
        shared = {
            "optimizer": self.optimizer.state_dict(),
            "attendance": vars(self.attendance),
            "members": self.world.members,
            "sizes": (header["world"], header["per_step"]),
        }
        return {**own, **copy.deepcopy(shared)}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse, on the replica that joins, or that missed a step which the others took."""
        self.world.heal(state["members"], self._reducer.residual_norm())
        self.optimizer.load_state_dict(state["optimizer"])
        self._load(state)
        self.attendance = Attendance(**copy.deepcopy(state["attendance"]))
        header = self._job.header
        header["world"], header["per_step"] = state["sizes"]
        header["config"]["workers"] = header["world"]["workers"]

    @abstractmethod
    def _save(self) -> dict[str, Any]:
        """What else the job needs, with its own state under "job"."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """The inverse."""


class HookMembership(Membership):
    """A hook's: ``torchft.Optimizer`` starts a quorum before each forward pass, and commits.

    Attributes:
        step: the manager's step when gradients were last exchanged; None: that is settled.
        wanted: this replica begins a unit, so that all must agree.
    """

    step: int | None = None
    wanted = True

    def __init__(self, hook: Hook, world: QuorumWorld, optimizer: Any) -> None:
        super().__init__(hook, world, optimizer, hook.reducer, hook.chosen)
        self.hook = hook
        hook.steps.applied = None  # the manager says what has counted

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        self.resolve()
        self.world.enter()
        self.step = self.manager.current_step()

    def resolve(self) -> None:
        """Undo the last exchange unless the step has counted, which the manager's number says."""
        before, self.step = self.step, None
        if before is None:
            return
        if self.manager.current_step() > before:
            self.attendance.note(self.world.workers)
        else:
            self.hook.steps.undo()
            self.attendance.uncommitted += 1
        self.hook.steps.forget()

    def agree(self, place: Mapping[str, Any]) -> None:
        """In each step, before anything else is sent."""
        if self.world.must_meet(self.wanted):
            self.meet(place, begun=self.hook.steps.total > 0)
        self.wanted = False

    def _save(self) -> dict[str, Any]:
        self.resolve()
        hook = self.hook
        model = copy.deepcopy(hook.source.network.state_dict())
        return {"job": hook._codec.save(hook.levels), "model": model}

    def _load(self, state: Mapping[str, Any]) -> None:
        hook = self.hook
        self.step = None
        hook.steps.forget()
        hook.source.network.load_state_dict(state["model"])
        hook._continue(hook._codec.fit(self.as_mine(upgraded(state["job"]))))

    def as_mine(self, state: Mapping[str, Any]) -> State:
        """A hook's state in the place that this replica has now; places change with the quorum."""
        return placed(state, self.world.rank, self.world.processes, self.world.hosted)


class LocalMembership(Membership):
    """That of local steps: each synchronisation is a step of torchft, with a quorum of its own.

    What replicas exchange is applied once the step has committed. Otherwise all is as before it,
    the local steps included, and the replicas that are still there try again at once. A replica
    that joins takes part in the synchronisation under way, but contributes no update.

    Attributes:
        moved: this replica has taken a step since it began or loaded another's state.
    """

    moved = False

    def __init__(self, local: LocalSteps, world: QuorumWorld, optimizer: Any) -> None:
        reducer = local.sync.reducer
        super().__init__(local, world, optimizer, reducer, local.chosen.exchange)
        self.local = local

    def synchronize(self, last: bool = False) -> None:
        """Exchange until it has counted.

        Raises:
            TrainingError: there is no quorum; or a parameter of this replica is not finite, and the
                others go on without it.
        """
        if not all(bool(p.isfinite().all()) for p in self.local.replicas.parameters):
            raise self._ended(
                "a parameter of this replica is not finite",
                "lower the learning rate; the others go on without it",
            )
        while not self._attempt(last):
            self.attendance.uncommitted += 1

    def _attempt(self, last: bool) -> bool:
        """One quorum; returns whether its exchange has counted."""
        local, sync = self.local, self.local.sync
        self._start_quorum()
        states = copy.deepcopy(sync.reducer.states)  # a lost step may have changed them
        rounds = [(f, f.since) for f in sync.fragments]
        means = None
        try:
            self._agree()
            if self.world.contributors:
                local._send(last)
                means = local.replicas.buffer_means(self.world)
        except StepLost:
            pass  # which the manager knows
        if self.manager.should_commit():
            self._commit(last, means)
            return True
        sync.reducer.states = states
        for fragment, since in rounds:
            fragment.since, fragment.flight = since, None
        return False

    def _start_quorum(self) -> None:
        try:
            self.manager.start_quorum()
        except ConfigError:
            raise
        except Exception as error:  # of torchft's client, of several types
            raise self._ended(
                "no quorum",
                "the lighthouse does not answer, or the other replicas have not come within "
                f"quorum_timeout ({type(error).__name__}: {str(error).splitlines()[0]}); what was "
                "synchronised before is intact",
            ) from error
        self.world.enter()

    def _ended(self, what: str, why: str) -> TrainingError:
        """The error that ends this replica, which its record has, too."""
        local, said = self.local, f"{what} after step {self.local.total}: {why}"
        if local.recorder is not None:
            local.recorder.close(len(local.rows), said)
        return TrainingError(said)

    def _agree(self) -> None:
        """Before each exchange, because a replica that has just joined contributes nothing."""
        local = self.local
        rounds = [[f.period, f.since] for f in local.sync.fragments]
        place = {"units": len(local.rows), "steps": local.total, "rounds": rounds}
        self.meet(place | {"period": local.next_period}, local.total > 0, self.moved)
        local.to_agree = False

    def _commit(self, last: bool, means: Mapping[int, Tensor] | None) -> None:
        world, local = self.world, self.local
        if not world.contributes:  # it has added nothing, so it keeps no residual
            for residual in self._reducer.residuals():
                if residual is not None:
                    residual.zero_()
        local._apply(last, means)
        if world.contributors:
            self.attendance.note(len(world.contributors))
        if local.total:  # before the first step a state may still be loaded, and a record continued
            self.write_or_wait()  # another replica may have become the first

    def _save(self) -> dict[str, Any]:
        return {"job": self.local.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        local = self.local
        local.load_state_dict(state["job"])
        local.replicas.receive(range(len(local.replicas.stacks)), 0.0)
        self.moved = False

    def as_mine(self, state: Mapping[str, Any]) -> State:
        """A state of local steps in the place that this replica has now."""
        self.moved = True
        return placed(state, self.world.rank, self.world.processes, self.world.hosted)
