"""The exchange: rows of the hosted workers' layers become shared updates.

Trainer, hook and local steps use this one. The hook's (``ddp.steps``) writes updates over the rows;
here the rows stay as they are, residuals change in place, except those of layers that this process
has not used, and an error ends the run (W simulated workers need no second residual).

A thread exchanges a bucket as soon as it is complete, while backward or the next local steps go on.
Without a thread ``finish_transfer`` exchanges all buckets in their order.

The way of a gradient: its source hands it over (``add_rows``); ``_exchange_complete`` passes on a
bucket that is complete; ``compression.reducer`` calls `Compressor.exchange`, whose collectives go
through ``collectives.comm`` to ``collectives.world``.

Layers are divided, last ones first, into fixed *buckets* of bounded size. One thread exchanges them
in that order, all rounds of one before the next.

A gradient that is not finite has a flag, 0 or NaN, which costs no collective of its own: it is
added to numbers that are averaged anyway, so that all processes know it in the same step; or, where
all compressors declare ``propagates_nonfinite``, the updates, which are the same on all processes,
show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import AnyLevel
from regimes.base.torch_compat import foreach_add_, foreach_norm
from regimes.collectives.layers import MARKS, NO_LAYER
from regimes.compression.background import Background
from regimes.compression.base import Compressor
from regimes.compression.kernels import on_gpu
from regimes.compression.reducer import Reducer


def make_buckets(parameters: Sequence[Tensor], cap: int) -> list[list[int]]:
    """Divide layers into buckets, from the last layer to the first, each type by itself. As in DDP,
    a bucket is full once it has ``cap`` bytes, with the layer that reaches them. DDP's first bucket
    may be smaller."""
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    # Own buckets, and not DDP's: DDP regroups parameters after the first step, so that a resumed
    # run would add in another order than an uninterrupted one. Last layers first, because backward
    # completes them first.
    for i in reversed(range(len(parameters))):
        kind, size = parameters[i].dtype, parameters[i].numel() * parameters[i].element_size()
        filling.setdefault(kind, []).append(i)
        sizes[kind] = sizes.get(kind, 0) + size
        if sizes[kind] >= cap:
            sizes[kind] = 0
            full.append(filling.pop(kind))
    return sorted([*full, *filling.values()], key=min, reverse=True)  # as backward completes them


def buckets_with_loss(
    parameters: Sequence[Tensor], bucket_mb: float, single: bool = False
) -> list[list[int]] | None:
    """Divide a model into buckets; the loss travels with the last one. None stands for one bucket
    of all layers (``single``), as where nothing can be exchanged before all gradients are there."""
    *early, last = make_buckets(parameters, int(bucket_mb * 2**20))
    return None if single or not early else [*early, [*last, NO_LAYER]]


@dataclass(eq=False)
class Transfer:
    """Holds what is exchanged together: one step's gradients, or a fragment's pseudo-gradients.

    Attributes:
        levels: by layer.
        left: buckets that have not left yet, in order.
        rows: by layer, ``[rows, *shape]``, of those that have arrived.
        extra: numbers that travel with the bucket that has ``NO_LAYER``, ``[rows]`` or ``[rows,
            k]``, such as losses; ``means`` are their means over all workers.
        updates: by layer, ``[*shape]``, of buckets that have come back.
        unused: layers that no worker of this process has used, which ``finish_transfer`` reduces to
            those that no worker of any process has used; None: nobody asks.
        used: the means over processes of what each layer's use is marked with.
    """

    levels: Sequence[AnyLevel]
    left: list[Sequence[int]]
    rows: dict[int, Tensor] = field(default_factory=dict)
    extra: Tensor | None = None
    updates: dict[int, Tensor] = field(default_factory=dict)
    means: Tensor | None = None
    unused: set[int] | None = None
    used: Tensor | None = None
    complete: set[int] = field(default_factory=set)  # layers, and NO_LAYER


class Exchange:
    """Exchanges the rows of one set of layers.

    Attributes:
        reducer: the compressors, and the layers' memories.
        buckets: layers that are exchanged together, in order; ``NO_LAYER`` stands for ``extra``.
        background: the thread that exchanges; None: ``finish_transfer`` does.
        transfer: the one under way, of those that ``begin_transfer`` without ``layers``.
    """

    def __init__(
        self,
        reducer: Reducer,
        buckets: Sequence[Sequence[int]] | None = None,
        *,
        background: torch.device | None = None,
    ) -> None:
        """``background``: exchange in a thread, and on a GPU in a stream, of its own there."""
        self.reducer, self.world = reducer, reducer.world
        self.buckets = buckets or [range(NO_LAYER, len(reducer.layers))]
        self.background = None if background is None else Background(background)
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
        self.reducer.drop_step()  # where backward has failed
        self.reducer.kept = {}
        self.transfer = Transfer(levels, list(self.buckets))
        return self.transfer

    def add_rows(self, rows: Mapping[int, Tensor], unused: Collection[int] | None = None) -> None:
        """Hand over layers that are complete in the current stream, ``[rows, *shape]`` each. Where
        a thread exchanges, a bucket that is complete leaves at once. Any thread may call this.

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
        """Wait until all buckets have come back, and return the transfer.

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
            _, finite = flag_of_updates(self.reducer, layers, transfer.updates, transfer.levels)
            if not finite:
                assert extra is not None
                assert stack is not None
                transfer.means = torch.full_like(transfer.means, torch.nan)
                transfer.extra = loss_with_flag(extra, stack)
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

    def send_transfer(
        self, rows: Mapping[int, Tensor], transfer: Transfer, extra: Tensor | None = None
    ) -> None:
        """Let a transfer of one bucket leave; ``wait_for_transfers`` waits until it has come
        back."""
        if extra is not None:
            transfer.extra, transfer.left = extra, [[NO_LAYER, *transfer.left[0]]]
        transfer.rows.update(rows)
        self._mark_complete(transfer, [NO_LAYER, *rows])
        if self.background is None:
            self.wait_for_transfers(transfer)

    def wait_for_transfers(self, transfer: Transfer | None = None) -> None:
        """Wait until all that was sent has come back; call this before any other collective.

        Raises:
            BaseException: an error of the thread.
        """
        if self.background is not None:
            self.background.synchronize()
        elif transfer is not None:
            self._exchange_complete(transfer, ())

    def settle_transfer(self, unapplied: Collection[int] = ()) -> Transfer:
        """Note that the step under way counts, and return its transfer.

        Args:
            unapplied: not for these layers, because the optimiser will not step them.
        """
        transfer, self.transfer = self.transfer, None
        assert transfer is not None
        self.reducer.settle_step({*unapplied, *(transfer.unused or ())})
        return transfer

    def exchange_step(
        self,
        rows: Sequence[Float[Tensor, "rows ..."]],
        levels: Sequence[AnyLevel],
        losses: Float[Tensor, " rows"],
        stack: Float[Tensor, "rows N"],
    ) -> tuple[list[Tensor], Tensor]:
        """Exchange a step that is complete; return the updates ``[*shape]`` by layer, and the mean
        loss, which is NaN if any gradient is not finite. Gradients stay as they are."""
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
            self.exchange_bucket(transfer, transfer.left.pop(0))

    def exchange_bucket(self, transfer: Transfer, bucket: Sequence[int]) -> None:
        """Exchange one bucket, whose rows stay as they are.

        The memory of a layer that this process has used changes in place. That of another layer is
        kept: only the exchange tells whether another process has used it. If none has, the layer
        gets its memory back, since its weights stay, too.
        """
        extra, marks = transfer.extra if NO_LAYER in bucket else None, None
        if unused := transfer.unused:
            self.reducer.keep(unused.intersection(bucket))
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


# -- the flag of a gradient that is not finite ---------------------------------------------------


def finite_flag(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Return 0, or NaN if any entry is not finite. On a GPU it is also NaN if the sum overflows: to
    look at the entries, the host would have to wait."""
    if on_gpu(tensors[0]):
        return 0 * torch.stack(foreach_norm([*tensors], 1)).sum()
    total = torch.stack([t.sum() for t in tensors]).sum()
    if not bool(total.isfinite()):
        finite = all(bool(t.isfinite().all()) for t in tensors)
        total = torch.full_like(total, 0.0 if finite else torch.nan)
    return 0 * total


def loss_with_flag(losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]) -> Tensor:
    """Return the losses, ``[rows]``, in float32 or float64; NaN where a row's gradient is not
    finite, as in ``finite_flag``."""
    sums = stack.sum(1)
    if not on_gpu(sums) and not bool(sums.isfinite().all()):
        sums = torch.where(stack.isfinite().all(1), 0, torch.nan)
    flagged = losses + 0 * sums
    return flagged if flagged.dtype == torch.float64 else flagged.to(torch.float32)


def shows_in_updates(compressors: Sequence[Compressor], rows: Sequence[Tensor]) -> bool:
    """Return whether a gradient that is not finite on any process shows in the updates, which are
    smaller than the gradients. It does not on a GPU, where the host would wait for it, nor in half
    precision, where an update may overflow as it is written."""
    return all(c.propagates_nonfinite for c in compressors) and all(
        not on_gpu(x) and x.dtype in (torch.float32, torch.float64) for x in rows
    )


def flag_of_updates(
    reducer: Reducer,
    layers: Sequence[int],
    updates: Mapping[int, Tensor],
    levels: Sequence[AnyLevel],
) -> tuple[Float[Tensor, ""], bool]:
    """Return a flag, and whether the flag is finite. It is not finite if an update shows that a
    gradient was not finite, or is not finite itself. All compressors must declare
    ``propagates_nonfinite``."""
    probes = []
    for i in layers:
        compressor, level = reducer.resolve_level(i, levels[i])
        probes.append(compressor.finite_probe(updates[i], reducer.states[i], level))
    total = torch.stack(foreach_norm(probes, 1)).sum()
    # A sum may overflow where its numbers do not, and their product where they do not.
    if bool(total.isfinite()):
        return total, True
    flag = finite_flag([*(updates[i] for i in layers), *probes])
    return flag, bool(flag.isfinite())


def fill_if_nonfinite(tensors: Sequence[Tensor], flag: Tensor, value: float) -> None:
    """Fill tensors where the flag, 0 or NaN, is not finite. On a GPU the host does not ask whether
    it is."""
    if on_gpu(flag) and value != value:
        foreach_add_([*tensors], flag, alpha=1)  # in few launches; without alpha the host reads it
        return
    broken = ~flag.isfinite()
    if not on_gpu(flag) and not broken:
        return
    for tensor in tensors:
        tensor.masked_fill_(broken, value)
