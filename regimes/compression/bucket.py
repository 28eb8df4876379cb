"""A bucket: what several layers have to send, which a compressor exchanges together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import Level
from regimes.base.seeding import Seed, derive_seed
from regimes.collectives.layers import Shard
from regimes.compression.kernels import Workspace, group_alike, make_once, on_gpu, sub_

T = TypeVar("T")


@dataclass
class State(Workspace):
    """Holds the memory of a layer between steps. Every field but the residual is the same on all
    workers.

    Attributes:
        key: The stream key of the layer, (seed, layer name). It is identity, not memory.
        first_worker: The worker to which the first hosted row belongs. It is identity, not memory.
        workers: The number of workers that send. It is identity, not memory.
        hosted: The workers of the rows, if these draw no numbers of their own. None: the
            consecutive ones from ``first_worker``. It is identity, not memory.
        shard: The rows of the layer that are here. None: all. It is identity, not memory.
        inner: The shape of each matrix of the layer, if its rows are matrices and its compressor
            reads them so (``Layer.inner``). None: the layer is one matrix. It is identity, not
            memory.
        step: The number of times that this layer has been sent.
        rate: The learning rate of this step. It is 1 if none is known, as between local steps,
            whose updates are in units of the weights.
        scale: What the gradient of the last step was multiplied by, with the loss (a GradScaler's),
            and its residual with it, unless the compressor keeps a unit of its own (``in_place``).
            A saved residual is divided by it.
        residual_rate: The learning rate at which the residual is a movement of the weights. None:
            it is a gradient, which counts at the rate of the step that sends it.
        residual: What each hosted worker has not sent yet. None: nothing.
        replaced: Names of fields that hold another tensor after each step, and are never changed in
            place.
    """

    replaced: ClassVar[frozenset[str]] = frozenset()
    key: tuple[int, str]
    first_worker: int = 0
    workers: int = field(default=1, kw_only=True)
    hosted: Sequence[int] | None = field(default=None, kw_only=True)
    shard: Shard | None = None
    inner: tuple[int, int] | None = field(default=None, kw_only=True)
    step: int = 0
    rate: float = 1.0
    scale: float = 1.0
    residual_rate: float | None = None
    residual: Float[Tensor, "hosted n m"] | None = None

    @property
    def residual_unit(self) -> float:
        """Return what the residual is multiplied by, beside the scale that a hook keeps of each
        layer."""
        return 1.0

    def rescale_residual(self, ratio: float) -> None:
        """Note that the residual is multiplied by ``ratio`` times ``residual_unit``."""

    def seeds(self, what: str, workers: Iterable[int] | None = None) -> list[Seed]:
        """Return seeds of this step's random numbers for a purpose: one for each of some workers,
        or one that all share. In a step that is captured they are places on the device
        (``SeedTable``)."""
        tails = [()] if workers is None else [(worker,) for worker in workers]
        return self._seeds([partial(self._seed, what, *tail) for tail in tails])

    def own_seeds(self, what: str, hosted: int) -> list[Seed]:
        """Return the ``seeds`` of the workers of so many rows."""
        first = self.first_worker
        return self.seeds(what, self.hosted or range(first, first + hosted))

    def _seed(self, what: str, *tail: int) -> int:
        return derive_seed(*self.key, what, self.step, *tail)

    def snapshot(self) -> dict[str, Any]:
        """Return the fields as they are now; later steps do not change what is returned. A
        residual's tensor is not copied: the next step writes to other memory, if it is
        tentative."""
        own = vars(self).copy()
        if len(own) > len(_PLAIN):  # another class than this, or fields that one has added
            for name in own.keys() - _PLAIN - self.replaced:
                if isinstance(value := own[name], Tensor):
                    own[name] = value.clone()
        return own

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Set the fields to those of a ``snapshot``."""
        vars(self).clear()
        vars(self).update(snapshot)

    def copy_for_step(self) -> State:
        """Return a copy for a step that may not count: tensors are copied, but the residual is
        shared."""
        other = copy.copy(self)
        other.restore(self.snapshot())
        return other

    def shared_state(self) -> dict[str, Any]:
        """Return, for a checkpoint, what is the same on all workers and the next step depends
        on."""
        own = ("key", "first_worker", "workers", "hosted", "shard", "inner", "scale", "residual")
        return {name: value for name, value in vars(self).items() if name not in own}

    def load_shared_state(
        self, shared: Mapping[str, Any], device: torch.device | None = None
    ) -> None:
        """Set the fields to those of a ``shared_state``; move tensors to ``device``."""
        for name, value in shared.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)


_PLAIN = frozenset(field.name for field in fields(State))  # of these the residual alone is a tensor


@dataclass
class Turn:
    """Holds tensors for the residuals of a bucket.

    Attributes:
        residuals: by layer ``[L, n, m]``.
        made: see `Bucket.of_deltas`.
    """

    residuals: list[Float[Tensor, "hosted _ _"]]
    made: dict[Hashable, Any] = field(default_factory=dict)


@dataclass
class Bucket:
    """Holds what several layers of one compressor have to send, none of them at "dense".

    It lasts until levels change. What depends on layers, levels and addresses alone is made once
    (``once``, ``of_deltas``).

    Attributes:
        layers: The indices of the layers in the model.
        states: The memories of the layers.
        levels: The level of each layer.
        feedback: Whether what `Compressor.exchange` leaves in ``deltas`` is the residual. If false,
            the deltas are the gradients themselves, which others read afterwards.
        tentative: Whether the next residuals are written to other memory than the present ones, so
            that `State.restore` brings these back; two places take turns. If false, they are
            written over the present ones.
        deltas: A tensor ``[L, n, m]`` for each layer: the gradient of each of the L hosted workers,
            with error feedback plus what its earlier steps have not sent. A convolution is viewed
            as ``[out, in * kh * kw]`` (PowerSGD, section 3).
    """

    layers: Sequence[int]
    states: Sequence[Any]
    levels: Sequence[Level]
    feedback: bool
    tentative: bool = False
    deltas: list[Float[Tensor, "hosted _ _"]] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)
    _made: dict[Hashable, Any] = field(default_factory=dict)
    _of_deltas: dict[Hashable, Any] = field(default_factory=dict)

    def take(self, deltas: list[Tensor]) -> None:
        """Use these tensors as the deltas of the step that begins; they are no residuals."""
        self.deltas, self._of_deltas = deltas, {}

    def take_turn(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Choose the tensors in which the deltas of the step that begins will be written; they are
        its residuals.

        Args:
            like: tensors of their shapes and types.
        """
        present, turns = [state.residual for state in self.states], self._turns
        for at, turn in enumerate(turns):
            if all(x is None or x is y for x, y in zip(present, turn.residuals, strict=True)):
                at = 1 - at if self.tentative else at
                break
        else:  # at first, or some are elsewhere, as after a step that was undone in some layers
            at = 0
            turns[:1] = [Turn(_make_residuals(like))]
        if at == len(turns):
            turns.append(Turn(_make_residuals(like)))
        self.deltas, self._of_deltas = turns[at].residuals, turns[at].made
        return self.deltas

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return what depends on layers and levels alone; it is made in the first step."""
        return make_once(self._made, what, make)

    def of_deltas(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return what depends on where the deltas lie in memory as well; it is made once for each
        place."""
        return make_once(self._of_deltas, what, make)

    @property
    def level(self) -> Level:
        """Return the level of all layers, where a compressor is given one level
        (``Compressor.one_level``)."""
        return self.levels[0]

    @property
    def sizes(self) -> list[int]:
        """Return how many numbers of a worker each layer has."""
        return self.once("sizes", lambda: [delta[0].numel() for delta in self.deltas])

    @property
    def flat(self) -> list[Float[Tensor, "hosted _"]]:
        """Return the deltas as rows, ``[L, n * m]`` each, of the same memory."""
        return self.of_deltas("flat", lambda: [delta.flatten(1) for delta in self.deltas])

    @property
    def whole(self) -> Float[Tensor, "hosted N"]:
        """Return the deltas of all layers end to end. With error feedback ``deltas`` and the
        residuals are parts of this tensor from now on. Without it the tensor is a copy where the
        deltas do not lie end to end in memory."""
        return self.of_deltas("whole", self._join)

    def _join(self) -> Float[Tensor, "hosted N"]:
        whole = end_to_end(self.deltas)
        if self.feedback:
            parts = whole.split(self.sizes, dim=1)
            for i, (part, state) in enumerate(zip(parts, self.states, strict=True)):
                self.deltas[i] = state.residual = part.view(self.deltas[i].shape)
            self._of_deltas.clear()
        return whole

    def shares(self, numbers: Sequence[int]) -> list[dict[int, int]]:
        """Return how many of a worker's numbers each layer has in one tensor for all layers, as
        `Comm` counts them."""
        return [dict(zip(self.layers, numbers, strict=True))]

    def subtract(self, sent: Sequence[Tensor]) -> None:
        """Subtract from the deltas what was sent of each layer, ``[L, n, m]``, or ``[n, m]`` where
        it is the same for all workers. The rest is the residual; without error feedback this does
        nothing."""
        if self.feedback:
            sub_([*zip(self.deltas, sent, strict=True)])


def _make_residuals(like: Sequence[Tensor]) -> list[Tensor]:
    """On a GPU those of one shape lie side by side: they are one batch without a copy."""
    alike = {x.dtype for x in like}
    if len(alike) > 1 or not on_gpu(like[0]):
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
    order = [i for places in group_alike(tuple(x.shape for x in like)) for i in places]
    flat = like[0].new_empty(sum(x.numel() for x in like))
    pieces = dict(zip(order, flat.split([like[i].numel() for i in order]), strict=True))
    return [pieces[i].view(x.shape) for i, x in enumerate(like)]


def end_to_end(parts: Sequence[Float[Tensor, "rows ..."]]) -> Float[Tensor, "rows N"]:
    """Join tensors of equally many rows side by side: a view where they lie so in memory, else a
    copy."""
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
    """Return new memories, by layer, that go on counting steps and keep the residuals' units."""
    kept = ("step", "residual_rate")
    return {
        name: {**new, **{key: saved[name][key] for key in kept if key in saved[name]}}
        for name, new in fresh.items()
    }
