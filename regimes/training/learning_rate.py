"""The learning rate as a pure function of the step: a linear warm-up, then the schedule.

A rate that changes per epoch is the rate at the epoch's first step.

- ``step``: divided at each decay, counted from the start of the run (paper, Table 7).
- ``cosine``, ``linear``: from the end of the warm-up to the end of the run (Loshchilov & Hutter,
  "SGDR", 2017, eq. 5; Devlin et al., "BERT", 2019).
- ``wsd``: warm-up, stable, then a linear fall in the last share of the run (Hu et al., "MiniCPM",
  2024; exponential there).
- ``cyclic``: cosines of equal length that restart (SGDR).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from regimes.base.config import OptimizerConfig


@dataclass(frozen=True)
class LearningRate:
    """Gives the learning rate of each step of a run.

    Attributes:
        per_epoch: steps per epoch.
        total: steps of the run.

    >>> config = OptimizerConfig(lr=0.4, warmup_from=0.1, warmup_epochs=2, decay_epochs=(4,))
    >>> rate = LearningRate(config, per_epoch=10, total=60)
    >>> [round(rate(10 * epoch), 3) for epoch in range(6)]
    [0.1, 0.25, 0.4, 0.4, 0.04, 0.04]
    >>> rate(19) == rate(10)
    True
    """

    config: OptimizerConfig
    per_epoch: int
    total: int

    def __call__(self, step: int) -> float:
        """The rate of ``step``, counted from 0."""
        c = self.config
        if c.per == "epoch":
            step -= step % self.per_epoch
        held, ramp = self._warmup_steps()
        if step < held + ramp:
            start, done = c.warmup_from or 0.0, max(0, step - held) / ramp
            return self._decay_rate(start + (c.lr - start) * done, step)
        return self._decay_rate(c.lr, step) * self._smooth_factor(step)

    def _warmup_steps(self) -> tuple[int, int]:
        """(steps at the first rate, steps in which the rate rises)."""
        c = self.config
        if c.warmup_steps is not None:
            return 0, c.warmup_steps
        if c.warmup_from is None:
            return 0, 0
        return c.warmup_hold * self.per_epoch, c.warmup_epochs * self.per_epoch

    def _decay_rate(self, rate: float, step: int) -> float:
        """``rate`` after the decays of a step schedule, including those within the warm-up."""
        c = self.config
        if c.schedule != "step":
            return rate
        firsts = [*c.decay_steps, *(first * self.per_epoch for first in c.decay_epochs)]
        try:
            return rate / c.decay_factor ** sum(step >= first for first in firsts)
        except OverflowError:  # no float is as large as the divisor
            return 0.0

    def _smooth_factor(self, step: int) -> float:
        """The factor of a smooth schedule after the warm-up; 1 for the others."""
        c, first = self.config, sum(self._warmup_steps())
        done = min(1.0, (step - first) / max(1, self.total - first))
        match c.schedule:
            case "cosine":
                share = _cosine_factor(done)
            case "linear":
                share = 1 - done
            case "wsd":
                falling = round(c.decay_share * self.total)
                share = min(1.0, max(0, self.total - step) / max(1, falling))
            case "cyclic":
                length = c.cycle_steps or c.cycle_epochs * self.per_epoch
                share = _cosine_factor((step - first) % length / length)
            case _:
                return 1.0
        return c.final + (1 - c.final) * share


def _cosine_factor(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2
