"""Several devices of a node as one worker: each has whole layers, and a gradient of its own.

What a node sends to the others is compressed, what its devices send each other is not: the node's
gradient is the mean over its devices, of which each gets its rows of every layer (reduce-scatter).
It exchanges these with the same rows of the other nodes, as a shard does, and gives the rows of
the shared update to the others of its node (all-gather). So a node sends each number once, whatever
its number of devices, and between rows, compressors and what measures them nothing is new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Shard
from regimes.collectives.world import World


class NodeRows:
    """Divides whole layers among the devices of a node, and joins them again."""

    def __init__(self, world: World) -> None:
        self.world = world

    def divide(self, whole: Mapping[int, Float[Tensor, "1 ..."]]) -> dict[int, Tensor]:
        """Return this device's rows of the node's mean of each layer, ``[1, *shape] -> [1, rows,
        ...]``. All devices of the node call this."""
        here = self._shards(whole)
        flat = [x.reshape(1, -1) for x in whole.values()]
        sums = Comm(self.world).sum_shards(flat, _chunks(here, whole))
        found = {}
        for (i, x), shard, part in zip(whole.items(), here, sums, strict=True):
            rows = shard.here.stop - shard.here.start
            found[i] = part.div_(self.world.shards).reshape(1, rows, *x.shape[2:])
        return found

    def join(
        self,
        rows: Mapping[int, Float[Tensor, "1 ..."]],
        whole: Mapping[int, Float[Tensor, "1 ..."]],
    ) -> None:
        """Overwrite the whole layers with the rows of all devices of the node, which call this."""
        chunks = _chunks(self._shards(whole), whole)
        parts, sizes = [x.reshape(-1) for x in rows.values()], [x.numel() for x in whole.values()]
        joined = Comm(self.world).join_shards(parts, chunks, sizes)
        pairs = zip(joined, whole.values(), strict=True)
        foreach_copy_([*whole.values()], [found.view(x.shape) for found, x in pairs])

    def _shards(self, whole: Mapping[int, Tensor]) -> list[Shard]:
        """Which rows of each layer are this device's; a scalar is one row."""
        count, place = self.world.shards, self.world.shard
        return [Shard(place, count, *(x.shape[1:2] or (1,))) for x in whole.values()]


def _chunks(shards: Sequence[Shard], whole: Mapping[int, Tensor]) -> list[int]:
    """Numbers of the first device's rows of each layer."""
    pairs = zip(shards, whole.values(), strict=True)
    return [shard.chunk * math.prod(x.shape[2:]) for shard, x in pairs]
