"""A constant threshold (Sahu et al., "Rethinking gradient sparsification as total error
minimization", NeurIPS 2021): all coordinates that move far enough.

At equal floats, TopK has the smallest error of a single step, and a constant threshold the smallest
error of all steps together. Its traffic varies: it is high while gradients and rate are large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

from regimes.base.config import DENSE, Level
from regimes.base.errors import require
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.base import Compressor, ResidualKind
from regimes.compression.bucket import Bucket
from regimes.compression.kernels import on_gpu
from regimes.compression.sparse import scatter_sum


@dataclass(frozen=True, kw_only=True)
class Threshold(Compressor):
    """Each worker sends the coordinates where gradient plus residual, times the learning rate, is
    at least the level in magnitude, with their indices. The level is in units of the weights: the
    hard threshold of Sahu et al., which they apply to rate x gradient + residual.

    Workers first exchange how many coordinates each of them sends. Those with fewer than the most
    pad their message with zeros. In local steps the level is compared with the movement itself.
    Under a GradScaler it is compared with the movement of the unscaled gradient.

    Attributes:
        residual: "update", as in the paper.
    """

    residual: ResidualKind = "update"
    one_level: ClassVar[bool] = False
    data_dependent: ClassVar[bool] = True

    @property
    def reads_rate(self) -> bool:
        return True

    def check(self, level: Level) -> None:
        number = isinstance(level, int | float) and not isinstance(level, bool)
        good = level == DENSE or (number and 0 < float(level) < float("inf"))
        require(good, "level of threshold", level, 'a movement above 0, or "dense"')

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        flat, states = bucket.flat, bucket.states
        large = [
            row.abs() * (state.rate / state.scale) >= float(level)
            for row, state, level in zip(flat, states, bucket.levels, strict=True)
        ]
        located = [_locate_chosen(row) for row in large]
        counts = comm.gather([own for own, _ in located])  # each [W]
        most = _largest_counts(counts)
        some = [i for i, count in enumerate(most) if count]
        chosen, places = [], []
        for i in some:
            own, places_of = located[i]
            ordinals = torch.arange(1, most[i] + 1, dtype=torch.int32, device=flat[i].device)
            padding = ordinals > own[:, None]
            places.append(places_of(ordinals).masked_fill_(padding, 0))
            chosen.append(flat[i].gather(1, places[-1]).masked_fill_(padding, 0))
        shares = [{bucket.layers[i]: most[i]} for i in some]
        updates = [
            state.buffer(x.shape[1:], x) for state, x in zip(states, bucket.deltas, strict=True)
        ]
        shapes = [delta.shape[1:] for delta in bucket.deltas]
        if some:
            values = comm.gather(chosen, shares)  # each [W, count]
            indices = comm.gather([place.int() for place in places], shares)
            weight = 1 / comm.world.workers
            entries = [
                (index, value, weight, shapes[i], states[i])
                for i, index, value in zip(some, indices, values, strict=True)
            ]
            for i, update in zip(some, scatter_sum(entries), strict=True):
                updates[i] = update
        for i in {*range(len(flat))} - {*some}:
            updates[i].zero_()
        if bucket.feedback:
            for row, sent in zip(flat, large, strict=True):
                row.masked_fill_(sent, 0)
        return updates

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The upper bound: all coordinates of all workers, and how many each sends."""
        return Traffic((2 * layer.size + 1) * workers, layer.size * (itemsize + 4) + 4)


def _locate_chosen(
    large: Bool[Tensor, "hosted size"],
) -> tuple[Int32[Tensor, " hosted"], Callable[[Tensor], Int64[Tensor, "hosted max_count"]]]:
    """How many places of each row are true, and a function from ordinals 1, 2, ... to the places of
    the first, the second, ... of them; above the count of a row it gives any place."""
    if not on_gpu(large):
        found = [np.flatnonzero(row) for row in large.numpy()]

        def list_places(ordinals: Int32[Tensor, " max_count"]) -> Int64[Tensor, "hosted max_count"]:
            places = np.zeros((len(found), len(ordinals)), np.int64)  # ordinals are all from 1 up
            for row, own in zip(places, found, strict=True):
                row[: len(own)] = own
            return torch.from_numpy(places)

        return torch.tensor([*map(len, found)], dtype=torch.int32), list_places
    taken = large.cumsum(1, dtype=torch.int32)  # chosen numbers up to each place
    counts = taken[:, -1].contiguous()

    def search_places(ordinals: Int32[Tensor, " max_count"]) -> Int64[Tensor, "hosted max_count"]:
        return torch.searchsorted(taken, ordinals.repeat(len(large), 1))

    return counts, search_places


def _largest_counts(counts: Sequence[Int32[Tensor, " workers"]]) -> list[int]:
    """The largest count of each layer. A sync point, the only one of a step for each bucket: counts
    are values, and they are the sizes of the next messages, which the host must know."""
    return torch.stack([of_layer.max() for of_layer in counts]).tolist()
