"""A layer's memory between steps, and memory that is only used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.config import Level


class Workspace:
    """What a checkpoint does not need: a buffer that is reused, because fresh pages cost as much as
    a pass over them, and which levels were checked.

    Slots, not fields: ``vars`` leaves them out, ``copy.copy`` shares them, ``copy.deepcopy``
    copies them.
    """

    __slots__ = ("_buffer", "_checked")

    def is_first(self, level: Level) -> bool:
        """Is this the first call with that level?"""
        checked: frozenset[Level] = getattr(self, "_checked", frozenset())
        self._checked = checked | {level}
        return level not in checked

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The layer's buffer in the type and on the device of ``like``. Its contents are undefined
        at first and overwritten in the next step."""
        buffer: Tensor | None = getattr(self, "_buffer", None)
        wanted = (tuple(shape), like.dtype, like.device)
        if buffer is None or (tuple(buffer.shape), buffer.dtype, buffer.device) != wanted:
            buffer = self._buffer = like.new_empty(shape)
        return buffer


@dataclass
class State(Workspace):
    """A layer's memory between steps. Every field but the residual is the same on all workers.

    Attributes:
        key: the layer's stream key: (seed, layer name). Identity, not memory.
        first_worker: which worker the first hosted row belongs to. Identity, not memory.
        step: how often this layer has been sent.
        residual: what each hosted worker has not sent yet; None: nothing.
    """

    key: tuple[int, str]
    first_worker: int = 0
    step: int = 0
    residual: Float[Tensor, "hosted n m"] | None = None

    def shared_state(self) -> dict[str, Any]:
        """What is the same on all workers and the next step depends on, for a checkpoint."""
        own = ("key", "first_worker", "residual")
        return {name: value for name, value in vars(self).items() if name not in own}

    def load_shared_state(
        self, shared: Mapping[str, Any], device: torch.device | None = None
    ) -> None:
        """The inverse; moves tensors to ``device``."""
        for name, value in shared.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
