"""The exchange of one bucket: each compressor's layers, and numbers that are averaged beside them.

``exchange.exchange`` says which layers form a bucket, and when it leaves.

A step may be skipped, or thrown away later. What the fields of a layer's memory were is therefore
kept before it, and its residual goes to other memory (`Bucket.take_turn`): so a step that was not
applied costs nothing but to set them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import DENSE, AnyLevel, FeedbackLevel, Level
from regimes.base.errors import ConfigError
from regimes.collectives.comm import Comm, Riders
from regimes.collectives.layers import MARKS, NO_LAYER, Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket
from regimes.compression.elementwise import Dense
from regimes.compression.kernels import on_gpu
from regimes.compression.traffic import TrafficCheck

# Numbers of the layers that one kernel takes. What it needs beside them is then no more
# than a large layer alone needs, and of a size that the C library takes again without new pages.
TOGETHER, TOGETHER_ON_GPU = 1 << 22, 1 << 24
Stacks = Sequence[Float[Tensor, "rows ..."]] | Mapping[int, Float[Tensor, "rows ..."]]


@dataclass
class BucketPlan:
    """Says how a bucket is exchanged, until its levels change.

    Attributes:
        chosen: what it depends on.
        dense: layers that travel as they are, with their compressors.
        absent: layers of which no row is here.
        parts: buckets of one compressor each, in the order in which they are exchanged.
        compared: all counts have been compared with the formulas.
    """

    chosen: Any
    dense: list[tuple[int, Compressor]] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    parts: list[tuple[Compressor, list[Bucket]]] = field(default_factory=list)
    compared: bool = False


class Reducer:
    """Reduces stacked gradients to updates; owns each layer's ``State``.

    Attributes:
        rates: the learning rate of each layer in the step to come, for layers that read it; None:
            they take 1.
        scale: what the gradients of the step to come were multiplied by.
        tentative: a step leaves the residuals before it as they are (`Bucket`).
        kept: by layer, the fields of its memory before the step under way.
        before: by layer, those before the last step, which are not taken back yet; None: there is
            nothing to undo.
        reads_rates: a compressor reads the rate, or a residual had another unit when it was loaded.
    """

    rates: Sequence[float] | None = None
    scale = 1.0
    tentative = False
    before: dict[int, dict[str, Any]] | None = None

    def __init__(
        self,
        compressor: Compressor,
        layers: Sequence[Layer],
        world: World,
        seed: int,
    ) -> None:
        self.layers, self.world = list(layers), world
        self.compressors = [compressor if layer.compressed else Dense() for layer in layers]
        self._at: dict[FeedbackLevel, tuple[Compressor, Level]] = {}
        # the answers of `resolve_level`
        self._choices: dict[tuple[int, AnyLevel], tuple[Compressor, Level]] = {}
        self._plans: dict[tuple[int, ...], BucketPlan] = {}
        self.kept: dict[int, dict[str, Any]] = {}
        self.reads_rates = any(c.reads_rate for c in self.compressors)
        self.traffic_check = TrafficCheck(self.resolve_level, self.layers, world)
        first = world.hosted[0]
        self.states: list[Any] = [
            c.init(layer, seed, first) for c, layer in zip(self.compressors, layers, strict=True)
        ]
        for layer, state in zip(layers, self.states, strict=True):
            state.shard = layer.shard
            state.workers = world.workers

    def reduce(
        self,
        bucket: Sequence[int],
        gradients: Stacks,
        levels: Sequence[AnyLevel],
        extra: Float[Tensor, "rows ..."] | None = None,
        marks: Float[Tensor, "1 marks"] | None = None,
    ) -> dict[int, Tensor]:
        """Exchange one bucket in all its rounds; return its updates by layer, the mean of ``extra``
        at ``NO_LAYER`` if the bucket has it, and at ``MARKS`` the mean of ``marks``.

        Args:
            extra: numbers of each worker, such as its losses.
            marks: numbers of each process, which are not counted.

        Where a worker's layers are divided into shards, the mean of ``extra``, ``[L, k]``, is over
        shards, too, and each shard sends its own.
        """
        layers = tuple(i for i in bucket if i != NO_LAYER)
        self.set_rates(layers)
        plan = self._plan(layers, gradients, levels)
        check = self.traffic_check
        before = {} if plan.compared else check.counted_so_far(layers, gradients, levels)
        plan.compared = not before
        riders = Riders()
        if extra is not None and len(layers) < len(bucket):
            riders.waiting[NO_LAYER] = extra
        for i, compressor in plan.dense:
            state = self.states[i]
            if type(compressor) is Dense and state.residual is None:
                state.step += 1  # most layers of a network: no more work than this
                riders.waiting[i] = gradients[i]
            else:
                riders.waiting[i] = compressor.send_whole(gradients[i], state, self.scale)
        if marks is not None:
            riders.waiting[MARKS] = marks
        updates = {i: gradients[i][0] for i in plan.absent}
        calls = set[Any]()
        if plan.parts and not self._together(layers, gradients):
            Comm(self.world, riders=riders, calls=calls).send_riders()
        for compressor, parts in plan.parts:
            turn = 0
            for part in parts:
                comm = Comm(self.world, part.layers, riders=riders, calls=calls, turn=turn)
                rows = [gradients[i] for i in part.layers]
                found = exchange_layers(compressor, part, rows, comm, self.scale)
                updates.update(zip(part.layers, found, strict=True))
                turn = comm.turn if compressor.one_level else 0
            calls = set()
        Comm(self.world, riders=riders, calls=calls).send_riders()
        for i, mean in riders.means.items():
            updates[i] = mean if i < 0 else mean.view(gradients[i].shape[1:])
        if before:
            check.compare_step(before, gradients, levels, self.states)
        # in the order that was asked for
        return {i: updates[i] for i in (*bucket, MARKS) if i in updates}

    def _together(self, layers: Sequence[int], gradients: Stacks) -> bool:
        """Between processes, where a collective costs a latency, and on a GPU, where a kernel costs
        a launch, layers are exchanged together; else one by one, so that each stays in the
        cache."""
        return self.world.lockstep or any(on_gpu(gradients[i]) for i in layers)

    def _plan(
        self, layers: tuple[int, ...], gradients: Stacks, levels: Sequence[AnyLevel]
    ) -> BucketPlan:
        """How these layers are exchanged at their levels."""
        kinds = [(gradients[i].dtype, on_gpu(gradients[i])) for i in layers[:1]]
        chosen = [levels[i] for i in layers], kinds, self.tentative
        plan = self._plans.get(layers)
        if plan is None or plan.chosen != chosen:
            # Buckets share no layer. Those that do were of other steps, as where other layers were
            # used, and hold memory for residuals.
            for other in [x for x in self._plans if not {*layers}.isdisjoint(x)]:
                del self._plans[other]
            plan = self._plans[layers] = self._make_plan(layers, gradients, levels, chosen)
        return plan

    def _make_plan(
        self, layers: Sequence[int], gradients: Stacks, levels: Sequence[AnyLevel], chosen: Any
    ) -> BucketPlan:
        plan, alike = BucketPlan(chosen), dict[int, list[int]]()  # by compressor: its layers
        for i in layers:
            compressor, level = self.resolve_level(i, levels[i])
            absent = not gradients[i].numel() and not compressor.joins_shards
            if type(compressor) is not Dense and absent and self.states[i].shard is not None:
                plan.absent.append(i)
            elif type(compressor) is Dense or level == DENSE:
                plan.dense.append((i, compressor))
            else:
                alike.setdefault(id(compressor), []).append(i)
        for own in alike.values():
            compressor = self.resolve_level(own[0], levels[own[0]])[0]
            parts = [own]
            if compressor.one_level:
                parts = _at_one_level(own, gradients, levels)
            elif not self._together(layers, gradients):
                parts = [[i] for i in own]
            feedback = bool(compressor.error_feedback)
            buckets = [
                Bucket(
                    part,
                    [self.states[i] for i in part],
                    [self.resolve_level(i, levels[i])[1] for i in part],
                    feedback,
                    self.tentative,
                )
                for part in parts
            ]
            plan.parts.append((compressor, buckets))
        return plan

    def resolve_level(self, layer: int, level: AnyLevel) -> tuple[Compressor, Level]:
        """Return the compressor of a layer at a level, and the level without error feedback, as
        ``Compressor.resolve_level`` does; the level is "dense" if the other one would send more
        than the layer has."""
        if (layer, level) not in self._choices:
            compressor, plain = self.compressors[layer], cast(Level, level)
            if isinstance(level, FeedbackLevel):
                if level not in self._at:  # one object for all layers, which are exchanged together
                    self._at[level] = compressor.resolve_level(level)
                compressor, plain = self._at[level]
            whole = compressor.exceeds(self.layers[layer], plain, self.world.workers)
            self._choices[layer, level] = compressor, DENSE if whole else plain
        return self._choices[layer, level]

    def set_rates(self, layers: Sequence[int]) -> None:
        """Set the rate of the step to come in the memories of layers, if any reads it."""
        rates = self.rates
        for i in layers if self.reads_rates else ():
            if rates is not None:
                self.states[i].rate = rates[i]

    def residuals(self) -> list[Tensor | None]:
        """Return what each hosted worker has not sent yet, by layer."""
        return [state.residual for state in self.states]

    # -- a step that may not count -------------------------------------------------------------

    def keep(self, layers: Iterable[int]) -> None:
        """Keep the memories of these layers before the step under way comes to them."""
        for i in layers:
            state = self.states[i]
            self.kept[i] = state.snapshot()
            if not self.tentative and state.residual is not None:
                state.residual = state.residual.detach()  # another tensor: it is not written to

    def settle_step(self, unapplied: Collection[int] = ()) -> None:
        """End a step that counts, except in ``unapplied`` layers: to adopt their residuals would
        forget an update that was never applied."""
        self._restore(self.kept, unapplied)
        self.before = {i: fields for i, fields in self.kept.items() if i not in unapplied}
        self.kept = {}

    def drop_step(self) -> None:
        """Restore the memories before a step under way that has failed, if there is one."""
        self._restore(self.kept, self.kept)

    def undo_step(self, layers: Collection[int] | None = None) -> set[int]:
        """Take the last step back in some layers, or in all; return the layers that the step had
        changed."""
        if (before := self.before) is None:
            return set()
        chosen = {i for i in before if layers is None or i in layers}
        self._restore(before, chosen)
        self.before = {i: x for i, x in before.items() if i not in chosen} or None
        return chosen

    def _restore(self, fields: dict[int, dict[str, Any]], layers: Iterable[int]) -> None:
        for i in layers:
            if i in fields:
                self.states[i].restore(fields[i])

    @property
    def scales(self) -> list[float]:
        """Return, by layer, the scale of the loss in which its residual is stored."""
        pairs = zip(self.states, self.compressors, strict=True)
        return [state.scale if compressor.in_place else 1.0 for state, compressor in pairs]

    def rescale(self, ratio: float) -> None:
        """Note that the present residuals are in units of ``ratio`` times the scale that was
        assumed."""
        for state, compressor in zip(self.states, self.compressors, strict=True):
            if compressor.in_place:
                state.scale *= ratio
            else:
                state.rescale_residual(ratio)

    # -- checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (shared, residuals): what is the same on all workers, and the hosted residuals."""
        shared, residuals = {}, {}
        for layer, state in zip(self.layers, self.states, strict=True):
            residuals[layer.name], shared[layer.name] = state.residual, state.shared_state()
        return shared, residuals

    def load_state_dict(self, shared: dict[str, Any], residuals: dict[str, Any]) -> None:
        """Continue from a ``state_dict``; ``to`` moves the tensors to the gradients' device."""
        parts = zip(self.layers, self.states, self.compressors, strict=True)
        for layer, state, compressor in parts:
            if layer.name not in shared or layer.name not in residuals:
                raise ConfigError(f"the checkpoint has no layer {layer.name!r}: another model?")
            state.load_shared_state(shared[layer.name])
            state.scale = 1.0
            state.residual = residual = residuals[layer.name]
            if residual is None:
                continue  # a scalar, which has no matrix, never has one
            state.residual = residual.contiguous()
            if tuple(residual.shape[1:]) not in (compressor.residual_shape(layer), layer.shape):
                raise ConfigError(
                    f"the checkpoint's residual of layer {layer.name!r} has shape "
                    f"{list(residual.shape)}, the layer {list(layer.shape)}: another model?"
                )
        self.reads_rates |= any(state.residual_rate is not None for state in self.states)

    def to(self, device: torch.device) -> Reducer:
        """Move all memories to a device."""
        for state in self.states:
            for name, value in vars(state).items():
                if isinstance(value, Tensor):
                    setattr(state, name, value.to(device))
        return self


def exchange_layers(
    compressor: Compressor,
    bucket: Bucket,
    gradients: Sequence[Float[Tensor, "hosted ..."]],
    comm: Comm,
    scale: float = 1.0,
) -> list[Tensor]:
    """Add residuals, call `Compressor.exchange`, and return the updates, ``[*shape]`` by layer.

    Gradients are left as they are. A residual survives every change of level. Without error
    feedback at this level it is added to one more gradient; what is not sent of the two is dropped.
    """
    compressor.add_residual(bucket, gradients, scale)
    for state in bucket.states:
        state.step += 1
    comm.protect(bucket.deltas)
    updates = compressor.exchange(bucket, comm)
    _check_updates(compressor, updates, bucket.deltas)
    if not bucket.feedback:
        for state in bucket.states:
            state.residual = None  # of another level: it was added to the delta
    return [x.view(gradient.shape[1:]) for x, gradient in zip(updates, gradients, strict=True)]


def _check_updates(compressor: Compressor, updates: Any, deltas: Sequence[Tensor]) -> None:
    """Raise ConfigError unless there is an update of each layer, of its size and type: another one
    would train on, as far as torch broadcasts and converts it."""
    if not isinstance(updates, Sequence) or len(updates) != len(deltas):
        got = f"{len(updates)} of them" if isinstance(updates, Sequence) else type(updates).__name__
        raise ConfigError(
            f"the compressor {type(compressor).__name__}: exchange returned {got}, expected a list "
            f"of {len(deltas)} updates, one for each layer of the bucket"
        )
    for update, delta in zip(updates, deltas, strict=True):
        if update.numel() != delta[0].numel() or update.dtype != delta.dtype:
            raise ConfigError(
                f"the compressor {type(compressor).__name__}: an update is {_describe(update)}, "
                f"expected {_describe(delta[0])}"
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _at_one_level(
    layers: Sequence[int], gradients: Stacks, levels: Sequence[AnyLevel]
) -> list[list[int]]:
    """Layers of one level and one type of numbers, up to a size, in the order of their first ones:
    the same on all processes, as the order of collectives is."""
    found: dict[Any, list[list[int]]] = {}
    room: dict[Any, int] = {}
    for i in layers:
        size, alike = gradients[i][0].numel(), (levels[i], gradients[i].dtype)
        if alike not in found or size > room[alike]:
            found.setdefault(alike, []).append([])
            room[alike] = TOGETHER_ON_GPU if on_gpu(gradients[i]) else TOGETHER
        found[alike][-1].append(i)
        room[alike] -= size
    return [part for parts in found.values() for part in parts]
