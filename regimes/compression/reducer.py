"""One training step's reduction: all layers' generators and memories, and the loss, in lock-step.

The mean loss rides in the first round's collective. It carries the news of a non-finite gradient
too (``loss + 0 * sum(gradient)``), so that all processes learn of it in the same step, for free.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        health = losses + 0 * stack.sum(1)
        programs = [mean_program(health.to(torch.float32))]
        for c, grad, state, level in zip(
            self.compressors, gradients, self.states, levels, strict=True
        ):
            programs.append(c.reduce(grad, state, level))
        results = self.world.drive(programs, range(-1, len(self.layers)))
        return results[1:], results[0]

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
