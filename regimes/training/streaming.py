"""Which layers are synchronised when: all at the end of a period, or groups of them in turn.

Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512) divides the network into
fragments. Each is sent once per period, at steps of its own, so that fewer bytes leave at a time;
its mean is applied some steps later, while workers go on; and each worker mixes it with its own
parameters. With one fragment, no delay and no mixing this is a synchronisation as of local SGD.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regimes.compression.reducer import Reducer
from regimes.config import AnyLevel, OuterConfig
from regimes.errors import require
from regimes.exchange.exchange import Exchange, Transfer
from regimes.job.state import by_layer, get_column
from regimes.training.outer_step import OuterStep
from regimes.training.replicas import Replicas


def divide_layers(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Consecutive layers in ``count`` groups, none empty, of nearly equal size.

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
class _Flight:
    """Pseudo-gradients that were sent, and what came back.

    Attributes:
        left: local steps until it is applied.
        transfer: has the shared pseudo-gradients of the fragment's layers as updates, and as means,
            until they are delivered, the mean losses that were sent with it, ``[steps]``.
    """

    left: int
    transfer: Transfer


@dataclass(eq=False)
class Fragment:
    """Layers that are synchronised together.

    Attributes:
        layers: their numbers, in order.
        period: local steps of the round under way.
        since: local steps taken in it.
        flight: what was sent and is not applied yet.
        unseen: something has come back that instruments have not seen yet.
    """

    layers: list[int]
    period: int = 1
    since: int = 0
    flight: _Flight | None = None
    unseen: bool = False


class SyncRounds:
    """The fragments of a network, their rounds, and the outer step.

    Attributes:
        exchange: shares pseudo-gradients; among processes a delay lets it go on in the background.
        stack, parts: the pseudo-gradients that were last sent, ``[L, N]`` and its ``[L, *shape]``
            per layer.
        updates: the shared ones that came back, ``[*shape]`` per layer.
        older: the pseudo-gradients, ``[L, *shape]``, of layers that were sent again before
            instruments saw what had come back: ``stack`` no longer has them.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reducer: Reducer,
        config: OuterConfig,
        storage: tuple[Float[Tensor, "rows N"], Sequence[Float[Tensor, "rows ..."]]],
    ) -> None:
        """
        Args:
            storage: of ``stack`` and ``parts``. Nothing else may use it between a fragment's
                leaving and the return of the last one, so unless ``config.streams`` that of
                gradients will do.
        """
        self.reducer, self.config = reducer, config
        delayed = config.delay > 0 and reducer.world.processes > 1
        device = storage[0].device if delayed else None
        self.exchange = Exchange(reducer, background=device)
        self.outer = OuterStep(parameters, reducer, config)
        sizes = [parameter.numel() for parameter in parameters]
        expected = f"at most the number of layers, {len(sizes)}"
        require(config.fragments <= len(sizes), "outer.fragments", config.fragments, expected)
        self.fragments = [Fragment(layers) for layers in divide_layers(sizes, config.fragments)]
        self.stack, self.parts = storage
        self.updates = list[Tensor](part[0] for part in self.parts)
        self.older: dict[int, Tensor] = {}
        self.begun = False

    # -- rounds ------------------------------------------------------------------------------

    @property
    def is_between(self) -> bool:
        """Has any fragment moved since it was synchronised?"""
        return any(fragment.since or fragment.flight for fragment in self.fragments)

    def begin_step(self, period: int) -> None:
        """A step begins. A new period applies to each fragment's next round. The first rounds are
        shorter, so that fragments are sent at equal distances."""
        count = len(self.fragments)
        for i, fragment in enumerate(self.fragments, start=1):
            if not self.begun:
                fragment.since = period - math.ceil(period * i / count)
                fragment.period = period
            elif not fragment.since:
                fragment.period = period
        self.begun = True

    def advance_step(self) -> bool:
        """A local step was taken; returns whether a fragment is to be sent or applied."""
        for fragment in self.fragments:
            fragment.since += 1
            if fragment.flight is not None:
                fragment.flight.left -= 1
        return any(
            f.since >= f.period or (f.flight is not None and f.flight.left <= 0)
            for f in self.fragments
        )

    def leaving_fragments(self, last: bool) -> Iterator[Fragment]:
        """Fragments that are to be sent: at the ``last`` step all that have moved."""
        for fragment in self.fragments:
            if fragment.since >= fragment.period or (last and fragment.since):
                yield fragment

    def arriving_fragments(self, last: bool) -> Iterator[tuple[Fragment, _Flight]]:
        """Fragments that are to be applied, and what came back: at the ``last`` step all, in the
        order of sending, so that instruments see what they would have seen without an end."""
        flights = [(f, f.flight) for f in self.fragments if f.flight is not None]
        for fragment, flight in sorted(flights, key=lambda pair: pair[1].left):
            if last or flight.left <= 0:
                self.wait_for_sent()
                for layer, update in flight.transfer.updates.items():
                    self.updates[layer] = update
                    self.older.pop(layer, None)
                fragment.unseen = True
                yield fragment, flight

    # -- what is sent ------------------------------------------------------------------------

    def measure_pseudo_gradients(
        self, fragment: Fragment, replicas: Replicas
    ) -> Float[Tensor, "rows n"]:
        """Measure a fragment's pseudo-gradients, ``[L, n]``, which are sent next."""
        for layer in fragment.layers if fragment.unseen else ():
            if layer not in self.older:  # sent again before the last fragment has come back
                self.older[layer] = self.parts[layer].clone()
                self.updates[layer] = self.updates[layer].clone()  # a compressor's own memory
        self.outer.pseudo_gradients(replicas, self.parts, fragment.layers)
        before = sum(part[0].numel() for part in self.parts[: fragment.layers[0]])
        size = sum(self.parts[layer][0].numel() for layer in fragment.layers)
        return self.stack[:, before : before + size]

    def send_fragment(
        self,
        fragment: Fragment,
        levels: Sequence[AnyLevel],
        losses: Float[Tensor, "rows steps"] | None,
    ) -> None:
        """Exchange a fragment's measured pseudo-gradients.

        Args:
            losses: sent with them; their means come with what comes back.
        """
        transfer = self.exchange.begin_transfer(levels, fragment.layers)
        fragment.flight, fragment.since = _Flight(self.config.delay, transfer), 0
        self.exchange.send_transfer({i: self.parts[i] for i in fragment.layers}, transfer, losses)

    def wait_for_sent(self) -> None:
        """Until all that was sent has come back; before any other collective."""
        self.exchange.wait_for_transfers()

    def deliver_means(self) -> Iterator[Tensor]:
        """Mean losses that have come back and were not delivered, in the order of sending."""
        self.wait_for_sent()
        flights = [f.flight for f in self.fragments if f.flight is not None]
        for flight in sorted(flights, key=lambda flight: flight.left):
            if flight.transfer.means is not None:
                yield flight.transfer.means
                flight.transfer.means = None

    def is_last(self, fragment: Fragment) -> bool:
        """Is it the fragment with which all have come back once more?"""
        return fragment is self.fragments[-1]

    def take_seen(self) -> tuple[Float[Tensor, "rows N"], list[Tensor]]:
        """For instruments: the pseudo-gradients that have come back last, and the updates they
        gave. Called when the last fragment has come back, before it is applied."""
        stack, older = self.stack, self.older
        if older:
            stack = stack.clone()
            places = stack.split([part[0].numel() for part in self.parts], 1)
            for layer, kept in older.items():
                places[layer].copy_(kept.flatten(1))
        self.older = {}
        for fragment in self.fragments:
            fragment.unseen = False
        return stack, self.updates

    def apply_fragment(
        self,
        fragment: Fragment,
        flight: _Flight,
        replicas: Replicas,
    ) -> None:
        """Take the outer step of a fragment. Running statistics go with the first fragment."""
        first = fragment is self.fragments[0]
        self.outer.step_outer(flight.transfer.updates, replicas, buffers=first)
        fragment.flight = None

    def close(self) -> None:
        """End the background thread."""
        self.exchange.close()

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, own): the entries "outer" of a state and of a process's part (``job.state``):
        each fragment's round, what is on its way and what instruments have not seen; per hosted
        worker, by layer, the pseudo-gradients of such fragments, and ``older``."""
        self.wait_for_sent()  # for the thread that changes memories
        memories, residuals = self.reducer.state_dict()
        fragments = [
            {
                "period": f.period,
                "since": f.since,
                "left": f.flight.left if f.flight else None,
                "updates": f.flight.transfer.updates if f.flight else {},
                "unseen": {i: self.updates[i] for i in f.layers} if f.unseen else {},
            }
            for f in self.fragments
        ]
        shared = {
            "layers": by_layer(memory=memories),
            "optimizer": self.outer.optimizer.state_dict(),
            "begun": self.begun,
            "fragments": fragments,
        }
        own = {"layers": by_layer(residual=residuals), "movements": self._save_pseudo_gradients()}
        return shared, own

    def _save_pseudo_gradients(self) -> list[dict[str, dict[int, Tensor]]]:
        kept = [i for f in self.fragments if f.flight or f.unseen for i in f.layers]
        return [
            {
                "sent": {i: self.parts[i][row].clone() for i in kept},
                "older": {i: kept[row].clone() for i, kept in self.older.items()},
            }
            for row in range(len(self.stack))
        ]

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        residuals: dict[str, Tensor | None],
        movements: Sequence[dict[str, dict[int, Tensor]]],
    ) -> None:
        """The inverse, of ``state`` and this process's residuals and pseudo-gradients."""
        self.outer.optimizer.load_state_dict(state["optimizer"])
        self.reducer.load_state_dict(get_column(state["layers"], "memory"), residuals)
        self.reducer.to(self.stack.device)
        device = self.stack.device
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.period, fragment.since = saved["period"], saved["since"]
            fragment.flight = None
            if saved["left"] is not None:
                updates = {i: update.to(device) for i, update in saved["updates"].items()}
                fragment.flight = _Flight(saved["left"], Transfer((), [], updates=updates))
            fragment.unseen = bool(saved["unseen"])
            for layer, update in saved["unseen"].items():
                self.updates[layer] = update.to(device)
        self.older = {}
        for row, own in enumerate(movements):
            for layer, moved in own["sent"].items():
                self.parts[layer][row].copy_(moved)
            for layer, moved in own["older"].items():
                shape = self.parts[layer].shape
                self.older.setdefault(layer, self.stack.new_empty(shape))[row].copy_(moved)
        self.begun = state["begun"]
