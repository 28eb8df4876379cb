"""One training step's reduction: every layer's generator and memory, and the loss.

Layers are reduced bucket by bucket (``regimes.collectives.overlap``), all layers of a bucket
together. The mean loss rides in one bucket's first round and carries the news of a non-finite
gradient (``loss + 0 * sum(gradient)``), so that all processes learn of it in the same step, free.
Where the updates show it (``Compressor.tells``), they are looked at in place of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import NO_LAYER, Layer, Mean, Program, Traffic
from regimes.collectives.world import World
from regimes.compression.base import Compressor, State
from regimes.compression.batched import launches
from regimes.compression.dense import Dense
from regimes.compression.returns import check_traffic
from regimes.config import DENSE, Level
from regimes.errors import ConfigError

Stacks = Sequence[Float[Tensor, "rows ..."]] | Mapping[int, Float[Tensor, "rows ..."]]


def finite_flag(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """0, or NaN where any entry is not finite (on a GPU also where their sum overflows: to ask
    would be to wait for it)."""
    total = torch.stack([t.sum() for t in tensors]).sum()
    if total.device.type == "cpu" and not bool(total.isfinite()):
        finite = all(bool(t.isfinite().all()) for t in tensors)
        total = torch.full_like(total, 0.0 if finite else torch.nan)
    return 0 * total


def loss_with_flag(losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]) -> Tensor:
    """The losses, ``[rows]``, in float32, or in float64 where they are; NaN where a row's gradient
    is not finite, as ``finite_flag`` has it."""
    sums = stack.sum(1)
    if sums.device.type == "cpu" and not bool(sums.isfinite().all()):
        sums = torch.where(stack.isfinite().all(1), 0, torch.nan)
    flagged = losses + 0 * sums
    return flagged if flagged.dtype == torch.float64 else flagged.to(torch.float32)


class Reducer:
    """Reduces stacked gradients to updates; owns each layer's ``State``.

    Attributes:
        buckets: layers that are reduced together, in order; ``NO_LAYER`` stands for the loss.
    """

    def __init__(
        self,
        compressor: Compressor,
        layers: Sequence[Layer],
        world: World,
        seed: int,
        buckets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.layers, self.world = list(layers), world
        self.buckets = buckets or [range(NO_LAYER, len(self.layers))]
        self.compressors = [compressor if layer.compressed else Dense() for layer in layers]
        # by layer and level: the traffic of a step of each phase; None once it was compared
        self._counted: dict[tuple[int, Level], dict[int, Traffic] | None] = {}
        first = world.hosted.start
        self.states = [
            c.init(layer, seed, first) for c, layer in zip(self.compressors, layers, strict=True)
        ]

    def step(
        self,
        gradients: Stacks,
        levels: Sequence[Level],
        losses: Float[Tensor, " rows"],
        stack: Float[Tensor, "rows N"],
    ) -> tuple[list[Tensor], Tensor]:
        """Reduce one step, bucket after bucket.

        Returns:
            The updates ``[*shape]`` per layer and the mean loss, NaN if any gradient is not
            finite. Gradients are left as they are; states move on.
        """
        loss, found = self.travelling(losses, stack), {}
        for bucket in self.buckets:
            found.update(self.reduce(bucket, gradients, levels, loss))
        updates = [found[i] for i in range(len(self.layers))]
        return updates, self.judged(found[NO_LAYER], updates, levels)

    def travelling(
        self, losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]
    ) -> Float[Tensor, " rows"]:
        """The losses of which the mean is asked: ``loss_with_flag``; as they are where updates
        tell of a gradient that is not finite, which saves a pass over the gradients."""
        return loss_with_flag(losses, stack[:, :0] if self._tells(stack) else stack)

    def judged(self, mean: Tensor, updates: Sequence[Tensor], levels: Sequence[Level]) -> Tensor:
        """The mean of ``travelling``, or NaN where the updates tell; the same on all processes."""
        if not self._tells(mean):
            return mean
        layers = zip(self.compressors, updates, self.states, levels, strict=True)
        found = [one.evidence(update, state, level) for one, update, state, level in layers]
        total = torch.stack(torch._foreach_norm(found, 1)).sum()
        return mean if bool(total.isfinite()) else torch.full_like(mean, torch.nan)

    def _tells(self, like: Tensor) -> bool:
        """On a CPU, which need not wait for the answer."""
        return not launches(like) and all(one.tells for one in self.compressors)

    def reduce(
        self,
        bucket: Sequence[int],
        gradients: Stacks,
        levels: Sequence[Level],
        loss: Float[Tensor, "rows ..."] | None,
        states: Mapping[int, State] | None = None,
    ) -> dict[int, Tensor]:
        """All rounds of one bucket; its updates by layer, and the mean of ``loss`` where
        ``NO_LAYER`` is among them.

        Args:
            states: memories to change in place of this reducer's own.
        """
        memories: Any = self.states if states is None else states
        programs = [
            _mean(loss)
            if i == NO_LAYER and loss is not None
            else self.compressors[i].reduce(gradients[i], memories[i], levels[i])
            for i in bucket
        ]
        before = {i: self.world.meter.layers[i] for i in self._unchecked(bucket, gradients, levels)}
        abreast = any(launches(gradients[i]) for i in bucket if i != NO_LAYER)
        found = self.world.drive(programs, bucket, abreast=abreast)
        for i, counted in before.items():
            self._check_traffic(i, levels[i], counted, memories[i], gradients[i].element_size())
        return dict(zip(bucket, found, strict=True))

    def _unchecked(
        self, bucket: Sequence[int], gradients: Stacks, levels: Sequence[Level]
    ) -> list[int]:
        """Layers whose traffic at their level was not compared with the formula yet."""
        fresh = [i for i in bucket if i != NO_LAYER and (i, levels[i]) not in self._counted]
        dtype = self.world.meter.dtype
        for i in fresh:
            floats = dtype in (torch.float32, torch.float64) and gradients[i].dtype == dtype
            sends = floats and levels[i] != DENSE and self.layers[i].compressed
            self._counted[i, levels[i]] = {} if sends else None
        return [i for i in bucket if i != NO_LAYER and self._counted[i, levels[i]] is not None]

    def _check_traffic(
        self, i: int, level: Level, before: Traffic, state: State, itemsize: int
    ) -> None:
        """Does the compressor's formula give what the meter has counted?"""
        now, compressor = self.world.meter.layers[i], self.compressors[i]
        steps = self._counted[i, level] or {}
        counted = Traffic(now.floats - before.floats, now.bytes - before.bytes)
        steps[compressor.phase(state)] = counted
        self._counted[i, level] = steps
        if len(steps) == compressor.phases:
            self._counted[i, level] = None
            said = compressor.traffic(self.layers[i], level, self.world.workers, itemsize)
            check_traffic(type(compressor).__name__, self.layers[i], level, said, steps.values())

    def residuals(self) -> list[Tensor | None]:
        """What each hosted worker still owes, per layer."""
        return [state.residual for state in self.states]

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, own): memories that all workers have alike, and the hosted residuals."""
        shared, own = {}, {}
        for layer, state in zip(self.layers, self.states, strict=True):
            own[layer.name], shared[layer.name] = state.residual, state.memory()
        return shared, own

    def load_state_dict(self, shared: dict[str, Any], residuals: dict[str, Any]) -> None:
        """The inverse; ``to`` moves the tensors to the gradients' device."""
        for layer, state in zip(self.layers, self.states, strict=True):
            if layer.name not in shared or layer.name not in residuals:
                raise ConfigError(f"the checkpoint has no layer {layer.name!r}: another model?")
            state.recall(shared[layer.name])
            state.residual = owed = residuals[layer.name]
            if owed is not None and tuple(owed.shape[1:]) not in (layer.matrix, layer.shape):
                raise ConfigError(
                    f"the checkpoint's residual of layer {layer.name!r} has shape "
                    f"{list(owed.shape)}, the layer {list(layer.shape)}: another model?"
                )

    def to(self, device: torch.device) -> Reducer:
        """Move all memories."""
        state: State
        for state in self.states:
            for name, value in vars(state).items():
                if isinstance(value, Tensor):
                    setattr(state, name, value.to(device))
        return self


def traffic_table(
    compressor: Compressor, layers: Sequence[Layer], level: Level, workers: int
) -> tuple[float, int]:
    """(floats, bytes) of one float32 step at one level, by the compressors' formulas."""
    costs = [compressor.cost(layer, level, workers) for layer in layers]
    return sum(c.floats for c in costs), sum(c.bytes for c in costs)


def costs_per_step(
    compressor: Compressor, layers: Sequence[Layer], levels: Mapping[str, Level], workers: int
) -> dict[str, dict[str, Any]]:
    """What one step costs at each level and dense, as a record's header has it; "layers": the
    floats of each layer."""
    found = {}
    for name, level in {**levels, DENSE: DENSE}.items():
        floats, sent = traffic_table(compressor, layers, level, workers)
        costs = [compressor.cost(layer, level, workers) for layer in layers]
        found[name] = {"floats": floats, "bytes": sent, "layers": [c.floats for c in costs]}
    return found


def check_order(
    chosen: Compressor, levels: Mapping[str, Level], layers: Sequence[Layer], workers: int
) -> None:
    """Raise ConfigError unless "low" compression sends at least as much as "high": as many floats,
    and where these are equal, as those of bits of a quantiser, as many bytes."""
    if {"low", "high"} <= levels.keys():
        low, high = levels["low"], levels["high"]
        sent = [traffic_table(chosen, layers, v, workers) for v in (low, high)]
        if sent[0] < sent[1]:
            raise ConfigError(
                f"levels.low = {low!r} sends less than levels.high = {high!r}: low and high "
                "qualify compression, so low must be the level that sends more; swap them"
            )


def _mean(value: Tensor) -> Program:
    return (yield Mean(value))
