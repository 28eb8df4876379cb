"""The contract of a compressor: turn worker gradients into one shared update.

A compressor is straight-line maths that *asks* for its collectives: ``send`` is a generator that
yields ``Mean`` or ``Gather`` requests and is answered with their results. It never talks to
another process. ``World.drive`` runs a bucket's generators side by side and answers one round of
requests after another; between real processes a round travels as few collectives. ``Together``
asks for work that layers do in one go on a GPU (``batched``).

Gradients carry a leading axis of hosted workers, ``[L, n, m]``: a convolution is viewed as
``[out, in * kh * kw]`` (PowerSGD, section 3). Error feedback (Stich & Karimireddy, 2019) and the
level "dense" are handled here, once, for all compressors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Layer, Mean, Program, Request, Together, Traffic
from regimes.compression import returns
from regimes.compression.batched import added, copied, subtracted
from regimes.config import DENSE, Level
from regimes.errors import require


class Workspace:
    """What does not outlive a step, or only as memory to be used again, because fresh pages cost as
    much as a pass over them. Slots and no fields: checkpoints leave them out, ``copy.copy`` shares
    them, and ``copy.deepcopy`` copies them.

    Attributes:
        early: what ``owe`` has made already, for the ``send`` that follows.
    """

    __slots__ = ("_checked", "_update", "early")
    early: Tensor | None

    def is_first(self, level: Level) -> bool:
        """Is this the first call with that level?"""
        known: frozenset[Level] = getattr(self, "_checked", frozenset())
        if level in known:
            return False
        self._checked = known | {level}
        return True

    def take_early(self) -> Tensor | None:
        """Once; then None."""
        found = getattr(self, "early", None)
        self.early = None
        return found

    def update_like(self, matrix: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Where this layer's updates go, undefined at first; each lives until the next."""
        kept: Tensor | None = getattr(self, "_update", None)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (
            matrix.shape,
            matrix.dtype,
            matrix.device,
        ):
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

    def memory(self) -> dict[str, Any]:
        """What all workers have alike and the next step depends on, for a checkpoint."""
        own = ("key", "first_worker", "residual")
        return {name: value for name, value in vars(self).items() if name not in own}

    def recall(self, memory: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Take over what ``memory`` gave, its tensors on a device."""
        for name, value in memory.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)


HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
Sending = Generator[Request, Any, tuple[Tensor, Tensor | None]]
Owing = Generator[Request, Any, Tensor]


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Hyper-parameters of a compressor; a layer's memory is in its ``State``.

    Attributes:
        error_feedback: add to each gradient what earlier steps left unsent; a number below 1 is the
            share of it that is kept from step to step, the rest is forgotten.
        phases: over how many kinds of steps ``traffic`` is the mean; see ``phase``.
        linear: the update depends on the workers' gradients through their mean alone, residuals
            included; such a compressor may be handed that mean in place of the workers.
        tells: where the gradient of any worker is not finite, ``evidence`` is not finite either.
    """

    error_feedback: bool | float = True
    linear: ClassVar[bool] = False
    tells: ClassVar[bool] = False
    phases: ClassVar[int] = 1
    usual: ClassVar[Mapping[str, Level]] = {}  # low and high, where a hook's user names none

    def __post_init__(self) -> None:
        given = self.error_feedback
        good = isinstance(given, bool) or 0 < given <= 1
        require(good, "compressor.error_feedback", given, "true, false, or a share in (0, 1]")

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
        """What ``send`` will hand to the collectives for one step of one layer. A run checks it
        against what was sent, at each level once."""

    def phase(self, state: State) -> int:
        """Which of its ``phases`` kinds of steps a layer has just taken."""
        return 0

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> State:
        """An empty memory."""
        return State((seed, layer.name), first_worker)

    @property
    def share(self) -> float:
        """Of what is owed, what is kept from step to step."""
        return float(self.error_feedback or True)

    def owe(self, grad: Float[Tensor, "hosted n m"], state: State, level: Level) -> Owing:
        """Ask for the sum of gradient and residual, in place of the residual."""
        return (yield Together(added, state.residual, grad, self.share))

    def reduce(self, grad: Float[Tensor, " hosted *shape"], state: State, level: Level) -> Program:
        """Error feedback around ``send``; returns the update, ``[*shape]``.

        ``grad`` is left as it is. The residual survives every change of level; at "dense" it is
        sent out in full and is then zero.
        """
        delta = grad.flatten(2) if grad.ndim > 2 else grad
        if state.residual is not None:
            # Before compressing: at any level, dense too, what is owed is part of what is sent.
            # In place on the residual, never on grad: gauges read the gradients afterwards.
            # Neither carries an autograd graph, which in-place arithmetic would break.
            delta = state.residual = yield from self.owe(delta, state, level)
        elif self.error_feedback and level != DENSE:
            delta = state.residual = yield Together(copied, delta)
        state.step += 1
        if level == DENSE:
            update = yield Mean(delta)
            state.residual = None  # all sent
        else:
            update, sent = yield from self._sending(delta, state, level)
            if self.error_feedback and sent is not None:
                yield Together(subtracted, delta, sent)  # what was not sent stays owed
        return update.view(grad.shape[1:])

    def evidence(self, update: Tensor, state: State, level: Level) -> Tensor:
        """After ``reduce``: a tensor that is the same on all workers, and, if the compressor
        ``tells``, not finite where a gradient was not. The update, or something smaller."""
        return update

    def _sending(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        """``send``; the first time at a level, what it does is checked."""
        if not state.is_first(level):
            return (yield from self.send(delta, state, level))
        name, layer, before = type(self).__name__, state.key[1], returns.sample(delta)
        program = self.send(delta, state, level)
        returns.check_send(name, program, layer)
        answer = yield from program
        returns.check_sent(name, layer, answer, delta, before, bool(self.error_feedback))
        return answer

    def cost(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Traffic of one step of one layer, 1-D layers and the level "dense" included."""
        if level == DENSE or not layer.compressed:
            return Traffic(layer.size, layer.size * itemsize)
        return self.traffic(layer, level, workers, itemsize)
