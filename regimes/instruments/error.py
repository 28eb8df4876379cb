"""What compression would lose: the share of the gradient's energy beyond each level's reach.

At measured steps the mean gradient g is compressed at every level, apart from the run and without
error feedback: ``error:<level>`` is sum |g - C(g)|^2 / sum |g|^2 over the epoch's measured steps,
0 for dense and near 1 where nothing of g gets through. PowerSGD's Q is carried along per level, as
the run carries its own. Read by ``ErrorLadder``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.config import Level
from regimes.errors import ConfigError
from regimes.instruments.base import Reading, Scene
from regimes.world import World, mean_program


@dataclass(frozen=True)
class CompressionError:
    """Which levels, and how often.

    Attributes:
        levels: names of the configuration's levels; none: all of them.
        stride: measure steps 0, stride, 2 stride, ... of an epoch. A measured step compresses once
            per level, and on several processes costs one dense mean (counted as signal bytes).
    """

    levels: tuple[str, ...] = ()
    stride: int = 8
    every: int = 1

    def __post_init__(self) -> None:
        if self.stride < 1 or self.every < 1:
            raise ConfigError(
                f"error.stride and error.every must be at least 1, got {self.stride}, {self.every}"
            )

    def start(self, scene: Scene) -> ErrorGauge:
        return ErrorGauge(self, scene)


class ErrorGauge:
    """Sums over an epoch's measured steps, and the compressor's memory per level.

    Raises:
        ConfigError: a level that the run does not define.
    """

    def __init__(self, settings: CompressionError, scene: Scene) -> None:
        if scene.compressor is None:
            raise ConfigError("the instrument 'error' needs a run with a compressor")
        for name in settings.levels:
            if name not in scene.levels:
                known = ", ".join(scene.levels)
                raise ConfigError(f"error.levels: unknown level {name!r}; expected some of {known}")
        self.stride, self.world, self.layers = settings.stride, scene.world, list(scene.layers)
        self.compressor, self.alone = scene.compressor, World(1)
        self.alone.meter.dtype = scene.world.meter.dtype
        self.levels: dict[str, Level] = {
            name: scene.levels[name] for name in settings.levels or scene.levels
        }
        self.states = {
            name: [self.compressor.init(layer, scene.seed, 0) for layer in self.layers]
            for name in self.levels
        }
        self.device = scene.parameters[0].device
        self._reset()

    def _reset(self) -> None:
        self.seen = 0
        self.lost = {name: torch.zeros(len(self.layers)).double() for name in self.levels}
        self.whole = torch.zeros(len(self.layers)).double()

    def step(self, stack: Float[Tensor, "rows N"], updates: Sequence[Tensor]) -> None:
        """Measure one step; gradients and updates are left as they are."""
        self.seen += 1
        if (self.seen - 1) % self.stride:
            return
        mean = self.world.drive([mean_program(stack)], [-1], signal=True)[0]
        sizes = [layer.size for layer in self.layers]
        parts = [p.view(x.shape) for p, x in zip(mean.split(sizes), self.layers, strict=True)]
        self.whole += _squares(parts)
        for name, level in self.levels.items():
            self.lost[name] += _squares(self._left(parts, name, level))

    def _left(self, parts: list[Tensor], name: str, level: Level) -> list[Tensor]:
        """What a level misses of each layer; nothing of what is never compressed."""
        chosen = [i for i, layer in enumerate(self.layers) if layer.compressed]
        states = [self.states[name][i] for i in chosen]
        for state in states:
            state.residual = None
        programs = [
            self.compressor.reduce(parts[i][None], state, level)
            for i, state in zip(chosen, states, strict=True)
        ]
        found = dict(zip(chosen, self.alone.drive(programs, chosen), strict=True))
        self.alone.meter.take()
        return [p - found[i] if i in found else torch.zeros_like(p) for i, p in enumerate(parts)]

    def read(self, epoch: int) -> Reading:
        """``error:<level>`` per layer and for the model; NaN where the gradient is zero."""
        lost, whole = self.lost, self.whole
        self._reset()
        return Reading(
            layers={f"error:{n}": (x / whole).tolist() for n, x in lost.items()},
            model={f"error:{n}": float(x.sum() / whole.sum()) for n, x in lost.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        """The memories that all processes have alike."""
        apart = ("key", "first_worker", "residual")
        return {
            name: [{k: v for k, v in vars(s).items() if k not in apart} for s in states]
            for name, states in self.states.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, states in state.items():
            for ours, theirs in zip(self.states[name], states, strict=True):
                vars(ours).update(
                    {
                        k: v.to(self.device) if isinstance(v, Tensor) else v
                        for k, v in theirs.items()
                    }
                )


def _squares(tensors: Sequence[Tensor]) -> Float[Tensor, " layers"]:
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().cpu()
