"""Local steps with replicas that come and go: each synchronisation is a step of torchft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regimes.collectives.quorum import Quorum, StepLost
from regimes.errors import ConfigError, TrainingError
from regimes.job.membership import Membership
from regimes.job.state import State, place_state

if TYPE_CHECKING:
    from regimes.local.steps import LocalSteps


class LocalMembership(Membership):
    """Each synchronisation is a step of torchft, with a quorum of its own.

    What replicas exchange is applied once the step has committed. Otherwise all is as before it,
    the local steps included, and the replicas that are still there try again at once. A replica
    that joins takes part in the synchronisation under way, but contributes no update.

    Attributes:
        moved: this replica has taken a step since it began or loaded another's state.
    """

    moved = False

    def __init__(self, local: LocalSteps, quorum: Quorum, optimizer: Any) -> None:
        reducer = local.sync.reducer
        super().__init__(local, quorum, optimizer, reducer, local.chosen.exchange)
        self.local = local

    def synchronize(self, last: bool = False) -> None:
        """Exchange until it has counted.

        Raises:
            TrainingError: there is no quorum; or a parameter of this replica is not finite, and the
                others go on without it.
        """
        if not all(bool(p.isfinite().all()) for p in self.local.replicas.parameters):
            raise self._end_replica(
                "a parameter of this replica is not finite",
                "lower the learning rate; the others go on without it",
            )
        while not self._try_quorum(last):
            self.attendance.uncommitted += 1

    def _try_quorum(self, last: bool) -> bool:
        """One quorum; returns whether its exchange has counted."""
        local, means = self.local, None
        self._start_quorum()
        try:
            self._agree_on_place()
            if self.quorum.contributors:
                local._send_fragments(last)
                means = local.replicas.buffer_means(self.world)
        except StepLost:
            pass  # which the manager knows
        if self.manager.should_commit():
            self._commit_step(last, means)
            return True
        local.sync.undo_sent()
        return False

    def _start_quorum(self) -> None:
        try:
            self.manager.start_quorum()
        except ConfigError:
            raise
        except Exception as error:  # of torchft's client, of several types
            raise self._end_replica(
                "no quorum",
                "the lighthouse does not answer, or the other replicas have not come within "
                f"quorum_timeout ({type(error).__name__}: {str(error).splitlines()[0]}); what was "
                "synchronised before is intact",
            ) from error
        self.quorum.enter_quorum(self.world)

    def _end_replica(self, what: str, why: str) -> TrainingError:
        """The error that ends this replica, which its record has, too."""
        local, said = self.local, f"{what} after step {self.local.total}: {why}"
        if local.recorder is not None:
            local.recorder.end_record(len(local.rows), said)
        return TrainingError(said)

    def _agree_on_place(self) -> None:
        """Before each exchange, because a replica that has just joined contributes nothing."""
        local = self.local
        place = {
            "units": len(local.rows),
            "steps": local.total,
            "rounds": local.sync.fragment_steps,
        }
        self.agree_in_quorum(place | {"period": local.next_period}, local.total > 0, self.moved)
        local.to_agree = False

    def _commit_step(self, last: bool, means: Mapping[int, Tensor] | None) -> None:
        quorum, local = self.quorum, self.local
        local.sync.settle_sent()
        if not quorum.contributes:  # it has added nothing, so it keeps no residual
            for residual in self._reducer.residuals():
                if residual is not None:
                    residual.zero_()
        local._apply_fragments(last, means)
        if quorum.contributors:
            self.attendance.note_step(len(quorum.contributors))
        if local.total:  # before the first step a state may still be loaded, and a record continued
            self.write_or_wait()  # another replica may have become the first

    def _save_job(self) -> dict[str, Any]:
        return {"job": self.local.state_dict()}

    def _load_job(self, state: Mapping[str, Any]) -> None:
        local = self.local
        local.load_state_dict(state["job"])
        local.replicas.receive_synced(range(len(local.replicas.stacks)), 0.0)
        self.moved = False

    def as_mine(self, state: Mapping[str, Any]) -> State:
        """A state of local steps in the place that this replica has now."""
        self.moved = True
        return place_state(state, self.world.rank, self.world.processes, self.world.hosted)
