"""The contract of a compressor: turn worker gradients into one shared update.

A compressor is straight-line maths that *asks* for its collectives: ``send`` is a generator that
yields ``Mean`` or ``Gather`` requests and is answered with their results. It never talks to
another process. ``World.drive`` runs all layers' generators in lock-step, so that each round is
one collective, whether the workers are simulated or real.

Gradients carry a leading axis of hosted workers, ``[L, n, m]``: a convolution is viewed as
``[out, in * kh * kw]`` (PowerSGD, section 3). Error feedback (Stich & Karimireddy, 2019) and the
level "dense" are handled here, once, for all compressors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.config import DENSE, Level
from regimes.errors import ConfigError


@dataclass(frozen=True)
class Layer:
    """One named parameter tensor: the unit at which compressors and policies decide."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """(n, m): the first dimension against all others."""
        return self.shape[0], self.size // self.shape[0]

    @property
    def compressed(self) -> bool:
        """1-D parameters travel dense (paper, Appendix F)."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Mean:
    """Ask for the mean over all W workers: ``[L, ...] -> [...]``."""

    tensor: Tensor


@dataclass(frozen=True)
class Gather:
    """Ask for every worker's tensor, in worker order: ``[L, ...] -> [W, ...]``."""

    tensor: Tensor


@dataclass(frozen=True)
class Traffic:
    """What one step hands to the collectives.

    Attributes:
        floats: the paper's convention, in elements of the model's dtype (other dtypes count by
            their bits, 32 to a float): a mean counts once, a gather once per worker.
        bytes: what one worker sends.
    """

    floats: float
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.floats + other.floats, self.bytes + other.bytes)


class Workspace:
    """Memory that is used again at every step, because fresh pages cost as much as a pass over
    them. No field of the state: neither saved nor copied."""

    __slots__ = ("_update",)

    def update_like(self, matrix: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Where this layer's updates go, undefined at first; each lives until the next."""
        kept: Tensor | None = getattr(self, "_update", None)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (
            matrix.shape, matrix.dtype, matrix.device
        ):  # fmt: skip
            kept = self._update = torch.empty_like(matrix, memory_format=torch.contiguous_format)
        return kept


@dataclass
class State(Workspace):
    """A layer's memory between steps. Every field but the residual is the same on all workers.

    Attributes:
        key: the layer's stream key: (seed, layer name). Identity, not memory.
        first_worker: which worker the first hosted row belongs to. Identity, not memory.
        step: how often this layer has been sent.
        residual: what each hosted worker still owes, or None when it owes nothing.
    """

    key: tuple[int, str]
    first_worker: int = 0
    step: int = 0
    residual: Float[Tensor, "hosted n m"] | None = None


Request = Mean | Gather
Program = Generator[Request, Tensor, Tensor]
Sending = Generator[Request, Tensor, tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Hyper-parameters of a compressor; a layer's memory is in its ``State``.

    Attributes:
        error_feedback: add to each gradient what earlier steps left unsent.
        linear: the update depends on the workers' gradients through their mean alone, residuals
            included; such a compressor may be handed that mean in place of the workers.
    """

    error_feedback: bool = True
    linear: ClassVar[bool] = False

    @abstractmethod
    def check(self, level: Level) -> None:
        """Raise ConfigError unless ``level`` is one of this compressor's (or "dense")."""

    @abstractmethod
    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        """Ask for collectives; return ``(update [n, m], sent [L, n, m] or [n, m])``.

        ``sent`` is what each worker's ``delta`` has contributed; the rest becomes its residual.
        With error feedback ``send`` may take it out of ``delta`` itself and return None. Otherwise
        ``delta`` must be left as it is; ``state`` may change except for its residual.
        """

    @abstractmethod
    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """What ``send`` will hand to the collectives for one step of one layer."""

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> State:
        """An empty memory."""
        return State((seed, layer.name), first_worker)

    def reduce(self, grad: Float[Tensor, " hosted *shape"], state: State, level: Level) -> Program:
        """Error feedback around ``send``; returns the update, ``[*shape]``.

        ``grad`` is left as it is. The residual survives every change of level; at "dense" it is
        sent out in full and is then zero.
        """
        delta = grad.flatten(2) if grad.ndim > 2 else grad
        if state.residual is not None:
            delta = state.residual.add_(delta)
        elif self.error_feedback and level != DENSE:
            delta = state.residual = delta.clone()
        state.step += 1
        if level == DENSE:
            update = yield Mean(delta)
            state.residual = None
        else:
            update, sent = yield from self.send(delta, state, level)
            if self.error_feedback and sent is not None:
                delta.sub_(sent)
        return update.view(grad.shape[1:])

    def cost(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Traffic of one step of one layer, 1-D layers and the level "dense" included."""
        if level == DENSE or not layer.compressed:
            return Traffic(layer.size, layer.size * itemsize)
        return self.traffic(layer, level, workers, itemsize)


def reject(compressor: str, level: Level, expected: str) -> ConfigError:
    """The sentence for a level that a compressor does not have."""
    return ConfigError(f'level {level!r} is none of {compressor}: expected {expected}, or "dense"')
