"""One training step up to the shared updates: gradients and their reduction, bucket by bucket; and
the losses of a unit's steps.

Several processes with more than one bucket overlap the two (``collectives.overlap``): a bucket is
reduced while the last backward pass of the step goes on. A single process reduces the same buckets
in the same order after backward. The numbers differ only in the order of additions over more than
two processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regimes.collectives.overlap import Pipeline, make_buckets
from regimes.collectives.requests import NO_LAYER
from regimes.compression.reducer import Reducer, loss_with_flag
from regimes.config import Level
from regimes.errors import TrainingError
from regimes.reduction import Coupled
from regimes.training.clock import Clock
from regimes.training.gradients import Gradients

Reduced = tuple[list[Tensor], Tensor, Tensor]  # updates, mean loss, losses of this process


def buckets_of(
    parameters: Sequence[nn.Parameter], bucket_mb: float, whole: bool
) -> list[list[int]] | None:
    """The buckets of a model, the loss in the last; None is one bucket of all, as where nothing can
    be reduced before the ``whole`` gradient is there."""
    *early, last = make_buckets(parameters, int(bucket_mb * 2**20))
    return None if whole or not early else [*early, [*last, NO_LAYER]]


class TrainingStep:
    """Takes one step at a time.

    Attributes:
        pipeline: reduces during backward; None where that gains nothing.
    """

    def __init__(self, gradients: Gradients, reducer: Reducer) -> None:
        self.gradients, self.reducer = gradients, reducer
        self.pipeline: Pipeline | None = None
        # Shared with the pipeline's thread, without a lock: the main thread touches these only
        # before the first bucket is ready and after ``finish``.
        self.levels: Sequence[Level] = []
        self.loss: Tensor | None = None
        self.updates: dict[int, Tensor] = {}
        if reducer.world.processes > 1 and len(reducer.buckets) > 1:
            buckets = [list(bucket) for bucket in reducer.buckets]
            self.pipeline = Pipeline(buckets, self._reduce, gradients.stack.device)
            gradients.on_layer_complete(self.pipeline.mark_ready)

    def take(
        self, x: Tensor, y: Tensor, epoch: int, step: int, levels: Sequence[Level], clock: Clock
    ) -> Reduced:
        """One batch ``x [L, b, ...]``, ``y [L, b]`` of the hosted workers.

        Returns:
            The updates ``[*shape]`` per layer, the mean loss, and the losses ``[rows]`` of this
            process, NaN if a gradient is not finite.
        """
        world, self.levels = self.reducer.world, levels
        world.take_marks()  # of what came before
        if self.pipeline is not None:
            self.pipeline.begin()
        with clock("compute"):
            losses = self._backward(x, y, epoch, step)
        with clock.exchanging(world), clock("compress"):
            return self._reduction(losses)

    def _backward(self, x: Tensor, y: Tensor, epoch: int, step: int) -> Float[Tensor, " rows"]:
        """Fill the gradients; the losses of this process's rows."""
        with self.reducer.world.contact("a pass of the model"):
            return self.gradients.compute(x, y, epoch, step)

    def _reduction(self, losses: Float[Tensor, " rows"]) -> Reduced:
        """What ``take`` returns, from the gradients and losses, at ``levels``."""
        stack, levels = self.gradients.stack, self.levels
        self.loss = rows = self.reducer.losses_to_send(losses, stack)
        if self.pipeline is None:
            for bucket in self.reducer.buckets:
                self._reduce(bucket)
        else:
            # The last bucket waits for the loss (NO_LAYER); other buckets may still wait for
            # layers that this pass did not use and backward therefore never reported.
            self.pipeline.mark_ready(range(NO_LAYER, len(levels)))
            self.pipeline.finish()
        by_layer, self.updates = self.updates, {}
        updates = [by_layer[i] for i in range(len(levels))]
        mean = self.reducer.flag_mean(by_layer[NO_LAYER], updates, levels)
        if mean is not by_layer[NO_LAYER]:  # the updates show a non-finite gradient
            rows = loss_with_flag(losses, stack)
        return updates, mean, rows

    def _reduce(self, bucket: Sequence[int]) -> None:
        """Called in the pipeline's thread, if there is one."""
        gradients = self.gradients.layers
        self.updates.update(self.reducer.reduce(bucket, gradients, self.levels, self.loss))

    def close(self) -> None:
        """End the pipeline's thread, so that no collective is in progress when the group ends."""
        if self.pipeline is not None:
            self.pipeline.close()


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

    def __init__(
        self,
        gradients: Gradients,
        clock: Clock,
        targets: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """``targets``: of the hosted workers, ``[L, b, ...]``, in a step of an epoch; read where a
        loss is not finite."""
        self.gradients, self.clock, self.total, self.targets = gradients, clock, 0.0, targets
        self.every = check_interval(gradients.stack.device)
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
        world, union = self.gradients.world, self.gradients.union
        whole = world.add_shards(rows)
        weights = self._weights(epoch, step).to(whole)
        both = world.gather([whole.expand(world.local), weights])
        finite, counts = both[0].isfinite().tolist(), both[1].tolist()
        present = world.hosted if world.processes == 1 else range(world.workers)
        bad = [(w, n) for w, ok, n in zip(present, finite, counts, strict=True) if not ok]
        workers = ", ".join(str(w) for w, _ in bad)
        if bad and not any(n for _, n in bad):
            return TrainingError(
                f"no target of worker {workers} counts in epoch {epoch}, step {step}: all of its "
                "batch are ignored, and a mean over none of them is not a number: leave out "
                "samples without a target, or raise batch_size; the record up to the last epoch "
                "is intact"
            )
        who = "the union of workers" if union and world.local > 1 else "worker"
        advice = "lower optimizer.lr or lengthen the warm-up"
        if not epoch and not step:
            advice = "before any update: see whether the data or the loss have NaN or infinity"
        return TrainingError(
            f"the loss or a gradient of {who} {workers} is not finite in epoch {epoch}, step "
            f"{step}: {advice}; the record up to the last epoch is intact"
        )

    def _weights(self, epoch: int, step: int) -> Float[Tensor, " L"]:
        """What the hosted workers' batches weigh in their losses; 1 where that is not known."""
        world, joins = self.gradients.world, self.gradients.reduction
        if self.targets is None or isinstance(joins, Coupled):
            return torch.ones(world.local)
        return torch.stack([joins.weight(own) for own in self.targets(epoch, step)])
