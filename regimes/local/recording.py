"""What a record has of local steps: when workers synchronise, and where the time of a unit went."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from torch import nn

from regimes import policies
from regimes.ddp import recording
from regimes.ddp.backward import StepClock
from regimes.local.arguments import Chosen


def header(
    about: recording.Recording | None,
    job: recording.Described,
    chosen: Chosen,
    model: nn.Module,
    seed: int,
) -> dict[str, Any]:
    """``run.json``. Without a name of its own a record has that of what decides the period; of the
    words for periods it has those that this can ask for."""
    rule = policies.REGISTRY.table(chosen.rule)
    about = about or recording.Recording("")
    named = replace(about, name=about.name or rule["name"])
    found = recording.header(named, job, chosen.exchange, model, seed)
    found["config"] |= {
        "sync_policy": rule,
        "sync_levels": {n: p for n, p in chosen.periods.items() if n in chosen.rule.names},
        "outer": asdict(chosen.outer),
    }
    return found


class UnitClock(StepClock):
    """Where the time of a unit's iterations went.

    Attributes:
        clocked: iterations whose beginning was seen, which is the end of the one before.
    """

    clocked = 0

    def start(self) -> None:
        """An iteration's own steps are over."""
        self.clocked += self.since is not None
        super().start()

    def of_unit(self, steps: int) -> dict[str, float]:
        """Seconds of a unit of so many iterations. One whose beginning was not seen, as that of the
        first, counts as the mean of the others."""
        if not self.clocked:
            return self.seconds
        return self.seconds | {"compute": self.seconds["compute"] * steps / self.clocked}

    def next_unit(self, steps: int) -> UnitClock:
        """The clock of the unit to come. A unit of one iteration has no others: it begins with the
        end of the one before."""
        clock = UnitClock(self.world)
        clock.since = self.since if steps == 1 else None
        return clock
