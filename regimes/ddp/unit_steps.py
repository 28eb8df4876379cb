"""What a hook asks of the steps of its model: counts, levels, and how the last step is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from regimes.compression.reducer import Reducer
from regimes.config import DENSE, AnyLevel
from regimes.job.clock import Clock


class UnitSteps:
    """The backward passes of one model, counted.

    Attributes:
        reducer: the compressors, and the layers' memories.
        levels: per layer, what a backward pass sends after the first ``dense_start`` of them.
        total: backward passes since training began.
        in_unit, finite_in_unit: backward passes since ``restart``, and those whose gradient was
            finite, as far as that is known.
        before_step: called at the first gradients of a backward pass.
        check: called once, before the next gradient is reduced.
        clock: where the time since ``restart`` went.
        scales: per layer, what the last gradient was multiplied by, with the loss.
        by_process: a layer is made of the parts of so many processes, so that a state loads on the
            same number alone.
    """

    scales: list[float]
    by_process = False

    def __init__(self, reducer: Reducer, device: torch.device, dense_start: int) -> None:
        self.reducer, self.device, self.dense_start = reducer, device, dense_start
        self.levels: Sequence[AnyLevel] = []
        self.total = 0
        self.before_step: Callable[[], Any] = lambda: None
        self.check: Callable[[], Any] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a unit: counts and clock start at zero."""
        self.in_unit = self.finite_in_unit = 0
        self.clock = Clock(self.device)

    @property
    def present_levels(self) -> Sequence[AnyLevel]:
        """Those of the step under way."""
        return [DENSE] * len(self.levels) if self.total < self.dense_start else self.levels

    def run_check(self) -> None:
        """Call ``check``, once."""
        if self.check is not None:
            self.check, check = None, self.check
            check()

    def forget(self) -> None:
        """The last step counts for good."""

    def take_back(self, arriving: int | None = None) -> None:
        """Undo the last step for layers whose gradient was cleared and never applied.

        Args:
            arriving: a layer whose next gradient is there already.
        """

    @contextlib.contextmanager
    def on_hook_stream(self) -> Iterator[None]:
        """Run where the hook's own work runs on a GPU."""
        yield
