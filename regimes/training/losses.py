"""The mean losses of a unit's steps, and the end of a run in which one is not finite."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.errors import TrainingError
from regimes.training.build import Run
from regimes.training.clock import Clock


def check_interval(device: torch.device) -> int:
    """Steps between two checks.

    To read a number that a GPU computes is to wait for it. Steps after a non-finite one are wasted
    there, but leave nothing: all losses of a unit are checked before it is measured, recorded or
    saved.
    """
    return 1 if device.type == "cpu" else 16


class Losses:
    """Sums up the losses of one unit, in float64 and in order.

    Attributes:
        total: of the losses checked so far.
        every: steps between two checks; 1 on the CPU, where a non-finite step changes no weight.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self.run, self.clock, self.total = run, clock, 0.0
        self.every = check_interval(run.device)
        self._unchecked: list[tuple[Tensor, Tensor, int, int]] = []

    def add(
        self, loss: Float[Tensor, ""], rows: Float[Tensor, " rows"], epoch: int, step: int
    ) -> None:
        """Add one step's mean loss, and the losses of this process's rows: NaN for a gradient that
        is not finite."""
        # a copy: the mean is a view of the collective's buffer, which the next step overwrites
        self._unchecked.append((loss.clone(), rows, epoch, step))
        if len(self._unchecked) == self.every:
            self.check()

    def check(self) -> None:
        """Wait for all steps so far.

        Raises:
            TrainingError: a loss is not finite. All processes have the same mean losses, so all
                raise in the same step.
        """
        if not self._unchecked:
            return
        values = torch.stack([loss for loss, *_ in self._unchecked]).tolist()
        for value, (_, rows, epoch, step) in zip(values, self._unchecked, strict=True):
            if not math.isfinite(value):
                raise self._not_finite(rows, epoch, step)
            self.total += value
        self._unchecked.clear()
        self.clock.settle()

    def _not_finite(self, rows: Tensor, epoch: int, step: int) -> TrainingError:
        """The error that names the workers; every process calls this together."""
        world, union = self.run.world, self.run.gradients.union
        finite = world.gather([rows.expand(world.local)])[0].isfinite().tolist()
        workers = ", ".join(str(worker) for worker, ok in enumerate(finite) if not ok)
        who = "the union of workers" if union and world.local > 1 else "worker"
        return TrainingError(
            f"the loss or a gradient of {who} {workers} is not finite in epoch {epoch}, step "
            f"{step}: lower optimizer.lr or lengthen the warm-up; the record up to the last epoch "
            "is intact"
        )
