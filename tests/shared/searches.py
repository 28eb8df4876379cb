"""Small searches of ``regimes tune`` and ``regimes harm``, and what they decide.

A training is a formula of configuration and seed, which writes a record at once. Decisions are the
runs of each round in their order, what was dropped, and what was concluded; no number that is
computed in floating point is among them.

    python tests/shared/searches.py   # writes tests/data/searches.json anew
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import plain
from configs import smoke_static

import regimes
from regimes.base.config import RunConfig, override, to_dict
from regimes.base.errors import RegimesError
from regimes.records import RecordWriter, locate_trunk
from regimes.records.branches import trunk_table
from regimes.search import rounds as search_rounds
from regimes.search import sweep, tune
from regimes.search.harms.evidence import Pulse
from regimes.training.quirks import resolve_quirks

STORED = Path(__file__).parents[1] / "data" / "searches.json"
FAILS, NOT_FINITE = "the disk is full", "a loss is not finite"  # errors of runs


class Stopped(Exception):
    """The search was killed."""


# -- a training by formula -------------------------------------------------------------------------


def noise(*words: Any) -> float:
    """A number in [-1, 1) that depends on these words alone."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**31 - 1


Formula = Callable[[RunConfig], float | str]  # the metric in the end, or the error of a run


@dataclass
class Trainer:
    """Trains runs as `sweep.make_trainer` does.

    Attributes:
        metric: its name.
        stop: runs after which the search is killed; None: it is not.
        rounds: what was trained, by call.
    """

    formula: Formula
    metric: str = "accuracy"
    stop: int | None = None
    rounds: list[list[tuple[Path, RunConfig]]] = field(default_factory=list)

    @contextlib.contextmanager
    def make_trainer(self, *given: Any) -> Iterator[sweep.Train]:
        yield self.train

    def train(self, todo: list[sweep.Cell], progress: sweep.Progress) -> list[str]:
        self.rounds.append([])
        for folder, config in todo:
            if self.stop is not None and sum(map(len, self.rounds)) == self.stop:
                raise Stopped
            self.rounds[-1].append((folder, config))
            found = self.formula(config)
            if not isinstance(found, str):
                self._write(folder, config, found)
            progress(folder, found if isinstance(found, str) else None)
        return []

    def _write(self, folder: Path, config: RunConfig, metric: float) -> None:
        header = plain.header(metric=self.metric, data={"digest": "d", "train": 40, "test": 200})
        header["config"], first = to_dict(resolve_quirks(config)), 0
        if config.branch is not None:
            trunk, first = locate_trunk(folder, config.branch.of), config.branch.at
            header["trunk"] = trunk_table(trunk, first, header["config"], None)
        writer = RecordWriter.create(folder, header)
        writer.event("start")
        shown = metric if math.isfinite(metric) else None
        for epoch in range(first, config.epochs):
            tested = {"loss": 1.0, "metric": shown}
            writer.epoch(plain.row(epoch, metric=shown, validation=tested), {})
        writer.event("end")
        writer.close()


def in_short(runs: Sequence[str]) -> str:
    """Runs in their order, with the seeds of runs that follow each other in one place.

    >>> in_short(["a/seed-0", "a/seed-1", "b/seed-1"])
    'a/seed-0 1; b/seed-1'
    """
    pairs = [run.rsplit("/seed-", 1) for run in runs]
    groups = itertools.groupby(pairs, key=lambda pair: pair[0])
    return "; ".join(f"{name}/seed-{' '.join(seed for _, seed in each)}" for name, each in groups)


# -- tune ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """A search of ``tune``.

    Attributes:
        score: of configuration and seed, or the error of the run.
        stop: runs after which it is killed, and started again.
    """

    score: Formula
    values: Mapping[str, Sequence[str]]
    seeds: tuple[int, ...] = (5, 6)
    halving: int | None = None
    budget: float | None = None
    metric: str = "accuracy"
    stop: int | None = None

    def decisions(self, out: Path) -> dict[str, Any]:
        base = smoke_static("data.validation_size=40", "epochs=24")
        cells = {name: override(base, [f"policy.level={name}"]) for name in ("low", "high")}
        trainer = Trainer(self.score, self.metric, self.stop)
        given: dict[str, Any] = {"halving": self.halving, "budget": self.budget}
        found: dict[str, Any] = {}
        try:
            with mock.patch.object(sweep, "make_trainer", trainer.make_trainer):
                try:
                    tuned = tune.tune(cells, self.values, self.seeds, out, **given)
                except Stopped:
                    trainer.stop = None
                    tuned = tune.tune(cells, self.values, self.seeds, out, **given)
        except RegimesError as error:
            found["refused"] = str(error)
        else:
            found["tried"] = {
                cell: "; ".join(map(_say_trial, trials)) for cell, trials in tuned.trials.items()
            }
            found["chosen"] = {cell: _say_trial(trial) for cell, trial in tuned.chosen.items()}
        rounds = []
        for each in trainer.rounds:
            runs = in_short([folder.relative_to(out).as_posix() for folder, _ in each])
            epochs = " and ".join(sorted({str(config.epochs) for _, config in each}))
            rounds.append(f"{epochs} epochs: {runs.replace('optimizer.', '')}")
        return {"rounds": rounds, **found}


def _say_trial(trial: tune.Trial) -> str:
    label = trial.label.replace("optimizer.", "")
    return f"{label} for {trial.share:.3g}, {trial.failed or f'{len(trial.scores)} scores'}"


def by_level(config: RunConfig) -> float:
    """Best at a rate that depends on the level, and a little on the seed."""
    best = {"low": 0.4, "high": 0.2}[config.policy["level"]]
    o = config.optimizer
    return 1 - abs(o.lr - best) - 0.1 * abs(o.momentum - 0.9) - 1e-4 * config.seed


def tied(config: RunConfig) -> float:
    """One score of all rates from 0.2 up."""
    return 0.5 if config.optimizer.lr >= 0.2 else 0.25


def noisy(config: RunConfig) -> float:
    """More noise than signal, and another one in each round."""
    o = config.optimizer
    return 0.5 - 0.1 * abs(o.lr - 0.3) + 0.1 * noise(o.lr, config.seed, config.epochs)


def diverging(config: RunConfig) -> float:
    """Larger rates are better, until none is finite."""
    return math.nan if config.optimizer.lr >= 0.4 else config.optimizer.lr


def failing(config: RunConfig) -> float | str:
    """Of the whole runs, one seed of the best rate cannot end."""
    o = config.optimizer
    failed = config.epochs == 24 and o.lr == 0.4 and config.seed == 6
    return FAILS if failed else by_level(config)


def one_cell(config: RunConfig) -> float | str:
    """All runs of a cell fail."""
    return FAILS if config.policy["level"] == "low" else by_level(config)


def perplexity(config: RunConfig) -> float:
    """Less is better."""
    return 10 + abs(config.optimizer.lr - 0.3) + 0.01 * noise(config.optimizer.lr, config.seed)


FOUR = {"optimizer.lr": ["0.1", "0.2", "0.4", "0.8"]}
EIGHT = {**FOUR, "optimizer.momentum": ["0.5", "0.9"]}
NINE = {"optimizer.lr": [f"0.{digit}" for digit in range(9, 0, -1)]}
TUNINGS: dict[str, Tuning] = {
    "tune, all for the whole run": Tuning(by_level, EIGHT),
    "tune, halves": Tuning(by_level, EIGHT, halving=2),
    "tune, thirds, one seed": Tuning(by_level, NINE, seeds=(5,), halving=3),
    "tune, ties": Tuning(tied, FOUR, halving=2),
    "tune, noise": Tuning(noisy, NINE, seeds=(1, 2, 3), halving=3),
    "tune, not finite": Tuning(diverging, FOUR, halving=2),
    "tune, a run of the last round fails": Tuning(failing, FOUR, halving=2),
    "tune, all runs of a cell fail": Tuning(one_cell, FOUR, halving=2),
    "tune, less is better": Tuning(perplexity, NINE, halving=4, metric="perplexity"),
    "tune, a budget that is enough": Tuning(by_level, FOUR, halving=2, budget=288),
    "tune, a budget that is not": Tuning(by_level, FOUR, halving=2, budget=287),
    "tune, killed and started again": Tuning(noisy, FOUR, halving=2, stop=11),
}


# -- harm ------------------------------------------------------------------------------------------

Law = Callable[[Pulse | None, int], float]


@dataclass(frozen=True)
class Searched:
    """A search of ``harm`` with a function that trains.

    Attributes:
        law: the metric of a pulse and a seed.
        given: arguments of ``harm``; of several tables each is one call, in the same folder.
        seconds: that a unit takes on a clock of its own; 0: there is none.
    """

    law: Law
    given: Sequence[dict[str, Any]]
    seconds: float = 0.0

    def decisions(self, out: Path) -> dict[str, Any]:
        now = [0.0]

        def job(pulse: Pulse | None, seed: int) -> float:
            now[0] += self.seconds * (self.given[-1]["units"] - (pulse.first if pulse else 0))
            return self.law(pulse, seed)

        clock = SimpleNamespace(monotonic=lambda: now[0])
        with mock.patch.object(
            search_rounds, "time", clock if self.seconds else search_rounds.time
        ):
            found = [regimes.harm(job, out=out, **given) for given in self.given]
        return _say_harm(out, found[-1])


@dataclass(frozen=True)
class Recorded:
    """A search of ``harm`` that trains trunks and branches.

    Attributes:
        harm: of a pulse of these words, from unit to unit, at a seed; in the share of an accuracy.
        given: arguments of ``harm``.
    """

    harm: Callable[[str, int, int, int], float]
    given: dict[str, Any]

    def decisions(self, out: Path) -> dict[str, Any]:
        def metric(config: RunConfig) -> float | str:
            trunk = 0.8 + 0.02 * noise("trunk", config.seed)
            if config.branch is None:
                return trunk
            units = [(config.branch.at, config.branch.at + (config.branch.length or 0))]
            if config.branch.length is None:  # several spans, which the policy has
                units = _spans_of(to_dict(config))
            harms = [self.harm(config.name, first, stop, config.seed) for first, stop in units]
            return NOT_FINITE if math.isinf(sum(harms)) else trunk - sum(harms)

        trainer = Trainer(metric)
        with mock.patch.object(sweep, "make_trainer", trainer.make_trainer):
            given = {"deletion": False, **self.given}
            found = regimes.harm(smoke_static("epochs=12"), out=out, **given)
        return _say_harm(out, found)


def _spans_of(value: Any) -> list[tuple[int, int]]:
    """The windows of a policy, wherever they are."""
    if not isinstance(value, dict):
        return []
    if value.get("name") == "windows":
        return [(first, stop) for first, stop in value["windows"]]
    return [span for inner in value.values() for span in _spans_of(inner)]


def _say_harm(out: Path, found: regimes.Harm) -> dict[str, Any]:
    calls, best = {}, {}
    for arm in found.known.rules.arms:
        for pulse in [*found.known.windows(arm), *found.known.unions(arm)]:
            verdict = found.known.of(pulse)
            needed = "no number" if verdict.needed is None else str(verdict.needed)
            calls[f"{arm}, {_say_spans(pulse)}"] = (
                f"{verdict.call} after {verdict.n}, {needed} would decide"
            )
        safe = found.known.best(arm)
        best[arm] = None if safe is None else _say_spans(safe)
    log = search_rounds.read_log(out, lambda names, facts: names)
    rounds = [in_short(each.runs) for each in log.rounds]
    return {"rounds": rounds, "calls": calls, "safe": best}


def _say_spans(pulse: Pulse) -> str:
    return ", ".join(f"{first}-{stop - 1}" for first, stop in pulse.spans)


def first_half(pulse: Pulse | None, seed: int) -> float:
    """A loss that each unit before the sixth raises by 0.2."""
    spans = pulse.spans if pulse else ()
    harmed = sum(unit < 6 for first, stop in spans for unit in range(first, stop))
    return 1.0 + 0.2 * harmed + 0.001 * noise(spans, seed) + 0.1 * seed


def spread(pulse: Pulse | None, seed: int) -> float:
    """Late units harm less than the margin, by less than the noise."""
    spans = pulse.spans if pulse else ()
    units = [unit for first, stop in spans for unit in range(first, stop)]
    return 1.0 + sum(0.03 / (1 + unit) for unit in units) + 0.03 * noise(spans, seed)


def at_the_margin(pulse: Pulse | None, seed: int) -> float:
    """Each pulse harms by the margin, exactly, but those of the end by nothing."""
    return 1.0 if pulse is None or pulse.first >= 6 else 1.25


def breaking(pulse: Pulse | None, seed: int) -> float:
    """The loss is not finite where a pulse begins before the fourth unit."""
    if pulse is not None and pulse.first < 4:
        return math.nan if seed % 2 else math.inf
    return 1.0 + 0.001 * noise(pulse and pulse.spans, seed)


def accuracy(pulse: Pulse | None, seed: int) -> float:
    """One kind of pulse harms early, another late."""
    share = 0.7 + 0.01 * noise(seed)
    for first, stop in pulse.spans if pulse else ():
        units = range(first, stop)
        share -= sum(0.01 for u in units if pulse and (u < 4) == (pulse.arm == "rank 1"))
    return share


def early(name: str, first: int, stop: int, seed: int) -> float:
    """Two points for each unit of the first third."""
    return 0.02 * sum(unit < 4 for unit in range(first, stop)) + 0.001 * noise(name, first, seed)


def middle(name: str, first: int, stop: int, seed: int) -> float:
    """What harms lies between phases that are safe."""
    units = range(first, stop)
    return 0.02 * sum(4 <= unit < 7 for unit in units) + 0.001 * noise(name, first, seed)


def breaks_early(name: str, first: int, stop: int, seed: int) -> float:
    """The training breaks where a pulse has the first unit."""
    return math.inf if first == 0 else middle(name, first, stop, seed)


LOSS: dict[str, Any] = {"units": 12, "margin": 0.05}
HARMS: dict[str, Searched | Recorded] = {
    "harm, a law": Searched(first_half, [{**LOSS, "runs": 200}]),
    "harm, noise, few runs": Searched(spread, [{**LOSS, "runs": 40, "units": 16}]),
    "harm, noise, many runs": Searched(spread, [{**LOSS, "runs": 120, "parts": 3}]),
    "harm, ties with the margin": Searched(at_the_margin, [{**LOSS, "runs": 60, "margin": 0.25}]),
    "harm, not finite": Searched(breaking, [{**LOSS, "runs": 60}]),
    "harm, two kinds, the usual margin": Searched(
        accuracy,
        [{"units": 8, "metric": "accuracy", "pulse": ["rank 1", "rank 2"], "runs": 70, "parts": 2}],
    ),
    "harm, goes on with more runs": Searched(
        first_half, [{**LOSS, "runs": runs, "first_seed": 3} for runs in (2, 9, 50)]
    ),
    "harm, few minutes": Searched(spread, [{**LOSS, "minutes": 4.0}], seconds=2.0),
    "harm, more minutes": Searched(spread, [{**LOSS, "minutes": 30.0}], seconds=2.0),
    "harm of a level, two at a time": Recorded(early, {"runs": 40, "jobs": 2}),
    "harm of a level between safe phases": Recorded(middle, {"runs": 70, "margin": 1.5}),
    "harm of a level beside units left out": Recorded(early, {"runs": 60, "deletion": True}),
    "harm of units left out": Recorded(middle, {"pulse": "deletion", "runs": 50}),
    "harm of a period and no feedback": Recorded(
        early, {"pulse": ["period=4", "no-feedback"], "runs": 40, "parts": 2}
    ),
    "harm of a level in groups": Recorded(
        middle, {"pulse": "high", "groups": ["features.*", "head.*"], "runs": 30, "parts": 2}
    ),
    "harm of a rate that breaks": Recorded(breaks_early, {"pulse": "optimizer.lr=9", "runs": 50}),
}
SEARCHES: dict[str, Tuning | Searched | Recorded] = {**TUNINGS, **HARMS}


def decisions(name: str, out: Path) -> dict[str, Any]:
    """What a search decides, in plain types."""
    with mock.patch.object(os, "fsync"):  # of thousands of lines
        return SEARCHES[name].decisions(out)


def main() -> None:
    found = {}
    for name in SEARCHES:
        with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
            found[name] = decisions(name, Path(scratch, "search"))
    STORED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
