"""One training step's reduction: all layers' generators and memories, and the loss, in lock-step.

The mean loss rides in the first round's collective. It carries the news of a non-finite gradient
too (``loss + 0 * sum(gradient)``), so that all processes learn of it in the same step, for free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.base import Compressor, Layer, State
from regimes.compression.dense import Dense
from regimes.config import Level
from regimes.errors import ConfigError
from regimes.world import World, mean_program

IDENTITY = ("key", "first_worker")  # fields of a State that follow from the configuration


def health(losses: Float[Tensor, " rows"], stack: Float[Tensor, "rows N"]) -> Tensor:
    """The losses, ``[rows]``; NaN where a gradient is not finite."""
    return (losses + 0 * stack.sum(1)).to(torch.float32)


class Reducer:
    """Reduces stacked gradients to updates; owns each layer's ``State``."""

    def __init__(
        self, compressor: Compressor, layers: Sequence[Layer], world: World, seed: int
    ) -> None:
        self.layers, self.world = list(layers), world
        self.compressors = [compressor if layer.compressed else Dense() for layer in layers]
        first = world.hosted.start
        self.states = [
            c.init(layer, seed, first) for c, layer in zip(self.compressors, layers, strict=True)
        ]

    def step(
        self,
        gradients: Sequence[Float[Tensor, "rows ..."]],
        levels: Sequence[Level],
        losses: Float[Tensor, " rows"],
        stack: Float[Tensor, "rows N"],
    ) -> tuple[list[Tensor], Tensor]:
        """Reduce one step.

        Returns:
            The updates ``[*shape]`` per layer and the mean loss, NaN if any gradient is not
            finite. Gradients are left as they are; states move on.
        """
        news = health(losses, stack)
        loss, *updates = self.reduce(range(-1, len(self.layers)), gradients, levels, news)
        return updates, loss

    def reduce(
        self,
        parcel: Sequence[int],
        gradients: Sequence[Float[Tensor, "rows ..."]],
        levels: Sequence[Level],
        news: Float[Tensor, " rows"] | None = None,
    ) -> list[Tensor]:
        """All rounds of some layers; their updates. The layer -1 stands for ``news``."""
        programs = [
            mean_program(news)
            if i < 0 and news is not None
            else self.compressors[i].reduce(gradients[i], self.states[i], levels[i])
            for i in parcel
        ]
        return self.world.drive(programs, parcel)

    def residuals(self) -> list[Tensor | None]:
        """What each hosted worker still owes, per layer."""
        return [state.residual for state in self.states]

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, own): memories that all workers have alike, and the hosted residuals."""
        shared, own = {}, {}
        for layer, state in zip(self.layers, self.states, strict=True):
            fields = {k: v for k, v in vars(state).items() if k not in IDENTITY}
            own[layer.name] = fields.pop("residual")
            shared[layer.name] = fields
        return shared, own

    def load_state_dict(self, shared: dict[str, Any], residuals: dict[str, Any]) -> None:
        """The inverse; tensors move to the gradients' device at their first use.

        Raises:
            ConfigError: the checkpoint is of another model.
        """
        for layer, state in zip(self.layers, self.states, strict=True):
            if layer.name not in shared or layer.name not in residuals:
                raise ConfigError(f"the checkpoint has no layer {layer.name!r}: another model?")
            for name, value in shared[layer.name].items():
                setattr(state, name, value)
            state.residual = residuals[layer.name]

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


def check_order(
    chosen: Compressor, levels: Mapping[str, Level], layers: Sequence[Layer], workers: int
) -> None:
    """Raise ConfigError unless "low" compression sends at least as much as "high"."""
    if {"low", "high"} <= levels.keys():
        low, high = levels["low"], levels["high"]
        sent = [traffic_table(chosen, layers, v, workers)[0] for v in (low, high)]
        if sent[0] < sent[1]:
            raise ConfigError(
                f"levels.low = {low!r} sends less than levels.high = {high!r}: low and high "
                "qualify compression, so low must be the level that sends more; swap them"
            )
