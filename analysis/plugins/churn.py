"""Churn: simulated workers that leave and join, to ask which phase of a training tolerates the loss
of a replica. What a worker that leaves takes with it: `regimes.training.present`.

torch is imported where workers are drawn: who reads a record needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from regimes.capabilities import (
    CAPTURED_STEPS,
    FIXED_WORKERS,
    ONE_PROCESS,
    SEVERAL_WORKERS,
    WORKERS_OF_A_UNIT,
)
from regimes.config import RunConfig
from regimes.config.bounds import Count, Natural, Share
from regimes.errors import ConfigError, require
from regimes.training.interventions import Circumstances, Intervention, InterventionConfig, Job

Workers = tuple[int, ...]  # ascending


@dataclass(frozen=True)
class Churn(InterventionConfig):
    """Simulated workers that leave and join.

    Attributes:
        absent: these workers are absent as long as this configuration holds.
        away: ``[worker, first, stop]``: absent in the units ``[first, stop)``.
        leave, join: in place of both, the probability that a present worker leaves, and that an
            absent one joins, at the start of each unit; drawn from the run's seed.
        per: what ``away``, ``leave`` and ``join`` count: units, or steps at ``batch_size``.
        least: workers that are always present.
        optimizer: with local steps, the optimiser state that one that joins starts from: a copy of
            the first's that stays, the mean, or none.
    """

    requires: ClassVar[frozenset[str]] = frozenset({ONE_PROCESS})

    absent: tuple[Natural, ...] = ()
    away: tuple[tuple[int, int, int], ...] = ()
    leave: Share = 0.0
    join: Share = 0.0
    per: Literal["unit", "step"] = "unit"
    least: Count = 1
    optimizer: Literal["copy", "average", "reset"] = "copy"

    def start(self, job: Job) -> ChangingWorkers:
        return ChangingWorkers(self, job)

    def ended(self, job: Job) -> ChangingWorkers:
        """Whoever is absent joins before the next step."""
        return ChangingWorkers(Churn(), job, configured=False)

    # -- what it does not go with ------------------------------------------------------------

    @property
    def takes_away(self) -> dict[str, str]:
        lacks = {
            CAPTURED_STEPS: "the workers present change during the run",
            FIXED_WORKERS: "worker 0 may be absent",
        }
        if self.least == 1:
            lacks[SEVERAL_WORKERS] = "a worker may be alone: set churn.least = 2, or more"
        if self.per == "step" and (self.away or self.leave):
            lacks[WORKERS_OF_A_UNIT] = (
                "workers leave and join between two steps of a unit, over which gradients are "
                'added up: set churn.per = "unit"'
            )
        return lacks

    def check(self, config: RunConfig, known: Circumstances) -> None:
        self._check_workers(config.workers)
        self._check_enough(config.workers)
        if known.units is not None and self.per == "unit":
            expected = f"windows that start within the run's {known.units} units"
            for window in self.away:
                require(window[1] < known.units, "churn.away", list(window), expected)

    def _check_workers(self, workers: int) -> None:
        expected = f"workers from 0 to {workers - 1}"
        for worker in self.absent:
            require(worker < workers, "churn.absent", worker, expected)
        for window in self.away:
            worker, first, stop = window
            good = 0 <= worker < workers and 0 <= first < stop
            form = f"[worker, first, stop) with {expected} and 0 <= first < stop"
            require(good, "churn.away", list(window), form)
        if (self.leave or self.join) and self.away:
            raise ConfigError("churn: windows (away) or probabilities (leave, join), not both")
        drawn = self.leave > 0 or not self.join
        require(drawn, "churn.join", self.join, "churn.leave above 0, too")

    def _check_enough(self, workers: int) -> None:
        presence = Presence(self, workers, 0)
        expected = f"{self.least} of {workers} workers present (churn.least)"
        require(len(presence.all) >= self.least, "churn.absent", list(self.absent), expected)
        times = sorted({0, *(t for _, *window in self.away for t in window)})
        present = [presence.at(time) for time in times] if self.away else [presence.all]
        for time, now in zip(times, present, strict=False):
            place = f"churn.away: at {self.per} {time}"
            require(len(now) >= self.least, place, list(now), expected)
        for time, (before, after) in zip(times[1:], pairwise(present), strict=False):
            if not {*before} & {*after}:
                raise ConfigError(
                    f"churn.away: at {self.per} {time} no worker stays, so new ones have no source"
                )


class Presence:
    """The workers that are present at each time, a unit or a step (``Churn.per``): a function of
    the configuration, so that it is neither saved nor synchronised.

    Drawn times follow from the one before, so a run asks for them in order; an earlier one is drawn
    anew from the start.

    >>> away = Presence(Churn(away=((2, 1, 3),)), workers=3, seed=0)
    >>> [away.at(time) for time in range(4)]
    [(0, 1, 2), (0, 1), (0, 1), (0, 1, 2)]
    """

    def __init__(self, churn: Churn, workers: int, seed: int) -> None:
        self.churn, self.seed = churn, seed
        self.all = tuple(w for w in range(workers) if w not in churn.absent)
        self._drawn: tuple[int, Workers] = 0, self.all

    def at(self, time: int) -> Workers:
        """The workers that are present in a unit, or at a step."""
        away = {w for w, first, stop in self.churn.away if first <= time < stop}
        if away:
            return tuple(w for w in self.all if w not in away)
        return self._draw(time) if self.churn.leave else self.all

    def _draw(self, time: int) -> Workers:
        last, present = self._drawn
        if time < last:
            last, present = 0, self.all
        for now in range(last + 1, time + 1):
            present = self._next(now, present)
        self._drawn = time, present
        return present

    def _next(self, time: int, before: Workers) -> Workers:
        """First all that join, then those that leave by ascending number, as long as enough are
        present and one of those before stays, from which others can copy."""
        import torch

        from regimes.seeding import make_generator

        drawn = torch.rand(
            max(self.all) + 1, generator=make_generator(self.seed, "churn", time)
        ).tolist()
        present = {*before, *(w for w in self.all if drawn[w] < self.churn.join)}
        staying = len(before)
        for worker in before:
            enough = len(present) > self.churn.least and staying > 1
            if drawn[worker] < self.churn.leave and enough:
                present.remove(worker)
                staying -= 1
        return tuple(sorted(present))


class ChangingWorkers(Intervention):
    """Changes the workers of one run, and says so in the column "churn".

    Attributes:
        worker_steps: of the unit so far, steps times the workers present.
        left, joined: events of the unit so far, in plain types.
    """

    def __init__(self, churn: Churn, job: Job, *, configured: bool = True) -> None:
        """``configured``: every row has the column; otherwise those with an event."""
        self.churn, self.job, self.configured = churn, job, configured
        self.presence = Presence(churn, job.config.workers, job.config.seed)
        self._start_unit()

    def _start_unit(self) -> None:
        self.worker_steps = 0
        self.left: list[dict[str, Any]] = []
        self.joined: list[dict[str, Any]] = []

    def before_step(self, unit: int, step: int) -> None:
        now = self.presence.at(unit if self.churn.per == "unit" else step)
        if now != self.job.present:
            self.change(now, step)
        self.worker_steps += len(now)

    def change(self, now: Workers, step: int) -> None:
        """Let workers leave and join before a step."""
        before = self.job.present
        unsent = self.job.set_present(now, self.churn.optimizer)
        self.left += [{"worker": w, "step": step, **unsent[w]} for w in before if w not in now]
        self.joined += [{"worker": w, "step": step} for w in now if w not in before]

    def columns(self) -> dict[str, Any]:
        steps, left, joined = self.worker_steps, self.left, self.joined
        self._start_unit()
        if not (self.configured or left or joined):
            return {}
        norms = {
            name: math.sqrt(math.fsum(event[name] ** 2 for event in left))
            for name in ("residual", "movement")
        }
        present = len(self.job.present)
        events = {"left": left, "joined": joined}
        return {"churn": {"present": present, "worker_steps": steps, **events, **norms}}
