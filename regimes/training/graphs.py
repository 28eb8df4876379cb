"""Steps as CUDA graphs: the launches of a step are recorded once, and replayed by one call.

A step has two graphs. *Forward and backward* is one for each shape of a batch, *reduction* one for
each vector of levels and shape of the compressors' memories. Between the two the clock looks at the
stream, so that "compute" and "compress" of a record stay true.

Outside of the graphs are the batch, deficits, instruments and the optimiser's step. Instruments and
deficits stand between reduction and optimiser, any optimiser may be chosen, and the learning rate
stays a number of the host: inside it would be a tensor of the device, which "capturable" optimisers
of torch round to float32, so that a run would have other bits. A step of an optimiser is a few
launches for all layers.

Without a graph are the first `WARM_UP` steps of each kind, a last, smaller batch, and a step with a
new rate that rescales a residual in the unit of the update. They run in the stream in which
graphs are captured: libraries prepare a stream at its first use, which a capture does not allow.

What torch asks of a capture (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs), and
where it is done: no wait of the host (the bounds of a step); fixed addresses (batch, losses, the
gradients' stack, and `_Graph.inputs`); no random state of the host (``Gradients.seeded``,
``seeding.SeedTable``); what a graph reads stays alive (``kernels.hold_cached_tensors``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import AnyLevel
from regimes.base.errors import ConfigError
from regimes.base.seeding import SeedTable
from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.meter import Meter
from regimes.compression.bucket import State
from regimes.compression.kernels import hold_cached_tensors
from regimes.compression.reducer import Reducer
from regimes.training.gradients import Gradients, Reduced

WARM_UP = 3  # steps of a kind before it is captured, as torch advises
_SEEDS = 4  # at most for each layer and hosted worker
# fields that decide no launch
_PASSING = {"key", "first_worker", "workers", "shard", "step", "rate", "residual_rate"}
T = TypeVar("T")
_Field = tuple[State, str]


class _Graph:
    """One kind of step, captured.

    Attributes:
        inputs: what a replay reads at these addresses; ``output``: what it leaves at others.
        held: see ``kernels.hold_cached_tensors``.
        unused: of a pass: the layers that each row has not used.
        seeds, sent, after: of a reduction: its seeds, what one step sends, and the fields of each
            memory after it.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.inputs = inputs
        self.output: Any = None
        self.held: list[Any] = []
        self.unused: list[set[int]] = []
        self.seeds: SeedTable | None = None
        self.sent: Meter | None = None
        self.after: list[dict[str, Any]] = []


class _Graphs:
    """The graphs of one function by kind; the least recently used are dropped."""

    def __init__(self, most: int, stream: torch.cuda.Stream) -> None:
        self.most, self.stream = most, stream
        # One pool of memory for all: graphs are replayed one after the other, and what one leaves
        # is used before the next. The one exception is a compressor's memory; it is copied to the
        # inputs of the graph that follows before that runs (`Graphs._move_memories`).
        self.pool = torch.cuda.graph_pool_handle()
        self.kept: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # steps of a kind without a graph

    def get_graph(self, kind: Hashable) -> _Graph | None:
        if kind in self.kept:
            self.kept.move_to_end(kind)
        return self.kept.get(kind)

    def is_due(self, kind: Hashable) -> bool:
        """Answer whether enough steps of a kind have gone before; if not, count one more."""
        count = self._seen.pop(kind, 0)
        if count == WARM_UP:
            return True
        self._seen[kind] = count + 1
        while len(self._seen) > 8 * self.most:  # of the many kinds that come once, at a change
            self._seen.popitem(last=False)
        return False

    def run_uncaptured(self, work: Callable[[], T]) -> T:
        """Do some work in the stream of captures, in the order of the current one."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = work()
        current.wait_stream(self.stream)
        return result

    def capture_graph(
        self, kind: Hashable, inputs: list[Tensor], work: Callable[[], Any]
    ) -> _Graph:
        """Record what some work launches, and keep that; nothing is computed yet.

        Raises:
            ConfigError: it waits, or does something else that cannot be captured.
        """
        graph = _Graph(inputs)
        # "thread_local": threads of reporters may use the GPU meanwhile, which "global" forbids.
        recording = torch.cuda.graph(
            graph.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        try:
            with hold_cached_tensors() as graph.held, recording:
                graph.output = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"graphs: a step of this model or compressor cannot be captured ({said}): leave "
                "graphs out"
            ) from error
        self.kept[kind] = graph
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)
        return graph


class Graphs:
    """Replays passes and exchanges as graphs, in one process on a GPU; the numbers are those
    without.

    Args:
        most: how many vectors of levels keep their graphs.
    """

    def __init__(self, gradients: Gradients, reducer: Reducer, most: int) -> None:
        self.gradients, self.reducer = gradients, reducer
        stream = torch.cuda.Stream(gradients.stack.device)
        self.passes, self.reductions = _Graphs(most, stream), _Graphs(most, stream)
        self._losses = torch.zeros_like(gradients.stack[:, 0])  # where reductions read them

    # -- forward and backward -------------------------------------------------------------------

    def compute_gradients(
        self, x: Tensor, y: Tensor, epoch: int, step: int
    ) -> Float[Tensor, " rows"]:
        """Compute as ``Gradients.compute_gradients`` does, by a graph where one is due."""
        g, kind = self.gradients, (_layout_of(x), _layout_of(y))
        graph = self.passes.get_graph(kind)
        if graph is None:
            last = g.micro_batch is not None and x.shape[1] % g.micro_batch > 0  # of an epoch
            if last or not self.passes.is_due(kind):
                work = partial(g.compute_gradients, x, y, epoch, step)
                return self._losses.copy_(self.passes.run_uncaptured(work))
            inputs = [x.clone(), y.clone()]
            work = partial(g.compute_gradients, inputs[0], inputs[1], epoch, step)
            graph = self.passes.capture_graph(kind, inputs, work)
            graph.unused = g.unused
        g.unused = graph.unused
        for place, batch in zip(graph.inputs, (x, y), strict=True):
            place.copy_(batch)
        graph.graph.replay()
        return self._losses.copy_(graph.output)

    # -- reduction ------------------------------------------------------------------------------

    def finish_step(self, levels: Sequence[AnyLevel], finish: Callable[[], Reduced]) -> Reduced:
        """Return what ``finish`` returns, at these levels, by a graph where one is due."""
        unused = frozenset(self.gradients.unused_by_all())
        # the values of memories that decide the kernel launches, apart from the level
        decisive = [
            tuple((k, _layout_of(v) if isinstance(v, Tensor) else v) for k, v in fields.items())
            for fields in map(_remembered, self.reducer.states)
        ]
        kind = (tuple(levels), tuple(decisive), unused)
        graph = self.reductions.get_graph(kind)
        if self._changes_unit(unused) or (graph is None and not self.reductions.is_due(kind)):
            return self.reductions.run_uncaptured(finish)
        if graph is None:
            graph = self._capture_reduction(kind, finish)
        else:
            self._move_memories(graph, unused)
        if graph.seeds is not None:
            graph.seeds.fill()
        graph.graph.replay()
        if graph.sent is not None:
            self.reducer.world.meter.add_counts(graph.sent)
        updates, mean, rows, _ = graph.output
        # ``Losses`` looks at rows many steps later
        return Reduced(list(updates), mean, rows.clone(), unused)

    def _changes_unit(self, unused: Collection[int]) -> bool:
        """Does a residual of a layer that this step uses change its unit?"""
        rates, reducer = self.reducer.rates, self.reducer
        return rates is not None and any(
            i not in unused and compressor.rescales(state, rate)
            for i, (compressor, state, rate) in enumerate(
                zip(reducer.compressors, reducer.states, rates, strict=True)
            )
        )

    def _capture_reduction(self, kind: Hashable, finish: Callable[[], Reduced]) -> _Graph:
        """Record the reduction. Its work on the host is done in passing, as in a step."""
        world, states = self.reducer.world, self.reducer.states
        fields = _tensor_fields(states)
        inputs = [getattr(state, name) for state, name in fields]
        seeds = SeedTable(_SEEDS * len(states) * world.hosted_count, self._losses.device)
        before = world.meter.take_counts()

        def work() -> Reduced:
            result = finish()
            self._put_back(fields, inputs)
            return result

        for state in states:
            state.use_seeds_of(seeds)
        try:
            graph = self.reductions.capture_graph(kind, inputs, work)
        finally:
            for state in states:
                state.use_seeds_of(None)
        graph.seeds, graph.sent = seeds, world.meter.take_counts()
        world.meter.add_counts(before)
        graph.after = [_remembered(state) for state in states]
        return graph

    @staticmethod
    def _put_back(fields: list[_Field], inputs: list[Tensor]) -> None:
        """Copy what a step has left of a memory to where the next one reads it, if it has the same
        layout; in ACP-SGD, where two factors take turns, it has not."""
        new = [getattr(state, name) for state, name in fields]
        back = [
            (field, old, now)
            for field, old, now in zip(fields, inputs, new, strict=True)
            if isinstance(now, Tensor) and _layout_of(now) == _layout_of(old)
        ]
        _copy_moved([old for _, old, _ in back], [now for _, _, now in back])
        for (state, name), old, _ in back:
            setattr(state, name, old)

    def _move_memories(self, graph: _Graph, unused: Collection[int]) -> None:
        """The host's part of a step: copy memories to where the graph reads them, and set their
        fields as after the step."""
        states, reducer = self.reducer.states, self.reducer
        present = [getattr(state, name) for state, name in _tensor_fields(states)]
        _copy_moved(graph.inputs, present)
        reducer.set_rates(range(len(states)))
        parts = zip(reducer.compressors, states, graph.after, strict=True)
        for i, (compressor, state, after) in enumerate(parts):
            begins = state.residual is None and after["residual"] is not None
            vars(state).update(after)
            if begins:
                compressor.begin_residual(state)
            state.step += i not in unused


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _copy_moved(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy what is not in its place."""
    pairs = zip(places, values, strict=True)
    if moved := [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]:
        foreach_copy_([place for place, _ in moved], [value for _, value in moved])


def _remembered(state: State) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name not in _PASSING}


def _tensor_fields(states: list[State]) -> list[_Field]:
    """The tensors of all memories, by name."""
    return [
        (state, name)
        for state in states
        for name, value in _remembered(state).items()
        if isinstance(value, Tensor)
    ]
