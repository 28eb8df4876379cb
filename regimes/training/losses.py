"""The mean losses of a unit's steps, and the end of a run in which one is not finite.

To look at a number that a GPU has computed is to wait for it, so a GPU is looked at every so many
steps only. Steps after a broken one are then taken in vain, but nothing of them remains: before a
unit is measured, recorded or saved, all its losses have been looked at.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.errors import TrainingError
from regimes.training.build import Run
from regimes.training.clock import Clock

GPU_INTERVAL = 16  # steps between two looks at a GPU


def check_interval(device: torch.device) -> int:
    return 1 if device.type == "cpu" else GPU_INTERVAL


class Losses:
    """Sums up the losses of one unit, in float64 and in order.

    Attributes:
        total: of those looked at.
        every: steps between two looks; 1 on the CPU, where no update comes of a broken step.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self.run, self.clock, self.total = run, clock, 0.0
        self.every = check_interval(run.device)
        self._unseen: list[tuple[Tensor, Tensor, int, int]] = []

    def add(
        self, loss: Float[Tensor, ""], rows: Float[Tensor, " rows"], epoch: int, step: int
    ) -> None:
        """One step's mean loss, and those of this process's rows: NaN for a gradient that is not
        finite."""
        # a copy, because what a collective gives is a part of its buffer
        self._unseen.append((loss.clone(), rows, epoch, step))
        if len(self._unseen) == self.every:
            self.check()

    def check(self) -> None:
        """Wait for all steps so far.

        Raises:
            TrainingError: the loss of one is not finite. All processes have the same losses, so
                that all of them come here.
        """
        if not self._unseen:
            return
        values = torch.stack([loss for loss, *_ in self._unseen]).tolist()
        for value, (_, rows, epoch, step) in zip(values, self._unseen, strict=True):
            if not math.isfinite(value):
                _not_finite(self.run, rows, epoch, step)
            self.total += value
        self._unseen.clear()
        self.clock.settle()


def _not_finite(run: Run, rows: Float[Tensor, " rows"], epoch: int, step: int) -> None:
    """Say which workers it was."""
    rows = rows.expand(run.world.local) if len(rows) == 1 else rows
    finite = run.world.gather([rows])[0].isfinite().tolist()
    culprits = ", ".join(str(w) for w, ok in enumerate(finite) if not ok)
    who = "the union of workers" if run.gradients.union and run.world.local > 1 else "worker"
    raise TrainingError(
        f"the loss or a gradient of {who} {culprits} is not finite in epoch {epoch}, step {step}: "
        "lower optimizer.lr or lengthen the warm-up; the record up to the last epoch is intact"
    )
