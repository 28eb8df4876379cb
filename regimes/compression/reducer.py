"""One training step's reduction: runs each layer's compressor, and averages the loss.

The mean loss travels with one bucket of layers (``regimes.collectives.overlap``). It is NaN where
any gradient is not finite, so that all processes know it in the same step at no extra cost; with
``Compressor.propagates_nonfinite`` the updates are examined instead of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import (
    NO_LAYER,
    JoinShards,
    Layer,
    Mean,
    Program,
    mean_of_sums,
)
from regimes.collectives.world import World
from regimes.compression.base import Compressor, State, upgraded
from regimes.compression.elementwise import Dense
from regimes.compression.kernels import on_gpu
from regimes.compression.traffic import TrafficCheck
from regimes.config import DENSE, Level
from regimes.errors import ConfigError

Stacks = Sequence[Float[Tensor, "rows ..."]] | Mapping[int, Float[Tensor, "rows ..."]]


def finite_flag(tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
    """0, or NaN where any entry is not finite. On a GPU also NaN where the sum overflows: to look
    at the entries, the host would have to wait."""
    total = torch.stack([t.sum() for t in tensors]).sum()
    if total.device.type == "cpu" and not bool(total.isfinite()):
        finite = all(bool(t.isfinite().all()) for t in tensors)
        total = torch.full_like(total, 0.0 if finite else torch.nan)
    return 0 * total


def loss_with_flag(losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]) -> Tensor:
    """The losses, ``[rows]``, in float32 or float64; NaN where a row's gradient is not finite, as
    in ``finite_flag``."""
    sums = stack.sum(1)
    if sums.device.type == "cpu" and not bool(sums.isfinite().all()):
        sums = torch.where(stack.isfinite().all(1), 0, torch.nan)
    flagged = losses + 0 * sums
    return flagged if flagged.dtype == torch.float64 else flagged.to(torch.float32)


class Reducer:
    """Reduces stacked gradients to updates; owns each layer's ``State``.

    Attributes:
        buckets: layers that are reduced together, in order; ``NO_LAYER`` stands for the loss.
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
        buckets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.layers, self.world = list(layers), world
        self.buckets = buckets or [range(NO_LAYER, len(self.layers))]
        self.compressors = [compressor if layer.compressed else Dense() for layer in layers]
        self.reads_rates = any(c.reads_rate for c in self.compressors)
        self.traffic_check = TrafficCheck(self.compressors, self.layers, world)
        first = world.hosted[0]
        self.states = [
            c.init(layer, seed, first) for c, layer in zip(self.compressors, layers, strict=True)
        ]
        for layer, state in zip(layers, self.states, strict=True):
            state.shard = layer.shard
            state.workers = world.workers

    def place(self, workers: int, first: int) -> None:
        """Adapt to a world with ``workers`` workers, of which ``first`` is the first hosted one."""
        for state in self.states:
            if (state.workers, state.first_worker) != (workers, first):
                state.workers, state.first_worker = workers, first
                self.traffic_check.clear()  # formulas may depend on the number

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
        loss, results = self.losses_to_send(losses, stack), {}
        for bucket in self.buckets:
            results.update(self.reduce(bucket, gradients, levels, loss))
        updates = [results[i] for i in range(len(self.layers))]
        return updates, self.flag_mean(results[NO_LAYER], updates, levels)

    def losses_to_send(
        self, losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]
    ) -> Float[Tensor, " rows"]:
        """``loss_with_flag``; without the flag where ``flag_mean`` examines the updates, which
        saves a pass over the gradients."""
        return loss_with_flag(losses, stack[:, :0] if self._examines_updates(stack) else stack)

    def flag_mean(self, mean: Tensor, updates: Sequence[Tensor], levels: Sequence[Level]) -> Tensor:
        """The mean loss, or NaN where an update is not finite; the same on all processes."""
        if not self._examines_updates(mean):
            return mean
        layers = zip(self.compressors, updates, self.states, levels, strict=True)
        probes = [c.finite_probe(update, state, level) for c, update, state, level in layers]
        total = torch.stack(torch._foreach_norm(probes, 1)).sum()
        return mean if bool(total.isfinite()) else torch.full_like(mean, torch.nan)

    def finite_flag(
        self,
        bucket: Sequence[int],
        updates: Mapping[int, Tensor],
        states: Mapping[int, State],
        levels: Sequence[Level],
    ) -> Float[Tensor, ""]:
        """0, or NaN where an update shows that a gradient was not finite, or is not finite itself;
        of compressors with ``propagates_nonfinite``."""
        probes = [
            self.compressors[i].finite_probe(updates[i], states[i], levels[i]) for i in bucket
        ]
        total = torch.stack(torch._foreach_norm(probes, 1)).sum()
        # A sum may overflow where its numbers do not, and their product where they do not.
        return 0 * total if bool(total.isfinite()) else finite_flag([*updates.values(), *probes])

    def _examines_updates(self, like: Tensor) -> bool:
        """Does ``flag_mean`` examine the updates? Not on a GPU: the host would wait for it."""
        alike = self.world.shards == 1  # a shard's update alone may be finite
        return alike and not on_gpu(like) and all(c.propagates_nonfinite for c in self.compressors)

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
            states: memories that change instead of this reducer's own.

        Where a worker's layers are divided into shards, the mean of ``loss`` is over shards, too:
        of ``[L]``, of which the worker sends one number, or of ``[L, k]``, which each shard sends.
        """
        memories: Any = self.states if states is None else states
        self.set_rates(bucket, memories)
        # Generators: a compressor's code runs in `World.drive`, one collective after another.
        programs = [
            _mean(loss, self.world.shards)
            if i == NO_LAYER and loss is not None
            else self._program(i, gradients[i], memories[i], levels[i])
            for i in bucket
        ]
        before = self.traffic_check.before(bucket, gradients, levels)
        batched = any(on_gpu(gradients[i]) for i in bucket if i != NO_LAYER)
        results = self.world.drive(programs, bucket, batched=batched)
        self.traffic_check.after(before, gradients, levels, memories)
        return dict(zip(bucket, results, strict=True))

    def _program(self, i: int, gradient: Tensor, state: State, level: Level) -> Program | Mean:
        """The program that reduces a layer. For a layer that is always dense, like the many small
        ones of a network, it is a single Mean, which saves a generator."""
        compressor = self.compressors[i]
        if type(compressor) is not Dense or state.residual is not None or level != DENSE:
            return compressor.reduce(gradient, state, level)
        state.step += 1
        return Mean(gradient)

    def set_rates(self, bucket: Sequence[int], memories: Any) -> None:
        """Set the rate of the step to come in the memories of layers, if any reads it."""
        rates = self.rates
        for i in bucket if self.reads_rates else ():
            if rates is not None and i != NO_LAYER:
                memories[i].rate = rates[i]

    def set_rows(self, hosted: Sequence[int]) -> None:
        """Rows belong to these workers from now on, all that are present; the caller moves the
        ``residuals``. Only for a world of one process."""
        state: State
        for state in self.states:
            state.first_worker, state.workers, state.hosted = 0, len(hosted), tuple(hosted)

    def residuals(self) -> list[Tensor | None]:
        """What each hosted worker has not sent yet, per layer."""
        return [state.residual for state in self.states]

    def residual_norm(self) -> float:
        """The Euclidean norm of all hosted residuals together."""
        residuals = [r for r in self.residuals() if r is not None]
        return float(torch.stack(torch._foreach_norm(residuals)).norm()) if residuals else 0.0

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
            kept = upgraded({layer.name: shared[layer.name]}, compressor.residual)
            state.load_shared_state(kept[layer.name])
            state.residual = residual = residuals[layer.name]
            if residual is None:
                continue  # a scalar, which has no matrix, never has one
            if tuple(residual.shape[1:]) not in (layer.matrix, layer.shape):
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


def _mean(value: Tensor, shards: int) -> Program | Mean:
    if shards == 1:
        return Mean(value)
    return _mean_loss(value, shards) if value.ndim == 1 else _mean_of_shards(value, shards)


def _mean_of_shards(value: Float[Tensor, "hosted k"], shards: int) -> Program:
    mean = yield Mean(value)
    joined = yield JoinShards(mean, len(mean), shards * len(mean))
    return joined.view(shards, -1).mean(0)


def _mean_loss(value: Float[Tensor, " hosted"], shards: int) -> Program:
    total = yield from mean_of_sums(value[:, None], shards)
    return total[0] / shards
