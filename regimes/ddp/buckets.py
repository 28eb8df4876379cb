"""DDP's gradient buckets in, aggregated gradients out, while backward goes on.

*Order.* DDP hands over buckets in the same order on every process, but fills them anew after the
first step. What travels is therefore divided anew (``collectives.overlap``), into buckets of at
most DDP's size, on a communicator that nothing else uses. (Chained callbacks issue a bucket's
second round whenever its first happens to be done, which differs between processes: torch's own
PowerSGD hook aborts of that on gloo.)

*Memory.* A layer's state belongs to its parameter, not to a place in a bucket. During backward only
a copy changes. When DDP has handed the results to the parameters, the copies are kept, unless
the aggregated gradient is not finite (then a GradScaler skips the step) or DDP has left a parameter
alone because no process used it. Costs one residual more per process.
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
        levels: per layer, what a backward pass sends once ``dense_start`` of them are over.
        total: backward passes since training began.
        steps, kept: backward passes since ``restart``, and those whose gradient was finite.
        begin: called when a backward pass hands over its first bucket.
        check: called once, in the thread, before the next gradient is reduced.
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
        # Not held: the model holds the hook where no garbage collector looks, so both would stay,
        # and the model's group with them.
        self.model = weakref.proxy(model)
        self.reducer, self.gauges, self.scale = reducer, gauges, scale
        self.parameters = list(parameters)
        self.index = {parameter: i for i, parameter in enumerate(parameters)}
        self.levels: Sequence[Level] = []
        self.dense_start, self.total = dense_start, 0
        self.spare: list[Tensor | None] = [None] * len(parameters)  # a retired residual's memory
        self.units = [1.0] * len(parameters)  # the scale in which a residual is kept
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
        self.steps = self.kept = 0
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
        joins = self.model._join_config.enable
        try:
            after_backward(self._finish)
        except RuntimeError:
            joins = True
        if joins:
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
        """The end of backward, just before DDP takes the results."""
        with self.clock.waiting():
            self.pipeline.finish()
        after_backward(self._settle)

    @torch.no_grad()
    def _settle(self) -> None:
        """Just after DDP has handed the results to the parameters: keep the step or drop it."""
        step, self.step = self.step, None
        assert step is not None
        left = self._unused_layers() if step.finite else set(step.states)
        states = self.reducer.states
        for i, new in step.states.items():
            if i in left:
                self.spare[i] = new.residual
            else:
                self.spare[i], states[i], self.units[i] = states[i].residual, new, step.scale
        self.steps += 1
        self.total += 1
        if step.finite:
            self.kept += 1
            with self.on_hook_stream():
                self._observe(step, left)
        self.clock.stop()

    def _unused_layers(self) -> set[int]:
        """Layers that no process has used: DDP does not touch their ``.grad``, unless it lies in
        the bucket itself."""
        if not (self.model.find_unused_parameters or self.model.static_graph):
            return set()
        used = self.model.reducer._get_local_used_map().tolist()
        inside = self.model.gradient_as_bucket_view
        return {
            i
            for i, parameter in enumerate(self.parameters)
            if not used[i] and not (inside and parameter.grad is not None)
        }

    def _observe(self, step: Step, left: Collection[int]) -> None:
        updates = [step.gradients[i] for i in range(len(self.parameters))]
        for i in left:
            updates[i] = torch.zeros_like(updates[i])
        if step.scale != 1.0:
            updates = list(torch._foreach_div(updates, step.scale))
            self.stack /= step.scale
        for gauge in self.gauges:
            gauge.step(self.stack, updates)

    @contextlib.contextmanager
    def on_hook_stream(self) -> Iterator[None]:
        """On a GPU: in the hook's own stream, after what the present one has been given. What the
        present one is given next comes later: it may change the buckets, where DDP keeps gradients
        (``gradient_as_bucket_view``), or save what gauges have added up."""
        if (stream := self.pipeline.stream) is None:
            yield
            return
        present = torch.cuda.current_stream(self.device)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            yield
        present.wait_stream(stream)

    # -- in the thread of the hook -----------------------------------------------------------

    def _reduce(self, bucket: list[int]) -> None:
        """One bucket. After an error nobody is left waiting for results (a static graph's first
        pass does, before ``_finish`` can tell)."""
        step = self.step
        assert step is not None
        try:
            self._reduce_in(step, bucket)
        except BaseException:
            step.failed = True
            self._resolve_futures(step)
            raise

    def _reduce_in(self, step: Step, bucket: list[int]) -> None:
        """All rounds of one bucket; the flag of a non-finite gradient rides in the first."""
        if not step.states:
            step.scale = self.scale()
        if self.check is not None:
            self.check, check = None, self.check
            check()
        gradients = {i: step.gradients[i] for i in bucket}
        flag = finite_flag(list(gradients.values()))
        if not flag.isfinite():
            torch._foreach_zero_(list(gradients.values()))  # NaN would stay in residuals for ever
        for i, gradient in gradients.items():
            if self.rows is not None:
                self.rows[i].view(gradient.shape).copy_(gradient)
            step.states[i] = self._copy(i, step.scale)
        stacked = {i: gradient[None] for i, gradient in gradients.items()}
        found = self.reducer.reduce(
            [NO_LAYER, *bucket], stacked, step.levels, flag[None], step.states
        )
        flag = found.pop(NO_LAYER) + finite_flag(list(found.values()))
        for i, update in found.items():
            gradients[i].copy_(update)
        if not flag.isfinite():
            step.finite = False
            for gradient in gradients.values():
                gradient.fill_(torch.nan)  # as without compression: a GradScaler must see it
        if len(step.states) == len(self.parameters):  # a static graph's first pass awaits them here
            self._resolve_futures(step)

    def _resolve_futures(self, step: Step) -> None:
        with self.lock:
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
            ratio = scale / self.units[layer]
            state.residual = torch.mul(state.residual, ratio, out=self.spare[layer])
        return state
