"""What FSDP2's quantised reduce-scatter does to a mean, for simulations: it is rounded once.

Each parameter is a module of its own here, and 1-D parameters are not compressed. Blocks are those
of ``attach(shards=...)``, which begin anew at each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.capabilities import MODULE_PARTS
from regimes.collectives.requests import Gather, Layer, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.pieces import make_pieces
from regimes.compression.scatter import QuantisedScatter
from regimes.config import Level
from regimes.errors import require


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

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        hosted, workers, rows = len(delta), state.workers, delta.shape[1]
        part = -(-rows // workers)  # rows of each owner; FSDP2 pads with zeros
        padded = torch.nn.functional.pad(delta, (0, 0, 0, workers * part - rows))
        parts = padded.reshape(hosted, workers, -1)
        pieces = make_pieces(Layer("", parts.shape[1:]).row, int(level), self.block, delta.dtype)
        total = yield from self.send_parts(parts, state, pieces)
        means = yield Gather(total / workers)
        if self.error_feedback:  # parts is what was not sent
            delta.copy_(parts.view(padded.shape)[:, :rows])
        return means.view(workers * part, -1)[:rows], None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The codes of other owners' rows, and the means of a part to all."""
        rows, columns = layer.matrix
        part = -(-rows // workers) * columns
        codes = super().traffic(Layer(layer.name, (workers, part)), level, workers, itemsize)
        return codes + Traffic(workers * part, part * itemsize)

    reduce, cost = Compressor.reduce, Compressor.cost  # of whole layers
