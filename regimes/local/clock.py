"""The clock of local steps in a user's own loop."""

from __future__ import annotations

from regimes.ddp.schedule import StepClock


class UnitClock(StepClock):
    """Where the time of a unit's iterations went.

    Attributes:
        clocked: iterations whose beginning is known: the end of the iteration before.
    """

    clocked = 0

    def start(self) -> None:
        """The computation of an iteration has ended; the wait for others begins."""
        self.clocked += self.since is not None
        super().start()

    def of_unit(self, steps: int) -> dict[str, float]:
        """Seconds of a unit of so many iterations. One whose beginning is not known, like the
        first, counts as the mean of the others."""
        share = steps / self.clocked if self.clocked else 1
        return self.seconds | {"compute": self.seconds["compute"] * share}

    def next_unit(self, steps: int) -> UnitClock:
        """The clock of the next unit. A unit of one iteration has no mean of others: it begins with
        the end of the iteration before."""
        clock = UnitClock(self.world)
        clock.since = self.since if steps == 1 else None
        return clock
