"""A search for harm whose runs a function of the user trains, such as a loop with `regimes.attach`.

The function gets a pulse, or None for the trunk, and a seed, and returns the metric in the end. How
it continues a saved state is its own affair (`docs/how-to/harm.md` has a loop). Results are in the
log alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes.base.errors import ConfigError, TrainingError, require
from regimes.plotting.looks import Metric
from regimes.search.harms.evidence import Pulse, PulseRun, units_trained
from regimes.search.harms.kinds import PulseKind
from regimes.search.harms.result import Harm
from regimes.search.harms.search import Facts, HarmSearch
from regimes.search.rounds import SearchBudget, SearchLog, Show, as_number, expect

LARGEST = 1e100  # beyond it a training broke; squares of smaller ones are finite
TrainingFunction = Callable[[Pulse | None, int], float]


class FunctionSearch(HarmSearch):
    """Searches for harm among runs that a function of the user trains.

    Attributes:
        job: the function; one call trains one run.
        units: how many units a run has.
        shown: how the metric that the function returns is written.
    """

    def __init__(
        self,
        out: Path,
        job: TrainingFunction,
        kinds: Mapping[str, PulseKind],
        units: int,
        shown: Metric,
        margin: float | None,
        parts: int,
        first_seed: int,
        lost_time: bool,
    ) -> None:
        require(units >= 2, "units", units, "2 or more")
        super().__init__(out, kinds, margin, parts, first_seed, lost_time)
        self.job, self.units, self.shown = job, units, shown
        self.question = {"units": units, "metric": shown.name}

    def search(self, budget: SearchBudget, show: Show) -> Harm:
        """Train runs until all is resolved or the budget is spent, and return what was found."""
        return self.conclude(self.run_rounds(budget, show))

    def train(self, runs: Sequence[PulseRun], ended: Callable[[PulseRun, Any], None]) -> None:
        """Call the function for each of these runs.

        Raises:
            ConfigError: it does not return a number.
            TrainingError: a trunk's metric is not finite.
        """
        for run in runs:
            metric = _read_metric(self.job(run.pulse, self.first_seed + run.seed))
            ended_well = abs(metric) <= LARGEST  # not a number is not
            if run.pulse is None and not ended_well:
                raise TrainingError(f"{self.name(run)}: the metric is {metric}")
            ended(run, metric if ended_well else None)

    def cost(self, run: PulseRun) -> float:
        return units_trained(run, self.units)

    def facts_of(self, log: SearchLog[PulseRun]) -> Facts:
        return Facts(self.units, self.end_of(PulseRun(None, 0), log), 0.0, self.shown)

    def end_of(self, run: PulseRun, log: SearchLog[PulseRun]) -> float:
        return self.shown.factor * float(log.results[run])

    def harm_of(self, run: PulseRun, log: SearchLog[PulseRun]) -> float:
        value = log.results[run]
        if value is None:
            return math.inf
        sign = self.shown.factor * (1 if self.shown.lower else -1)
        return float(sign * (value - log.results[PulseRun(None, run.seed)]))

    def describe_run(self, run: PulseRun, log: SearchLog[PulseRun]) -> str:
        return f"{self.name(run)}: {self.shown.name} {log.results[run]}"

    def check_result(self, run: PulseRun, result: Any) -> None:
        if result is not None or run.pulse is None:
            expect(abs(as_number(result)) <= LARGEST)


def _read_metric(value: Any) -> float:
    """The metric that a function returned; ConfigError if it is none, or too large for one."""
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not truth and not isinstance(value, str | bytes):
            return float(value)
    try:
        shown = " ".join(f"{value!r}".split())
    except ValueError:  # Python writes no such number
        shown = "a number of too many digits"
    raise ConfigError(f"the function returned {shown:.40}, expected a number")
