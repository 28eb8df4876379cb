"""A hook with replicas that come and go: a step counts if torchft's optimiser has committed it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from regimes.collectives.quorum import Quorum
from regimes.job.membership import Membership
from regimes.job.state import State, place_state
from regimes.job.upgrade import upgrade_state

if TYPE_CHECKING:
    from regimes.ddp.hook import Hook


class HookMembership(Membership):
    """A hook's: ``torchft.Optimizer`` starts a quorum before each forward pass, and commits.

    Attributes:
        step: the manager's step when gradients were last exchanged; None: that is settled.
        wanted: this replica begins a unit, so that all must agree.
    """

    step: int | None = None
    wanted = True

    def __init__(self, hook: Hook, quorum: Quorum, optimizer: Any) -> None:
        super().__init__(hook, quorum, optimizer, hook.reducer, hook.chosen)
        self.hook = hook
        hook.steps.applied = None  # the manager says what has counted

    def begin_step(self) -> None:
        """The first gradient of a backward pass is there."""
        self.resolve_step()
        self.quorum.enter_quorum(self.world)
        self.step = self.manager.current_step()

    def resolve_step(self) -> None:
        """Undo the last exchange unless the step has counted, which the manager's number says."""
        before, self.step = self.step, None
        if before is None:
            return
        if self.manager.current_step() > before:
            self.attendance.note_step(self.world.workers)
        else:
            self.hook.steps.undo_step()
            self.attendance.uncommitted += 1
        self.hook.steps.forget_step()

    def agree_in_step(self, place: Mapping[str, Any]) -> None:
        """In each step, before anything else is sent."""
        if self.quorum.must_agree(self.world, self.wanted):
            self.agree_in_quorum(place, begun=self.hook.steps.total > 0)
        self.wanted = False

    def _save_job(self) -> dict[str, Any]:
        self.resolve_step()
        hook = self.hook
        model = copy.deepcopy(hook.source.network.state_dict())
        return {"job": hook._codec.save_state(hook.levels), "model": model}

    def _load_job(self, state: Mapping[str, Any]) -> None:
        hook = self.hook
        self.step = None
        hook.steps.forget_step()
        hook.source.network.load_state_dict(state["model"])
        hook._continue_from(hook._codec.fit_state(self.as_mine(upgrade_state(state["job"]))))

    def as_mine(self, state: Mapping[str, Any]) -> State:
        """A hook's state in the place that this replica has now; places change with the quorum."""
        return place_state(state, self.world.rank, self.world.processes, self.world.hosted)
