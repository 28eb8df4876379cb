"""A bucket: what several layers have to send, which a compressor exchanges together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.layers import Shard
from regimes.compression.kernels import Workspace, sub_
from regimes.config import Level
from regimes.seeding import Seed, derive_seed


@dataclass
class State(Workspace):
    """A layer's memory between steps. Every field but the residual is the same on all workers.

    Attributes:
        key: the layer's stream key: (seed, layer name). Identity, not memory.
        first_worker: which worker the first hosted row belongs to. Identity, not memory.
        workers: how many send. Identity, not memory.
        hosted: the workers of the rows, where these draw no numbers of their own; None: the
            consecutive ones from ``first_worker``. Identity, not memory.
        shard: which rows of the layer are here; None: all. Identity, not memory.
        step: how often this layer has been sent.
        rate: the learning rate of this step; 1 where nothing says it, as between local steps: their
            updates are in units of the weights.
        scale: what the gradient of this step was multiplied by, with the loss (a GradScaler's).
            Where a residual is saved, it is divided by it.
        residual_rate: the learning rate at which the residual is a movement of the weights; None:
            it is a gradient, which counts at the rate of the step that sends it.
        residual: what each hosted worker has not sent yet; None: nothing.
        replaced: names of fields that hold another tensor after each step, and are never changed
            in place.
    """

    replaced: ClassVar[frozenset[str]] = frozenset()
    key: tuple[int, str]
    first_worker: int = 0
    workers: int = field(default=1, kw_only=True)
    hosted: Sequence[int] | None = field(default=None, kw_only=True)
    shard: Shard | None = None
    step: int = 0
    rate: float = 1.0
    scale: float = 1.0
    residual_rate: float | None = None
    residual: Float[Tensor, "hosted n m"] | None = None

    @property
    def residual_unit(self) -> float:
        """What the residual is multiplied by, beside the scale that a hook keeps of each layer."""
        return 1.0

    def rescale_residual(self, ratio: float) -> None:
        """The residual is multiplied by ``ratio`` times ``residual_unit``."""

    def seeds(self, what: str, workers: Iterable[int] | None = None) -> list[Seed]:
        """Seeds of this step's random numbers for a purpose, one for each of some workers, or one
        that all share. In a step that is captured they are places on the device (``SeedTable``)."""
        tails = [()] if workers is None else [(worker,) for worker in workers]
        return self._seeds([partial(self._seed, what, *tail) for tail in tails])

    def own_seeds(self, what: str, hosted: int) -> list[Seed]:
        """`seeds` of the workers of so many rows."""
        first = self.first_worker
        return self.seeds(what, self.hosted or range(first, first + hosted))

    def _seed(self, what: str, *tail: int) -> int:
        return derive_seed(*self.key, what, self.step, *tail)

    def twin(self) -> State:
        """A state that shares no memory with this one but the residual, the buffer and what is no
        tensor; ``copy.copy`` takes ten times as long. Where the next residual goes is not taken
        over: it may be the memory of this one's."""
        other = object.__new__(type(self))
        own = vars(other)
        own.update(vars(self))
        if len(own) > len(_PLAIN):  # another class than this, or fields that one has added
            for name in own.keys() - _PLAIN - self.replaced:
                if isinstance(value := own[name], Tensor):
                    own[name] = value.clone()
        for name in ("_buffer", "_table"):
            if (value := getattr(self, name, None)) is not None:
                setattr(other, name, value)
        return other

    def shared_state(self) -> dict[str, Any]:
        """What is the same on all workers and the next step depends on, for a checkpoint."""
        own = ("key", "first_worker", "workers", "hosted", "shard", "scale", "residual")
        return {name: value for name, value in vars(self).items() if name not in own}

    def load_shared_state(
        self, shared: Mapping[str, Any], device: torch.device | None = None
    ) -> None:
        """The inverse; moves tensors to ``device``."""
        for name, value in shared.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)


_PLAIN = frozenset(field.name for field in fields(State))  # of these the residual alone is a tensor


@dataclass
class Bucket:
    """What several layers of one compressor have to send, none of them at "dense".

    Attributes:
        layers: their indices in the model.
        deltas: by layer ``[L, n, m]``: each hosted worker's gradient, with error feedback plus what
            its earlier steps have not sent. A convolution is viewed as ``[out, in * kh * kw]``
            (PowerSGD, section 3).
        states: their memories.
        levels: how each is compressed.
        feedback: what `Compressor.exchange` leaves in ``deltas`` is the residual. Without it the
            deltas are the gradients themselves, which others read afterwards.
    """

    layers: Sequence[int]
    deltas: list[Float[Tensor, "hosted _ _"]]
    states: Sequence[Any]
    levels: Sequence[Level]
    feedback: bool

    @property
    def level(self) -> Level:
        """The level of all, where a compressor is given one (``Compressor.one_level``)."""
        return self.levels[0]

    @cached_property
    def sizes(self) -> list[int]:
        """How many numbers of a worker each layer has."""
        return [delta[0].numel() for delta in self.deltas]

    @property
    def flat(self) -> list[Float[Tensor, "hosted _"]]:
        """The deltas as rows, of the same memory."""
        return [delta.flatten(1) for delta in self.deltas]

    @cached_property
    def whole(self) -> Float[Tensor, "hosted N"]:
        """The deltas of all layers end to end. With error feedback ``deltas`` and the residuals are
        parts of it from now on; without it is a copy where they do not lie so in memory."""
        whole = end_to_end(self.deltas)
        if self.feedback:
            parts = whole.split(self.sizes, dim=1)
            for i, (part, state) in enumerate(zip(parts, self.states, strict=True)):
                delta = self.deltas[i] = state.residual = part.view(self.deltas[i].shape)
                if state.room is not None:  # else it would keep memory that nothing uses
                    state.write_to(delta, None)
        return whole

    def shares(self, numbers: Sequence[int]) -> list[dict[int, int]]:
        """Of one tensor for all layers: how many of a worker's numbers each layer has, as `Comm`
        counts them."""
        return [dict(zip(self.layers, numbers, strict=True))]

    def subtract(self, sent: Sequence[Tensor]) -> None:
        """Take out of the deltas what was sent of each layer, ``[L, n, m]``, or ``[n, m]`` where it
        is the same of all workers. What is left is the residual; without error feedback this does
        nothing."""
        if self.feedback:
            sub_([*zip(self.deltas, sent, strict=True)])


def end_to_end(parts: Sequence[Float[Tensor, "rows ..."]]) -> Float[Tensor, "rows N"]:
    """Tensors of as many rows side by side: a view where they are so in memory, else a copy."""
    first, place = parts[0], parts[0].storage_offset()
    for part in parts:
        beside = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.storage_offset() == place
            and (len(part) == 1 or part.stride(0) == first.stride(0))
            and part[0].is_contiguous()
        )
        if not beside:
            return torch.cat([part.flatten(1) for part in parts], dim=1)
        place += part[0].numel()
    width = place - first.storage_offset()
    return first.as_strided((len(first), width), (first.stride(0), 1), first.storage_offset())


def restart_memories(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """New memories, by layer, that go on counting steps and keep the residuals' units."""
    kept = ("step", "residual_rate")
    return {
        name: {**new, **{key: saved[name][key] for key in kept if key in saved[name]}}
        for name, new in fresh.items()
    }
