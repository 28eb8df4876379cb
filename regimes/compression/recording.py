"""Work of a GPU as CUDA graphs: recorded once, and replayed by few calls.

Collectives are not captured. Between each two of them lies a *segment*, which is a graph of its
own: recorded work is segments and collectives in turn.

What torch asks of a capture (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs), and
where it is done: no wait of the host (the bounds of a segment; ``Compressor.replayable``); fixed
addresses (``ExchangeGraphs.run``); no random state of the host (``seeding.SeedTable``); what a
graph reads stays alive (``kernels.hold_cached_tensors``); nothing else is launched meanwhile
(``ExchangeGraphs.make_graphs``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias, TypeVar

import torch

from regimes.base.errors import ConfigError
from regimes.collectives.world import Collective, World
from regimes.compression.kernels import hold_cached_tensors

WARM_UP = 3  # steps before a kind is captured, as torch advises
T = TypeVar("T")
Answer: TypeAlias = Callable[[Collective], object]


class Kinds:
    """Keeps what is made for each kind of step; the least recently used are dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()

    def find(self, kind: Hashable) -> Any:
        """Return what is kept for a kind, or None."""
        made = self.kept.get(kind)
        if made is not None:
            self.kept.move_to_end(kind)
        return made

    def is_due(self, kind: Hashable) -> bool:
        """Return whether enough steps have been counted for a kind."""
        return self._seen.get(kind, 0) >= WARM_UP

    def count(self, kind: Hashable) -> None:
        """Count a step."""
        self._seen[kind] = self._seen.pop(kind, 0) + 1
        while len(self._seen) > 8 * self.most:  # of the many kinds that come once, at a change
            self._seen.popitem(last=False)

    def keep(self, kind: Hashable, made: Any) -> None:
        """Keep something for a kind, of which steps are counted anew."""
        self._seen.pop(kind, None)
        self.kept[kind] = made
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)


def perform(collective: Collective) -> None:
    """Perform a collective, as it was asked for."""
    collective()


@dataclass
class Recording:
    """Holds graphs, and the collectives between them.

    Attributes:
        output: what a replay leaves, at fixed addresses.
        held: see ``kernels.hold_cached_tensors``.
    """

    segments: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    output: Any = None
    held: list[Any] = field(default_factory=list)

    def replay(self, answer: Answer = perform) -> None:
        """Launch all segments, and answer the collectives between them."""
        for segment, collective in zip_longest(self.segments, self.collectives):
            segment.replay()
            if collective is not None:
                answer(collective)


class Recorder:
    """Records work in one stream.

    Attributes:
        pool: the memory of all graphs. They are replayed one after the other, in any order: what
            one leaves is used before the next, or lies elsewhere, as memories of compressors do
            (``ExchangeGraphs._put_back``) and what buckets return (``_make_rooms``).
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.pool = stream, torch.cuda.graph_pool_handle()

    def run(self, work: Callable[[], T]) -> T:
        """Do some work in the stream of captures, in the order of the current one: libraries
        prepare a stream at its first use, which a capture does not allow."""
        current = torch.cuda.current_stream(self.stream.device)
        if current == self.stream:
            return work()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = work()
        current.wait_stream(self.stream)
        return result

    def record(
        self,
        work: Callable[[], Any],
        world: World,
        answer: Answer = perform,
        prepare: Callable[[], object] = lambda: None,
    ) -> Recording:
        """Record what some work launches. A capture computes nothing, so each segment is replayed
        once as soon as it ends.

        Args:
            answer: performs each collective, or does something in its place.
            prepare: called before each replay.

        Raises:
            ConfigError: it waits, or does something else that cannot be captured.
        """
        made, inside = Recording(), ExitStack()

        def begin() -> None:
            made.segments.append(graph := torch.cuda.CUDAGraph())
            # "thread_local": other threads may use the GPU meanwhile, which "global" forbids
            words: Any = {"stream": self.stream, "capture_error_mode": "thread_local"}
            inside.enter_context(torch.cuda.graph(graph, self.pool, **words))

        def end() -> None:
            inside.close()
            prepare()
            made.segments[-1].replay()

        def cut(collective: Collective) -> None:
            end()
            made.collectives.append(collective)
            answer(collective)
            begin()

        try:
            with hold_cached_tensors() as made.held, listening(world, cut), inside:
                begin()
                made.output = work()
                end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"graphs: a step of this model or compressor cannot be captured ({said}): leave "
                "graphs out"
            ) from error
        return made


@contextmanager
def listening(world: World, listener: Callable[[Collective], None]) -> Iterator[None]:
    """Inside, a listener gets each collective in place of its being performed."""
    world.listener = listener
    try:
        yield
    finally:
        world.listener = None
