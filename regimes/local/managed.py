"""Local steps of replicas that come and go (``regimes.ddp.managed``): each synchronisation is a
step of torchft, with a quorum of its own.

What replicas exchange is applied once the step has committed. Otherwise all is as before it, the
local steps included, and the replicas that are still there try again at once. A replica that joins
takes part in the synchronisation under way without a movement of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regimes.collectives.managed import ManagedWorld, StepLost
from regimes.ddp.choices import check_needs
from regimes.ddp.managed import KEY, Attendance, load_sizes, size_header, sizes, write_or_wait
from regimes.errors import ConfigError, TrainingError
from regimes.local.arguments import LocalChoice, Trained
from regimes.local.steps import LocalSteps


def check_managed(chosen: LocalChoice) -> None:
    """Raise ConfigError for what replicas that come and go cannot have."""
    if chosen.outer.delay:
        raise ConfigError(
            "outer.delay: with a manager an update is applied when its step commits, so it "
            "cannot be delayed: leave it out"
        )
    if chosen.outer.states == "average":
        raise ConfigError(
            'outer.states = "average": momenta are averaged after the commit, outside of a quorum: '
            'with a manager use "keep" or "reset"'
        )
    if getattr(chosen.rule, "reads_loss", False):
        raise ConfigError(
            f"policy: {type(chosen.rule).__name__} decides by the mean training loss of all "
            "replicas, which would be sent outside of a quorum: with a manager take another policy"
        )
    check_needs(chosen.rule, ("norms",), "with a manager local steps give")


class ManagedSteps(LocalSteps):
    """Made by ``local_steps(..., manager=manager)``; one per replica.

    Attributes:
        moved: this replica has taken a step since it began or loaded another's state.
    """

    world: ManagedWorld
    moved = False

    def _start_alike(self, what: Trained, model: nn.Module) -> None:
        """torchft copies the first replica's state to the others in the first quorum."""

    def _join(self) -> None:
        """Join the other replicas, which may be in the middle of the job."""
        self.attendance = Attendance()
        self.world.manager.register_state_dict_fn(KEY, self._load, self._save)
        self._synchronize()

    def step(self) -> None:
        self.moved = True
        super().step()

    # -- a synchronisation -------------------------------------------------------------------

    def _synchronize(self, *, last: bool = False) -> None:
        while not self._attempt(last):
            self.attendance.uncommitted += 1

    def _attempt(self, last: bool) -> bool:
        """One quorum; returns whether its exchange has counted."""
        world, exchange = self.world, self.exchange
        self._start_quorum()
        states = copy.deepcopy(exchange.reducer.states)  # a lost step may have changed them
        rounds = [(f, f.since) for f in exchange.fragments]
        means, broken = None, False
        try:
            self._meet()
            if world.contributors:
                self._send(last)
                means = self.replicas.buffer_means(world)
                broken = self._is_broken()
        except StepLost:
            pass  # which the manager knows
        if broken:
            world.manager.report_error(RuntimeError("a parameter is not finite"))
        if world.manager.should_commit():
            self._commit(last, means)
            return True
        exchange.reducer.states = states
        for fragment, since in rounds:
            fragment.since, fragment.flight = since, None
        return False

    def _start_quorum(self) -> None:
        manager = self.world.manager
        try:
            manager.start_quorum()
        except ConfigError:
            raise
        except Exception as error:  # of torchft's client, of several types
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if self.recorder is not None:
                self.recorder.close(len(self.rows), f"no quorum after step {self.total}: {why}")
            raise TrainingError(
                f"no quorum after step {self.total}: the lighthouse does not answer, or the other "
                f"replicas have not come within quorum_timeout ({why}); what was synchronised "
                "before is intact"
            ) from error
        self.world.enter()

    def _meet(self) -> None:
        """Agree before each exchange, not only in a new quorum: a replica that has just joined has
        no movement of its own."""
        world, reducer = self.world, self.exchange.reducer
        if world.rank:  # before the others may open the files
            write_or_wait(self, world)
        rounds = [[f.period, f.since] for f in self.exchange.fragments]
        place = {"units": len(self.rows), "steps": self.total, "rounds": rounds}
        place["period"] = self.next_period
        rates = self.schedule.all_rates()
        world.meet(reducer.residual_norm(), self.moved, state=place, lr=rates)
        size_header(self, self.total, self.chosen.exchange)
        reducer.place(world.workers, world.hosted[0])
        self.attendance.changes += world.take_changes()
        self.to_agree = False

    def _is_broken(self) -> bool:
        """Whether a parameter is not finite on some replica.

        Raises:
            TrainingError: it is on this one, which leaves; the others try again without it.
        """
        flights = [f.flight for f in self.exchange.fragments if f.flight is not None]
        if all(bool(f.means.isfinite()) for f in flights if f.means is not None):
            return False
        if all(bool(f.sent.isfinite()) for f in flights if f.sent is not None):
            return True
        why = f"a parameter of this replica is not finite after step {self.total}"
        self.world.manager._pg.abort()
        if self.recorder is not None:
            self.recorder.close(len(self.rows), why)
        raise TrainingError(f"{why}: lower the learning rate; the others go on without it")

    def _commit(self, last: bool, means: Mapping[int, Tensor] | None) -> None:
        contributors = self.world.contributors
        if self.world.rank not in contributors:  # it has added nothing, so it keeps no residual
            for state in self.exchange.reducer.states:
                state.residual = None if state.residual is None else state.residual.zero_()
        self._apply(last, means)
        if contributors:
            self.attendance.note(len(contributors))
        if self.total:  # before the first step a state may still be loaded, and a record continued
            write_or_wait(self, self.world)  # another replica may have become the first

    def _open_record(self) -> None:
        self.record_opened = True
        write_or_wait(self, self.world)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See ``LocalSteps``. The state may be of another process: ranks change with the quorum."""
        super().load_state_dict({**saved, "process": self._identity()["process"]})
        self.moved = True

    def _columns(self) -> dict[str, Any]:
        return {"replicas": self.attendance.take()}

    # -- a replica joins ---------------------------------------------------------------------

    def _save(self) -> dict[str, Any]:
        """For a replica that joins: between two synchronisations it is where all are."""
        state = self.state_dict()
        state["residuals"] = dict.fromkeys(state["residuals"])
        return {
            "local": state,
            "optimizer": copy.deepcopy(self.replicas.optimizers[0].state_dict()),
            "attendance": self.attendance.state_dict(),
            "members": dict(self.world.members),
            "sizes": sizes(self),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """The inverse, on the replica that joins, or that missed a step which the others took."""
        self.world.heal(state["members"], self.exchange.reducer.residual_norm())
        self.replicas.optimizers[0].load_state_dict(state["optimizer"])
        self.load_state_dict(state["local"])
        self.replicas.receive(range(len(self.replicas.stacks)), 0.0)
        self.moved = False
        self.attendance.load_state_dict(state["attendance"])
        load_sizes(self, state["sizes"])
