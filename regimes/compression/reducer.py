"""The exchange of one bucket: each compressor's layers, and numbers that are averaged beside them.

``exchange.exchange`` says which layers form a bucket, and when it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.comm import Comm, Riders
from regimes.collectives.layers import MARKS, NO_LAYER, Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket, State
from regimes.compression.elementwise import Dense
from regimes.compression.kernels import on_gpu
from regimes.compression.traffic import TrafficCheck
from regimes.config import DENSE, AnyLevel, FeedbackLevel, Level
from regimes.errors import ConfigError

# Numbers of the layers that one kernel takes. What it needs beside them is then no more
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
        self._at: dict[FeedbackLevel, tuple[Compressor, Level]] = {}
        self._choices: dict[tuple[int, AnyLevel], tuple[Compressor, Level]] = {}  # of `at`
        self.reads_rates = any(c.reads_rate for c in self.compressors)
        self.traffic_check = TrafficCheck(self.at, self.layers, world)
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
        before = self.traffic_check.before(bucket, gradients, levels)
        riders = Riders()
        alike: dict[int, list[int]] = {}  # by compressor: the layers that it exchanges
        updates: dict[int, Tensor] = {}
        for i in bucket:
            if i == NO_LAYER:
                if extra is not None:
                    riders.waiting[i] = extra
                continue
            compressor, level = self.at(i, levels[i])
            if type(compressor) is Dense and memories[i].residual is None:
                memories[i].step += 1  # the many small layers of a network: no more work than this
                riders.waiting[i] = gradients[i]
                continue
            absent = not gradients[i].numel() and not compressor.joins_shards
            if absent and memories[i].shard is not None:
                updates[i] = gradients[i][0]  # no row of the layer is here
            elif level == DENSE:
                riders.waiting[i] = send_whole(compressor, gradients[i], memories[i])
            else:
                alike.setdefault(id(compressor), []).append(i)
        if marks is not None:
            riders.waiting[MARKS] = marks
        # Between processes, where a collective costs a latency, and on a GPU, where a kernel costs
        # a launch, layers are exchanged together; else one by one, so that each stays in the cache.
        together = self.world.lockstep or any(on_gpu(gradients[i]) for i in bucket if i != NO_LAYER)
        calls = set[Any]()
        if not together:
            Comm(self.world, riders=riders, calls=calls).send_riders()
        for layers in alike.values():
            updates |= self._exchange(layers, gradients, levels, memories, riders, calls, together)
            calls = set()
        Comm(self.world, riders=riders, calls=calls).send_riders()
        for i, mean in riders.means.items():
            updates[i] = mean if i < 0 else mean.view(gradients[i].shape[1:])
        self.traffic_check.after(before, gradients, levels, memories)
        # in the order that was asked for
        return {i: updates[i] for i in (*bucket, MARKS) if i in updates}

    def _exchange(
        self,
        layers: Sequence[int],
        gradients: Stacks,
        levels: Sequence[AnyLevel],
        memories: Any,
        riders: Riders,
        calls: set[Any],
        together: bool,
    ) -> dict[int, Tensor]:
        """Exchange layers of one compressor; their updates."""
        updates: dict[int, Tensor] = {}
        compressor, turn = self.at(layers[0], levels[layers[0]])[0], 0
        by_layer = not (together or compressor.one_level)
        parts = [[i] for i in layers] if by_layer else [[*layers]]
        if compressor.one_level:
            parts = _at_one_level(layers, gradients, levels)
        for part in parts:
            comm = Comm(self.world, part, riders=riders, calls=calls, turn=0 if by_layer else turn)
            rows, states = [gradients[i] for i in part], [memories[i] for i in part]
            chosen = [self.at(i, levels[i])[1] for i in part]
            found = exchange_layers(compressor, part, rows, states, chosen, comm)
            updates.update(zip(part, found, strict=True))
            turn = comm.turn
        return updates

    def at(self, layer: int, level: AnyLevel) -> tuple[Compressor, Level]:
        """The compressor of a layer at a level, as ``Compressor.at``; "dense" where that would send
        more than the layer has."""
        if (layer, level) not in self._choices:
            compressor, plain = self.compressors[layer], cast(Level, level)
            if isinstance(level, FeedbackLevel):
                if level not in self._at:  # one object for all layers, which are exchanged together
                    self._at[level] = compressor.at(level)
                compressor, plain = self._at[level]
            whole = compressor.exceeds(self.layers[layer], plain, self.world.workers)
            self._choices[layer, level] = compressor, DENSE if whole else plain
        return self._choices[layer, level]

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


def exchange_layers(
    compressor: Compressor,
    layers: Sequence[int],
    gradients: Sequence[Float[Tensor, "hosted ..."]],
    states: Sequence[State],
    levels: Sequence[Level],
    comm: Comm,
) -> list[Tensor]:
    """Error feedback around `Compressor.exchange`; the updates, ``[*shape]``.

    Gradients are left as they are. A residual survives every change of level. Without error
    feedback at this level it is added to one more gradient; what is not sent of the two is dropped.
    """
    deltas = compressor.add_residual(gradients, states)
    for state in states:
        state.step += 1
    bucket = Bucket(layers, deltas, states, levels, bool(compressor.error_feedback))
    comm.keep(deltas)
    updates = compressor.exchange(bucket, comm)
    _check_updates(compressor, updates, deltas)
    if not compressor.error_feedback:
        for state in states:
            state.residual = None  # of another level: it was added to the delta
    return [x.view(gradient.shape[1:]) for x, gradient in zip(updates, gradients, strict=True)]


def _check_updates(compressor: Compressor, updates: Any, deltas: Sequence[Tensor]) -> None:
    """Raise ConfigError unless there is an update of each layer, of its size and type: another one
    would train on, as far as torch broadcasts and converts it."""
    if not isinstance(updates, Sequence) or len(updates) != len(deltas):
        got = f"{len(updates)} of them" if isinstance(updates, Sequence) else type(updates).__name__
        raise ConfigError(
            f"the compressor {type(compressor).__name__}: exchange returned {got}, expected a list "
            f"of {len(deltas)} updates, one for each layer of the bucket"
        )
    for update, delta in zip(updates, deltas, strict=True):
        if update.numel() != delta[0].numel() or update.dtype != delta.dtype:
            raise ConfigError(
                f"the compressor {type(compressor).__name__}: an update is {_describe(update)}, "
                f"expected {_describe(delta[0])}"
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def send_whole(compressor: Compressor, gradient: Tensor, state: State) -> Tensor:
    """What a layer sends at "dense": its residual as well, which is then zero."""
    compressor.before_dense(state)
    delta = gradient
    if state.residual is not None:
        (delta,) = compressor.add_residual([gradient], [state])
        state.residual = None
    state.step += 1
    return delta


def _at_one_level(
    layers: Sequence[int], gradients: Stacks, levels: Sequence[AnyLevel]
) -> list[list[int]]:
    """Layers of one level and one type of numbers, up to a size, in the order of their first ones:
    the same on all processes, as the order of collectives is."""
    found: dict[Any, list[list[int]]] = {}
    room: dict[Any, int] = {}
    for i in layers:
        size, alike = gradients[i][0].numel(), (levels[i], gradients[i].dtype)
        if alike not in found or size > room[alike]:
            found.setdefault(alike, []).append([])
            room[alike] = TOGETHER_ON_GPU if on_gpu(gradients[i]) else TOGETHER
        found[alike][-1].append(i)
        room[alike] -= size
    return [part for parts in found.values() for part in parts]
