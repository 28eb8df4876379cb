"""A job with replicas that come and go: torchft decides which replicas take part in a step, and
whether the step counts.

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
from typing import Any, cast

from regimes.collectives.processes import ProcessWorld
from regimes.collectives.quorum import Quorum
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import costs_per_step
from regimes.errors import RecordError
from regimes.job.choices import Choice
from regimes.job.job import Job
from regimes.job.move_residuals import without_residuals
from regimes.job.state import own_part
from regimes.records.schema import Cost

_KEY = "regimes"  # of the state that a replica sends to one that joins


def inner_optimizer(optimizer: Any) -> Any:
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

    def note_step(self, replicas: int) -> None:
        """A step has counted."""
        self.counts[replicas] = self.counts.get(replicas, 0) + 1

    def as_column(self) -> dict[str, Any]:
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
        self, job: Job, quorum: Quorum, optimizer: Any, reducer: Reducer, chosen: Choice
    ) -> None:
        """
        Args:
            reducer, chosen: what the job exchanges.
        """
        self.world: ProcessWorld = job.world
        self.quorum, self.manager, self.optimizer = (
            quorum,
            quorum.manager,
            inner_optimizer(optimizer),
        )
        self._job, self._reducer, self._chosen = job, reducer, chosen
        self.attendance = Attendance()
        self.manager.register_state_dict_fn(_KEY, self.load_from_replica, self.save_for_replica)

    def take_column(self) -> dict[str, Any]:
        """The column "replicas" of the unit that ends."""
        ended, self.attendance = self.attendance, Attendance()
        return ended.as_column()

    def agree_in_quorum(self, place: Mapping[str, Any], begun: bool, moved: bool = True) -> None:
        """All replicas agree, in the thread that sends.

        Args:
            place: where this one is in the job.
            begun: the job has taken a step.
            moved: this replica has something to exchange.
        """
        job, world, quorum = self._job, self.world, self.quorum
        if world.rank:  # before the others may open the files
            self.write_or_wait()
        rates = job.schedule.all_rates()
        quorum.agree_on_facts(world, self._reducer.residual_norm(), moved, state=place, lr=rates)
        if not begun and not job.rows:  # the header says how many replicas the job began with
            self._size_header(world.workers)
        self._reducer.place(world.workers, world.hosted[0])
        self.attendance.changes += quorum.changes
        quorum.changes = []
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
            recorder.close_files()
        elif not self.world.rank and recorder.writer is None:
            try:
                recorder.open_record(job.rows, job.continued or bool(job.rows))
            except RecordError as error:
                if not self.manager.current_step():
                    raise
                if not recorder.warned:
                    said = f"{error}; training goes on, rows are kept in memory"
                    warnings.warn(said, stacklevel=2)
                recorder.warned = True

    # -- a replica joins ---------------------------------------------------------------------

    def save_for_replica(self) -> dict[str, Any]:
        """For a replica that joins; called within ``start_quorum``, in a thread of the manager."""
        own, header = self._save_job(), self._job.header
        own["job"]["parts"] = [without_residuals(own_part(own["job"]))]
        shared = {
            "optimizer": self.optimizer.state_dict(),
            "attendance": vars(self.attendance),
            "members": self.quorum.members,
            "sizes": (header["world"], header["per_step"]),
        }
        return {**own, **copy.deepcopy(shared)}

    def load_from_replica(self, state: Mapping[str, Any]) -> None:
        """The inverse, on the replica that joins, or that missed a step which the others took."""
        self.quorum.note_loaded_state(state["members"], self._reducer.residual_norm())
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_job(state)
        self.attendance = Attendance(**copy.deepcopy(state["attendance"]))
        header = self._job.header
        header["world"], header["per_step"] = state["sizes"]
        header["config"]["workers"] = header["world"]["workers"]

    @abstractmethod
    def _save_job(self) -> dict[str, Any]:
        """What else the job needs, with its own state under "job"."""

    @abstractmethod
    def _load_job(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
