"""What compression would lose: the share of the gradient's energy that each level does not send.

At measured steps the mean gradient g is compressed at every level, without effect on the run and
without error feedback: ``error:<level>`` is sum |g - C(g)|^2 / sum |g|^2 over the epoch's measured
steps, 0 for dense and near 1 where almost nothing of g is sent. Each level has a PowerSGD Q of its
own that continues from step to step, as the run's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.capabilities import COMPRESSED_PARTS
from regimes.base.config import DENSE, AnyLevel, Bounded
from regimes.base.config.bounds import Count
from regimes.base.errors import ConfigError, require
from regimes.collectives.comm import Comm
from regimes.collectives.world import World
from regimes.compression.bucket import Bucket
from regimes.compression.reducer import exchange_layers
from regimes.instruments.base import (
    MeasurementContext,
    Reading,
    StridedGauge,
    squared_norms,
)


@dataclass(frozen=True)
class CompressionLoss(Bounded):
    """Measures what share of the gradient's squared norm each level would lose.

    Attributes:
        levels: Names of the configuration's levels. Empty: all of them.
        stride: Measure steps 0, stride, 2 stride, ... of an epoch. A measured step compresses once
            per level. On several processes it also costs one dense mean, which counts as signal
            bytes.
        every: Record at the end of every this many units.
    """

    bounds_prefix = "instruments.error."
    requires = frozenset({COMPRESSED_PARTS})

    levels: tuple[str, ...] = ()
    stride: Count = 8
    every: Count = 1

    def start(self, context: MeasurementContext) -> CompressionLossGauge:
        return CompressionLossGauge(self, context)


class _Alone(World):
    """A world of one, in which nothing is sent or counted but what the shards of a worker need."""

    def __init__(self, of: World) -> None:
        super().__init__(1)
        self.of, self.shards, self.shard = of, of.shards, of.shard

    def sum_shards(self, tensors: list[Tensor], chunks: Sequence[int] = ()) -> list[Tensor]:
        return self.of.sum_shards(tensors, chunks)

    def join_shards(
        self, parts: list[Tensor], chunks: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor]:
        return self.of.join_shards(parts, chunks, sizes)


class CompressionLossGauge(StridedGauge):
    """Sums up over an epoch's measured steps, and keeps the compressor's state per level."""

    def __init__(self, settings: CompressionLoss, context: MeasurementContext) -> None:
        if context.compressor is None:
            raise ConfigError("the instrument 'error' needs a run with a compressor")
        known = context.levels.keys()
        where, choice = "instruments.error.levels", f"some of {', '.join(known)}"
        require(known >= set(settings.levels), where, settings.levels, choice)
        self.stride, self.world, self.layers = settings.stride, context.world, context.parts
        self.context = context
        # An instrument does not know the rate, on which what such a compressor sends depends.
        good = not context.compressor.data_dependent
        require(
            good, "instruments.error", "error", "a compressor that does not read the learning rate"
        )
        self.compressor, self.alone = context.compressor, _Alone(context.world)
        self.alone.meter.dtype = context.world.meter.dtype
        self.levels = {name: context.levels[name] for name in settings.levels or known}
        self.states = {
            name: [self.compressor.init(layer, context.seed, 0) for layer in self.layers]
            for name in self.levels
        }
        for states in self.states.values():
            for layer, state in zip(self.layers, states, strict=True):
                state.shard = layer.shard
        self.device = context.parameters[0].device
        self.drop_epoch()

    def drop_epoch(self) -> None:
        super().drop_epoch()
        self.lost = {name: torch.zeros(len(self.layers)).double() for name in self.levels}
        self.energy = torch.zeros(len(self.layers)).double()

    def measure(self, stack: Float[Tensor, "rows N"]) -> None:
        pieces = self.context.mean_gradient(stack).split([layer.size for layer in self.layers])
        parts = [p.view(x.shape) for p, x in zip(pieces, self.layers, strict=True)]
        self.energy = self.energy + squared_norms(parts).cpu()
        if self.reversible:
            self.states = {
                name: [s.copy_for_step() for s in states] for name, states in self.states.items()
            }
        self.lost = {
            name: self.lost[name] + squared_norms(self._errors(parts, name, level)).cpu()
            for name, level in self.levels.items()
        }

    def _errors(self, parts: list[Tensor], name: str, level: AnyLevel) -> list[Tensor]:
        """Each layer's gradient minus what a level sends of it; zero if it is sent whole."""
        errors, states = [torch.zeros_like(p) for p in parts], self.states[name]
        compressor, sent = self.compressor.resolve_level(level)
        if sent == DENSE:
            return errors
        workers = self.world.workers
        compressed = [
            i
            for i, layer in enumerate(self.layers)
            if layer.compressed and not compressor.exceeds(layer, sent, workers)
        ]
        # among the shards of a worker together, because each exchange costs a latency
        together = [compressed] if self.alone.shards > 1 else [[i] for i in compressed]
        for layers in together:
            own = [states[i] for i in layers]
            for state in own:
                state.residual = None  # else error feedback would add the last measurement's error
            rows, levels = [parts[i][None] for i in layers], [sent for _ in layers]
            bucket = Bucket(layers, own, levels, bool(compressor.error_feedback))
            updates = exchange_layers(compressor, bucket, rows, Comm(self.alone, layers))
            for i, update in zip(layers, updates, strict=True):
                errors[i] = parts[i] - update
        self.alone.meter.take_counts()
        return errors

    def read(self, epoch: int) -> Reading:
        """Return ``error:<level>`` per layer and for the model; NaN where the gradient is zero."""
        lost = {name: self._of_whole(squares) for name, squares in self.lost.items()}
        energy = self._of_whole(self.energy)
        self.drop_epoch()
        return Reading(
            layers={f"error:{n}": (x / energy).tolist() for n, x in lost.items()},
            model={f"error:{n}": float(x.sum() / energy.sum()) for n, x in lost.items()},
        )

    def _of_whole(self, squares: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
        """Squared norms of whole layers, from the norms of their parts."""
        if self.world.shards == 1 and not self.world.divided:
            return squares
        device = getattr(self.world, "device", squares.device)
        return self.world.whole_norms(squares.sqrt().to(device)).cpu().square()

    def state_dict(self) -> dict[str, Any]:
        """Return, per level, the compressors' states that are the same on all processes."""
        return {name: [s.shared_state() for s in states] for name, states in self.states.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in state.keys() & self.states.keys():  # a branch may have other levels
            for own, shared in zip(self.states[name], state[name], strict=True):
                own.load_shared_state(shared, self.device)
