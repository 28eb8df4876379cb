"""Reduces buckets of gradients to aggregated gradients, while backward goes on.

The way of a gradient: ``ddp.source`` hands it over (``Buckets.add``); the thread of
``collectives.overlap`` calls ``Buckets._reduce`` once its bucket is complete;
``compression.reducer`` runs the compressors' programs, whose requests ``collectives.world``
answers; the result is written over the gradient.

*Order.* DDP gives its buckets in the same order on every process, but regroups parameters after the
first step. Layers are therefore divided into buckets of our own (``collectives.overlap``), of at
most DDP's size, on a communicator that nothing else uses. (Chained callbacks issue a bucket's
second round when its first is done, a moment that differs between processes.)

*Memory.* A layer's state belongs to its parameter, not to a place in a bucket. During backward only
a copy changes. The copy replaces the state after DDP has written the results to the parameters,
unless the aggregated gradient is not finite (then a GradScaler skips the step) or DDP has not
written a parameter because no process used it. This costs one more residual per process. The state
before a step stays until the next one, which may find that the step was not applied
(``ddp.applied``): then it comes back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regimes.collectives.overlap import Pipeline, make_buckets
from regimes.collectives.quorum import StepLost
from regimes.collectives.requests import NO_LAYER
from regimes.compression.base import State
from regimes.compression.kernels import on_gpu
from regimes.compression.reducer import Reducer, finite_flag
from regimes.config import DENSE, Level
from regimes.ddp.applied import UNKNOWN, AppliedSteps
from regimes.ddp.refit import several
from regimes.ddp.schedule import StepClock
from regimes.ddp.source import Source
from regimes.errors import ConfigError
from regimes.instruments.gradient_norm import NormsGauge
from regimes.precision import full_precision


@dataclass
class Step:
    """One backward pass in the making; dictionaries are keyed by layer."""

    levels: Sequence[Level]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # in DDP's buckets; later updates
    states: dict[int, State] = field(default_factory=dict)  # as they will be
    scale: float = 0.0
    flags: list[Tensor] = field(default_factory=list)  # by bucket: NaN where one is not finite
    unused: list[tuple[list[int], Tensor]] = field(default_factory=list)  # layers, their shares
    finite: bool = True
    failed: bool = False
    lost: bool = False  # a replica has left in it


@dataclass
class Undo:
    """The state before a step, kept while the step may still be undone."""

    states: list[State]
    scales: list[float]
    gauges: list[tuple[Any, dict[str, Any]]]  # and their attributes
    finite: bool
    layers: set[int]  # whose states the step has changed, and which are not taken back yet


class Buckets:
    """The exchange of one model's gradients.

    Attributes:
        levels: per layer, what a backward pass sends after the first ``dense_start`` of them.
        total: backward passes since training began.
        steps, finite_steps: backward passes since ``restart``, and those whose gradient was
            finite.
        scales: per layer, the scale of the loss in which its residual is stored.
        before_step: called at the first gradients of a backward pass.
        check: called once, in the pipeline's thread, before the next gradient is reduced.
        clock: where the time since ``restart`` went.
        applied: tells whether the last step was applied; None: a quorum does (``ddp.torchft``).
        last: what ``undo`` needs; None: there is nothing to undo.
    """

    last: Undo | None = None
    warned = False

    def __init__(
        self,
        source: Source,
        reducer: Reducer,
        gauges: Collection[Any],
        *,
        keep_gradients: bool,
        scale: Callable[[], float],
        dense_start: int = 0,
        optimizer: Any = None,
    ) -> None:
        """
        Args:
            reducer: of the source's layers, or of this process's shards of them.
            gauges: see every finite step, in units of the unscaled loss; a ``Gauge`` with
                ``reversible`` each.
            keep_gradients: whether a gauge reads this process's gradients, too.
            dense_start: so many steps send the gradient uncompressed.
            scale: what the loss is multiplied by (a GradScaler's scale).
            optimizer: steps the parameters, if it is known.
        """
        self.applied: AppliedSteps | None = AppliedSteps(source.parameters.values(), optimizer)
        for gauge in gauges:
            gauge.reversible = True
        self.source, self.reducer, self.gauges, self.scale = source, reducer, gauges, scale
        self.levels: Sequence[Level] = []
        self.dense_start, self.total = dense_start, 0
        # The residual before the last step: the next step writes to its memory.
        self.spare: list[Tensor | None] = [None] * len(source.local)
        self.scales = [1.0] * len(source.local)
        sizes = [t.numel() for t in source.local]
        self.stack = torch.zeros(
            (1, sum(sizes) if keep_gradients else 0),
            dtype=reducer.world.meter.dtype,
            device=source.device,
        )
        self.rows = self.stack[0].split(sizes) if keep_gradients else None
        # by whole layers, which are the same on all processes
        buckets = make_buckets([*source.parameters.values()], source.bucket_bytes)
        self.pipeline = Pipeline(buckets, self._reduce, source.device)
        self.step: Step | None = None
        self.before_step: Callable[[], Any] = lambda: None
        self.check: Callable[[], Any] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a unit: counts and clock start at zero."""
        self.steps = self.finite_steps = 0
        self.clock = StepClock(self.reducer.world)

    # -- in the thread of backward, called by the source -------------------------------------

    def approach(self, arriving: int | None = None) -> None:
        if self.last is not None and self.applied is not None:
            self.take_back(arriving)
            self.last = None  # from here on .grad may be the sum of several passes

    def begin(self) -> None:
        self.before_step()
        self.clock.start()
        dense = self.total < self.dense_start
        self.step = Step([DENSE] * len(self.levels) if dense else self.levels)
        self.pipeline.begin()

    def add(self, gradients: Mapping[int, Tensor]) -> None:
        assert self.step is not None
        self.step.gradients.update(gradients)
        self.pipeline.mark_ready(gradients)
        if self.step.failed:
            self.source.release()

    def finish(self) -> None:
        with self.clock.waiting():
            self.pipeline.finish()
            if self.step is not None and self.step.flags and not self.step.lost:
                self._check_complete(self.step)
                self._read(self.step)

    def _check_complete(self, step: Step) -> None:
        """Raise ConfigError where a layer has no gradient: some buckets of DDP were never full. It
        would explain that too, but only in the next forward pass, after a step with gradients that
        are not shared."""
        names = [*self.source.parameters]
        if missing := [names[i] for i in range(len(names)) if i not in step.gradients]:
            raise ConfigError(
                f"{several(missing)} had no gradient in this backward pass, and "
                "DistributedDataParallel waits for all that it was given: freeze layers before "
                "wrapping the model, or wrap it with find_unused_parameters=True"
            )

    @torch.no_grad()
    def _read(self, step: Step) -> None:
        """Copy a step's flags to the host: the only synchronisation of a step with a GPU.

        An update may overflow in one shard alone: then all shards skip the step."""
        world = self.reducer.world
        failed = ~torch.stack(step.flags).isfinite().all()
        total = world.add_shards(failed.to(world.meter.dtype).reshape(1))
        read = torch.cat([failed.to(total.dtype).reshape(1), total, *(t for _, t in step.unused)])
        here, anywhere, *shares = read.tolist()
        step.finite = not anywhere
        if anywhere and not here:
            for gradient in step.gradients.values():
                gradient.fill_(torch.nan)
        self.source.note_unused(
            dict(zip([i for layers, _ in step.unused for i in layers], shares, strict=True))
        )

    @torch.no_grad()
    def settle(self) -> None:
        """Adopt the step's states, but those of layers that the optimiser will not step. Error
        feedback would otherwise forget what was never applied."""
        step, self.step = self.step, None
        assert step is not None
        states, self.last = self.reducer.states, None
        if step.lost:
            for i, new in step.states.items():
                self._spare(i, new)
            self.clock.stop()
            return
        unapplied = self.source.unwritten() if step.finite else set(step.states)
        if step.finite or self.applied is None:  # a GradScaler skips others, which count
            gauges = [(gauge, dict(vars(gauge))) for gauge in self.gauges]
            layers = step.states.keys() - unapplied
            self.last = Undo([*states], [*self.scales], gauges, step.finite, layers)
        for i, new in step.states.items():
            if i in unapplied:
                self._spare(i, new)
            else:
                self.spare[i], states[i], self.scales[i] = states[i].residual, new, step.scale
        self.steps += 1
        self.total += 1
        if step.finite:
            self.finite_steps += 1
            with self.on_hook_stream():
                self._observe(step, unapplied)
        if self.applied is not None:
            self.applied.begin()
        self.clock.stop()

    def take_back(self, arriving: int | None = None) -> None:
        """Undo the last step for layers whose gradient was cleared and never applied.

        Args:
            arriving: a layer whose next gradient is there already.
        """
        last, applied = self.last, self.applied
        if last is None or applied is None:
            return
        cleared = applied.cleared(last.layers - applied.stepped, arriving)
        if thrown := cleared & applied.known:
            self.undo(thrown)
        elif cleared and not applied.stepped and not applied.moved(cleared):
            held_back = any(self.reducer.states[i].residual is not None for i in cleared)
            if held_back and not self.warned and self.reducer.world.rank == 0:
                self.warned = True
                warnings.warn(UNKNOWN, stacklevel=2)

    def undo(self, layers: Collection[int] | None = None) -> None:
        """Take the last step back: states, statistics and counts are as before it. Its traffic
        stays counted, because it was sent.

        Args:
            layers: only of these; the step still counts while others are left.
        """
        if (last := self.last) is None:
            return
        chosen = last.layers if layers is None else last.layers.intersection(layers)
        for i in chosen:
            self.spare[i] = self.reducer.states[i].residual
            self.reducer.states[i], self.scales[i] = last.states[i], last.scales[i]
        last.layers = last.layers - chosen
        if last.layers:
            for gauge, before in last.gauges:
                if isinstance(gauge, NormsGauge):
                    gauge.revert(before["sums"], chosen)
            return
        self.last = None
        for gauge, before in last.gauges:
            vars(gauge).update(before)
        self.steps -= 1
        self.total -= 1
        self.finite_steps -= last.finite

    def _observe(self, step: Step, unapplied: Collection[int]) -> None:
        updates = [full_precision(step.gradients[i]) for i in range(len(self.scales))]
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
        current = torch.cuda.current_stream(self.pipeline.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    # -- in the thread of the pipeline -------------------------------------------------------

    def _reduce(self, bucket: list[int]) -> None:
        """One bucket. An error resolves all futures, because the first pass of a static graph waits
        for them before ``finish`` can raise it."""
        step = self.step
        assert step is not None
        if step.lost:
            return
        try:
            self._reduce_in(step, bucket)
        except StepLost:
            step.lost = True
        except BaseException:
            step.failed = True
            self.source.release()
            raise

    def _reduce_in(self, step: Step, bucket: list[int]) -> None:
        """All rounds of one bucket; the flag of a non-finite gradient is sent with the first."""
        if not step.states:
            step.scale = self.scale()
        if self.check is not None:
            self.check, check = None, self.check
            check()
        gradients = {i: step.gradients[i] for i in bucket}
        exact = {i: full_precision(gradient) for i, gradient in gradients.items()}
        shown = self._shows_in_updates(bucket, gradients)
        sent = [] if shown else [finite_flag([*exact.values()])]
        if not shown:
            _blank([*exact.values()], sent[0], 0.0)  # NaN would spread in some compressors' codes
        for i, gradient in exact.items():
            if self.rows is not None:
                self.rows[i].view(gradient.shape).copy_(gradient)
            step.states[i] = self._copy(i, step.scale, gradient)
        updates, flag = self._exchange(step, bucket, exact, sent)
        if shown:
            flag = self.reducer.finite_flag(bucket, updates, step.states, step.levels)
        written = [i for i, x in updates.items() if x.data_ptr() != gradients[i].data_ptr()]
        if written:
            torch._foreach_copy_([gradients[i] for i in written], [updates[i] for i in written])
        if not shown:  # tested as written: float16 may overflow where float32 does not
            flag = flag + finite_flag([full_precision(x) for x in gradients.values()])
        # NaN in the gradients, as without compression: a GradScaler then skips the step
        _blank([*gradients.values()], flag, torch.nan)
        step.flags.append(flag)
        if len(step.states) == len(self.scales):  # here: a static graph's first pass waits for it
            self.source.release()

    def _shows_in_updates(self, bucket: Sequence[int], gradients: Mapping[int, Tensor]) -> bool:
        """Does a gradient that is not finite on any process show in what the exchange gives, which
        is smaller? Only on a CPU, as in ``Reducer.flag_mean``."""
        compressors = self.reducer.compressors
        return all(
            compressors[i].propagates_nonfinite
            and gradients[i].dtype in (torch.float32, torch.float64)
            and gradients[i].device.type == "cpu"
            for i in bucket
        )

    def _exchange(
        self, step: Step, bucket: list[int], exact: Mapping[int, Tensor], sent: list[Tensor]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """The updates, and the flag of all processes, if one is sent: it travels with the marks of
        layers that the step has not used."""
        unused = self.source.unused(bucket)
        marks = [*(flag[None] for flag in sent), *([] if unused is None else [unused])]
        dtype = self.reducer.world.meter.dtype
        marks = [mark.to(dtype) for mark in marks]
        flags = None
        if marks:  # of one no copy: on a GPU it is a launch
            flags = (torch.cat(marks) if len(marks) > 1 else marks[0])[None]
        layers = bucket if flags is None else [NO_LAYER, *bucket]
        stacked = {i: gradient[None] for i, gradient in exact.items()}
        updates = self.reducer.reduce(layers, stacked, step.levels, flags, step.states)
        means = updates.pop(NO_LAYER) if flags is not None else torch.zeros(0)
        if unused is not None:
            step.unused.append((bucket, means[len(sent) :]))
        return updates, means[0] if sent else means

    def _copy(self, layer: int, scale: float, gradient: Tensor) -> State:
        """A state that the step may change, its residual in units of the step's scale."""
        state = self.reducer.states[layer].twin()
        state.scale = scale
        if (residual := state.residual) is None:
            return state
        ratio, spare = scale / self.scales[layer], self.spare[layer]
        if ratio != 1 or on_gpu(residual):
            state.residual = torch.mul(residual, ratio, out=spare)
        else:  # the compressor adds the gradient to it, and leaves the present one
            matrix = gradient.flatten(1) if gradient.ndim > 2 else gradient
            fits = matrix.is_contiguous() and matrix.data_ptr() == gradient.data_ptr()
            room = torch.empty_like(residual) if spare is None else spare
            state.write_to(room, matrix if fits else None)
        return state

    def _spare(self, layer: int, state: State) -> None:
        """The next step may write to the residual of a state that is not adopted, unless it is the
        present one, because the step has not come to it."""
        if state.residual is not self.reducer.states[layer].residual:
            self.spare[layer] = state.residual


def _blank(tensors: Sequence[Tensor], flag: Tensor, value: float) -> None:
    """Fill tensors where the flag is not finite. On a GPU the host does not ask whether it is."""
    broken = ~flag.isfinite()
    if flag.device.type == "cpu" and not broken:
        return
    for tensor in tensors:
        tensor.masked_fill_(broken, value)
