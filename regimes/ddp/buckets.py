"""Reduces DDP's gradient buckets to aggregated gradients, while backward goes on.

*Order.* DDP gives its buckets in the same order on every process, but regroups parameters after the
first step. Layers are therefore divided into buckets of our own (``collectives.overlap``), of at
most DDP's size, on a communicator that nothing else uses. (Chained callbacks issue a bucket's
second round when its first is done, a moment that differs between processes: torch's own PowerSGD
hook aborts on gloo because of that.)

*Memory.* A layer's state belongs to its parameter, not to a place in a bucket. During backward only
a copy changes. The copy replaces the state after DDP has written the results to the parameters,
unless the aggregated gradient is not finite (then a GradScaler skips the step) or DDP has not
written a parameter because no process used it. This costs one more residual per process.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from regimes.collectives.overlap import Pipeline, make_buckets
from regimes.collectives.requests import NO_LAYER
from regimes.compression.base import State
from regimes.compression.reducer import Reducer, finite_flag
from regimes.config import DENSE, Level
from regimes.ddp.backward import Step, StepClock, after_backward, in_memory_order
from regimes.errors import ConfigError
from regimes.instruments.base import Gauge


class Buckets:
    """The communication hook proper.

    Attributes:
        levels: per layer, what a backward pass sends after the first ``dense_start`` of them.
        total: backward passes since training began.
        steps, finite_steps: backward passes since ``restart``, and those whose gradient was
            finite.
        scales: per layer, the scale of the loss in which its residual is stored.
        begin: called at the first bucket of a backward pass.
        check: called once, in the pipeline's thread, before the next gradient is reduced.
        clock: where the time since ``restart`` went.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Sequence[nn.Parameter],
        reducer: Reducer,
        gauges: Collection[Gauge],
        *,
        keep_gradients: bool,
        scale: Callable[[], float],
        dense_start: int = 0,
    ) -> None:
        """
        Args:
            parameters: the layers' parameters, in the reducer's order.
            gauges: see every finite step, in units of the unscaled loss.
            keep_gradients: whether a gauge reads this process's gradients, too.
            dense_start: so many steps send the gradient uncompressed.
            scale: what the loss is multiplied by (a GradScaler's scale).
        """
        # Weak: DDP keeps the hook in C++, where the garbage collector sees no cycle. A strong
        # reference would keep the model, and its process group, for ever.
        self.model = weakref.proxy(model)
        self.reducer, self.gauges, self.scale = reducer, gauges, scale
        self.parameters = list(parameters)
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.levels: Sequence[Level] = []
        self.dense_start, self.total = dense_start, 0
        # The residual before the last step: the next step writes to its memory.
        self.spare: list[Tensor | None] = [None] * len(parameters)
        self.scales = [1.0] * len(parameters)
        sizes = [p.numel() for p in parameters]
        self.stack = parameters[0].new_zeros(1, sum(sizes) if keep_gradients else 0)
        self.rows = self.stack[0].split(sizes) if keep_gradients else None
        self.device = parameters[0].device
        buckets = make_buckets(parameters, model.bucket_bytes_cap)
        self.pipeline = Pipeline(buckets, self._reduce, self.device)
        self.step: Step | None = None
        self.begin: Callable[[], Any] = lambda: None
        self.check: Callable[[], Any] | None = None
        self.lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """A unit begins."""
        self.steps = self.finite_steps = 0
        self.clock = StepClock(self.reducer.world)

    # -- in the thread of backward -----------------------------------------------------------

    def receive(self, bucket: Any) -> Future[Tensor]:
        """Take one bucket (``torch.distributed.GradBucket``); its buffer is overwritten with the
        aggregated gradient, which the future announces."""
        if bucket.index() == 0:
            self._begin()
        assert self.step is not None
        gradients = {
            self.index[p]: in_memory_order(g, p)
            for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True)
        }
        self.step.gradients.update(gradients)
        future: Future[Tensor] = Future(devices=[self.device] if self.pipeline.stream else None)
        self.step.pending.append((future, bucket.buffer()))
        self.pipeline.mark_ready(gradients)
        if self.step.failed:
            self._resolve_futures(self.step)
        return future

    def _begin(self) -> None:
        uneven = self.model._join_config.enable
        try:
            # Queued at the first bucket, so before DDP queues its own callback at the last: the
            # results are complete when DDP copies them to the parameters.
            after_backward(self._finish)
        except RuntimeError:  # not within backward: join() replays collectives outside of it
            uneven = True
        if uneven:
            raise ConfigError(
                "the hook works inside backward() only: uneven inputs (model.join()) are not "
                "supported, let every process take the same number of steps"
            )
        self.begin()
        self.clock.start()
        dense = self.total < self.dense_start
        self.step = Step([DENSE] * len(self.levels) if dense else self.levels)
        self.pipeline.begin()

    def _finish(self) -> None:
        """The end of backward, just before DDP copies the results to the parameters."""
        with self.clock.waiting():
            self.pipeline.finish()
        after_backward(self._settle)  # queued after DDP's callback

    @torch.no_grad()
    def _settle(self) -> None:
        """Just after DDP has copied the results to the parameters: adopt the step's states, but
        those of layers that the optimiser will not step. Error feedback would otherwise forget what
        was never applied."""
        step, self.step = self.step, None
        assert step is not None
        unapplied = self._unused_layers() if step.finite else set(step.states)
        states = self.reducer.states
        for i, new in step.states.items():
            if i in unapplied:
                self.spare[i] = new.residual
            else:
                self.spare[i], states[i], self.scales[i] = states[i].residual, new, step.scale
        self.steps += 1
        self.total += 1
        if step.finite:
            self.finite_steps += 1
            with self.on_hook_stream():
                self._observe(step, unapplied)
        self.clock.stop()

    def _unused_layers(self) -> set[int]:
        """Layers that no process has used: DDP does not write their ``.grad``, unless it is a view
        of the bucket."""
        if not (self.model.find_unused_parameters or self.model.static_graph):
            return set()
        used = self.model.reducer._get_local_used_map().tolist()
        inside = self.model.gradient_as_bucket_view
        return {
            i
            for i, parameter in enumerate(self.parameters)
            if not used[i] and not (inside and parameter.grad is not None)
        }

    def _observe(self, step: Step, unapplied: Collection[int]) -> None:
        updates = [step.gradients[i] for i in range(len(self.parameters))]
        for i in unapplied:
            updates[i] = torch.zeros_like(updates[i])
        if step.scale != 1.0:
            updates = list(torch._foreach_div(updates, step.scale))
            self.stack /= step.scale
        for gauge in self.gauges:
            gauge.step(self.stack, updates)

    @contextlib.contextmanager
    def on_hook_stream(self) -> Iterator[None]:
        """On a GPU, run in the hook's own stream, between past and future work of the current one.
        Past work has written the gradients. Future work may overwrite them, where ``.grad`` is a
        view of the bucket (``gradient_as_bucket_view``), or save what gauges have added up."""
        if (stream := self.pipeline.stream) is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    # -- in the thread of the pipeline -------------------------------------------------------

    def _reduce(self, bucket: list[int]) -> None:
        """One bucket. An error resolves all futures, because the first pass of a static graph waits
        for them before ``_finish`` can raise it."""
        step = self.step
        assert step is not None
        try:
            self._reduce_in(step, bucket)
        except BaseException:
            step.failed = True
            self._resolve_futures(step)
            raise

    def _reduce_in(self, step: Step, bucket: list[int]) -> None:
        """All rounds of one bucket; the flag of a non-finite gradient is sent with the first."""
        if not step.states:
            step.scale = self.scale()
        if self.check is not None:
            self.check, check = None, self.check
            check()
        gradients = {i: step.gradients[i] for i in bucket}
        flag = finite_flag(list(gradients.values()))
        if not flag.isfinite():
            torch._foreach_zero_(
                list(gradients.values())
            )  # or NaN would stay in residuals for ever
        for i, gradient in gradients.items():
            if self.rows is not None:
                self.rows[i].view(gradient.shape).copy_(gradient)
            step.states[i] = self._copy(i, step.scale)
        stacked = {i: gradient[None] for i, gradient in gradients.items()}
        updates = self.reducer.reduce(
            [NO_LAYER, *bucket], stacked, step.levels, flag[None], step.states
        )
        flag = updates.pop(NO_LAYER) + finite_flag(list(updates.values()))
        for i, update in updates.items():
            gradients[i].copy_(update)
        if not flag.isfinite():
            step.finite = False
            for gradient in gradients.values():
                gradient.fill_(torch.nan)  # a GradScaler must see it, as without compression
        if len(step.states) == len(self.parameters):
            self._resolve_futures(
                step
            )  # not in ``_finish``: a static graph's first pass waits here

    def _resolve_futures(self, step: Step) -> None:
        with self.lock:  # after an error, ``receive`` calls this in backward's thread as well
            while step.pending:
                future, buffer = step.pending.pop()
                future.set_result(buffer)

    def _copy(self, layer: int, scale: float) -> State:
        """A state that the step may change, its residual in units of the step's scale."""
        state = copy.copy(self.reducer.states[layer])
        for name, value in vars(state).items():
            if name != "residual" and isinstance(value, Tensor):
                setattr(state, name, value.clone())
        if state.residual is not None:
            ratio = scale / self.scales[layer]
            state.residual = torch.mul(state.residual, ratio, out=self.spare[layer])
        return state
