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
    workers. The first six fields, to ``inner``, say whose memory it is: they are set when it is
    made, and checkpoints leave them out.

    Attributes:
        key: The key of the layer's random numbers, (seed, layer name).
        first_worker: The first of the workers that this process hosts.
        workers: The number of workers that send.
        hosted: The workers as which the rows draw random numbers (``own_seeds``), if these have
            other numbers in the whole job, as within a replica. None: the consecutive ones from
            ``first_worker``.
        shard: The rows of the layer that are here. None: all.
        inner: The shape of each matrix of the layer, if its rows are matrices and its compressor
            reads them so (``Layer.inner``). None: the layer is one matrix.
        step: The number of times that this layer has been sent.
        rate: The learning rate of this step. It is 1 if none is known, as between local steps,
            whose updates are in units of the weights.
        scale: The number by which the loss of the last step was multiplied, and so its gradient (a
            GradScaler's). The residual is multiplied by it, too, unless the compressor keeps a unit
            of its own (its ``in_place`` is false). A saved residual is divided by it.
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
        """Return the factor by which the numbers of ``residual`` are too large. It is 1, unless a
        subclass lets the residual keep the scale of the step that has left it."""
        return 1.0

    def rescale_residual(self, ratio: float) -> None:
        """Note that the numbers of ``residual`` have become too large by another factor, ``ratio``
        (see ``residual_unit``). A memory whose factor is always 1 has nothing to note."""

    def seeds(self, what: str, workers: Iterable[int] | None = None) -> list[Seed]:
        """Return seeds for the random numbers of this step.

        Args:
            what: the purpose of the numbers; each purpose has seeds of its own.
            workers: the workers that get a seed each. None: one seed that all workers share.

        Returns:
            Numbers; or, while a CUDA graph captures the step, places on the device, to which the
            seeds of each later step are written.
        """
        tails = [()] if workers is None else [(worker,) for worker in workers]
        return self._seeds([partial(self._seed, what, *tail) for tail in tails])

    def own_seeds(self, what: str, hosted: int) -> list[Seed]:
        """Return the ``seeds`` of the workers that this process hosts, one for each row.

        Args:
            hosted: the number of rows.
        """
        first = self.first_worker
        return self.seeds(what, self.hosted or range(first, first + hosted))

    def _seed(self, what: str, *tail: int) -> int:
        return derive_seed(*self.key, what, self.step, *tail)

    def snapshot(self) -> dict[str, Any]:
        """Return the fields as they are now. Tensors are copied, so that later steps do not change
        what was returned. The residual alone is not copied: a step that may be undone
        (``Bucket.tentative``) writes the next residual to other memory."""
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
        """Return a copy for a step that may be undone. Tensors are copied, except for the residual,
        which both share."""
        other = copy.copy(self)
        other.restore(self.snapshot())
        return other

    def shared_state(self) -> dict[str, Any]:
        """Return the fields that a checkpoint saves once for all workers: those that are the same
        on all of them and on which the next step depends."""
        own = ("key", "first_worker", "workers", "hosted", "shard", "inner", "scale", "residual")
        return {name: value for name, value in vars(self).items() if name not in own}

    def load_shared_state(
        self, shared: Mapping[str, Any], device: torch.device | None = None
    ) -> None:
        """Set the fields to those of a ``shared_state``.

        Args:
            device: where tensors are moved. None: they stay where they are.
        """
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

    It lasts until levels change. A compressor may keep in it what it needs again in each step
    (``once``, ``of_deltas``).

    Attributes:
        layers: The indices of the layers in the model.
        states: The memories of the layers.
        levels: The level of each layer.
        feedback: Whether what `Compressor.exchange` leaves in ``deltas`` is the residual. If false,
            the deltas are the gradients themselves, which others read afterwards.
        tentative: Whether the next step may be undone. If true, its residuals are written to other
            memory than the present ones, so that `State.restore` brings the present ones back; two
            places take turns. If false, they are written over the present ones.
        deltas: A tensor ``[L, n, m]`` for each layer: the gradient of each of the L workers that
            this process hosts. With error feedback the residual has been added to it. The matrix of
            a convolution is ``[out, in * kh * kw]``.
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
        """Use these tensors as the deltas of the step that begins. They are not kept as
        residuals."""
        self.deltas, self._of_deltas = deltas, {}

    def take_turn(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors into which the deltas of the step that begins are to be written. They
        are also ``deltas`` from now on, and the residuals after the step.

        Args:
            like: tensors with the shapes and types of the deltas.
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
        """Return what ``make`` returns. It is called in the first step of this bucket only, so use
        this for what depends on nothing but layers and levels.

        Args:
            what: a name for the result; each name has a result of its own.
        """
        return make_once(self._made, what, make)

    def of_deltas(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` returns. It is called once for each place in memory where the deltas
        lie, so use this for what also depends on this place, such as views of the deltas.

        Args:
            what: a name for the result; each name has a result of its own.
        """
        return make_once(self._of_deltas, what, make)

    @property
    def level(self) -> Level:
        """Return the level of all layers, for a compressor that is given layers at one level
        (``Compressor.one_level``); in general, the level of the first layer."""
        return self.levels[0]

    @property
    def sizes(self) -> list[int]:
        """Return how many numbers each layer has, n x m."""
        return self.once("sizes", lambda: [delta[0].numel() for delta in self.deltas])

    @property
    def flat(self) -> list[Float[Tensor, "hosted _"]]:
        """Return views of the deltas as rows, ``[L, n * m]`` for each layer."""
        return self.of_deltas("flat", lambda: [delta.flatten(1) for delta in self.deltas])

    @property
    def whole(self) -> Float[Tensor, "hosted N"]:
        """Return the deltas of all layers end to end in one tensor, ``[L, N]``. With error feedback
        ``deltas`` and the residuals are views of this tensor from now on. Without error feedback it
        is a view if the deltas lie end to end in memory, and otherwise a copy."""
        return self.of_deltas("whole", self._join)

    def _join(self) -> Float[Tensor, "hosted N"]:
        whole = end_to_end(self.deltas)
        if self.feedback:
            parts = whole.split(self.sizes, dim=1)
            # In place, in the list of this `Turn`, which must know where its residuals lie. What
            # was made of the old places is of no use any more.
            for i, (part, state) in enumerate(zip(parts, self.states, strict=True)):
                self.deltas[i] = state.residual = part.view(self.deltas[i].shape)
            self._of_deltas.clear()
        return whole

    def shares(self, numbers: Sequence[int]) -> list[dict[int, int]]:
        """Return the argument ``shares`` of `Comm` for one tensor that all layers share.

        Args:
            numbers: how many numbers each layer has in the tensor, for one worker.
        """
        return [dict(zip(self.layers, numbers, strict=True))]

    def subtract(self, sent: Sequence[Tensor]) -> None:
        """Subtract what was sent from the deltas, so that the residual is left. Without error
        feedback this does nothing.

        Args:
            sent: of each layer, ``[L, n, m]``, or ``[n, m]`` if it is the same for all workers.
        """
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
