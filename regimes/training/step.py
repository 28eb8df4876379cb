"""From a batch to the shared updates: gradients and their reduction, bucket by bucket.

Several processes with more than one bucket of gradients do both at the same time
(``regimes.collectives.overlap``): buckets leave during the last backward pass of the step, and the
mean loss, with the news of a non-finite gradient, leaves with the last of them. One process
reduces the same buckets in the same order after backward, and so does everybody with a clipped
gradient, whose norm is known at the end only. The numbers are the same but for the order in which
more than two processes' terms are added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regimes.collectives.overlap import Pipeline, make_buckets
from regimes.collectives.requests import NO_LAYER
from regimes.compression.reducer import Reducer, loss_with_flag
from regimes.config import Level
from regimes.training.clock import Clock
from regimes.training.gradients import Gradients


def buckets_of(
    parameters: Sequence[nn.Parameter], bucket_mb: float, whole: bool
) -> list[list[int]] | None:
    """The buckets of a model, the loss in the last; None is one bucket of all.

    Args:
        whole: nothing can be reduced before the whole gradient is there.
    """
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
        # what the pipeline's thread reads and leaves; the main thread touches these between
        # ``begin`` and the first bucket, and after ``finish``
        self.levels: Sequence[Level] = []
        self.loss: Tensor | None = None
        self.updates: dict[int, Tensor] = {}
        if reducer.world.processes > 1 and len(reducer.buckets) > 1:
            buckets = [list(bucket) for bucket in reducer.buckets]
            self.pipeline = Pipeline(buckets, self._reduce, gradients.stack.device)
            gradients.announce(self.pipeline.mark_ready)

    def take(
        self, x: Tensor, y: Tensor, epoch: int, step: int, levels: Sequence[Level], clock: Clock
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """One batch ``x [L, b, ...]``, ``y [L, b]`` of the hosted workers.

        Returns:
            The updates ``[*shape]`` per layer; the mean loss, and the losses ``[rows]`` of this
            process, NaN if a gradient is not finite.
        """
        g, world, self.levels = self.gradients, self.reducer.world, levels
        if self.pipeline is not None:
            self.pipeline.begin()
        with clock("compute"):
            losses = g.compute(x, y, epoch, step)
        waited = world.seconds
        with clock("compress"):
            self.loss = rows = self.reducer.losses_to_send(losses, g.stack)
            self._rest()
            found, self.updates = self.updates, {}
            updates = [found[i] for i in range(len(levels))]
            mean = self.reducer.flag_mean(found[NO_LAYER], updates, levels)
            if mean is not found[NO_LAYER]:
                rows = loss_with_flag(losses, g.stack)
        clock.move(world.seconds - waited, "compress", "communicate")
        return updates, mean, rows

    def _rest(self) -> None:
        """What has not left during backward: everything, or the last bucket and layers that were
        not used."""
        if self.pipeline is None:
            for bucket in self.reducer.buckets:
                self._reduce(bucket)
        else:
            self.pipeline.mark_ready(range(NO_LAYER, len(self.levels)))
            self.pipeline.finish()

    def _reduce(self, bucket: Sequence[int]) -> None:
        """In the pipeline's thread, if there is one."""
        gradients = self.gradients.layers
        self.updates.update(self.reducer.reduce(bucket, gradients, self.levels, self.loss))

    def close(self) -> None:
        """Let no collective go on behind the back of whoever ends the run."""
        if self.pipeline is not None:
            self.pipeline.close()
