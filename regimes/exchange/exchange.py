"""The exchange: rows of the hosted workers' layers become shared updates.

Trainer, hook and local steps use this one; what differs is a value:

- *written*: updates are written over the rows, and a step that is not finite over all of them, so
  that an optimiser, or its GradScaler, sees what it would see without compression. What the
  compressors' memories were is kept, until ``settle_transfer`` knows which layers are stepped (the
  hook: its caller may skip a step, or throw it away). Otherwise residuals change in place, and an
  error ends the run (the trainer: W simulated workers need no second residual), except those of
  layers that this process has not used.
- *in the background*: a thread exchanges a bucket as soon as it is complete, while backward or the
  next local steps go on. Otherwise ``finish_transfer`` exchanges all buckets in their order.

The way of a gradient: its source hands it over (``add_rows``); ``_exchange_complete`` passes on a
bucket that is complete; ``compression.reducer`` calls `Compressor.exchange`, whose collectives go
through ``collectives.comm`` to ``collectives.world``.

Layers are divided, last ones first, into fixed *buckets* of bounded size. One thread exchanges them
in that order, all rounds of one before the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.layers import MARKS, NO_LAYER
from regimes.compression.kernels import on_gpu
from regimes.compression.reducer import Reducer
from regimes.config import AnyLevel
from regimes.exchange.background import Background
from regimes.exchange.nonfinite import (
    fill_if_nonfinite,
    finite_flag,
    flag_of_updates,
    loss_with_flag,
    shows_in_updates,
)
from regimes.exchange.tentative import TentativeMemories
from regimes.precision import full_precision


def make_buckets(parameters: Sequence[Tensor], cap: int) -> list[list[int]]:
    """Layers from last to first, cut before a bucket of more than ``cap`` bytes, and where the
    type changes."""
    buckets: list[list[int]] = []
    room, dtype = -1, None
    # Own buckets, and not DDP's: DDP regroups parameters after the first step, so that a resumed
    # run would add in another order than an uninterrupted one. Last layers first, because backward
    # completes them first.
    for i in reversed(range(len(parameters))):
        size = parameters[i].numel() * parameters[i].element_size()
        if size > room or parameters[i].dtype != dtype:
            buckets.append([])
            room, dtype = cap, parameters[i].dtype
        buckets[-1].append(i)
        room -= size
    return buckets


def buckets_with_loss(
    parameters: Sequence[Tensor], bucket_mb: float, whole: bool = False
) -> list[list[int]] | None:
    """The buckets of a model, the loss in the last; None is one bucket of all, as where nothing can
    be exchanged before the ``whole`` gradient is there."""
    *early, last = make_buckets(parameters, int(bucket_mb * 2**20))
    return None if whole or not early else [*early, [*last, NO_LAYER]]


@dataclass(eq=False)
class Transfer:
    """What is exchanged together: one step's gradients, or a fragment's pseudo-gradients.

    Attributes:
        levels: by layer.
        left: buckets that have not left yet, in order.
        rows: by layer, ``[rows, *shape]``, of those that have arrived.
        extra: numbers that travel with the bucket that has ``NO_LAYER``, ``[rows]`` or ``[rows,
            k]``, such as losses; ``means`` are their means over all workers.
        updates: by layer, ``[*shape]``, of buckets that have come back.
        scale: what the loss was multiplied by.
        flags: by bucket, 0 or NaN where a gradient is not finite; of a written exchange.
        marks: by bucket, its layers and the means of the source's marks.
        unused: layers that no worker of this process has used, which ``finish_transfer`` reduces to
            those that no worker of any process has used; None: nobody asks.
        used: the means over processes of what each layer's use is marked with.
        finite: no gradient is NaN or infinite; known after ``finish_transfer``.
        failed: an error has ended it.
    """

    levels: Sequence[AnyLevel]
    left: list[Sequence[int]]
    rows: dict[int, Tensor] = field(default_factory=dict)
    extra: Tensor | None = None
    updates: dict[int, Tensor] = field(default_factory=dict)
    means: Tensor | None = None
    scale: float = 1.0
    flags: list[Tensor] = field(default_factory=list)
    marks: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    unused: set[int] | None = None
    used: Tensor | None = None
    finite: bool = True
    failed: bool = False
    complete: set[int] = field(default_factory=set)  # layers, and NO_LAYER


class Listener:
    """What a written exchange asks its owner, and reports to it, in the thread that exchanges."""

    def scale_of_loss(self) -> float:
        """What the loss is multiplied by; asked at a step's first bucket."""
        return 1.0

    def before_first_bucket(self) -> None:
        """A step's first bucket leaves next."""

    def layer_marks(self, layers: Sequence[int]) -> Tensor | None:
        """Numbers for each layer of a bucket, to be averaged over all workers, ``[layers]``."""
        return None

    def note_marks(self, means: Mapping[int, float]) -> None:
        """The means of a step's marks, by layer, once ``finish_transfer`` has read them."""

    def refuse_missing(self, layers: Sequence[int]) -> None:
        """Raise: these layers have not arrived, so that some buckets have never left."""

    def release_gradients(self) -> None:
        """All rows of a step are overwritten, or will never be. In any thread."""


class Exchange:
    """Exchanges the rows of one set of layers.

    Attributes:
        reducer: the compressors, and the layers' memories.
        buckets: layers that are exchanged together, in order; ``NO_LAYER`` stands for ``extra``.
        background: the thread that exchanges; None: ``finish_transfer`` does.
        memories: what those of a written exchange, and of layers that are not used, were before.
        copies: by layer, where a row is copied before it is overwritten; None: nowhere.
        transfer: the one under way, of those that ``begin_transfer`` without ``layers``.
    """

    def __init__(
        self,
        reducer: Reducer,
        buckets: Sequence[Sequence[int]] | None = None,
        *,
        background: torch.device | None = None,
        written: Listener | None = None,
        copies: Sequence[Tensor] | None = None,
    ) -> None:
        """
        Args:
            background: exchange in a thread, and on a GPU in a stream, of its own there.
            written: updates are written over the rows; the owner that is asked and gets reports.
        """
        self.reducer, self.world = reducer, reducer.world
        self.buckets = buckets or [range(NO_LAYER, len(reducer.layers))]
        self.background = None if background is None else Background(background)
        self.memories = TentativeMemories(reducer)
        reducer.tentative = written is not None
        self.written, self.copies = written, copies
        self.transfer: Transfer | None = None

    # -- what a client calls -----------------------------------------------------------------

    def begin_transfer(
        self, levels: Sequence[AnyLevel], layers: Sequence[int] | None = None
    ) -> Transfer:
        """Begin an exchange of all layers, or of one bucket of ``layers`` beside others that are
        still on their way."""
        if layers is not None:
            return Transfer(levels, [layers])
        if self.background is not None:
            self.background.wait_idle()  # raises the error of an earlier step that has failed
        self.memories.drop_step()  # where backward has failed
        self.memories.kept = {}
        self.transfer = Transfer(levels, list(self.buckets))
        return self.transfer

    def add_rows(self, rows: Mapping[int, Tensor], unused: Collection[int] | None = None) -> None:
        """These layers are complete in the current stream, ``[rows, *shape]`` each. Where a thread
        exchanges, a bucket that is complete leaves at once. In any thread.

        Args:
            unused: with the last ones, the layers that no worker of this process has used.
        """
        assert self.transfer is not None
        if unused is not None:
            self.transfer.unused = {*unused}
        self.transfer.rows.update(rows)
        self._mark_complete(self.transfer, rows)

    def _mark_complete(self, transfer: Transfer, layers: Iterable[int]) -> None:
        if self.background is not None:
            self.background.submit(partial(self._exchange_complete, transfer, set(layers)))
        else:
            transfer.complete.update(layers)

    def finish_transfer(
        self,
        extra: Float[Tensor, "rows ..."] | None = None,
        stack: Float[Tensor, "rows N"] | None = None,
    ) -> Transfer:
        """Wait until all has come back.

        Args:
            extra: losses, which travel with the bucket that has ``NO_LAYER``.
            stack: the gradients of all layers end to end. If a gradient is not finite, ``means``
                are NaN, and ``extra`` is NaN in its row.
        """
        transfer = self.transfer
        assert transfer is not None
        compressors, examined = self.reducer.compressors, False
        if extra is not None and stack is not None:
            # To examine the updates saves a pass over rows.
            examined = shows_in_updates(compressors, [stack])
            transfer.extra = loss_with_flag(extra, stack[:, :0] if examined else stack)
        else:
            transfer.extra = extra
        if extra is not None:
            self._mark_complete(transfer, [NO_LAYER])
        self.wait_for_transfers(transfer)
        if examined and transfer.means is not None:
            layers = range(len(compressors))
            states = self.reducer.states
            _, finite = flag_of_updates(
                layers, self.reducer.at, transfer.updates, states, transfer.levels
            )
            if not finite:
                assert extra is not None
                assert stack is not None
                transfer.means = torch.full_like(transfer.means, torch.nan)
                transfer.extra = loss_with_flag(extra, stack)
        if transfer.flags:
            self._read_flags(transfer)
        if transfer.unused:
            self._find_unused(transfer)
        return transfer

    @torch.no_grad()
    def _find_unused(self, transfer: Transfer) -> None:
        """Which layers no worker at all has used: their updates are zeros. A process that has used
        all layers need not ask, which on a GPU is a wait of its host."""
        assert transfer.unused is not None
        if transfer.used is not None:
            used = transfer.used.tolist()
            transfer.unused = {i for i in transfer.unused if not used[i]}
        for i in transfer.unused:
            transfer.updates[i] = torch.zeros_like(transfer.updates[i])

    @torch.no_grad()
    def _read_flags(self, transfer: Transfer) -> None:
        """Copy a step's flags to the host: the only synchronisation of a step with a GPU.

        An update may overflow in one shard alone: then all shards skip the step."""
        assert self.written is not None
        if missing := [i for i in range(len(self.reducer.layers)) if i not in transfer.rows]:
            self.written.refuse_missing(missing)
        failed = ~torch.stack(transfer.flags).isfinite().all()
        # all shards take part in this sum, so it comes before any branch on the flags
        total = self.world.add_shards(failed.to(self.world.meter.dtype).reshape(1))
        numbers = [failed.to(total.dtype).reshape(1), total, *(t for _, t in transfer.marks)]
        is_here, anywhere, *means = torch.cat(numbers).tolist()
        transfer.finite = not anywhere
        if anywhere and not is_here:
            for row in transfer.rows.values():
                row.fill_(torch.nan)
        layers = [i for bucket, _ in transfer.marks for i in bucket]
        self.written.note_marks(dict(zip(layers, means, strict=True)))

    def send_transfer(
        self, rows: Mapping[int, Tensor], transfer: Transfer, extra: Tensor | None = None
    ) -> None:
        """Let a transfer of one bucket leave: ``wait_for_transfers`` until it has come back."""
        if extra is not None:
            transfer.extra, transfer.left = extra, [[NO_LAYER, *transfer.left[0]]]
        transfer.rows.update(rows)
        self._mark_complete(transfer, [NO_LAYER, *rows])
        if self.background is None:
            self.wait_for_transfers(transfer)

    def wait_for_transfers(self, transfer: Transfer | None = None) -> None:
        """Until all that was sent has come back; before any other collective.

        Raises:
            BaseException: an error of the thread.
        """
        if self.background is not None:
            self.background.synchronize()
        elif transfer is not None:
            self._exchange_complete(transfer, ())

    def settle_transfer(self, unapplied: Collection[int] = ()) -> Transfer:
        """The step under way counts.

        Args:
            unapplied: not for these layers, because the optimiser will not step them.
        """
        transfer, self.transfer = self.transfer, None
        assert transfer is not None
        self.memories.settle_step({*unapplied, *(transfer.unused or ())})
        return transfer

    def exchange_step(
        self,
        rows: Sequence[Float[Tensor, "rows ..."]],
        levels: Sequence[AnyLevel],
        losses: Float[Tensor, " rows"],
        stack: Float[Tensor, "rows N"],
    ) -> tuple[list[Tensor], Tensor]:
        """Exchange a step that is complete: the updates ``[*shape]`` per layer, and the mean loss,
        NaN if any gradient is not finite. Gradients are left as they are."""
        self.begin_transfer(levels)
        self.add_rows(dict(enumerate(rows)))
        self.finish_transfer(losses, stack)
        transfer = self.settle_transfer()
        assert transfer.means is not None
        return [transfer.updates[i] for i in range(len(rows))], transfer.means

    def close(self) -> None:
        """End the thread, so that no collective is in progress when the group ends."""
        if self.background is not None:
            self.background.close()

    # -- in the thread that exchanges ----------------------------------------------------------

    def _exchange_complete(self, transfer: Transfer, layers: Collection[int]) -> None:
        """Exchange the buckets that are complete with these layers, in their order."""
        transfer.complete.update(layers)
        # Only the first one left may go, though a later one may be complete: which layers are
        # complete by now differs between processes, and collectives in different orders would
        # deadlock or exchange the wrong bytes. For the same reason one bucket goes through all of
        # its rounds before the next (callbacks at the end of a round come at different moments).
        while transfer.left and transfer.complete.issuperset(transfer.left[0]):
            self._exchange_bucket(transfer, transfer.left.pop(0))

    def _exchange_bucket(self, transfer: Transfer, bucket: Sequence[int]) -> None:
        """Exchange one bucket; after an error report to the owner."""
        try:
            if self.written is None:
                self._reduce_apart(transfer, bucket)
            else:
                self._reduce_and_write(transfer, bucket, self.written)
        except BaseException:
            transfer.failed = True
            # DDP's first pass of a static graph waits for the results, before this can be raised
            if self.written is not None:
                self.written.release_gradients()
            raise

    def _reduce_apart(self, transfer: Transfer, bucket: Sequence[int]) -> None:
        """Exchange one bucket, whose rows stay as they are.

        The memory of a layer that this process has used changes in place. That of another layer is
        kept: only the exchange tells whether another process has used it. If none has, the layer
        gets its memory back, since its weights stay, too.
        """
        extra, marks = transfer.extra if NO_LAYER in bucket else None, None
        if unused := transfer.unused:
            self.memories.keep(unused.intersection(bucket))
        if transfer.unused is not None and extra is not None and self.world.processes > 1:
            marks = extra.new_ones(1, len(self.reducer.layers))
            for i in transfer.unused:
                marks[0, i].fill_(0.0)  # a list would have to be copied to a GPU
        results = self.reducer.reduce(bucket, transfer.rows, transfer.levels, extra, marks)
        if extra is not None:
            transfer.means = results.pop(NO_LAYER)
        if marks is not None:
            transfer.used = results.pop(MARKS)
        transfer.updates.update(results)

    def _reduce_and_write(self, transfer: Transfer, bucket: Sequence[int], owner: Listener) -> None:
        """All rounds of one bucket of a single row; the flag of a gradient that is not finite is
        sent with the first."""
        if not transfer.flags:
            transfer.scale = owner.scale_of_loss()
            # Here and not in the caller's thread: it may contain a collective, which must come
            # before those of the first bucket on all processes.
            owner.before_first_bucket()
        rows = {i: transfer.rows[i] for i in bucket}
        exact = {i: full_precision(row) for i, row in rows.items()}
        compressors = self.reducer.compressors
        shown = shows_in_updates([compressors[i] for i in bucket], [*rows.values()])
        # a flag of its own, unless a process that has none gets NaN in its updates anyway
        propagates = all(compressors[i].propagates_nonfinite for i in bucket)
        sent = [] if propagates else [finite_flag([*exact.values()])]
        if not propagates:  # NaN would spread in some compressors' codes
            fill_if_nonfinite([*exact.values()], sent[0], 0.0)
        self.memories.keep(bucket)
        for i, row in exact.items():
            if self.copies is not None:  # before the compressor may write to the row's memory
                self.copies[i].view(row.shape).copy_(row)
            if not on_gpu(row):
                free = self.reducer.states[i].residual is not None and compressors[i].in_place
                self.reducer.states[i].lend(_as_matrix(row) if free else None)
        self.reducer.scale = transfer.scale
        marks = owner.layer_marks(bucket)
        numbers = [*(flag[None] for flag in sent), *([] if marks is None else [marks])]
        numbers = [number.to(self.world.meter.dtype) for number in numbers]
        extra, layers = None, bucket
        if numbers:  # of one no copy: on a GPU it is a launch
            extra = (torch.cat(numbers) if len(numbers) > 1 else numbers[0])[None]
            layers = [NO_LAYER, *bucket]
        updates = self.reducer.reduce(layers, exact, transfer.levels, extra)
        means = updates.pop(NO_LAYER) if numbers else torch.zeros(0)
        if marks is not None:
            transfer.marks.append((bucket, means[len(sent) :]))
        if shown:
            flag, _ = flag_of_updates(
                bucket, self.reducer.at, updates, self.reducer.states, transfer.levels
            )
        pairs = [(row[0], updates[i]) for i, row in rows.items()]
        pairs = [(row, update) for row, update in pairs if row.data_ptr() != update.data_ptr()]
        if pairs:
            torch._foreach_copy_([row for row, _ in pairs], [update for _, update in pairs])
        if not shown:  # tested as written: float16 may overflow where float32 does not
            flag = finite_flag([full_precision(row) for row in rows.values()])
            if sent:
                flag = flag + means[0]
        # NaN in the gradients, as without compression: a GradScaler then skips the step
        fill_if_nonfinite([*rows.values()], flag, torch.nan)
        transfer.flags.append(flag)
        if not transfer.left:  # here: a static graph's first pass waits for it
            owner.release_gradients()


def _as_matrix(rows: Tensor) -> Tensor | None:
    """The memory of a single row as a matrix; None where it has gaps, or there are several rows."""
    if len(rows) > 1:
        return None
    gradient = rows[0]
    matrix = gradient.flatten(1) if gradient.ndim > 2 else gradient
    fits = matrix.is_contiguous() and matrix.data_ptr() == gradient.data_ptr()
    return matrix if fits else None
