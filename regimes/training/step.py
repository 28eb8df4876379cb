"""One training step up to the shared updates: gradients and their reduction, bucket by bucket.

Several processes with more than one bucket overlap the two (``collectives.overlap``): a bucket is
reduced while the last backward pass of the step goes on, and the mean loss, which carries the flag
of a non-finite gradient, travels with the last bucket. A single process reduces the same buckets in
the same order after backward, as do all with gradient clipping, which needs the norm of the whole
gradient. The numbers differ only in the order of additions over more than two processes.
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
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """One batch ``x [L, b, ...]``, ``y [L, b]`` of the hosted workers.

        Returns:
            The updates ``[*shape]`` per layer, the mean loss, and the losses ``[rows]`` of this
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
                rows = loss_with_flag(losses, g.stack)
        clock.move(world.seconds - waited, "compress", "communicate")
        return updates, mean, rows

    def _reduce(self, bucket: Sequence[int]) -> None:
        """Called in the pipeline's thread, if there is one."""
        gradients = self.gradients.layers
        self.updates.update(self.reducer.reduce(bucket, gradients, self.levels, self.loss))

    def close(self) -> None:
        """End the pipeline's thread, so that no collective is in progress when the group ends."""
        if self.pipeline is not None:
            self.pipeline.close()
