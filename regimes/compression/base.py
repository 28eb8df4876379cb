"""The contract of a compressor: turn worker gradients into one shared update.

``send`` is a generator that yields requests (``collectives.requests``) and receives their results;
``World.run_programs`` sends the requests of a bucket's layers together. Gradients carry a leading
axis of hosted workers, ``[L, n, m]``: a convolution is viewed as ``[out, in * kh * kw]`` (PowerSGD,
section 3).
Error feedback (Stich & Karimireddy, 2019) and the level "dense" are handled here for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.capabilities import (
    CAPTURED_STEPS,
    GRADIENT_UNIT,
    LEARNING_RATE,
)
from regimes.collectives.requests import Batched, Layer, Mean, Program, Request, Shard, Traffic
from regimes.compression.answers import check_send, check_sent, sample_evenly
from regimes.compression.kernels import Workspace, add_, add_apart, clone, sub_
from regimes.config import DENSE, AnyLevel, Bounded, FeedbackLevel, Level
from regimes.errors import ConfigError, require
from regimes.seeding import Seed, derive_seed

Unit = Literal["gradient", "update"]  # of a residual
Sending = Generator[Request, Any, tuple[Tensor, Tensor | None]]
SendingTogether = Generator[Request, Any, tuple[Sequence[Tensor], Tensor | None]]


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
    """

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
            for name in own.keys() - _PLAIN:
                if isinstance(value := own[name], Tensor):
                    own[name] = value.clone()
        for name in ("_buffer", "_checked", "_table"):
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


@dataclass(frozen=True, kw_only=True)
class Compressor(Bounded, ABC):
    """Hyper-parameters of a compressor; a layer's memory is in its ``State``.

    Attributes:
        error_feedback: add to each gradient what earlier steps did not send. A number below 1
            decays that residual by this factor in each step.
        residual: the unit of what was not sent. "gradient" keeps it as it is, so that it is applied
            at the learning rate of the step that sends it (torch's PowerSGD hook, epfml/powersgd).
            "update" keeps it as a movement of the weights: at a change of the rate it is multiplied
            by the ratio of the previous rate to the present one (dist-EF-SGD: Zheng, Huang & Kwok,
            2019, algorithm 1). At a rate of zero it is left as it is. Where a branch has another
            unit than its trunk, its first step adds what the trunk's next step would have added.
        reads_rate: the result depends on the learning rate, which the reducer must know.
        data_dependent: how much is sent depends on the gradient; ``traffic`` is the most.
        replayable: a CUDA graph may replay ``send``. The kernels that it launches must then depend
            on nothing but the level, the hyper-parameters and the fields of the state without
            ``step`` and ``rate``; random numbers take their seeds from ``State.seeds``. Fields are
            tensors, numbers or text.
        linear: the update depends on the workers' gradients through their mean alone, residuals
            included; such a compressor may be given that mean in place of all gradients.
        propagates_nonfinite: where the gradient of any worker is not finite, ``finite_probe`` is
            not finite either.
        takes_bucket: it is an `InBuckets`: ``send_bucket`` is given several layers.
        in_place: the next residual may be computed in the memory of the present one, which is in
            units of the step's ``scale``. Without it the compressor leaves the present one as it
            is, and keeps its unit.
        joins_shards: a layer with rows on several processes is compressed as one matrix;
            without it each shard by itself, as if it were a layer.
        phases: the number of kinds of steps that ``traffic`` averages over; see ``phase``.
        usual: the levels "low" and "high" of a hook, unless its user names some.
        memory: the class of a layer's memory.
    """

    bounds_prefix = "compressor."

    error_feedback: bool | float = True
    residual: Unit = "gradient"
    data_dependent: ClassVar[bool] = False
    replayable: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    propagates_nonfinite: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    joins_shards: ClassVar[bool] = False
    takes_bucket: ClassVar[bool] = False
    phases: ClassVar[int] = 1
    usual: ClassVar[Mapping[str, Level]] = {}
    memory: ClassVar[type[State]] = State

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.error_feedback
        good = isinstance(given, bool) or 0 < given <= 1
        require(good, "compressor.error_feedback", given, "true, false, or a share in (0, 1]")
        unit = self.residual
        require(unit in get_args(Unit), "compressor.residual", unit, '"gradient" or "update"')
        if unit != type(self).residual and not given:
            raise ConfigError(
                f"compressor.residual = {unit!r} has no effect without error feedback: leave it "
                "out, or set compressor.error_feedback"
            )

    @property
    def reads_rate(self) -> bool:
        return self.residual == "update"

    def at(self, level: AnyLevel) -> tuple[Compressor, Level]:
        """The compressor at a level, which may have error feedback of its own, and that level
        without it: what all other methods take.

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
        """What it needs of a job (``capabilities``), as its other attributes say."""
        needs = {
            LEARNING_RATE: self.reads_rate,
            GRADIENT_UNIT: self.residual != type(self).residual,
        }
        return frozenset(need for need, applies in needs.items() if applies)

    @property
    def takes_away(self) -> Mapping[str, str]:
        """What other parts of a job lack beside it (``capabilities``), and why."""
        if self.replayable:
            return {}
        why = "what it launches depends on values, or its class does not say replayable"
        return {CAPTURED_STEPS: why}

    @abstractmethod
    def check(self, level: Level) -> None:
        """Raise ConfigError unless ``level`` is one of this compressor's (or "dense")."""

    @abstractmethod
    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        """Ask for collectives; return ``(update [n, m], sent [L, n, m] or [n, m])``.

        ``sent`` is what each worker's ``delta`` has contributed; the rest becomes its residual.
        With error feedback ``send`` may subtract it from ``delta`` itself and return None.
        Otherwise ``delta`` must be left as it is; ``state`` may change except for its residual.
        """

    @abstractmethod
    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """What ``send`` passes to the collectives in one step of one layer. A run compares it with
        what was sent, once at each level."""

    def phase(self, state: State) -> int:
        """The kind of the step that a layer has just taken, below ``phases``."""
        return 0

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> State:
        """An empty memory."""
        shard, name = layer.shard, layer.name
        if shard is not None and shard.count > 1 and not self.joins_shards:
            name = f"{name}/{shard.index}"  # shards draw different random numbers
        return self.memory((seed, name), first_worker)

    def reduce(self, grad: Float[Tensor, " hosted *shape"], state: State, level: Level) -> Program:
        """Error feedback around ``send``; returns the update, ``[*shape]``.

        ``grad`` is left as it is. The residual survives every change of level. At "dense" it is
        sent in full and is then zero. Without error feedback, at this level alone, it is added to
        one more gradient; what is not sent of the two is dropped.
        """
        if state.shard is not None and not grad.numel() and not self.joins_shards:
            return grad[0]  # no row of the layer is here
        delta = grad.flatten(2) if grad.ndim > 2 else grad
        if (work := self._add_residual(delta, state, level)) is not None:
            # batched with the bucket's other layers
            delta = state.residual = yield Batched(work[0], *work[1])
        state.step += 1
        if level == DENSE:
            update = yield Mean(delta)
            state.residual = None
        else:
            update, sent = yield from self._checked_send(delta, state, level)
            if not self.error_feedback:
                state.residual = None  # of another level: it was added to delta
            elif sent is not None:
                yield Batched(sub_, delta, sent)  # delta is the residual: what remains is unsent
        return update.view(grad.shape[1:])

    def _add_residual(
        self, delta: Tensor, state: State, level: Level
    ) -> tuple[Callable[..., Sequence[Tensor]], tuple[Any, ...]] | None:
        """What a kernel computes before ``send``, which is the next residual: decay x residual +
        gradient, or a copy of the gradient. None: there is no error feedback."""
        if state.residual is not None:
            # At any level, dense too: after a change of level the old residual is still unsent.
            # In place on the residual, never on grad, which instruments read afterwards; neither
            # has an autograd graph that in-place arithmetic would break.
            decay = float(self.error_feedback or True) * self._rescale(state)
            return add_, (state.residual, delta, decay, state.room)
        if self.error_feedback and level != DENSE:
            self.begin_residual(state)
            return clone, (delta,)
        return None

    def begin_residual(self, state: State) -> None:
        """A residual that this step leaves, where there was none, has the unit of its rate."""
        state.residual_rate = self._unit_at(state.rate)

    def _rescale(self, state: State) -> float:
        """The factor that converts the residual to the gradients of this step's rate."""
        if state.rate == 0:
            return 1.0
        before, state.residual_rate = state.residual_rate, self._unit_at(state.rate)
        return 1.0 if before is None else before / state.rate

    def _unit_at(self, rate: float) -> float | None:
        """``State.residual_rate`` of a residual that a step at this rate leaves."""
        return rate if self.residual == "update" else None

    def rescales(self, state: State, rate: float) -> bool:
        """Does a step at this rate change the residual's unit?"""
        changes = rate != 0 and state.residual_rate != self._unit_at(rate)
        return changes and state.residual is not None

    def residual_shape(self, layer: Layer) -> tuple[int, ...]:
        """The shape of a worker's residual in memory."""
        return layer.matrix

    def numbers(self, residual: Tensor, layer: Layer) -> Float[Tensor, "hosted n m"]:
        """A residual in memory as numbers."""
        return residual

    def finite_probe(self, update: Tensor, state: State, level: Level) -> Tensor:
        """After ``reduce``: the update, or a smaller tensor that is the same on all workers and,
        with ``propagates_nonfinite``, not finite where a gradient was not."""
        return update

    def _checked_send(
        self, delta: Float[Tensor, "hosted n m"], state: State, level: Level
    ) -> Sending:
        """``send``; its first call at a level is checked."""
        if not state.is_first((level, bool(self.error_feedback))):
            return (yield from self.send(delta, state, level))
        where, before = (type(self).__name__, state.key[1]), sample_evenly(delta)
        program = self.send(delta, state, level)
        check_send(where, program)
        answer = yield from program
        check_sent(where, answer, delta, before, bool(self.error_feedback))
        return answer

    def cost(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Traffic of one step of one layer, 1-D layers and the level "dense" included."""
        if level == DENSE or not layer.compressed:
            return Traffic(layer.size, layer.size * itemsize)
        return self.traffic(layer, level, workers, itemsize)


def check_level(chosen: Compressor, level: AnyLevel) -> None:
    """Raise ConfigError unless ``level`` is one of a compressor's, or one of them with error
    feedback of its own."""
    compressor, plain = chosen.at(level)
    small = not isinstance(plain, int) or abs(plain) < 2**63  # of a tensor, and of a float
    where = f"level of {type(compressor).__name__}"
    require(small, where, plain, "a number of at most 63 bits")
    compressor.check(plain)


def has_feedback(chosen: Compressor, levels: Iterable[AnyLevel]) -> bool:
    """Has a compressor error feedback, throughout or at one of these levels?"""
    return any(chosen.at(level)[0].error_feedback for level in (DENSE, *levels))


class InBuckets(Compressor):
    """Base of compressors that work on several layers at once, so that what a step costs in calls
    does not grow with their number."""

    takes_bucket: ClassVar[bool] = True

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        (update,), sent = yield from self.send_bucket([delta], [state], level)
        return update.view(delta.shape[1:]), None if sent is None else sent.view(delta.shape)

    @abstractmethod
    def send_bucket(
        self, deltas: Sequence[Float[Tensor, "hosted _ _"]], states: Sequence[State], level: Level
    ) -> SendingTogether:
        """``send`` of several layers; returns ``(updates, sent [L, N] or None)``: an update of each
        layer, of any shape, and what was sent of all, end to end. Each request has the ``sizes`` of
        the layers' parts in it. With error feedback the deltas lie end to end (`end_to_end`)."""

    def reduce_bucket(
        self, grads: Sequence[Tensor], states: Sequence[State], level: Level
    ) -> Generator[Request, Any, Sequence[Tensor]]:
        """``reduce`` of several layers at one level other than "dense" (see ``takes_bucket``);
        returns an update of each, of any shape."""
        deltas = [grad.flatten(2) if grad.ndim > 2 else grad for grad in grads]
        works: dict[Any, dict[int, tuple[Any, ...]]] = {}  # by kernel: the arguments by layer
        for i, (delta, state) in enumerate(zip(deltas, states, strict=True)):
            if (work := self._add_residual(delta, state, level)) is not None:
                kernel = add_apart if work[0] is add_ else work[0]
                works.setdefault(kernel, {})[i] = work[1]
            state.step += 1
        for kernel, arguments in works.items():
            for i, delta in zip(arguments, kernel([*arguments.values()]), strict=True):
                deltas[i] = delta
        if not self.error_feedback:
            updates, _ = yield from self._checked_bucket(deltas, states, level)
            for state in states:
                state.residual = None  # of another level: it was added to its delta
            return updates
        whole = end_to_end(deltas)
        parts = whole.split([delta[0].numel() for delta in deltas], dim=1)
        deltas = [part.view(delta.shape) for part, delta in zip(parts, deltas, strict=True)]
        updates, sent = yield from self._checked_bucket(deltas, states, level)
        if sent is not None:
            yield Batched(sub_, whole, sent)
        for state, delta in zip(states, deltas, strict=True):
            state.residual = delta
            if state.room is not None:  # else it would keep memory that nothing uses
                state.write_to(delta, None)
        return updates

    def _checked_bucket(
        self, deltas: Sequence[Tensor], states: Sequence[State], level: Level
    ) -> SendingTogether:
        """``send_bucket``; its first call at a level is checked, by the first layer."""
        if not states[0].is_first((level, bool(self.error_feedback))):
            return (yield from self.send_bucket(deltas, states, level))
        where, before = (type(self).__name__, states[0].key[1]), sample_evenly(deltas[0])
        updates, sent = yield from self.send_bucket(deltas, states, level)
        here, shape = slice(deltas[0][0].numel()), deltas[0].shape
        first = updates[0].view(shape[1:]), None if sent is None else sent[:, here].view(shape)
        check_sent(where, first, deltas[0], before, bool(self.error_feedback))
        return updates, sent


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


def numbers_of(deltas: Sequence[Float[Tensor, "hosted _ _"]]) -> list[int]:
    """How many numbers of a worker each layer has."""
    return [delta[0].numel() for delta in deltas]


def restart_memories(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """New memories, by layer, that go on counting steps and keep the residuals' units."""
    kept = ("step", "residual_rate")
    return {
        name: {**new, **{key: saved[name][key] for key in kept if key in saved[name]}}
        for name, new in fresh.items()
    }
