"""The steps of a hook: each backward pass is an exchange, which counts once it is settled.

The way of a gradient: its source (``ddp.source``) hands it over, ``HookSteps.add_gradients``; once
a bucket is complete (``exchange.exchange``), the thread that exchanges calls ``exchange_bucket``,
which lets ``compression.reducer`` exchange it, tentatively, and writes the result over it. After
DDP has written the results to the parameters the exchange is settled, unless the aggregated
gradient is not finite (then a GradScaler skips the step) or DDP has not written a parameter because
no process used it. The next pass may find that the last one was not applied (``ddp.applied``): then
it is undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regimes.base.config import AnyLevel
from regimes.base.errors import ConfigError
from regimes.base.precision import full_precision, is_half
from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.layers import NO_LAYER, Layer
from regimes.collectives.node import NodeRows
from regimes.collectives.processes import ProcessWorld
from regimes.compression.exchange import (
    Exchange,
    Transfer,
    fill_if_nonfinite,
    finite_flag,
    flag_of_updates,
    make_buckets,
    shows_in_updates,
)
from regimes.compression.graphs import ExchangeGraphs
from regimes.compression.kernels import on_gpu
from regimes.compression.recording import Recorder
from regimes.hook.ddp.unit_steps import UnitSteps
from regimes.job.fit_state import list_names


class Stateful(Protocol):
    """Stands for what ``torch.distributed.checkpoint`` saves and loads."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class ModelAdapter(Protocol):
    """Shows a model to its hook.

    Attributes:
        network: the model without its wrapper.
        parameters: what is trained, by name.
        layers: names and whole shapes of what is exchanged. A row of a shape is a row of a
            compressed matrix.
        local: what this process holds of each layer, its rows where several processes hold one
            replica together.
        mesh: these processes; None: each holds whole layers.
        device: of all parameters.
        config: entries of a record's configuration.
        ignored: names of parameters of the network that processes may have apart.
        replicated: processes hold replicas, or shards of several, whose weights can be compared;
            else each its own rows of one.
        follows: other parameters in the places of those that were attached are trained like them.
    """

    ignored: Collection[str]
    replicated: bool
    follows: bool
    parameters: dict[str, nn.Parameter]
    layers: list[Layer]
    local: list[Tensor]
    mesh: Any
    device: torch.device
    config: dict[str, Any]

    @property
    def network(self) -> nn.Module: ...

    def make_world(self, timeout: float) -> ProcessWorld:
        """Make a world of the processes among which gradients are shared; all of them call this."""
        ...

    def shared_facts(self) -> dict[str, Any]:
        """Return what must be the same on all processes, in plain types."""
        ...

    def make_state(self, hook: Any, branch: bool, saved: Any) -> Stateful:
        """Make what `Hook.sharded_state` of a hook on this model returns."""
        ...

    def connect_receiver(self, receiver: Any) -> None:
        """Call these steps in each backward pass from now on; they are `HookSteps` if gradients are
        handed over."""
        ...

    def close(self) -> None:
        """End the job: gradients are exchanged as without a hook from now on."""

    def detach(self) -> None:
        """Leave the model, after ``close``, as it was before the hook."""


class GradientSource(ModelAdapter, Protocol):
    """Hands over a model's gradients, one for each layer, before they are shared.

    Attributes:
        bucket_bytes: the largest bucket, in bytes of whole layers.
    """

    bucket_bytes: int

    def release_gradients(self) -> None:
        """Let backward go on: all gradients of a step are overwritten, or will never be. Any thread
        may call this."""
        ...

    def mark_unused(self, layers: Sequence[int]) -> Tensor | None:
        """Return 1 for each layer that this process has not used in the step, else 0, ``[layers]``,
        to be averaged over all processes; None if DDP knows it."""
        ...

    def note_unused(self, shares: Mapping[int, float]) -> None:
        """Take the means of these marks over all processes, by layer, at the end of the step."""
        ...

    def unwritten_layers(self) -> set[int]:
        """Return the layers that no process has used: the step leaves their ``.grad`` as it was."""
        ...


class HookSteps(UnitSteps, Exchange):
    """Follows the backward passes of one model, whose gradients a thread exchanges.

    Updates are written over the gradients, and a step that is not finite over all of them, so that
    an optimiser, or its GradScaler, sees what it would see without compression. What the
    compressors' memories were is kept, until it is known which layers are stepped: the script may
    skip a step, or throw it away.

    Attributes:
        stack: this process's own gradients of the step under way, one after another, ``[1, size]``;
            size 0 where no gauge reads them.
        copies: by layer, where a gradient is copied to in ``stack``; None: nowhere.
        flags: of the buckets of the step under way that have come back, 0 or NaN where a gradient
            is not finite.
        marks: by bucket, its layers and the means of the source's marks.
        own: of the step under way, by layer ``[1, ...]``: the rows that this process exchanges. Of
            a node with several devices these are a part of what each has, else the same.
        finite: no gradient of the step is NaN or infinite; known after ``finish_step``.
        failed: an error has ended the exchange of the step under way.
    """

    source: GradientSource

    def _prepare(self) -> None:
        source, reducer = self.source, self.reducer
        # of whole layers, whose sizes are the same on all processes: so all have the same buckets
        buckets = make_buckets([*source.parameters.values()], source.bucket_bytes)
        Exchange.__init__(self, reducer, buckets, background=source.device)
        reducer.tentative = True
        self.sizes = [layer.size for layer in reducer.layers]
        self.node = NodeRows(reducer.world) if reducer.world.node else None
        self.stack, self.copies = self._make_stack(0), None
        self._forget_flags()

    def use_graphs(self, most: int) -> None:
        """Replay the exchange of each bucket as CUDA graphs from now on, of so many kinds."""
        stream = None if self.background is None else self.background.stream
        assert stream is not None  # on a GPU
        self.graphs = ExchangeGraphs(self.reducer, most, Recorder(stream))

    # -- in the thread of backward, called by the source -------------------------------------

    def on_backward_start(self, first_layer: int | None = None) -> None:
        """Settle the last step as a backward pass begins: undo it in layers where it was not
        applied, else let it count. Every ``.grad`` is still as the script has left it, except in
        layer ``first_layer``. DDP's source calls this in every pass, also under ``no_sync``, and
        several times; the others once, in a pass that exchanges."""
        if self._last is not None:
            self.undo_cleared(first_layer)
            self.commit_step()  # from here on .grad may be the sum of several passes

    def begin_step(self) -> None:
        """Begin a step, whose first gradients are complete."""
        self.begin_pass()
        self.begin_transfer(self.present_levels)
        self._forget_flags()
        # Let the exchange copy this process's gradients if a gauge reads them. The memory stays
        # from step to step, until a step does not need it.
        kept = any(getattr(gauge, "due", True) for gauge in self.readers)
        size = sum(self.sizes) if kept else 0
        if self.stack.shape[1] != size:
            self.stack = self._make_stack(size)
            self.copies = self.stack[0].split(self.sizes) if kept else None

    def _forget_flags(self) -> None:
        self.flags: list[Tensor] = []
        self.marks: list[tuple[Sequence[int], Tensor]] = []
        self.own: dict[int, Tensor] = {}
        self.finite, self.failed = True, False

    def _make_stack(self, size: int) -> Tensor:
        """Zeros ``[1, size]``."""
        kind = self.reducer.world.meter.dtype
        return torch.zeros((1, size), dtype=kind, device=self.device)

    def add_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        """Hand over complete gradients, by layer, ``[1, *shape]``; the aggregated ones will
        overwrite them."""
        self.add_rows(gradients)
        if self.failed:
            self.source.release_gradients()

    def finish_step(self) -> None:
        """Wait until all gradients of the step are overwritten."""
        if self.graphs is not None and self.background is not None:
            # now that backward has ended, which may draw random numbers or use other streams
            self.background.submit(self.graphs.make_graphs)
        with self.clock.count_waiting(self.world):
            self._read_flags(self.finish_transfer())

    @torch.no_grad()
    def _read_flags(self, transfer: Transfer) -> None:
        """Copy a step's flags to the host: the only synchronisation of a step with a GPU.

        An update may overflow in one shard alone: then all shards skip the step."""
        if missing := [i for i in range(len(self.reducer.layers)) if i not in transfer.rows]:
            # Some buckets were never full. DDP itself would say so only in the next forward pass,
            # after a step with gradients that are not shared.
            names = [*self.source.parameters]
            raise ConfigError(
                f"{list_names([names[i] for i in missing])} had no gradient in this backward pass, "
                "and DistributedDataParallel waits for all that it was given: freeze layers before "
                "wrapping the model, or wrap it with find_unused_parameters=True"
            )
        failed = ~torch.stack(self.flags).isfinite().all()
        # all shards take part in this sum, so it comes before any branch on the flags
        total = self.world.add_shards(failed.to(self.world.meter.dtype).reshape(1))
        numbers = [failed.to(total.dtype).reshape(1), total, *(t for _, t in self.marks)]
        is_here, anywhere, *means = torch.cat(numbers).tolist()
        self.finite = not anywhere
        # of a node a bucket has only those rows that this device exchanges filled
        if anywhere and (not is_here or self.node is not None):
            for row in transfer.rows.values():
                row.fill_(torch.nan)
        layers = [i for bucket, _ in self.marks for i in bucket]
        self.source.note_unused(dict(zip(layers, means, strict=True)))

    @torch.no_grad()
    def settle_step(self) -> None:
        """Count the step, whose result is in the parameters' ``.grad``: adopt its memories, except
        for layers that the optimiser will not step."""
        step = self.transfer
        assert step is not None
        # The optimiser skips a step that is not finite: then no layer adopts its residual, which
        # would forget an update that was never applied.
        unapplied: Collection[int] = range(len(step.rows))
        if self.finite:
            unapplied = self.source.unwritten_layers()
        self._last = None
        self.settle_transfer(unapplied)
        self.count_step(self.finite)
        if self.finite and self.gauges:
            with self.on_hook_stream():
                self._show_gauges(step, unapplied)
        self.applied.note_exchange(self.may_warn)
        self.clock.stop_step()

    def _show_gauges(self, step: Transfer, unapplied: Collection[int]) -> None:
        updates = [full_precision(self.own[i][0]) for i in range(len(step.rows))]
        for i in unapplied:
            updates[i] = torch.zeros_like(updates[i])
        self.show_step(self.stack, updates)

    @contextlib.contextmanager
    def on_hook_stream(self) -> Iterator[None]:
        """On a GPU, run in the hook's own stream, between past and future work of the current one.
        Past work has written the gradients. Future work may overwrite them, where ``.grad`` is a
        view of the bucket (``gradient_as_bucket_view``), or save what gauges have added up."""
        background = self.background
        if background is None or (stream := background.stream) is None:
            yield
            return
        current = torch.cuda.current_stream(background.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    # -- in the thread that exchanges ----------------------------------------------------------

    def exchange_bucket(self, transfer: Transfer, bucket: Sequence[int]) -> None:
        try:
            self._reduce_and_write(transfer, bucket)
        except BaseException:
            self.failed = True
            # DDP's first pass of a static graph waits for the results, before this can be raised
            self.source.release_gradients()
            raise

    def _reduce_and_write(self, transfer: Transfer, bucket: Sequence[int]) -> None:
        """All rounds of one bucket of a single row."""
        if not self.flags:
            self.reducer.scale = self.loss_scale.of_pass()
            # Here and not in the caller's thread: it may contain a collective, which must come
            # before those of the first bucket on all processes.
            self.run_check()
        whole = {i: transfer.rows[i] for i in bucket}
        work = partial(self._exchange_rows, whole, transfer.levels)
        if self.graphs is None:
            self.reducer.keep(bucket)
            flag, means, *rows = work()
        else:
            written = [*whole.values(), *([] if self.copies is None else [self.stack])]
            flag, means, *rows = self.graphs.run((*bucket,), transfer.levels, work, written)
        self.own.update(zip(bucket, rows, strict=True))
        self.flags.append(flag)
        if len(means):
            self.marks.append((bucket, means))
        if not transfer.left:  # here: a static graph's first pass waits for it
            self.source.release_gradients()

    def _exchange_rows(self, whole: dict[int, Tensor], levels: Sequence[AnyLevel]) -> list[Tensor]:
        """Exchange a bucket and write the updates over its rows; return its flag, the means of the
        source's marks (none: empty), and the rows that this process exchanges. The flag of a
        gradient that is not finite is sent with the first round."""
        rows, bucket = whole, [*whole]
        exact = _in_full_precision(rows)
        if self.node is not None:
            exact = self.node.divide(exact)
            rows = {i: row.to(whole[i].dtype) for i, row in exact.items()}
        compressors = self.reducer.compressors
        shown = shows_in_updates([compressors[i] for i in bucket], [*rows.values()])
        # a flag of its own, unless a process that has none gets NaN in its updates anyway
        propagates = all(compressors[i].propagates_nonfinite for i in bucket)
        sent = [] if propagates else [finite_flag([*exact.values()])]
        if not propagates:  # NaN would spread in some compressors' codes
            fill_if_nonfinite([*exact.values()], sent[0], 0.0)
        on_cpu = not any(map(on_gpu, [*exact.values()][:1]))
        for i, row in exact.items() if on_cpu or self.copies is not None else ():
            if self.copies is not None:  # before the compressor may write to the row's memory
                self.copies[i].view(row.shape).copy_(row)
            if on_cpu:
                free = self.reducer.states[i].residual is not None and compressors[i].in_place
                self.reducer.states[i].lend(_as_matrix(row) if free else None)
        marks = self.source.mark_unused(bucket)
        numbers = [*(flag[None] for flag in sent), *([] if marks is None else [marks])]
        numbers = [number.to(self.world.meter.dtype) for number in numbers]
        extra, layers = None, bucket
        if numbers:  # of one no copy: on a GPU it is a launch
            extra = (torch.cat(numbers) if len(numbers) > 1 else numbers[0])[None]
            layers = [NO_LAYER, *bucket]
        updates = self.reducer.reduce(layers, exact, levels, extra)
        means = updates.pop(NO_LAYER) if numbers else torch.zeros(0)
        if shown:
            flag, _ = flag_of_updates(self.reducer, bucket, updates, levels)
        pairs = [(row[0], updates[i]) for i, row in rows.items()]
        pairs = [(row, update) for row, update in pairs if row.data_ptr() != update.data_ptr()]
        if pairs:
            foreach_copy_([row for row, _ in pairs], [update for _, update in pairs])
        if not shown:  # tested as written: float16 may overflow where float32 does not
            flag = finite_flag([*_in_full_precision(rows).values()])
            if sent:
                flag = flag + means[0]
        # NaN in the gradients, as without compression: a GradScaler then skips the step
        fill_if_nonfinite([*rows.values()], flag, torch.nan)
        if self.node is not None:
            self.node.join(rows, whole)
        return [flag, means[len(sent) :], *rows.values()]


def _in_full_precision(rows: dict[int, Tensor]) -> dict[int, Tensor]:
    if any(map(is_half, {row.dtype for row in rows.values()})):
        return {i: full_precision(row) for i, row in rows.items()}
    return rows


def _as_matrix(rows: Tensor) -> Tensor | None:
    """The memory of a single row as a matrix; None where it has gaps, or there are several rows."""
    if len(rows) > 1:
        return None
    gradient = rows[0]
    matrix = gradient.flatten(1) if gradient.ndim > 2 else gradient
    fits = matrix.is_contiguous() and matrix.data_ptr() == gradient.data_ptr()
    return matrix if fits else None
