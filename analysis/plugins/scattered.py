"""What FSDP2's quantised reduce-scatter does to a mean, for simulations: it is rounded once.

Each parameter is a module of its own here, and 1-D parameters are not compressed. Blocks are those
of ``attach(shards=...)``, which begin anew at each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regimes.base.capabilities import MODULE_PARTS
from regimes.base.config import Level
from regimes.base.errors import require
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket, State
from regimes.compression.pieces import make_pieces
from regimes.compression.scatter import QuantisedScatter


@dataclass(frozen=True, kw_only=True)
class ScatteredMean(QuantisedScatter):
    """`QuantisedScatter` of a whole layer; its owners then send the means of their rows to all as
    they are, in place of FSDP2's gathering of weights."""

    in_place: ClassVar[bool] = True
    memory: ClassVar[type[State]] = State

    def __post_init__(self) -> None:
        super().__post_init__()
        what = "none: a simulation keeps residuals in full precision"
        require(self.residual_bits is None, "compressor.residual_bits", self.residual_bits, what)

    @property
    def requires(self) -> frozenset[str]:
        return super().requires - {MODULE_PARTS}

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        workers, padded, parts, pieces = comm.world.workers, [], [], []
        for delta in bucket.deltas:
            rows = -(-delta.shape[1] // workers)  # of each owner; FSDP2 pads with zeros
            missing = workers * rows - delta.shape[1]
            padded.append(torch.nn.functional.pad(delta, (0, 0, 0, missing)))
            parts.append(padded[-1].reshape(len(delta), workers, -1))
            row = Layer("", tuple(parts[-1].shape[1:])).row
            pieces.append(make_pieces(row, int(bucket.level), self.block, delta.dtype))
        sums = self.sum_parts(parts, bucket.states, pieces, comm)
        means = comm.gather([total / workers for total in sums])
        if bucket.feedback:  # parts are what was not sent
            for delta, left, whole in zip(bucket.deltas, parts, padded, strict=True):
                delta.copy_(left.view(whole.shape)[:, : delta.shape[1]])
        return [
            mean.view(-1, delta.shape[2])[: delta.shape[1]]
            for mean, delta in zip(means, bucket.deltas, strict=True)
        ]

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The codes of other owners' rows, and the means of a part to all."""
        rows, columns = layer.matrix
        part = -(-rows // workers) * columns
        codes = super().traffic(Layer(layer.name, (workers, part)), level, workers, itemsize)
        return codes + Traffic(workers * part, part * itemsize)

    cost = Compressor.cost  # of whole layers
