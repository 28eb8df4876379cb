"""Levels by trials in the running job: local steps try another level on some of their workers.

The pure part: who is treated at which level, what the results say, and the level that follows. What
exchanges and scores is ``training.trials``. No torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from regimes.capabilities import ALIKE_WORKERS, FIXED_WORKERS, WORKER_MODELS, WORKER_SCORES
from regimes.config import AnyLevel, FeedbackLevel
from regimes.config.bounds import Count, InnerShare, NonNegative
from regimes.errors import require
from regimes.policies.base import Decision, FollowsDecays, RatesSoFar, follow_level, start_level
from regimes.policies.history import PastEpoch, as_history
from regimes.policies.ladders import Rungs

NO_PERIOD = (
    "another policy: a trial compares levels of a compressor; a worker that skips a "
    "synchronisation would be scored with noise of its own, which averaging takes away"
)
PRIOR = 1.0  # c^2 of the interval: the mean in standard deviations is mixed over N(0, 1 / c^2)


class Interval(NamedTuple):
    """What is known of a level's harm, in nats.

    Attributes:
        blocks: of trials.
        mean: of their harms; nan without any.
        low, high: a confidence sequence of the true mean; infinite while there are too few.
    """

    blocks: int
    mean: float
    low: float
    high: float


class Assignment(NamedTuple):
    """One trial.

    Attributes:
        level: the level of the treated workers.
        treated: the numbers of these workers, rising.
    """

    level: str
    treated: tuple[int, ...]


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of numbers that come one by one (Welford, 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    def interval(self, risk: float) -> Interval:
        """A confidence sequence of the mean of normal numbers of unknown variance: with probability
        1 - ``risk`` the true mean is within all intervals, however many numbers come and whenever
        one looks.

        It holds the means that the sequential t-test with a normal mixture does not reject (Wang &
        Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
        variance", 2024, arXiv:2310.03722, the scale-invariant test martingale). The likelihood
        ratio against a mean of 0 is
        ``sqrt(c^2 / (n + c^2)) (Q / (Q - S^2 / (n + c^2)))^(n / 2)`` for n numbers of sum S and sum
        of squares Q, and by Ville's inequality it exceeds ``1 / risk`` with at most that
        probability. Numbers that are not normal have the coverage in the limit of many
        (Waudby-Smith et al., "Time-uniform central limit theory and asymptotic confidence
        sequences", 2024).

        >>> moments = Moments()
        >>> for value in (1.0, 1.2, 0.8, 1.1, 0.9, 1.0):
        ...     moments.add(value)
        >>> [round(x, 3) for x in moments.interval(0.05)[2:]]
        [0.685, 1.315]
        """
        n = self.count
        if n < 2:
            return Interval(n, self.mean if n else math.nan, -math.inf, math.inf)
        kept = PRIOR / (n + PRIOR)
        largest = kept ** (-1 / n) * risk ** (-2 / n)
        room = 1 - largest * kept
        if room <= 0:
            return Interval(n, self.mean, -math.inf, math.inf)
        half = math.sqrt(self.squares * (largest - 1) / (n * room))
        return Interval(n, self.mean, self.mean - half, self.mean + half)


@dataclass
class _Results:
    """What the trials so far have said, since the last decay of the learning rate.

    Attributes:
        block: the results of the block under way.
        last: the number of the last trial.
        barred: trials of blocks before this one do not count.
        shown: for each level that was shown to harm, the interval that has shown it.
    """

    rates: RatesSoFar = field(default_factory=RatesSoFar)
    harms: dict[str, Moments] = field(default_factory=dict)
    shown: dict[str, Interval] = field(default_factory=dict)
    block: list[Mapping[str, Any]] = field(default_factory=list)
    last: int = -1
    barred: int = 0


@dataclass(frozen=True)
class Trial(Rungs, FollowsDecays):
    """The level that sends least of those not shown to harm, by trials in the running job.

    At some synchronisations of local steps a share of the workers is *treated*: they start the next
    round from where another level would have led, the others from where the job's own level leads.
    At the end of the round, before they are averaged, all are scored on one batch. The trial's
    result is the mean loss of the treated less the mean loss of the others.

    *Who.* Trials come in blocks of ``1 / share``. In a block each worker is treated once, in an
    order drawn from the seed, so that what distinguishes the workers cancels in the block's mean,
    which is one observation. *What.* While the job is at one of the levels before the last, the
    treated get the last one; at the last one they get the others, block by block. So each block
    compares a level with the last one, and its observation is that level's harm.

    *When.* A level is shown to harm once the whole of its interval (`Moments.interval`) is above
    ``margin``; the job is at the first of ``levels`` that is not shown to harm. The risk is shared
    by the levels: between two decays of the learning rate, the probability that any level without
    harm is given up is at most ``risk``. A decay forgets all results, and the job tries the highest
    compression again: harm depends on the rate (docs/findings/law.md), so that results at another
    rate measure another number. A sliding window would have no risk to state.

    Attributes:
        levels: from the highest compression to the lowest, which is the reference.
        share: of the workers that are treated: 1/2, 1/3, 1/4, ...
        every: synchronisations from one trial to the next.
        rounds: after which a trial is scored; in between the treated follow the other level, with a
            residual of its own. Levels that differ in error feedback alone need two: at the first
            synchronisation they send the same.
        risk: the probability of giving up a level that does no harm.
        margin: harm that is accepted, in nats of the loss after such rounds.
        samples: training samples in the batch that scores a trial, drawn anew for each; a script
            passes batches of its own.
        null: the treated get the job's own level, so that every harm that is shown is a false
            alarm.
        only_measures: the job stays at the last level, whatever is shown.
    """

    requires: ClassVar[frozenset[str]] = frozenset(
        {WORKER_MODELS, ALIKE_WORKERS, FIXED_WORKERS, WORKER_SCORES}
    )

    levels: tuple[str, ...] = ("high", "low")
    share: InnerShare = 0.5
    every: Count = 4
    rounds: Count = 1
    risk: InnerShare = 0.05
    margin: NonNegative = 0.0
    samples: Count = 64
    null: bool = False
    only_measures: bool = False
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # 0.33 is a third; with all workers treated there are no others to compare them with
        good = self.block > 1 and abs(self.share * self.block - 1) < 0.02
        require(good, "policy.share", self.share, "1/2, 1/3, 1/4, ...: each worker is treated once")
        expected = f"at most policy.every, {self.every}: one trial at a time"
        require(self.rounds <= self.every, "policy.rounds", self.rounds, expected)

    # -- who is treated ----------------------------------------------------------------------

    @property
    def block(self) -> int:
        """Trials in which each worker is treated once."""
        return round(1 / self.share)

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError unless so many workers can be divided into a block's groups."""
        expected = f"a multiple of {self.block} with policy.share = {self.share:.3g}"
        require(workers % self.block == 0, "workers", workers, expected)

    def check_levels(self, values: Mapping[str, AnyLevel]) -> None:
        """Raise ConfigError where a level differs from the last one in error feedback alone, and a
        trial ends before that shows."""
        *sent, reference_sent = (
            x.level if isinstance(x, FeedbackLevel) else x for x in map(values.get, self.levels)
        )
        alike = self.rounds == 1 and reference_sent in sent
        expected = "2 or more: levels that differ in error feedback alone send the same at first"
        require(not alike, "policy.rounds", self.rounds, expected)

    def assignment(self, base: str, number: int, workers: int, seed: int) -> Assignment:
        """Trial ``number`` of a job at the level ``base``, which is among ``levels``."""
        block, place = divmod(number, self.block)
        order = list(range(workers))
        random.Random(f"{seed} trial {block}").shuffle(order)
        size = workers // self.block
        treated = tuple(sorted(order[place * size : (place + 1) * size]))
        return Assignment(self._pick_other_level(base, block), treated)

    def _pick_other_level(self, base: str, block: int) -> str:
        *tried, reference = self.levels
        if self.null:
            return base
        return reference if base != reference else tried[block % len(tried)]

    # -- what follows ------------------------------------------------------------------------

    def intervals(self, history: Sequence[PastEpoch]) -> dict[str, Interval]:
        """What is known of the harm of each level but the last, compared with that one, since the
        last decay of the learning rate."""
        harms = self._results(history).harms
        return {
            level: harms.get(level, Moments()).interval(self._risk) for level in self.levels[:-1]
        }

    def shown(self, history: Sequence[PastEpoch]) -> dict[str, Interval]:
        """The levels that were shown to harm since the last decay, with the first interval that has
        shown it."""
        return dict(self._results(history).shown)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        first = self.levels[-1 if self.only_measures else 0]
        if not history:
            return start_level(first, layers)
        if self.only_measures:
            return follow_level(first, None, history)
        shown = self._results(history).shown
        level = next((x for x in self.levels[:-1] if x not in shown), self.levels[-1])
        why = self.just_decayed(history)
        if why is None and (found := shown.get(history[-1].levels[0])) is not None:
            why = {"rule": "trial", "old": self.margin, "new": found.low, "blocks": found.blocks}
        return follow_level(level, why, history)

    @property
    def _risk(self) -> float:
        """The risk of each interval."""
        return self.risk / (len(self.levels) - 1)

    def _results(self, history: Sequence[PastEpoch]) -> _Results:
        past = as_history(history)
        return past.accumulate(self._add_results, _Results, self._add_results)

    def _add_results(self, results: _Results, epochs: Sequence[PastEpoch]) -> _Results:
        for past in epochs:
            for trial in past.trials:
                self._add_trial(results, trial)
            decays = len(results.rates.decays)
            self._add(results.rates, [past])
            if len(results.rates.decays) > decays:
                # a trial under way has begun at the old rate
                results.harms, results.shown = {}, {}
                results.barred = (results.last + 1) // self.block + 1
        return results

    def _add_trial(self, results: _Results, trial: Mapping[str, Any]) -> None:
        """Add a trial, and the block's harm if it ends a block that compared the same levels
        throughout."""
        number, block = trial["number"], trial["number"] // self.block
        results.last = number
        if results.block and results.block[0]["number"] // self.block != block:
            results.block = []
        results.block.append(trial)
        pairs = {(t["level"], t["base"]) for t in results.block}
        differences = [t["difference"] for t in results.block]
        if len(results.block) < self.block or len(pairs) > 1 or block < results.barred:
            return
        if any(difference is None for difference in differences):
            return
        ((level, base),) = pairs
        *tried, reference = self.levels
        mean = math.fsum(differences) / len(differences)
        if base == reference and level in tried:
            self._add_harm(results, level, mean)
        elif base in tried and level in (base, reference):
            # the treated are at the reference (in a null trial at the base): the sign is opposite
            self._add_harm(results, base, -mean)
        elif self.null and base == reference == level:
            self._add_harm(results, tried[block % len(tried)], mean)

    def _add_harm(self, results: _Results, level: str, harm: float) -> None:
        moments = results.harms.setdefault(level, Moments())
        moments.add(harm)
        found = moments.interval(self._risk)
        if found.low > self.margin:
            results.shown.setdefault(level, found)
