"""Steps as CUDA graphs: the launches of a step are recorded once, and replayed by one call.

A step has two graphs. *Forward and backward* is one for each shape of a batch, *reduction* one for
each kind of exchange (``compression.graphs``). Between the two the clock looks at the stream, so
that "compute" and "compress" of a record stay true.

Outside of the graphs are the batch, deficits, instruments and the optimiser's step. Instruments and
deficits stand between reduction and optimiser, any optimiser may be chosen, and the learning rate
stays a number of the host: inside it would be a tensor of the device, which "capturable" optimisers
of torch round to float32, so that a run would have other bits. A step of an optimiser is a few
launches for all layers.

Without a graph are the first `WARM_UP` steps of each kind, a batch whose last micro-batch is
smaller, a step with a new rate that rescales a residual in the unit of the update, and two steps
that graphs of reductions are recorded after and compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import AnyLevel
from regimes.compression.graphs import ExchangeGraphs
from regimes.compression.recording import Kinds, Recorder, Recording
from regimes.compression.reducer import Reducer
from regimes.training.gradients import Gradients, Reduced


class Graphs:
    """Replays passes and exchanges as graphs, in one process on a GPU; the numbers are those
    without.

    Args:
        most: how many kinds of exchange, such as vectors of levels, keep their graphs.
    """

    def __init__(self, gradients: Gradients, reducer: Reducer, most: int) -> None:
        self.gradients, self.world = gradients, reducer.world
        stream = torch.cuda.Stream(gradients.stack.device)
        # two: what an exchange leaves may be read until the next exchange
        self.recorder, recorder = Recorder(stream), Recorder(stream)
        self.passes, self.exchanges = Kinds(most), ExchangeGraphs(reducer, most, recorder)
        self._losses = torch.zeros_like(gradients.stack[:, 0])  # where reductions read them

    def compute_gradients(
        self, x: Tensor, y: Tensor, epoch: int, step: int
    ) -> Float[Tensor, " rows"]:
        """Compute as ``Gradients.compute_gradients`` does, by a graph where one is due."""
        g, kind = self.gradients, tuple((t.shape, t.stride(), t.dtype) for t in (x, y))
        found: tuple[list[Tensor], Recording, list[set[int]]] | None = self.passes.find(kind)
        if found is not None:
            inputs, recording, g.unused = found
            for place, batch in zip(inputs, (x, y), strict=True):
                place.copy_(batch)
            recording.replay()
            return self._losses.copy_(recording.output)
        # Such a batch comes once an epoch. Its micro-batches have two layouts.
        uneven = g.micro_batch is not None and x.shape[1] % g.micro_batch > 0
        if uneven or not self.passes.is_due(kind):
            self.passes.count(kind)
            work = partial(g.compute_gradients, x, y, epoch, step)
            return self._losses.copy_(self.recorder.run(work))
        inputs = [x.clone(), y.clone()]
        work = partial(g.compute_gradients, inputs[0], inputs[1], epoch, step)
        recording = self.recorder.run(partial(self.recorder.record, work, self.world))
        self.passes.keep(kind, (inputs, recording, g.unused))
        return self._losses.copy_(recording.output)

    def finish_step(self, levels: Sequence[AnyLevel], finish: Callable[[], Reduced]) -> Reduced:
        """Return what ``finish`` returns, at these levels, by a graph where one is due. It may be
        called twice."""
        unused = frozenset(self.gradients.unused_by_all())

        def work() -> list[Tensor]:
            reduced = finish()
            return [*reduced.updates, reduced.loss, reduced.losses]

        *updates, mean, rows = self.exchanges.run((*range(len(levels)),), levels, work, (), unused)
        self.exchanges.make_graphs()
        # ``Losses`` looks at rows many steps later
        return Reduced(updates, mean, rows.clone(), unused)
