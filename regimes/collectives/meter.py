"""Counts what is passed to the collectives: floats by the paper's convention, bytes, calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regimes.collectives.layers import NO_LAYER, Traffic

_KINDS = ("mean", "gather", "broadcast")  # others join them where they are asked for
_MOST_WAITING = 256  # different requests that are kept before they are added up
_Request = tuple[tuple[int, ...], str, tuple[int, ...], torch.dtype, bool]
_ORDER = (*_KINDS, "exchange", "scatter", "weights", "sum", "join")  # in a record


class Meter:
    """Holds what was passed to the collectives since the last ``take_counts``.

    Attributes:
        layers: traffic per layer index; ``NO_LAYER``: of no layer (loss, buffers).
        calls: number of collectives, per kind ("mean", "gather", "broadcast", and where
            they are asked for "exchange"; between shards of a worker "sum" and "join"; of FSDP2
            "scatter" and "weights").
        sent: bytes that one worker had for others, per kind (see `Traffic`); for "sum" and "join",
            that one shard had; for "weights", an all-gather of sharded weights, its shard once for
            each other process.
        dense: bytes that the same would have had without compression, per kind. Only FSDP2's own
            collectives are counted here, because only it knows their types and number.
    """

    def __init__(self, dtype: torch.dtype, workers: int) -> None:
        self.dtype, self.workers = dtype, workers
        self._layers: dict[int, Traffic] = defaultdict(lambda: Traffic(0, 0))
        self.calls: dict[str, int] = dict.fromkeys(_KINDS, 0)
        self._sent: dict[str, int] = dict.fromkeys(_KINDS, 0)
        self.dense: dict[str, int] = {}
        # equal requests come in each step: how often, since the tables were last asked for
        self._waiting: dict[_Request, int] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Meter) or self.state_dict() != other.state_dict():
            return False
        return (self.dtype, self.workers) == (other.dtype, other.workers)

    @property
    def layers(self) -> dict[int, Traffic]:
        self._add_waiting()
        return self._layers

    @property
    def sent(self) -> dict[str, int]:
        self._add_waiting()
        return self._sent

    def count_request(
        self,
        layer: int | Sequence[int],
        kind: str,
        tensor: Tensor,
        convention: bool = True,
        sizes: Sequence[int] = (),
    ) -> None:
        """Count one request; ``tensor`` is stacked, its first row is one worker's share.

        Args:
            layer: or several, which have ``sizes`` numbers of that share.
            convention: whether the paper's convention counts it as floats; bytes count always.
        """
        numbers = tensor.numel() // tensor.shape[0]
        if isinstance(layer, int):
            self.count_requests((layer,), kind, (numbers,), tensor.dtype, convention)
            return
        assert sum(sizes) == numbers, f"{numbers} numbers, of layers {sum(sizes)}"
        self.count_requests(tuple(layer), kind, tuple(sizes), tensor.dtype, convention)

    def count_requests(
        self,
        layers: tuple[int, ...],
        kind: str,
        numbers: tuple[int, ...],
        dtype: torch.dtype,
        convention: bool = True,
    ) -> None:
        """Count a request of each layer, for so many numbers of one worker's share."""
        request = layers, kind, numbers, dtype, convention
        # taken out first: another thread may ask for the tables now
        self._waiting[request] = self._waiting.pop(request, 0) + 1
        # of other kinds one collective carries several requests: the world counts those calls
        self.calls["broadcast"] += kind == "broadcast"
        if len(self._waiting) > _MOST_WAITING:  # where what is sent depends on the gradient
            self._add_waiting()

    def _add_waiting(self) -> None:
        while self._waiting:
            (layers, kind, numbers, dtype, convention), times = self._waiting.popitem()
            for layer, asked in zip(layers, numbers, strict=True):
                # of an exchange a worker keeps the part that is for itself
                kept = asked // self.workers if kind in ("exchange", "scatter") else 0
                size = (asked - kept) * dtype.itemsize
                floats_sent = asked - kept if dtype == self.dtype else size / 4
                # an exchange: with the gather of what it adds up it is one mean (see ``Traffic``)
                copies = {"gather": self.workers, "exchange": 0}.get(kind, 1)
                floats = floats_sent * copies if convention else 0
                self._layers[layer] = self._layers[layer] + Traffic(times * floats, times * size)
                self._sent[kind] = self._sent.get(kind, 0) + times * size

    def count_within(self, kind: str, tensor: Tensor) -> None:
        """Count one request among the shards of a worker."""
        self.sent[kind] = self.sent.get(kind, 0) + tensor.numel() * tensor.element_size()

    def count_dense(self, kind: str, numbers: int, width: int) -> None:
        """Count what would have been sent without compression: numbers of so many bytes."""
        self.dense[kind] = self.dense.get(kind, 0) + numbers * width

    def count_weights(self, shard: Tensor, others: int) -> None:
        """Count an all-gather of sharded weights, in which this shard goes to so many others."""
        size = shard.numel() * shard.element_size() * others
        self.layers[NO_LAYER] = self.layers[NO_LAYER] + Traffic(0, size)
        for table, more in ((self.sent, size), (self.calls, 1)):
            table["weights"] = table.get("weights", 0) + more

    def state_dict(self) -> dict[str, Any]:
        """Return the counts so far, in plain types."""
        layers = {i: [t.floats, t.bytes] for i, t in self.layers.items()}
        counted = {"layers": layers, "calls": dict(self.calls), "sent": dict(self.sent)}
        return counted | ({"dense": dict(self.dense)} if self.dense else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the counts by those of a ``state_dict``."""
        self.take_counts()
        self.layers.update({i: Traffic(*counts) for i, counts in state["layers"].items()})
        self.calls.update(state["calls"])
        self.sent.update(state["sent"])
        self.dense.update(state.get("dense", {}))

    def add_counts(self, other: Meter) -> None:
        """Add what another meter has counted."""
        for request, times in other._waiting.items():  # few, of any number of layers
            self._waiting[request] = self._waiting.pop(request, 0) + times
        for i, traffic in other._layers.items():
            self._layers[i] = self._layers[i] + traffic
        tables = (self.calls, other.calls), (self._sent, other._sent), (self.dense, other.dense)
        for own, more in tables:
            for kind, count in more.items():
                own[kind] = own.get(kind, 0) + count

    def take_counts(self) -> Meter:
        """Return the counts so far and start again from zero."""
        # in one order, whichever was asked for first: a record has the same bytes everywhere
        calls = {kind: self.calls[kind] for kind in _ORDER if kind in self.calls}
        taken, fresh = Meter(self.dtype, self.workers), Meter(self.dtype, self.workers)
        taken._layers, taken.calls, taken._sent = self.layers, calls, self._sent
        taken.dense = self.dense
        self._layers, self.calls, self._sent = fresh._layers, fresh.calls, fresh._sent
        self.dense = fresh.dense
        return taken
