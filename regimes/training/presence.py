"""Which simulated workers are present when: a function of the configuration, so that it is neither
saved nor synchronised."""

from __future__ import annotations

from itertools import pairwise

import torch

from regimes.config import ChurnConfig, RunConfig
from regimes.errors import ConfigError, require, unexpected
from regimes.instruments.gradient_norm import OF_GRADIENTS
from regimes.seeding import stream

Workers = tuple[int, ...]  # ascending


class Presence:
    """The workers that are present at each time, a unit or a step (``ChurnConfig.per``).

    Drawn times follow from the one before, so a run asks for them in order; an earlier one is drawn
    anew from the start.

    >>> away = Presence(ChurnConfig(away=((2, 1, 3),)), workers=3, seed=0)
    >>> [away.at(time) for time in range(4)]
    [(0, 1, 2), (0, 1), (0, 1), (0, 1, 2)]
    """

    def __init__(self, config: ChurnConfig, workers: int, seed: int) -> None:
        self.config, self.seed = config, seed
        self.all = tuple(w for w in range(workers) if w not in config.absent)
        self._drawn: tuple[int, Workers] = 0, self.all

    def at(self, time: int) -> Workers:
        """The workers that are present in a unit, or at a step."""
        away = {w for w, first, stop in self.config.away if first <= time < stop}
        if away:
            return tuple(w for w in self.all if w not in away)
        return self._draw(time) if self.config.leave else self.all

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
        drawn = torch.rand(max(self.all) + 1, generator=stream(self.seed, "churn", time)).tolist()
        present = {*before, *(w for w in self.all if drawn[w] < self.config.join)}
        staying = len(before)
        for worker in before:
            enough = len(present) > self.config.least and staying > 1
            if drawn[worker] < self.config.leave and enough:
                present.remove(worker)
                staying -= 1
        return tuple(sorted(present))


def check_churn(config: RunConfig) -> None:
    """Raise ConfigError unless the table ``churn`` fits the run: without it, nothing is checked."""
    churn = config.churn
    if churn is None:
        return
    known = f"workers from 0 to {config.workers - 1}"
    for worker in churn.absent:
        require(worker < config.workers, "churn.absent", worker, known)
    for window in churn.away:
        worker, first, stop = window
        good = 0 <= worker < config.workers and 0 <= first < stop
        expected = f"[worker, first, stop) with {known} and 0 <= first < stop"
        require(good, "churn.away", list(window), expected)
    if (churn.leave or churn.join) and churn.away:
        raise ConfigError("churn: windows (away) or probabilities (leave, join), not both")
    require(churn.leave > 0 or not churn.join, "churn.join", churn.join, "churn.leave above 0, too")
    _check_enough(churn, config.workers)
    _check_readers(config, churn)


def _check_enough(churn: ChurnConfig, workers: int) -> None:
    presence = Presence(churn, workers, 0)
    drawn = f"{churn.least} of {workers} workers present (churn.least)"
    require(len(presence.all) >= churn.least, "churn.absent", list(churn.absent), drawn)
    times = sorted({0, *(t for _, *window in churn.away for t in window)})
    present = [presence.at(time) for time in times] if churn.away else [presence.all]
    for time, now in zip(times, present, strict=False):
        place = f"churn.away: at {churn.per} {time}"
        require(len(now) >= churn.least, place, list(now), drawn)
    for time, (before, after) in zip(times[1:], pairwise(present), strict=False):
        if not {*before} & {*after}:
            raise ConfigError(
                f"churn.away: at {churn.per} {time} no worker stays, so new ones have no source"
            )


def _check_readers(config: RunConfig, churn: ChurnConfig) -> None:
    """Raise if an instrument or the signal reads single workers, which may be absent, or needs the
    same workers in all steps of a unit."""
    norms = config.instruments.get("norms")
    read = (
        {config.signal} if norms is None else {config.signal, *norms.get("readings", OF_GRADIENTS)}
    )
    if "worker0" in read:
        raise unexpected("signal", "worker0", "another one: with churn worker 0 may be absent")
    measures_noise = "noise" in config.instruments
    least = "at least 2 with instruments.noise, which compares workers"
    require(not measures_noise or churn.least > 1, "churn.least", churn.least, least)
    by_step = churn.per == "step" and (churn.away or churn.leave)
    whole = not by_step or not (read & {"global", "local-mean"} or measures_noise)
    expected = (
        '"unit" where the signals "global" and "local-mean" or the noise are measured: they add up '
        "the workers' gradients over a unit"
    )
    require(whole, "churn.per", churn.per, expected)
