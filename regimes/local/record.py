"""What a record has of local steps: when workers synchronise, and where the time of a unit went."""

from __future__ import annotations

from dataclasses import asdict, replace

from torch import nn

from regimes import policies
from regimes.ddp.job import Job
from regimes.ddp.record import RecordOptions
from regimes.ddp.schedule import StepClock
from regimes.local.arguments import LocalChoice
from regimes.records import Header


def header(
    options: RecordOptions | None,
    job: Job,
    chosen: LocalChoice,
    model: nn.Module,
    seed: int,
) -> Header:
    """``run.json``. The record's default name is that of the rule for the period; of the names of
    periods it has those that the rule can choose."""
    rule = policies.REGISTRY.table(chosen.rule)
    options = options or RecordOptions("")
    named = replace(options, name=options.name or rule["name"])
    result = job._header(named, chosen.exchange, model, seed)
    result["config"] |= {
        "sync_policy": rule,
        "sync_levels": {n: p for n, p in chosen.periods.items() if n in chosen.rule.names},
        "outer": asdict(chosen.outer),
    }
    return result


class UnitClock(StepClock):
    """Where the time of a unit's iterations went.

    Attributes:
        clocked: iterations whose beginning is known: the end of the iteration before.
    """

    clocked = 0

    def start(self) -> None:
        """An iteration's own steps are over."""
        self.clocked += self.since is not None
        super().start()

    def of_unit(self, steps: int) -> dict[str, float]:
        """Seconds of a unit of so many iterations. One whose beginning is not known, like the
        first, counts as the mean of the others."""
        if not self.clocked:
            return self.seconds
        return self.seconds | {"compute": self.seconds["compute"] * steps / self.clocked}

    def next_unit(self, steps: int) -> UnitClock:
        """The clock of the next unit. A unit of one iteration has no mean of others: it begins with
        the end of the iteration before."""
        clock = UnitClock(self.world)
        clock.since = self.since if steps == 1 else None
        return clock
