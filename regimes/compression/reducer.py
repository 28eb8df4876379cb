"""The rounds of one bucket: runs each layer's compressor, and averages numbers beside it.

``exchange.exchange`` says which layers form a bucket, and when it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import (
    MARKS,
    NO_LAYER,
    JoinShards,
    Layer,
    Mean,
    Program,
)
from regimes.collectives.world import World
from regimes.compression.base import Compressor, InBuckets, State
from regimes.compression.elementwise import Dense
from regimes.compression.kernels import on_gpu
from regimes.compression.traffic import TrafficCheck
from regimes.config import DENSE, AnyLevel, FeedbackLevel, Level
from regimes.errors import ConfigError

# Numbers of the layers that one program reduces. What a program needs beside them is then no more
# than a large layer alone needs, and of a size that the C library takes again without new pages.
TOGETHER, TOGETHER_ON_GPU = 1 << 22, 1 << 24
Stacks = Sequence[Float[Tensor, "rows ..."]] | Mapping[int, Float[Tensor, "rows ..."]]


class Reducer:
    """Reduces stacked gradients to updates; owns each layer's ``State``.

    Attributes:
        rates: the learning rate of each layer in the step to come, for layers that read it; None:
            they take 1.
        reads_rates: a compressor reads the rate, or a residual had another unit when it was loaded.
    """

    rates: Sequence[float] | None = None

    def __init__(
        self,
        compressor: Compressor,
        layers: Sequence[Layer],
        world: World,
        seed: int,
    ) -> None:
        self.layers, self.world = list(layers), world
        self.compressors = [compressor if layer.compressed else Dense() for layer in layers]
        self._at: dict[tuple[int, FeedbackLevel], tuple[Compressor, Level]] = {}
        self._takes_buckets = any(c.takes_bucket for c in self.compressors)
        self.reads_rates = any(c.reads_rate for c in self.compressors)
        self.traffic_check = TrafficCheck(self.compressors, self.layers, world)
        first = world.hosted[0]
        self.states = [
            c.init(layer, seed, first) for c, layer in zip(self.compressors, layers, strict=True)
        ]
        for layer, state in zip(layers, self.states, strict=True):
            state.shard = layer.shard
            state.workers = world.workers

    def reduce(
        self,
        bucket: Sequence[int],
        gradients: Stacks,
        levels: Sequence[AnyLevel],
        extra: Float[Tensor, "rows ..."] | None = None,
        states: Sequence[State] | Mapping[int, State] | None = None,
        marks: Float[Tensor, "1 marks"] | None = None,
    ) -> dict[int, Tensor]:
        """All rounds of one bucket; its updates by layer, and the mean of ``extra`` where
        ``NO_LAYER`` is among them, and at ``MARKS`` that of ``marks``.

        Args:
            extra: numbers of each worker, such as its losses.
            states: memories that change instead of this reducer's own.
            marks: numbers of each process, which are not counted.

        Where a worker's layers are divided into shards, the mean of ``extra``, ``[L, k]``, is over
        shards, too, and each shard sends its own.
        """
        memories: Any = self.states if states is None else states
        self.set_rates(bucket, memories)
        joint = self._layers_together(bucket, gradients, levels)
        # Generators: a compressor runs in `World.run_programs`, one collective after another.
        programs: list[Any] = []
        places: list[int | list[int]] = []
        for i in bucket:
            if i == NO_LAYER and extra is not None:
                programs.append(_average_value(extra, self.world.shards))
                places.append(i)
            elif i not in joint:
                programs.append(self._program(i, gradients[i], memories[i], levels[i]))
                places.append(i)
            elif i == joint[i][0]:
                own, rows = [memories[j] for j in joint[i]], [gradients[j] for j in joint[i]]
                compressor, level = self.at(i, levels[i])
                assert isinstance(compressor, InBuckets)
                programs.append(compressor.reduce_bucket(rows, own, level))
                places.append(joint[i])
        if marks is not None:
            programs.append(Mean(marks))
            places.append(MARKS)
        before = self.traffic_check.before(bucket, gradients, levels)
        batched = any(on_gpu(gradients[i]) for i in bucket if i != NO_LAYER)
        results = self.world.run_programs(programs, places, batched=batched)
        self.traffic_check.after(before, gradients, levels, memories)
        updates: dict[int, Tensor] = {}
        for place, result in zip(places, results, strict=True):
            if isinstance(place, int):
                updates[place] = result
                continue
            for i, part in zip(place, result, strict=True):
                updates[i] = part.view(gradients[i].shape[1:])
        # in the order that was asked for
        return {i: updates[i] for i in (*bucket, MARKS) if i in updates}

    def _layers_together(
        self, bucket: Sequence[int], gradients: Stacks, levels: Sequence[AnyLevel]
    ) -> dict[int, list[int]]:
        """The layers of a bucket that one program reduces with each layer: those at its level, of a
        compressor that ``takes_bucket``, up to a size. The same on all processes, as the order of
        programs is."""
        found: dict[Any, list[list[int]]] = {}
        room: dict[Any, int] = {}
        for i in bucket if self._takes_buckets else ():
            if i == NO_LAYER or not self.compressors[i].takes_bucket or levels[i] == DENSE:
                continue
            if not (size := gradients[i][0].numel()):
                continue
            alike = levels[i], gradients[i].dtype
            if size > room.get(alike, 0):
                found.setdefault(alike, []).append([])
                room[alike] = TOGETHER_ON_GPU if on_gpu(gradients[i]) else TOGETHER
            found[alike][-1].append(i)
            room[alike] -= size
        parts = [part for parts in found.values() for part in parts if len(part) > 1]
        return {i: part for part in parts for i in part}

    def _program(self, i: int, gradient: Tensor, state: State, level: AnyLevel) -> Program | Mean:
        """The program that reduces a layer. For a layer that is always dense, like the many small
        ones of a network, it is a single Mean, which saves a generator."""
        compressor, level = self.at(i, level)
        if type(compressor) is not Dense or state.residual is not None or level != DENSE:
            return compressor.reduce(gradient, state, level)
        state.step += 1
        return Mean(gradient)

    def at(self, layer: int, level: AnyLevel) -> tuple[Compressor, Level]:
        """The compressor of a layer at a level, as ``Compressor.at``."""
        if not isinstance(level, FeedbackLevel):
            return self.compressors[layer], level
        if (layer, level) not in self._at:
            self._at[layer, level] = self.compressors[layer].at(level)
        return self._at[layer, level]

    def set_rates(self, bucket: Sequence[int], memories: Any) -> None:
        """Set the rate of the step to come in the memories of layers, if any reads it."""
        rates = self.rates
        for i in bucket if self.reads_rates else ():
            if rates is not None and i != NO_LAYER:
                memories[i].rate = rates[i]

    def residuals(self) -> list[Tensor | None]:
        """What each hosted worker has not sent yet, per layer."""
        return [state.residual for state in self.states]

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, residuals): what is the same on all workers, and the hosted residuals."""
        shared, residuals = {}, {}
        for layer, state in zip(self.layers, self.states, strict=True):
            residuals[layer.name], shared[layer.name] = state.residual, state.shared_state()
        return shared, residuals

    def load_state_dict(self, shared: dict[str, Any], residuals: dict[str, Any]) -> None:
        """The inverse; ``to`` moves the tensors to the gradients' device."""
        parts = zip(self.layers, self.states, self.compressors, strict=True)
        for layer, state, compressor in parts:
            if layer.name not in shared or layer.name not in residuals:
                raise ConfigError(f"the checkpoint has no layer {layer.name!r}: another model?")
            state.load_shared_state(shared[layer.name])
            state.residual = residual = residuals[layer.name]
            if residual is None:
                continue  # a scalar, which has no matrix, never has one
            state.residual = residual.contiguous()
            if tuple(residual.shape[1:]) not in (compressor.residual_shape(layer), layer.shape):
                raise ConfigError(
                    f"the checkpoint's residual of layer {layer.name!r} has shape "
                    f"{list(residual.shape)}, the layer {list(layer.shape)}: another model?"
                )
        self.reads_rates |= any(state.residual_rate is not None for state in self.states)

    def to(self, device: torch.device) -> Reducer:
        """Move all memories."""
        state: State
        for state in self.states:
            for name, value in vars(state).items():
                if isinstance(value, Tensor):
                    setattr(state, name, value.to(device))
        return self


def _average_value(value: Tensor, shards: int) -> Program | Mean:
    return Mean(value) if shards == 1 else _mean_of_shards(value, shards)


def _mean_of_shards(value: Float[Tensor, "hosted k"], shards: int) -> Program:
    mean = yield Mean(value)
    joined = yield JoinShards(mean, len(mean), shards * len(mean))
    return joined.view(shards, -1).mean(0)
