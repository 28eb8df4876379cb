"""Rounds of local steps: each worker steps by itself, and all synchronise every so many steps. The
trainer's workers and a process of a script's own loop (``regimes.hook.local``) use the same rounds.

The *pseudo-gradient* of a worker is the last synchronised parameters less its own. Any compressor
reduces it with error feedback, like a gradient; the result is the gradient of an outer SGD
(Reddi et al., "Adaptive federated optimization", 2021; DiLoCo: Douillard et al., 2023). Without
compression, at rate 1 and without momentum, that is the mean of the workers' parameters.

Which layers are synchronised when: all at the end of a period, or groups of them in turn. Streaming
DiLoCo (Douillard et al., 2025, arXiv:2501.18512) divides the network into *fragments*. Each is sent
once per period, at steps of its own, so that fewer bytes leave at a time; its mean is applied some
steps later, while workers go on; and each worker mixes it with its own parameters. With one
fragment, no delay and no mixing this is a synchronisation as of local SGD.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import AnyLevel, OuterConfig
from regimes.base.errors import require
from regimes.collectives.comm import signals
from regimes.compression.exchange import Exchange, Transfer, loss_with_flag
from regimes.compression.reducer import Reducer
from regimes.instruments.panel import Panel
from regimes.job.clock import Clock
from regimes.job.state import by_layer, get_column
from regimes.training.optimizers import Optimizers
from regimes.training.replicas import Replicas

_Step = tuple[Tensor, int, int]  # losses of this process, [rows]; epoch, step
Loss = tuple[Tensor, Tensor, int, int]  # mean of all workers; then as of `_Step`


def divide_layers(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide consecutive layers into ``count`` groups, none empty, of nearly equal size.

    >>> divide_layers([10, 10, 5, 5, 10], 2)
    [[0, 1], [2, 3, 4]]
    """
    total, ends = sum(sizes), list(itertools.accumulate(sizes))
    groups: list[list[int]] = []
    first = 0
    for group in range(1, count + 1):
        most = len(sizes) - (count - group)  # a layer for each group to come
        stop = first + 1
        while stop < most and ends[stop] * count <= total * group:
            stop += 1
        stop = most if group == count else stop
        groups.append(list(range(first, stop)))
        first = stop
    return groups


@dataclass(eq=False)
class Fragment:
    """Holds the layers that are synchronised together, and where in their round they are.

    Attributes:
        layers: their numbers, in order.
        period: local steps of the round under way.
        steps_taken: local steps taken in it.
        transfer: what was sent and is not applied yet; None: nothing. It has the shared
            pseudo-gradients as updates, and as means, until they are delivered, the mean losses
            that were sent with it.
        steps_left: local steps until it is applied.
        losses: those that were sent with it.
        has_unseen: something has come back that instruments have not seen yet.
    """

    layers: list[int]
    period: int = 1
    steps_taken: int = 0
    transfer: Transfer | None = None
    steps_left: int = 0
    losses: list[_Step] = field(default_factory=list)
    has_unseen: bool = False


class Rounds:
    """Keeps the fragments of a network, their rounds, and the outer step.

    Attributes:
        replicas: the workers' own parameters; None while all share each step.
        exchange: shares pseudo-gradients; among processes a delay lets it go on in the background.
        optimizer: the outer one, over the synchronised parameters.
        inner: the trainer's optimiser, which instruments ask for a rate: of a round it is the sum
            of its steps' (``rate``). None: a script's own loop.
        stack, parts: the pseudo-gradients that were last sent, ``[L, N]`` and its ``[L, *shape]``
            per layer.
        updates: the shared ones that came back, ``[*shape]`` per layer.
        older: the pseudo-gradients, ``[L, *shape]``, of layers that were sent again before
            instruments saw what had come back: ``stack`` no longer has them.
        count: synchronisations since ``take_count``; of fragments the last of each period counts.
        pending: losses that no collective has averaged yet.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reducer: Reducer,
        config: OuterConfig,
        storage: tuple[Float[Tensor, "rows N"], Sequence[Float[Tensor, "rows ..."]]],
        *,
        inner: Optimizers | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """
        Args:
            storage: of ``stack`` and ``parts``. Nothing else may use it between a fragment's
                leaving and the return of the last one. So it may be the storage of gradients,
                unless ``config.leaves_apart``.
        """
        self.parameters, self.reducer, self.config = list(parameters), reducer, config
        self.world, self.inner, self.replicas = reducer.world, inner, replicas
        delayed = config.delay > 0 and self.world.processes > 1
        self.exchange = Exchange(reducer, background=storage[0].device if delayed else None)
        self.optimizer = torch.optim.SGD(
            self.parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            foreach=True,
        )
        sizes = [parameter.numel() for parameter in self.parameters]
        expected = f"at most the number of layers, {len(sizes)}"
        require(config.fragments <= len(sizes), "outer.fragments", config.fragments, expected)
        self.fragments = [Fragment(layers) for layers in divide_layers(sizes, config.fragments)]
        self.stack, self.parts = storage
        self.updates = list[Tensor](part[0] for part in self.parts)
        self.older: dict[int, Tensor] = {}
        self.has_begun, self.count, self.rate = False, 0, 0.0
        self.pending: list[_Step] = []

    @property
    def is_local(self) -> bool:
        """Answer whether each worker has parameters of its own now."""
        return self.replicas is not None

    @property
    def is_between(self) -> bool:
        """Answer whether any fragment has moved since it was synchronised."""
        return any(fragment.steps_taken or fragment.transfer for fragment in self.fragments)

    # -- steps -------------------------------------------------------------------------------

    def begin_step(self, period: int) -> None:
        """Begin a step. A new period applies to each fragment's next round. The first rounds are
        shorter, so that fragments are sent at equal distances."""
        count = len(self.fragments)
        for i, fragment in enumerate(self.fragments, start=1):
            if not self.has_begun:
                fragment.steps_taken = period - math.ceil(period * i / count)
                fragment.period = period
            elif not fragment.steps_taken:
                fragment.period = period
        self.has_begun = True

    def advance_step(self) -> bool:
        """Count a local step that was taken; returns whether a fragment is to be sent or
        applied."""
        for fragment in self.fragments:
            fragment.steps_taken += 1
            fragment.steps_left -= 1
        return any(
            f.steps_taken >= f.period or (f.transfer and f.steps_left <= 0) for f in self.fragments
        )

    # -- a synchronisation -------------------------------------------------------------------

    def synchronize(
        self,
        levels: Sequence[AnyLevel],
        panel: Panel,
        clock: Clock | None = None,
        *,
        last: bool = False,
    ) -> Iterator[Loss]:
        """Send what has completed its period, and apply what has come back: at the ``last`` step
        all. ``panel`` sees what is exchanged before it is applied.

        Yields:
            The losses that were averaged on the way, before anything that came with them is
            applied; of a script's own loop 0, or NaN if a parameter is not finite. Only a caller
            who takes them all has synchronised.
        """
        if last:  # first: to send a fragment again would lose what of it is on its way
            yield from self._receive_fragments(panel, clock, last)
        timed = self._timer(clock)
        if clock is not None:
            self.world.take_marks()  # of collectives that it does not count here
        with timed():
            for fragment in self.fragments:
                if fragment.steps_taken >= fragment.period or (last and fragment.steps_taken):
                    self._send_fragment(fragment, levels)
        yield from self._receive_fragments(panel, clock, last)

    def _send_fragment(self, fragment: Fragment, levels: Sequence[AnyLevel]) -> None:
        assert self.replicas is not None
        layers, parts = fragment.layers, self.parts
        for i in layers if fragment.has_unseen else ():
            if i not in self.older:  # sent again before the last fragment has come back
                self.older[i] = parts[i].clone()
                self.updates[i] = self.updates[i].clone()  # a compressor's own memory
        for i in layers:
            torch.sub(self.parameters[i].data, self.replicas.stacks[i], out=parts[i])
        if self.inner is None:
            first = sum(part[0].numel() for part in parts[: layers[0]])
            sent = self.stack[:, first : first + sum(parts[i][0].numel() for i in layers)]
            self.pending = [(loss_with_flag(sent.new_zeros(1), sent), 0, 0)]
        fragment.steps_taken, fragment.steps_left = 0, self.config.delay
        fragment.transfer = self.exchange.begin_transfer(levels, layers)
        losses = self._pending_losses() if self.pending else None
        fragment.losses, self.pending = self.pending, []
        self.exchange.send_transfer({i: parts[i] for i in layers}, fragment.transfer, losses)

    def _receive_fragments(self, panel: Panel, clock: Clock | None, last: bool) -> Iterator[Loss]:
        """Apply what has come back: at the ``last`` step all, in the order of sending, so that
        instruments see what they would have seen without an end."""
        timed = self._timer(clock)
        if self.exchange.background is not None:
            with nullcontext() if clock is None else clock("communicate"):
                self.wait_for_sent()
        for fragment in self._in_flight():
            if not last and fragment.steps_left > 0:
                continue
            yield from self._delivered_losses()
            assert fragment.transfer is not None
            assert self.replicas is not None
            for layer, update in fragment.transfer.updates.items():
                self.updates[layer] = update
                self.older.pop(layer, None)
            fragment.has_unseen = True
            if fragment is self.fragments[-1]:  # with it all have come back once more
                if self.inner is not None:
                    self.inner.lr, self.rate = self.rate, 0.0
                panel.step(*self._take_seen(), nullcontext if clock is None else clock)
                self.count += 1
            with timed():
                self._apply_fragment(fragment, self.replicas)

    def _timer(self, clock: Clock | None) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext if clock is None else partial(clock.count_exchange, self.world)

    def _in_flight(self) -> list[Fragment]:
        """The fragments that were sent and are not applied yet, in the order of sending."""
        return sorted(
            (f for f in self.fragments if f.transfer), key=lambda fragment: fragment.steps_left
        )

    def _take_seen(self) -> tuple[Float[Tensor, "rows N"], list[Tensor]]:
        """For instruments: the pseudo-gradients that have come back last, and the updates they
        gave."""
        stack, older = self.stack, self.older
        if older:
            stack = stack.clone()
            places = stack.split([part[0].numel() for part in self.parts], 1)
            for layer, kept in older.items():
                places[layer].copy_(kept.flatten(1))
        self.older = {}
        for fragment in self.fragments:
            fragment.has_unseen = False
        return stack, self.updates

    def _apply_fragment(self, fragment: Fragment, replicas: Replicas) -> None:
        """Step the synchronised parameters by the shared pseudo-gradients; the workers go on from
        them, with the optimisers' states as configured. Running statistics, which are averaged, go
        with the first fragment."""
        assert fragment.transfer is not None
        updates, fragment.transfer = fragment.transfer.updates, None
        # torch's foreach SGD with Nesterov adds momentum x velocity to .grad in place, and
        # instruments read the updates when the last fragment has come back.
        given = {i: u.clone() for i, u in updates.items()} if self.config.nesterov else updates
        for i, parameter in enumerate(self.parameters):
            parameter.grad = given.get(i)
        self.optimizer.step()
        if fragment is self.fragments[0]:
            replicas.set_buffers(replicas.buffer_means(self.world))
        replicas.receive_synced(updates, self.config.mixing)
        replicas.settle_states(self.config.states, self.world)

    def wait_for_sent(self) -> None:
        """Wait until all that was sent has come back; call it before any other collective."""
        self.exchange.wait_for_transfers()

    def close(self) -> None:
        """End the background thread."""
        self.exchange.close()

    # -- at the end of a unit ----------------------------------------------------------------

    def flush_losses(self) -> list[Loss]:
        """Average the losses of steps that were in no synchronisation so far: a unit's record has
        their mean."""
        losses = [*self._delivered_losses()]
        if self.pending:
            means = signals(self.world).mean([self._pending_losses()])[0]
            losses += [(m, *step) for m, step in zip(means.unbind(), self.pending, strict=True)]
            self.pending = []
        return losses

    def take_count(self) -> int:
        """Return the number of synchronisations since the last call."""
        taken, self.count = self.count, 0
        return taken

    def _pending_losses(self) -> Float[Tensor, "rows steps"]:
        losses = [rows for rows, *_ in self.pending]
        return losses[0][:, None] if len(losses) == 1 else torch.stack(losses, 1)

    def _delivered_losses(self) -> Iterator[Loss]:
        """Losses with means that have come back, in the order of sending. A fragment whose losses a
        caller refuses keeps them."""
        self.wait_for_sent()
        for transfer, losses in [(f.transfer, f.losses) for f in self._in_flight()]:
            if transfer is not None and transfer.means is not None:
                # of a script's own loop there is a single number
                means = [transfer.means] if self.inner is None else transfer.means.unbind()
                for mean, step in zip(means, losses, strict=True):
                    yield mean, *step
                transfer.means = None

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (shared, own): the entries "outer" of a state and of a process's part
        (``job.state``). They have each fragment's round, what is on its way and what instruments
        have not seen; per hosted worker, by layer, the pseudo-gradients of such fragments, and
        ``older``."""
        self.wait_for_sent()  # for the thread that changes memories
        memories, residuals = self.reducer.state_dict()
        fragments = [
            {
                "period": f.period,
                "since": f.steps_taken,
                "left": f.steps_left if f.transfer else None,
                "updates": f.transfer.updates if f.transfer else {},
                "unseen": {i: self.updates[i] for i in f.layers} if f.has_unseen else {},
            }
            for f in self.fragments
        ]
        shared = {
            "layers": by_layer(memory=memories),
            "optimizer": self.optimizer.state_dict(),
            "begun": self.has_begun,
            "fragments": fragments,
            "rates": self.rate,
        }
        kept = [i for f in self.fragments if f.transfer or f.has_unseen for i in f.layers]
        movements = [
            {
                "sent": {i: self.parts[i][row].clone() for i in kept},
                "older": {i: older[row].clone() for i, older in self.older.items()},
            }
            for row in range(len(self.stack) if self.is_local else 0)
        ]
        return shared, {"layers": by_layer(residual=residuals), "movements": movements}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        residuals: dict[str, Tensor | None],
        movements: Sequence[dict[str, dict[int, Tensor]]],
    ) -> None:
        """Restore ``state`` and the hosted workers' residuals and pseudo-gradients."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.reducer.load_state_dict(get_column(state["layers"], "memory"), residuals)
        device = self.stack.device
        self.reducer.to(device)
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.period, fragment.steps_taken = saved["period"], saved["since"]
            fragment.transfer, fragment.steps_left, fragment.losses = None, saved["left"] or 0, []
            if saved["left"] is not None:
                updates = {i: update.to(device) for i, update in saved["updates"].items()}
                fragment.transfer = Transfer((), [], updates=updates)
            fragment.has_unseen = bool(saved["unseen"])
            for layer, update in saved["unseen"].items():
                self.updates[layer] = update.to(device)
        self.older, self.pending = {}, []
        for row, own in enumerate(movements):
            for layer, moved in own["sent"].items():
                self.parts[layer][row].copy_(moved)
            for layer, moved in own["older"].items():
                shape = self.parts[layer].shape
                self.older.setdefault(layer, self.stack.new_empty(shape))[row].copy_(moved)
        self.has_begun, self.rate = state["begun"], state.get("rates", 0.0)  # 0.4: not of own loops
