"""The losses of a unit's steps, and the error of one that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.errors import TrainingError
from regimes.base.reduction import Coupled
from regimes.job.clock import Clock
from regimes.training.gradients import Gradients


def check_interval(device: torch.device) -> int:
    """Return the number of steps between two checks: 1 on the CPU, else 16.

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

    def __init__(
        self,
        gradients: Gradients,
        clock: Clock,
        samples: Callable[[int, int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """``samples``: inputs and targets of the hosted workers, ``[L, b, ...]``, in a step of an
        epoch; read where a loss is not finite."""
        self.gradients, self.clock, self.total, self.samples = gradients, clock, 0.0, samples
        self.every = check_interval(gradients.stack.device)
        self._unchecked: list[tuple[Tensor, Tensor, int, int]] = []

    def add_step(
        self, loss: Float[Tensor, ""], rows: Float[Tensor, " rows"], epoch: int, step: int
    ) -> None:
        """Add one step's mean loss, and the losses of this process's rows: NaN for a gradient that
        is not finite."""
        # a copy: the mean is a view of the collective's buffer, which the next step overwrites
        self._unchecked.append((loss.clone(), rows, epoch, step))
        if len(self._unchecked) == self.every:
            self.check_finite()

    def check_finite(self) -> None:
        """Wait for all steps so far, add up their losses, and refuse one that is not finite.

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
        self.clock.read_events()

    def _not_finite(self, rows: Tensor, epoch: int, step: int) -> TrainingError:
        """The error that names the workers; every process calls this together."""
        world, union = self.gradients.world, self.gradients.union
        weights, broken = (t.to(rows) for t in self._read_samples(epoch, step))
        hosted = [rows.expand(world.hosted_count), weights, broken]
        losses, counted, odd = world.all_gather(hosted)
        finite, counts = losses.isfinite().tolist(), counted.tolist()
        everyone = zip(range(world.workers), finite, counts, strict=True)
        bad = [(w, n) for w, ok, n in everyone if not ok]
        workers = ", ".join(str(w) for w, _ in bad)
        if samples := ", ".join(str(w) for w, has in enumerate(odd.tolist()) if has):
            return TrainingError(
                f"the samples of worker {samples} in epoch {epoch}, step {step} have NaN or "
                "infinity, and so has the loss or a gradient: clean the data, or leave them out; "
                "the record up to the last epoch is intact"
            )
        if bad and not any(n for _, n in bad):
            return TrainingError(
                f"no target of worker {workers} counts in epoch {epoch}, step {step}: all of its "
                "batch are ignored, and a mean over none of them is not a number: leave out "
                "samples without a target, or raise batch_size; the record up to the last epoch "
                "is intact"
            )
        many = "the union of workers" if union and world.hosted_count > 1 else "worker"
        # where each worker's numbers are finite, their sum or a compressor's product overflows
        who = f"{many} {workers}" if bad else "all workers together"
        advice = "lower optimizer.lr or lengthen the warm-up"
        if not epoch and not step:
            advice = (
                "before any update, and on finite data: see whether the loss or the first weights "
                "have NaN or infinity"
            )
        return TrainingError(
            f"the loss or a gradient of {who} is not finite in epoch {epoch}, step "
            f"{step}: {advice}; the record up to the last epoch is intact"
        )

    def _read_samples(
        self, epoch: int, step: int
    ) -> tuple[Float[Tensor, " L"], Float[Tensor, " L"]]:
        """What the hosted workers' batches weigh in their losses, 1 where that is not known; and 1
        where a sample is not finite, else 0."""
        count, joins = self.gradients.world.hosted_count, self.gradients.reduction
        if self.samples is None:
            return torch.ones(count), torch.zeros(count)
        x, y = self.samples(epoch, step)
        finite = [
            bool(a.isfinite().all()) and bool(b.isfinite().all()) for a, b in zip(x, y, strict=True)
        ]
        broken = torch.tensor([0.0 if good else 1.0 for good in finite])
        if isinstance(joins, Coupled):
            return torch.ones(count), broken
        return torch.stack([joins.weight(own) for own in y]), broken
