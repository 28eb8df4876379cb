"""Exchanges as CUDA graphs (``recording``): of a bucket in the hook, of a step in the trainer.

Steps of a kind (levels, layout of the compressors' memories, scale of the loss, addresses) come in
this order: `WARM_UP` that lead to it, as they are; one after which its graph is recorded; one with
which the graph's first replay is compared, bit for bit; then replays. All but the last are ordinary
steps, so a graph that cannot be recorded, or computes something else, ends a job before it has
changed a number. Nothing is sent twice: to be recorded and compared, an exchange gets the answers
that the collectives of the ordinary step have got.

A replay reads memories of compressors at the addresses of the recorded step, and leaves them where
an ordinary step has left them. What is elsewhere is copied first. So a tentative step
(`HookSteps`) leaves the memories before it alone, and another step may follow any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regimes.base.config import AnyLevel
from regimes.base.errors import ConfigError
from regimes.base.seeding import SeedTable
from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.meter import Meter
from regimes.collectives.world import Collective
from regimes.compression.bucket import State
from regimes.compression.recording import Answer, Kinds, Recorder, Recording, listening, perform
from regimes.compression.reducer import Reducer

# Places for seeds for each layer and hosted worker. No compressor of ours asks for more than one;
# a step that asks for more than there are is not captured (`SeedTable.places`).
_SEEDS = 4
# Fields of a `State` that decide no launch: whose memory it is, which never changes, and numbers of
# the step, which launches of a replayable compressor may not depend on (`Compressor.replayable`).
# `scale` is not among them: kernels multiply by it as a number of the host.
_PASSING = {"key", "first_worker", "workers", "shard", "step", "rate", "residual_rate"}


@dataclass
class _Exchange:
    """An exchange of some layers that can be done again.

    Attributes:
        layers, unused, work, tensors: see ``ExchangeGraphs.run``.
        kind: of the exchange.
    """

    layers: tuple[int, ...]
    states: Sequence[State]
    unused: frozenset[int]
    work: Callable[[], Sequence[Tensor]]
    tensors: Sequence[Tensor]
    kind: Hashable

    def visible(self, found: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return all tensors that the exchange changes, and those that it has ``found``."""
        memories = [x for state in self.states for x in _tensors(state).values()]
        seen = [*self.tensors, *memories]
        return [*seen, *(x for x in found if not any(x is y for y in seen))]

    def restore(self, fields: Sequence[dict[str, Any]]) -> None:
        """Set the fields of all memories."""
        for state, own in zip(self.states, fields, strict=True):
            state.restore(own)


@dataclass
class _Graph:
    """An exchange as graphs.

    Attributes:
        tensors: see ``ExchangeGraphs.run``; they stay alive.
        inputs: the tensors of each memory that a replay reads.
        after, decisive: the fields of each memory after a replay, and those that decide.
        sent: what a replay sends.
        proven: a replay has given what a step without a graph gave.
    """

    tensors: Sequence[Tensor]
    inputs: list[dict[str, Tensor]]
    recording: Recording
    after: list[dict[str, Any]]
    decisive: tuple[Hashable, ...]
    seeds: SeedTable
    sent: Meter
    proven: bool = False

    def decisive_now(self, states: Sequence[State]) -> tuple[Hashable, ...]:
        """Return what decides the next exchange: quickly, if nothing has changed since a replay."""
        unchanged = all(
            value is getattr(state, name)
            for state, fields in zip(states, self.after, strict=True)
            for name, value in fields.items()
        )
        return self.decisive if unchanged else tuple(map(_decisive, states))


class ExchangeGraphs:
    """Replays the exchanges of one reducer's layers; the numbers are those without graphs.

    Args:
        most: how many kinds of exchange of the same layers keep their graphs.
    """

    def __init__(self, reducer: Reducer, most: int, recorder: Recorder) -> None:
        self.reducer, self.most, self.recorder = reducer, most, recorder
        self.kinds: dict[tuple[int, ...], Kinds] = {}
        self._last: dict[tuple[int, ...], _Graph] = {}  # that was replayed
        self._due: list[Callable[[], None]] = []

    def run(
        self,
        layers: tuple[int, ...],
        levels: Sequence[AnyLevel],
        work: Callable[[], Sequence[Tensor]],
        tensors: Sequence[Tensor] = (),
        unused: frozenset[int] = frozenset(),
    ) -> Sequence[Tensor]:
        """Return what ``work`` returns, an exchange of these layers, by a graph if there is one. Of
        a tentative step the memories before it are kept (``Reducer.keep``).

        Args:
            work: may be done again, with the same memories and ``tensors``.
            tensors: what the work changes beside memories. At other addresses it is another kind.
            unused: layers that are not sent in this step.
        """
        reducer, kinds = self.reducer, self.kinds.setdefault(layers, Kinds(self.most))
        states = [reducer.states[i] for i in layers]
        last: _Graph | None = self._last.get(layers)
        memories = tuple(map(_decisive, states)) if last is None else last.decisive_now(states)
        places = tuple((x.data_ptr(), _layout_of(x)) for x in tensors)
        given = tuple(levels[i] for i in layers), unused, reducer.scale, places
        kind = *given, memories
        exchange = _Exchange(layers, states, unused, work, tensors, kind)
        graph: _Graph | None = kinds.find(kind)
        changes = self._changes_unit(exchange)
        if graph is not None and graph.proven and not changes:
            found, self._last[layers] = self._replay(exchange, graph), graph
            reducer.world.meter.add_counts(graph.sent)
            return found
        self._keep(layers)
        if not changes and (graph is not None or kinds.is_due(kind)):
            return self.recorder.run(partial(self._run_and_note, exchange))
        found = self.recorder.run(work)
        # Counted is what a step leaves. So memories that no step at these levels leaves, such as
        # those before the first one, are no kind that is captured, however often a step is undone.
        kinds.count((*given, tuple(map(_decisive, states))))
        return found

    def make_graphs(self) -> None:
        """Record the graphs of exchanges that are due, and compare those that are new. To be called
        when no other thread of this process launches anything, such as a backward pass that draws
        random numbers: torch allows one capture at a time, and waits for the whole device first.

        Raises:
            ConfigError: an exchange cannot be captured, or a replay gives other bits.
        """
        due, self._due = self._due, []
        for make in due:
            self.recorder.run(make)

    def _changes_unit(self, exchange: _Exchange) -> bool:
        """Does a residual of a layer that this step uses change its unit?"""
        rates, reducer = self.reducer.rates, self.reducer
        return rates is not None and any(
            reducer.compressors[i].rescales(reducer.states[i], rates[i])
            for i in exchange.layers
            if i not in exchange.unused
        )

    def _keep(self, layers: Collection[int]) -> None:
        if self.reducer.tentative:
            self.reducer.keep(layers)

    def _run_and_note(self, exchange: _Exchange) -> Sequence[Tensor]:
        """Do an exchange without a graph, and note what a graph needs to do it again."""
        before = [vars(state).copy() for state in exchange.states]
        contents, answers = [x.clone() for x in exchange.visible()], list[list[Tensor]]()

        def listener(collective: Collective) -> None:
            collective()
            answers.append([x.clone() for x in _tensors_of(collective)])

        with listening(self.reducer.world, listener):
            found = exchange.work()
        self._due.append(partial(self._prove, exchange, before, contents, answers, found))
        return found

    def _prove(
        self,
        exchange: _Exchange,
        before: list[dict[str, Any]],
        contents: list[Tensor],
        answers: list[list[Tensor]],
        found: Sequence[Tensor],
    ) -> None:
        """Do an exchange again as graphs, and compare. What it has left without them stands.

        Args:
            before, contents: the memories' fields before it, and what was in ``visible`` tensors.
            answers: what the tensors of each collective held after it.
            found: what it has returned.
        """
        after, seen = [vars(state).copy() for state in exchange.states], exchange.visible(found)
        truth, kinds = [x.clone() for x in seen], self.kinds[exchange.layers]
        answer = partial(_repeat_answer, iter(answers))
        try:
            exchange.restore(before)
            _copy_moved(exchange.visible(), contents)
            graph: _Graph | None = kinds.find(exchange.kind)
            if graph is None:
                graph = self._record(exchange, after, found, answer)
                kinds.keep(exchange.kind, graph)
            else:
                self._replay(exchange, graph, answer)
                graph.proven = True
            if not _have_same_bits(exchange.visible(graph.recording.output), truth):
                raise ConfigError(
                    "graphs: a step that was replayed has given other numbers than the same step "
                    "without graphs: leave graphs out, or call torch.use_deterministic_algorithms"
                    "(True), if a kernel adds in no fixed order"
                )
        except BaseException:
            exchange.restore(after)
            _copy_moved(seen, truth)
            raise

    def _record(
        self,
        exchange: _Exchange,
        after: list[dict[str, Any]],
        found: Sequence[Tensor],
        answer: Answer,
    ) -> _Graph:
        """Record an exchange. Its work on the host is done in passing, as in a step."""
        world, states = self.reducer.world, exchange.states
        rooms = self._make_rooms(exchange, found)
        inputs = [_tensors(state) for state in states]
        seeds = SeedTable(_SEEDS * len(states) * world.hosted_count, self.recorder.stream.device)

        def work() -> Sequence[Tensor]:
            found = exchange.work()
            self._put_back(states, inputs, after)
            if rooms is None:
                return found
            _copy_moved(rooms, found)
            return rooms

        own, world.meter = world.meter, Meter(world.meter.dtype, world.workers)
        for state in states:
            state.use_seeds_of(seeds)
        try:
            recording = self.recorder.record(work, world, answer, seeds.fill)
        finally:
            for state in states:
                state.use_seeds_of(None)
            sent, world.meter = world.meter, own
        left, decisive = [*map(_remembered, states)], tuple(map(_decisive, states))
        return _Graph(exchange.tensors, inputs, recording, left, decisive, seeds, sent)

    def _make_rooms(self, exchange: _Exchange, found: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Make room outside of the graphs' pool for what an exchange returns; none where it has all
        layers. Of several the others come before it is used, and those that were recorded earlier
        may have numbers in passing where this one leaves its own."""
        if len(exchange.layers) == len(self.reducer.layers):
            return None
        outside = {x.untyped_storage().data_ptr() for x in exchange.tensors}
        return [
            x if x.untyped_storage().data_ptr() in outside else torch.empty_like(x) for x in found
        ]

    def _put_back(
        self,
        states: Sequence[State],
        inputs: Sequence[dict[str, Tensor]],
        after: Sequence[dict[str, Any]],
    ) -> None:
        """Copy what a step has left of a memory to where the step without a graph had left it, so
        that nothing which outlasts the step lies in the graphs' pool. Unless the step is tentative,
        it goes to where the next one reads it, if it has the same layout; in ACP-SGD, where two
        factors take turns, it has not."""
        moved = []
        for state, read, left in zip(states, inputs, after, strict=True):
            for name, now in _tensors(state).items():
                place = left[name]
                if not self.reducer.tentative and name in read:
                    place = read[name] if _layout_of(read[name]) == _layout_of(now) else place
                if place.data_ptr() != now.data_ptr():
                    moved.append((place, now))
                    setattr(state, name, place)
        _copy_moved([place for place, _ in moved], [now for _, now in moved])

    def _replay(
        self, exchange: _Exchange, graph: _Graph, answer: Answer = perform
    ) -> Sequence[Tensor]:
        """Replay an exchange, after the host's part of a step."""
        pairs = [
            (place, getattr(state, name))
            for state, read in zip(exchange.states, graph.inputs, strict=True)
            for name, place in read.items()
        ]
        _copy_moved([place for place, _ in pairs], [present for _, present in pairs])
        for state, read in zip(exchange.states, graph.inputs, strict=True):
            vars(state).update(read)
        self._keep(exchange.layers)  # what is kept is read, and not written to
        self.reducer.set_rates(exchange.layers)
        set_fields(self.reducer, exchange.layers, graph.after, exchange.unused)
        graph.seeds.fill()
        graph.recording.replay(answer)
        found: Sequence[Tensor] = graph.recording.output
        return found


def set_fields(
    reducer: Reducer,
    layers: Sequence[int],
    after: Sequence[dict[str, Any]],
    unused: Collection[int] = (),
) -> None:
    """Set the fields of memories as after a step, except for those that each step has anew."""
    for i, fields in zip(layers, after, strict=True):
        state = reducer.states[i]
        begins = state.residual is None and fields["residual"] is not None
        vars(state).update(fields)
        if begins:
            reducer.compressors[i].begin_residual(state)
        state.step += i not in unused


def _repeat_answer(answers: Iterator[list[Tensor]], collective: Collective) -> None:
    foreach_copy_(_tensors_of(collective), next(answers))


def _tensors_of(collective: Collective) -> list[Tensor]:
    return [x for x in collective.args if isinstance(x, Tensor)]


def _remembered(state: State) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name not in _PASSING}


def _tensors(state: State) -> dict[str, Tensor]:
    return {name: x for name, x in vars(state).items() if isinstance(x, Tensor)}


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _decisive(state: State) -> Hashable:
    """The values of a memory that decide the kernel launches, apart from the level."""
    fields = _remembered(state).items()
    return tuple((k, _layout_of(v) if isinstance(v, Tensor) else v) for k, v in fields)


def _have_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Also of numbers that are not finite; the host waits once."""
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[0].numel()]
    bits = [[x.contiguous().view(-1).view(torch.uint8) for x in pair] for pair in pairs]
    return not bits or bool(torch.stack([(a == b).all() for a, b in bits]).all())


def _copy_moved(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy what is not in its place."""
    pairs = zip(places, values, strict=True)
    if moved := [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]:
        overwritten = {place.data_ptr() for place, _ in moved}  # where fields swap their tensors
        sources = [x.clone() if x.data_ptr() in overwritten else x for _, x in moved]
        foreach_copy_([place for place, _ in moved], sources)
