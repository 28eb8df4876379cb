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
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from regimes.collectives.requests import Batched, Gather, Layer, Traffic
from regimes.compression.base import Compressor, Sending, State, Unit
from regimes.compression.kernels import on_gpu
from regimes.compression.sparse import scatter_sum
from regimes.config import DENSE, Level
from regimes.errors import require


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

    residual: Unit = "update"
    data_dependent: ClassVar[bool] = True

    @property
    def reads_rate(self) -> bool:
        return True

    def check(self, level: Level) -> None:
        number = isinstance(level, int | float) and not isinstance(level, bool)
        good = level == DENSE or (number and 0 < float(level) < float("inf"))
        require(good, "level of threshold", level, 'a movement above 0, or "dense"')

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        large = flat.abs() * (state.rate / state.scale) >= float(level)
        own_counts, places_of = _locate_chosen(large)
        counts = yield Gather(own_counts)  # [W]
        max_count = yield Batched(_largest_counts, counts)
        if not max_count:
            return state.buffer(delta.shape[1:], delta).zero_(), None
        ordinals = torch.arange(1, max_count + 1, dtype=torch.int32, device=flat.device)
        padding = ordinals > own_counts[:, None]
        places = places_of(ordinals).masked_fill_(padding, 0)
        values = yield Gather(flat.gather(1, places).masked_fill_(padding, 0))  # [W, max_count]
        indices = yield Gather(places.int())
        weight, shape = 1 / len(values), delta[0].shape
        update = yield Batched(scatter_sum, indices, values, weight, shape, state)
        if self.error_feedback:
            flat.masked_fill_(large, 0)
        return update, None

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


def _largest_counts(entries: Sequence[tuple[Int32[Tensor, " workers"]]]) -> list[int]:
    """The largest count of each layer. A sync point, the only one of a step for each bucket: counts
    are values, and they are the sizes of the next messages, which the host must know."""
    return torch.stack([counts.max() for (counts,) in entries]).tolist()
