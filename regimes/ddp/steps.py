"""The steps of a hook: each backward pass is an exchange, which counts once it is settled.

The way of a gradient: ``ddp.source`` hands it over (``HookSteps.add_gradients``);
``exchange.exchange`` exchanges it, tentatively, and writes the result over it. After DDP has
written the results to the parameters the exchange is settled, unless the aggregated gradient is not
finite (then a GradScaler skips the step) or DDP has not written a parameter because no process used
it. The next pass may find that the last one was not applied (``ddp.applied``): then it is undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regimes.compression.reducer import Reducer
from regimes.ddp.applied import AppliedSteps
from regimes.ddp.loss_scale import LossScale
from regimes.ddp.source import Source
from regimes.ddp.unit_steps import UnitSteps
from regimes.errors import ConfigError
from regimes.exchange.exchange import Exchange, Listener, Transfer, make_buckets
from regimes.exchange.tentative import TentativeMemories
from regimes.job.refit import list_names
from regimes.precision import full_precision


class HookSteps(UnitSteps, Listener):
    """The backward passes of one model; the hook exchanges their gradients.

    Attributes:
        exchange: the exchange of their gradients.
        stack: this process's own gradients of the step under way, one after another, ``[1, size]``;
            size 0 where no gauge reads them.
    """

    def __init__(
        self,
        source: Source,
        reducer: Reducer,
        gauges: Collection[Any],
        *,
        readers: Sequence[Any] = (),
        loss_scale: LossScale,
        dense_start: int = 0,
        optimizer: Any = None,
    ) -> None:
        """
        Args:
            reducer: of the source's layers, or of this process's shards of them.
            readers: those of the gauges that, when they are ``due``, read this process's own
                gradients as well as the shared update.
            dense_start: how many steps, from the first on, send the gradient uncompressed.
            loss_scale: what the loss is multiplied by.
            optimizer: steps the parameters, if it is known.
        """
        applied = AppliedSteps([[p] for p in source.parameters.values()], optimizer)
        super().__init__(reducer, source.device, dense_start, gauges, applied, loss_scale)
        self.source, self.readers = source, readers
        self.sizes = [t.numel() for t in source.local]
        self.stack = self._make_stack(0)
        # of whole layers, whose sizes are the same on all processes: so all have the same buckets
        buckets = make_buckets([*source.parameters.values()], source.bucket_bytes)
        self.exchange = Exchange(
            reducer,
            buckets,
            background=source.device,
            written=self,
        )

    # -- in the thread of backward, called by the source -------------------------------------

    def approach_pass(self, arriving: int | None = None) -> None:
        if self._last is not None:
            self.take_back(arriving)
            self.forget_step()  # from here on .grad may be the sum of several passes

    def begin_step(self) -> None:
        self.applied.begin_pass()
        self.loss_scale.begin_pass()
        self.before_step()  # before the clock: it may end a unit, which changes clock and levels
        self.clock.start_step()
        self.exchange.begin_transfer(self.present_levels)
        self._keep_gradients(any(getattr(gauge, "due", True) for gauge in self.readers))

    def _keep_gradients(self, kept: bool) -> None:
        """Let the exchange copy this process's gradients of the step under way, or not. The memory
        stays from step to step, until a step does not need it."""
        size = sum(self.sizes) if kept else 0
        if self.stack.shape[1] != size:
            self.stack = self._make_stack(size)
            self.exchange.copies = self.stack[0].split(self.sizes) if kept else None

    def _make_stack(self, size: int) -> Tensor:
        """Zeros ``[1, size]``."""
        kind = self.reducer.world.meter.dtype
        return torch.zeros((1, size), dtype=kind, device=self.device)

    def add_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        self.exchange.add_rows(gradients)
        if self.exchange.transfer is not None and self.exchange.transfer.failed:
            self.source.release_gradients()

    def finish_step(self) -> None:
        with self.clock.count_waiting(self.reducer.world):
            self.exchange.finish_transfer()

    @torch.no_grad()
    def settle_step(self) -> None:
        """Adopt the step's memories, except for layers that the optimiser will not step."""
        step = self.exchange.transfer
        assert step is not None
        # The optimiser skips a step that is not finite: then no layer adopts its residual, which
        # would forget an update that was never applied.
        unapplied: Collection[int] = range(len(step.rows))
        if step.finite:
            unapplied = self.source.unwritten_layers()
        self._last = None
        self.exchange.settle_transfer(unapplied)
        # A step that is not finite has changed no memory, and counts although a GradScaler skips
        # it: it is not undone.
        if step.finite:
            self.keep_for_undo()
        self.in_unit += 1
        self.total += 1
        if step.finite:
            self.finite_in_unit += 1
            if self.gauges:
                with self.on_hook_stream():
                    self._show_gauges(step, unapplied)
        self.applied.note_exchange(self.may_warn)
        self.clock.stop_step()

    def _show_gauges(self, step: Transfer, unapplied: Collection[int]) -> None:
        updates = [full_precision(step.rows[i][0]) for i in range(len(step.rows))]
        for i in unapplied:
            updates[i] = torch.zeros_like(updates[i])
        self.show_step(self.stack, updates)

    @property
    def memories(self) -> TentativeMemories:
        return self.exchange.memories

    @contextlib.contextmanager
    def on_hook_stream(self) -> Iterator[None]:
        """On a GPU, run in the hook's own stream, between past and future work of the current one.
        Past work has written the gradients. Future work may overwrite them, where ``.grad`` is a
        view of the bucket (``gradient_as_bucket_view``), or save what gauges have added up."""
        background = self.exchange.background
        if background is None or (stream := background.stream) is None:
            yield
            return
        current = torch.cuda.current_stream(background.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    # -- what the exchange asks and tells ------------------------------------------------------

    def scale_of_loss(self) -> float:
        return self.loss_scale.of_pass()

    def before_first_bucket(self) -> None:
        self.run_check()

    def layer_marks(self, layers: Sequence[int]) -> Tensor | None:
        return self.source.mark_unused(layers)

    def note_marks(self, means: Mapping[int, float]) -> None:
        self.source.note_unused(means)

    def refuse_missing(self, layers: Sequence[int]) -> None:
        """Raise ConfigError: some buckets of DDP were never full. DDP itself would say so only in
        the next forward pass, after a step with gradients that are not shared."""
        names = [*self.source.parameters]
        raise ConfigError(
            f"{list_names([names[i] for i in layers])} had no gradient in this backward pass, and "
            "DistributedDataParallel waits for all that it was given: freeze layers before "
            "wrapping the model, or wrap it with find_unused_parameters=True"
        )

    def release_gradients(self) -> None:
        self.source.release_gradients()
