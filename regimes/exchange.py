"""From a batch to the shared updates: gradients and their reduction.

Several processes with more than one parcel of gradients do both at the same time: the parcels
(``regimes.parcels``) leave during the last backward pass of the step, and the mean loss, with the
news of a non-finite gradient, leaves with the last of them. One process does one after the other,
and so do a model of one parcel and a clipped gradient, whose norm is known at the end only. The
numbers are the same but for the order in which more than two processes' terms are added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from regimes.clock import Clock
from regimes.compression.reducer import Reducer, health
from regimes.config import Level
from regimes.gradients import Gradients
from regimes.parcels import Pipeline, divide

LOSS = -1  # in the place of a layer


class Exchange:
    """Takes one step at a time.

    Attributes:
        pipeline: reduces during backward; None where that gains nothing.
    """

    def __init__(self, gradients: Gradients, reducer: Reducer, parcel_mb: float) -> None:
        self.gradients, self.reducer = gradients, reducer
        self.pipeline: Pipeline | None = None
        self.levels: Sequence[Level] = []
        self.news: Tensor | None = None
        self.updates: dict[int, Tensor] = {}
        if reducer.world.processes == 1 or gradients.clip is not None:
            return
        *early, last = divide(gradients.parameters, int(parcel_mb * 2**20))
        if early:
            parcels = [*early, [*last, LOSS]]
            self.pipeline = Pipeline(parcels, self._reduce, gradients.stack.device)
            gradients.announce(self.pipeline.put)

    def step(
        self, x: Tensor, y: Tensor, epoch: int, step: int, levels: Sequence[Level], clock: Clock
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """One batch ``x [L, b, ...]``, ``y [L, b]`` of the hosted workers.

        Returns:
            The updates ``[*shape]`` per layer; the mean loss, NaN if any gradient is not finite;
            the losses of this process's own rows.
        """
        g, world, self.levels = self.gradients, self.reducer.world, levels
        if self.pipeline is not None:
            self.pipeline.begin()
        with clock("compute"):
            losses = g.compute(x, y, epoch, step)
        waited = world.seconds
        with clock("compress"):
            if self.pipeline is None:
                updates, loss = self.reducer.step(g.layers, levels, losses, g.stack)
            else:
                updates, loss = self._rest(self.pipeline, losses)
        clock.move(world.seconds - waited, "compress", "communicate")
        return updates, loss, losses

    def _rest(self, pipeline: Pipeline, losses: Tensor) -> tuple[list[Tensor], Tensor]:
        """What has not left during backward: the last parcel, and layers that were not used."""
        self.news = health(losses, self.gradients.stack)
        pipeline.put(range(LOSS, len(self.levels)))
        pipeline.finish()
        found, self.updates = self.updates, {}
        return [found[i] for i in range(len(self.levels))], found[LOSS]

    def _reduce(self, parcel: list[int]) -> None:
        """In the pipeline's thread."""
        updates = self.reducer.reduce(parcel, self.gradients.layers, self.levels, self.news)
        self.updates.update(zip(parcel, updates, strict=True))

    def close(self) -> None:
        """Let no collective go on behind the back of whoever ends the run."""
        if self.pipeline is not None:
            self.pipeline.close()
