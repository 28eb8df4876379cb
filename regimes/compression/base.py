"""The contract of a compressor: `Compressor.exchange` turns worker gradients into shared updates.

It is given a `Bucket`, what several layers have to send, and a `Comm`, which reaches the other
workers: W simulated ones in this process, or those of other processes. Error feedback (Stich &
Karimireddy, 2019) and the level "dense" are handled around it (``compression.reducer``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.capabilities import (
    CAPTURED_EXCHANGES,
    CAPTURED_STEPS,
    GRADIENT_UNIT,
    LEARNING_RATE,
)
from regimes.base.config import DENSE, AnyLevel, Bounded, ByName, FeedbackLevel, GivenLevel, Level
from regimes.base.errors import ConfigError, require
from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.bucket import Bucket, State
from regimes.compression.kernels import add_

Own = TypeVar("Own", bound="Compressor")
ResidualKind = Literal["gradient", "update"]  # of a residual


@dataclass(frozen=True, kw_only=True)
class Compressor(Bounded, ABC):
    """Turns the gradients of all workers into one update. A subclass holds the hyper-parameters;
    the memory of a layer is in its ``State``.

    A compressor of your own implements ``check``, ``exchange`` and ``traffic``
    (docs/how-to/compressor.md).

    Attributes:
        error_feedback: Add to each gradient what earlier steps did not send. A number below 1
            multiplies this residual in each step.
        residual: The unit in which the residual is kept. "gradient" keeps a gradient, which moves
            the weights at the learning rate of the step that sends it (torch's PowerSGD hook,
            epfml/powersgd). "update" keeps a movement of the weights: at a change of the rate it is
            multiplied by the previous rate divided by the present one (dist-EF-SGD: Zheng, Huang &
            Kwok, 2019, algorithm 1). At a rate of zero it is left as it is. If a branch has another
            unit than its trunk, its first step adds what the trunk's next step would have added.
        level: The level that is used throughout, or the levels that the words of a policy stand
            for, ``{"low": 4, "high": 1}``, if a script passes the object. The methods are told the
            level of each layer.
        level_word: The name of the argument for the level, such as "rank" of PowerSGD.
        data_dependent: Whether the traffic depends on the gradient. ``traffic`` is then the most.
        replayable: Whether a CUDA graph may replay ``exchange``. The kernels that it launches must
            then depend only on the level, the hyper-parameters and the fields of the state without
            ``step`` and ``rate``, and random numbers must take their seeds from ``State.seeds``.
            Fields are tensors, numbers or text.
        linear: Whether the update depends on the workers' gradients through their mean alone,
            residuals included. Such a compressor may be given this mean in place of all gradients.
        propagates_nonfinite: Whether ``finite_probe`` is not finite if the gradient of any worker
            is not finite.
        one_level: Whether ``exchange`` is given layers at one level, and as many as are worth a
            kernel that takes them at once. If false, the layers of a bucket come at any levels; in
            a world of one process on a CPU they come one by one, because a layer then stays in the
            cache.
        in_place: Whether the residual is what ``exchange`` leaves in the deltas, in units of the
            step's ``scale``. If false, the compressor stores it by itself, and keeps its unit.
        joins_shards: Whether a layer with rows on several processes is compressed as one matrix. If
            false, each shard is compressed by itself, as if it were a layer.
        phases: The number of kinds of steps that ``traffic`` averages over; see ``phase``.
        usual: The levels "low" and "high" of a hook, unless its user names some.
        memory: The class of a layer's memory.
    """

    bounds_prefix = "compressor."

    error_feedback: bool | float = True
    residual: ResidualKind = "gradient"
    level: GivenLevel | ByName | None = field(default=None, hash=False)
    level_word: ClassVar[str] = "level"
    data_dependent: ClassVar[bool] = False
    replayable: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    propagates_nonfinite: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    joins_shards: ClassVar[bool] = False
    one_level: ClassVar[bool] = True
    phases: ClassVar[int] = 1
    usual: ClassVar[Mapping[str, Level]] = {}
    memory: ClassVar[type[State]] = State

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "level", getattr(self, self.level_word))
        given = self.error_feedback
        good = isinstance(given, bool) or 0 < given <= 1
        require(good, "compressor.error_feedback", given, "true, false, or a share in (0, 1]")
        unit = self.residual
        require(
            unit in get_args(ResidualKind), "compressor.residual", unit, '"gradient" or "update"'
        )
        if unit != type(self).residual and not given:
            raise ConfigError(
                f"compressor.residual = {unit!r} has no effect without error feedback: leave it "
                "out, or set compressor.error_feedback"
            )

    def __repr__(self) -> str:
        """The fields, without a level that is not set: saved states have this text."""
        unset = self.level_word if self.level is None else ""
        shown = [f.name for f in fields(self) if f.repr and f.name != unset]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({values})"

    def with_level(self: Own, level: GivenLevel | ByName | None) -> Own:
        """Return a copy of this compressor with another level (None: without one). Whether the
        level is valid is asked later, by ``check``."""
        changed = copy(self)
        for name in {"level", self.level_word}:
            object.__setattr__(changed, name, level)
        return changed

    @property
    def reads_rate(self) -> bool:
        """Return whether the result of a step depends on the learning rate, which the job must then
        know; here, whether the residual is kept in the unit "update"."""
        return self.residual == "update"

    def resolve_level(self, level: AnyLevel) -> tuple[Compressor, Level]:
        """Return a compressor and a plain level for a level that may have error feedback of its
        own, ``{"level": 1, "error_feedback": False}``. The compressor has this error feedback, and
        the plain level, 1, is what all other methods take. For any other level they are this
        compressor and the level as it is.

        Raises:
            ConfigError: this compressor's other fields exclude the level's error feedback.
        """
        if not isinstance(level, FeedbackLevel):
            return self, level
        given = level.error_feedback
        unit = self.residual if given else type(self).residual
        return replace(self, error_feedback=given, residual=unit), level.level

    @property
    def requires(self) -> frozenset[str]:
        """Name the capabilities that a job must offer, by the words of
        ``regimes.base.capabilities``. With ``residual="update"``, which keeps the residual as a
        movement of the weights, these are "learning_rate" (the rate of each step is known) and
        "gradient_unit" (gradients are exchanged). With ``residual="gradient"`` there are none."""
        needs = {
            LEARNING_RATE: self.reads_rate,
            GRADIENT_UNIT: self.residual != type(self).residual,
        }
        return frozenset(need for need, applies in needs.items() if applies)

    @property
    def takes_away(self) -> Mapping[str, str]:
        """Name the capabilities that a job loses by this compressor, each with the reason. If the
        compressor is not ``replayable``, these are "captured_steps" and "captured_exchanges", the
        CUDA graphs of the trainer and of the hook. Otherwise there are none."""
        if self.replayable:
            return {}
        why = "what it launches depends on values, or its class does not say replayable"
        return {CAPTURED_STEPS: why, CAPTURED_EXCHANGES: why}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # or dataclass would write one
            cls.__repr__ = Compressor.__repr__  # type: ignore[method-assign]
        if "send" in vars(cls) and "exchange" not in vars(cls):
            raise ConfigError(
                f"the compressor {cls.__name__} has a generator `send`, which has become the plain "
                "method exchange(bucket, comm): see docs/how-to/compressor.md"
            )

    @abstractmethod
    def check(self, level: Level) -> None:
        """Raise ConfigError unless ``level`` is a level of this compressor."""

    @abstractmethod
    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        """Send what the layers of a bucket have to send, and return the update of each layer. An
        update has the n x m numbers of the layer's matrix, in any shape, and is the same on all
        workers.

        With error feedback (``bucket.feedback``) take what was sent out of ``bucket.deltas``, by
        `Bucket.subtract` or in place: what is left is the residual. Without it leave the deltas as
        they are. The memories (``bucket.states``) may change, except for their residuals.
        """

    @abstractmethod
    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return what ``exchange`` sends of one layer in one step, in floats and bytes. If steps
        are of several kinds (``phases``), this is their mean. A run compares it with what was sent,
        once at each level.

        Args:
            layer: a layer that is compressed (`Layer.compressed`).
            level: a level other than "dense".
            workers: the number of workers, W.
            itemsize: the bytes of a number in the model's type.
        """

    def phase(self, state: State) -> int:
        """Return which kind of step a layer has just taken, of the ``phases`` kinds, counted from
        0. It is 0 if all steps are alike."""
        return 0

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> State:
        """Make an empty memory for a layer.

        Args:
            seed: the seed of the run.
            first_worker: the first of the workers that this process hosts.
        """
        shard, name = layer.shard, layer.name
        if shard is not None and shard.count > 1 and not self.joins_shards:
            name = f"{name}/{shard.index}"  # shards draw different random numbers
        return self.memory((seed, name), first_worker)

    def add_residual(self, bucket: Bucket, gradients: Sequence[Tensor], scale: float) -> None:
        """Set the deltas of a bucket, ``[L, n, m]`` for each layer, for the step that begins.

        With error feedback a delta is the gradient plus the residual. The residual is multiplied by
        ``error_feedback``, if this is a number, and converted to the scale and the learning rate of
        this step. The deltas are then the next residuals, because ``exchange`` takes out what it
        sends. Without error feedback the deltas are the gradients themselves, except that a
        residual which another level has left is added to one gradient.

        Args:
            gradients: of each layer, ``[L, *shape]`` for the L workers that this process hosts.
            scale: the number by which the loss was multiplied, for example by a GradScaler.
        """
        matrices = [x.flatten(2) if x.ndim > 2 else x for x in gradients]
        factors = [self._factor(state, scale) for state in bucket.states]
        old = [i for i, state in enumerate(bucket.states) if state.residual is not None]
        deltas = matrices
        # Never in place on the gradient, which instruments read afterwards. Neither has an autograd
        # graph that in-place arithmetic would break.
        if bucket.feedback:
            deltas = bucket.take_turn(matrices)
        else:
            if old:
                deltas = [torch.empty_like(x) if i in old else x for i, x in enumerate(matrices)]
            bucket.take(deltas)
        if old:
            owed = [bucket.states[i].residual for i in old]
            add_([(x, matrices[i], factors[i], deltas[i]) for i, x in zip(old, owed, strict=True)])
        if not bucket.feedback:
            return
        if new := [i for i, state in enumerate(bucket.states) if state.residual is None]:
            foreach_copy_([deltas[i] for i in new], [matrices[i] for i in new])
            for i in new:
                self.begin_residual(bucket.states[i])
        for state, delta in zip(bucket.states, deltas, strict=True):
            state.residual = delta

    def send_whole(self, gradient: Tensor, state: State, scale: float = 1.0) -> Tensor:
        """Return what a layer sends in a step at "dense": the gradient plus the residual that a
        compressed level has left, ``[L, n, m]``. The residual is then empty. Without a residual
        this is the gradient itself.

        Args:
            gradient: ``[L, *shape]`` for the L workers that this process hosts.
            scale: the number by which the loss was multiplied.
        """
        self.before_dense(state)
        state.step += 1
        factor, residual, state.residual = self._factor(state, scale), state.residual, None
        if residual is None:
            return gradient
        matrix = gradient.flatten(2) if gradient.ndim > 2 else gradient
        add_([(residual, matrix, factor, total := torch.empty_like(matrix))])
        return total

    def before_dense(self, state: State) -> None:
        """Change the memory before a step at "dense". By default nothing changes, and the step
        sends the residual, too."""

    def begin_residual(self, state: State) -> None:
        """Note in what unit the first residual of a layer is kept: in the unit "update" with the
        learning rate of this step."""
        state.residual_rate = self._unit_at(state.rate)

    def _factor(self, state: State, scale: float) -> float:
        """What the residual is multiplied by, as it is added to a gradient of this scale."""
        ratio, state.scale = scale / state.scale, scale
        if state.residual is None:
            return 1.0
        of_rate = 1.0  # converts the residual to the gradients of this step's rate
        if state.rate != 0:
            before, state.residual_rate = state.residual_rate, self._unit_at(state.rate)
            of_rate = 1.0 if before is None else before / state.rate
        return float(self.error_feedback or True) * of_rate * ratio

    def _unit_at(self, rate: float) -> float | None:
        """``State.residual_rate`` of a residual that a step at this rate leaves."""
        return rate if self.residual == "update" else None

    def rescales(self, state: State, rate: float) -> bool:
        """Return whether a step at this learning rate has to convert the residual. It has to if the
        residual is a movement of the weights (``residual="update"``) and the last step had another
        rate, and if the residual was a movement and is now to be a gradient, or the reverse. A
        CUDA graph cannot do such a step."""
        changes = rate != 0 and state.residual_rate != self._unit_at(rate)
        return changes and state.residual is not None

    def residual_shape(self, layer: Layer) -> tuple[int, ...]:
        """Return the shape in which the residual of one worker is kept in memory: (n, m), unless a
        subclass keeps it otherwise."""
        return layer.matrix

    def numbers(self, residual: Tensor, layer: Layer) -> Float[Tensor, "hosted n m"]:
        """Return a residual as ``[L, n, m]``, from the form in which the memory keeps it. Here both
        are the same; a subclass may keep the residual in fewer bits."""
        return residual

    def finite_probe(self, update: Tensor, state: State, level: Level) -> Tensor:
        """Return a tensor in which each worker can see whether all gradients of a layer were
        finite: the update, or a smaller tensor that is the same on all workers, too. It is not
        finite if a gradient was not, provided that the compressor ``propagates_nonfinite``.

        Args:
            update: what ``exchange`` has returned for the layer.
            level: the level of the step, or "dense".
        """
        return update

    def cost(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return the traffic of one step of any layer at any level, in floats and bytes. The layer
        may have one dimension, the level may be "dense", and the layer may be sent whole
        (``exceeds``). The arguments are those of ``traffic``."""
        if level == DENSE or not layer.compressed or self.exceeds(layer, level, workers):
            return Traffic(layer.size, layer.size * itemsize)
        return self.traffic(layer, level, workers, itemsize)

    def exceeds(self, layer: Layer, level: Level, workers: int) -> bool:
        """Return whether a level would send more bytes of a layer than "dense". The layer is then
        sent whole.

        If a layer is divided into shards, the bytes of all shards count together, so that all
        shards come to one answer. The bytes are counted as if the model were float32, so that the
        answer does not depend on its type.
        """
        if level == DENSE or not layer.compressed or self.data_dependent:
            return False
        whole, shard = layer.whole, layer.shard
        parts = [whole]
        if shard is not None and not self.joins_shards:  # each shard is compressed by itself
            parts = [part for i in range(shard.count) if (part := whole.on(i, shard.count)).size]
        compressed_bytes = sum(self.traffic(part, level, workers).bytes for part in parts)
        return self.sends_more(compressed_bytes, self.cost(whole, DENSE, workers).bytes)

    def sends_more(self, compressed_bytes: int, dense_bytes: int) -> bool:
        """Return whether a layer is sent whole, given the bytes of its step at a level and the
        bytes of its step at "dense"."""
        return compressed_bytes > dense_bytes


def check_level(chosen: Compressor, level: AnyLevel) -> None:
    """Raise ConfigError unless ``level`` is one of a compressor's levels, or one of them with error
    feedback of its own."""
    compressor, plain = chosen.resolve_level(level)
    small = not isinstance(plain, int) or abs(plain) < 2**63  # of a tensor, and of a float
    where = f"level of {type(compressor).__name__}"
    require(small, where, plain, "a number of at most 63 bits")
    compressor.check(plain)


def has_feedback(chosen: Compressor, levels: Iterable[AnyLevel]) -> bool:
    """Return whether a compressor has error feedback, throughout or at one of these levels."""
    return any(chosen.resolve_level(level)[0].error_feedback for level in (DENSE, *levels))
