"""One backward pass of DDP: its state, its clock, its end, the memory order of its gradients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from regimes.collectives.world import World
from regimes.compression.base import State
from regimes.config import Level


@dataclass
class Step:
    """One backward pass in the making; dictionaries are keyed by layer."""

    levels: Sequence[Level]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # in the buckets; later the updates
    states: dict[int, State] = field(default_factory=dict)  # as they will be
    pending: list[tuple[Future[Tensor], Tensor]] = field(default_factory=list)  # and their buffers
    scale: float = 0.0
    finite: bool = True
    failed: bool = False


class StepClock:
    """Where the time of a unit's steps went, from its first bucket on. "communicate" and
    "compress" are the waits at the end of backward; "compute" is all the rest, the script's own.
    The clock never waits for a GPU.

    Attributes:
        seconds: so far, by name.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.seconds = dict.fromkeys(("compute", "compress", "communicate"), 0.0)
        self.since: float | None = None

    def start(self) -> None:
        """A step's first bucket is full."""
        if self.since is None:
            self.since = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The script waits for the results of a step."""
        start, before = time.perf_counter(), self.world.seconds
        yield
        waited = time.perf_counter() - start
        # Collectives that overlap with backward cost the script nothing.
        communicated = min(waited, self.world.seconds - before)
        for name, spent in {"communicate": communicated, "compress": waited - communicated}.items():
            self.seconds[name] += spent
            self.seconds["compute"] -= spent

    def stop(self) -> None:
        """A step is over."""
        now = time.perf_counter()
        self.seconds["compute"] += now - (now if self.since is None else self.since)
        self.since = now


def after_backward(callback: Callable[[], None]) -> None:
    """Queue a callback of the autograd engine for the end of backward. Callbacks run in the order
    in which they were queued; DDP queues its own when the last bucket is full."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_memory_order(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A parameter's part of the bucket, ``[*shape]``. It is stored in the parameter's own memory
    order if that has no gaps; ``bucket.gradients()`` gives it as if it were contiguous."""
    if parameter.is_contiguous():
        return flat
    extent = sum(s * (n - 1) for s, n in zip(parameter.stride(), parameter.shape, strict=True)) + 1
    if extent != parameter.numel():
        return flat
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
