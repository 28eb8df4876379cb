"""Low-rank updates by power iteration: PowerSGD and ACP-SGD. The level is the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket, State
from regimes.compression.kernels import (
    Stack,
    left_product,
    orthonormalise,
    reconstruct,
    reconstruct_and_subtract_,
    right_product,
    stack_alike,
    stack_tensors,
    subtract_products_,
    unstack,
)
from regimes.config import DENSE, Bounds, ByName, GivenLevel, Level
from regimes.errors import require
from regimes.precision import HALF
from regimes.seeding import make_generator


@dataclass(frozen=True, kw_only=True)
class LowRank(Compressor):
    """Base of the compressors that send a matrix as two factors of few columns.

    Attributes:
        rank: The number of columns of a factor, or the rank that each word of a policy stands for.
            In a configuration, ``levels`` has it.
    """

    rank: int | ByName | None = field(default=None, hash=False)
    level: GivenLevel | ByName | None = field(default=None, init=False, repr=False, hash=False)
    level_word: ClassVar[str] = "rank"
    one_level: ClassVar[bool] = False
    replayable: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 4, "high": 1}

    def sends_more(self, compressed_bytes: int, dense_bytes: int) -> bool:
        """As many are too many: sent whole, the layer loses nothing, and no product is computed."""
        return compressed_bytes >= dense_bytes

    def check(self, level: Level) -> None:
        good = level == DENSE or (type(level) is int and level >= 1)
        where = f"level of {type(self).__name__}"
        require(good, where, level, 'a rank, a whole number from 1, or "dense"')


@dataclass
class PowerState(State):
    """``q``: the right factor of the last step, transposed; the same on every worker."""

    replaced: ClassVar[frozenset[str]] = frozenset({"q"})
    q: Float[Tensor, "rank m"] | None = None


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Sends two small means per layer and step, ``(n + m) min(r, n, m)`` floats for rank r (Vogels,
    Karimireddy & Jaggi, 2019, algorithm 1).

    Each step makes one power iteration. It starts from the right factor Q of the last step, so Q
    follows the leading directions of the gradient. The mathematics is that of the paper; in
    addition Q survives a change of rank, at which rows are added or dropped. If a matrix is divided
    into shards of rows, each process has its rows of P, and the contributions of the shards to Q
    are added.

    >>> PowerSGD(rank=4)
    PowerSGD(error_feedback=True, residual='gradient', rank=4, reset_on_change=False, wire='full')
    >>> PowerSGD().cost(Layer("conv", (64, 64, 3, 3)), 4, workers=4)
    Traffic(floats=2560, bytes=10240)

    Attributes:
        reset_on_change: Do as the authors' code does: a change of level forgets Q, and a change to
            dense forgets the residual instead of sending it.
        wire: The type in which the two factors travel: "full" is the model's type; "fp16" and
            "bf16" are half the bytes of float32. Error feedback keeps what the rounding loses. With
            half precision simulated and real workers are equal only up to rounding, as with `Cast`,
            and the compressor is not linear.
    """

    reset_on_change: bool = False
    wire: str = "full"
    propagates_nonfinite: ClassVar[bool] = True
    joins_shards: ClassVar[bool] = True
    memory: ClassVar[type[State]] = PowerState

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.wire in ("full", *HALF)
        require(good, "compressor.wire", self.wire, '"full", "fp16" or "bf16"')
        if self.wire != "full":
            # Each worker rounds its own factors before the mean; a large finite factor overflows.
            object.__setattr__(self, "linear", False)
            object.__setattr__(self, "propagates_nonfinite", False)

    def exceeds(self, layer: Layer, level: Level, workers: int) -> bool:
        """The authors' code sends every matrix at its rank, as their Table 1 counts."""
        return not self.reset_on_change and super().exceeds(layer, level, workers)

    def before_dense(self, state: State) -> None:
        if self.reset_on_change:
            state.residual = cast(PowerState, state).q = None

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        """Algorithm 1. The deltas are gradients plus residuals."""
        ranks = bucket.once("ranks", lambda: _ranks(bucket))
        keys = [*zip(ranks, [state.shard for state in bucket.states], strict=True)]
        stacks = [
            stack.at_present()
            for stack in bucket.of_deltas("stacks", lambda: stack_alike(bucket.deltas, keys))
        ]
        last = bucket.once("last", _Factors)
        right = self._warm_starts(bucket, stacks, last)
        own = [left_product(q, stack) for q, stack in zip(right, stacks, strict=True)]
        shares = bucket.once("left", lambda: _shares(stacks, own, bucket))
        left = self._mean(own, shares, comm)
        left = self._orthonormal(left, stacks, bucket, comm)  # each [layers, r, n]
        own = [right_product(p, stack) for p, stack in zip(left, stacks, strict=True)]
        right = self._mean_of_shards(own, stacks, bucket, comm)  # each [layers, r, m]
        rooms = [bucket.states[stack.places[0]] for stack in stacks]
        if bucket.feedback:  # what remains in the deltas is the residual
            products = reconstruct_and_subtract_(stacks, left, right, rooms)
        else:
            products = [reconstruct(*x) for x in zip(left, right, rooms, strict=True)]
        last.stacked, last.alone = right, unstack(stacks, right)
        for state, q in zip(bucket.states, last.alone, strict=True):
            state.q = q
        return unstack(stacks, products)

    def _warm_starts(
        self, bucket: Bucket, stacks: Sequence[Stack], last: _Factors
    ) -> list[Float[Tensor, "layers r m"]]:
        """The right factors of the last step, stacked."""
        states = bucket.states
        if last.alone and all(x.q is q for x, q in zip(states, last.alone, strict=True)):
            return last.stacked  # else a step was undone, or a state loaded
        starts = [
            self._warm_start(*layer)
            for layer in zip(states, bucket.levels, bucket.deltas, strict=True)
        ]
        return [stack_tensors([starts[i] for i in stack.places]) for stack in stacks]

    def _mean(
        self, factors: Sequence[Tensor], shares: Sequence[Mapping[int, int]], comm: Comm
    ) -> list[Tensor]:
        """The means of the workers' factors; they travel as ``wire``."""
        if self.wire == "full":
            return comm.mean(factors, shares)
        means = comm.mean([factor.to(HALF[self.wire]) for factor in factors], shares)
        return [mean.to(factor.dtype) for mean, factor in zip(means, factors, strict=True)]

    def _orthonormal(
        self, factors: list[Tensor], stacks: Sequence[Stack], bucket: Bucket, comm: Comm
    ) -> list[Tensor]:
        """This process's part of orthonormal bases. All shards compute the basis of the joined
        factor, which is the same on each, completed or not."""
        shards = [bucket.states[stack.places[0]].shard for stack in stacks]
        if shards[0] is None:
            return orthonormalise(factors, bucket.once)
        counts = [factor.shape[0] * factor.shape[1] for factor in factors]  # of columns
        joined = comm.join_shards(
            [factor.flatten(0, 1).mT.reshape(-1) for factor in factors],  # row by row
            [shard.chunk * count for shard, count in zip(shards, counts, strict=True)],
            [shard.rows * count for shard, count in zip(shards, counts, strict=True)],
        )
        whole = [
            rows.view(-1, count).mT.unflatten(0, factor.shape[:2])
            for rows, count, factor in zip(joined, counts, factors, strict=True)
        ]
        bases = orthonormalise(whole, bucket.once)
        return [basis[..., shard.here] for basis, shard in zip(bases, shards, strict=True)]

    def _mean_of_shards(
        self, own: Sequence[Tensor], stacks: Sequence[Stack], bucket: Bucket, comm: Comm
    ) -> list[Tensor]:
        """The workers' means of sums over shards. Each shard exchanges its share of the sum, so
        that the worker sends it once."""
        shard = bucket.states[0].shard
        if shard is None:
            shares = bucket.once("right", lambda: _shares(stacks, own, bucket))
            return self._mean(own, shares, comm)
        sizes = [q[0].numel() for q in own]
        heres = [replace(shard, rows=size).here for size in sizes]
        shares = _shares(stacks, own, bucket, heres)
        means = self._mean(comm.sum_shards([q.flatten(1) for q in own]), shares, comm)
        joined = comm.join_shards(means, [-(-size // shard.count) for size in sizes], sizes)
        return [q.view(of.shape[1:]) for q, of in zip(joined, own, strict=True)]

    def _warm_start(self, state: PowerState, level: Level, like: Tensor) -> Tensor:
        """The last step's Q, ``[rank, m]``, with rows dropped, or added as seeded normal noise."""
        rank = _rank(state, level, like)
        forget = self.reset_on_change and state.q is not None and len(state.q) != rank
        last = None if forget else state.q
        return resize_rows(last, rank, like.shape[-1], like, (*state.key, "q"))

    def finite_probe(self, update: Tensor, state: State, level: Level) -> Tensor:
        return update if level == DENSE else cast(Tensor, cast(PowerState, state).q)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        n, m = layer.matrix
        floats = (n + m) * min(int(level), n, m)
        if self.wire != "full":
            return Traffic(floats / 2, floats * 2)
        return Traffic(floats, floats * itemsize)


@dataclass
class _Factors:
    """Right factors, of each stack and of each layer: parts of one another."""

    stacked: list[Tensor] = field(default_factory=list)
    alone: list[Tensor] = field(default_factory=list)


def _ranks(bucket: Bucket) -> list[int]:
    layers = zip(bucket.states, bucket.levels, bucket.deltas, strict=True)
    return [_rank(*layer) for layer in layers]


def _rank(state: State, level: Level, like: Tensor) -> int:
    """The rank of a factor: at most that of the whole matrix."""
    rows = like.shape[1] if state.shard is None else state.shard.rows
    return min(int(level), rows, like.shape[2])


def _shares(
    stacks: Sequence[Stack],
    factors: Sequence[Float[Tensor, "hosted ..."]],
    bucket: Bucket,
    here: Sequence[slice] = (),
) -> list[dict[int, int]]:
    """How many of each factor's numbers each layer has, or of a part of them that lies ``here``.
    Empty where each factor is one layer's, in their order."""
    if all(len(stack.places) == 1 for stack in stacks):
        return []
    found = []
    for i, (stack, factor) in enumerate(zip(stacks, factors, strict=True)):
        size = factor[0].numel() // len(stack.places)
        part = here[i] if here else slice(0, factor[0].numel())
        ends = [(at * size, (at + 1) * size) for at in range(len(stack.places))]
        sizes = [max(0, min(part.stop, end) - max(part.start, start)) for start, end in ends]
        layers = [bucket.layers[place] for place in stack.places]
        found.append(dict(zip(layers, sizes, strict=True)))
    return found


def resize_rows(
    rows: Float[Tensor, "old m"] | None, rank: int, width: int, like: Tensor, key: Sequence[Any]
) -> Float[Tensor, "rank m"]:
    """A factor with rows dropped, or added as normal noise that is seeded by ``key``."""
    if rows is not None and len(rows) >= rank:
        return rows[:rank]
    old = [] if rows is None else list(rows)
    fresh = [
        torch.randn(width, generator=make_generator(*key, row), dtype=like.dtype).to(like.device)
        for row in range(len(old), rank)
    ]
    return torch.stack([*old, *fresh])


@dataclass
class AlternatingState(State):
    """``factor``: the mean that was sent last, the same on every worker; P transposed where
    ``is_left``, else Q."""

    replaced: ClassVar[frozenset[str]] = frozenset({"factor"})
    factor: Float[Tensor, "rank side"] | None = None
    is_left: bool = False


@dataclass(frozen=True, kw_only=True)
class ACPSGD(LowRank):
    """Sends the factor P in one step and the factor Q in the next (Zhang et al., ICDCS 2023). On
    average a step sends ``(n + m) min(r, n, m) / 2`` floats, half of what PowerSGD sends, in one
    mean instead of two that depend on each other.

    Such a half-iteration sends one factor and takes the other from the half before. The residual of
    a worker is its gradient minus its own contribution, not minus the mean: it is subtracted before
    the mean arrives. So a step may have several halves, each on what the one before has left. Two
    halves are ``num_iters_per_step = 2`` of epfml/powersgd.

    Attributes:
        iterations: The number of half-iterations in a step. Two cost what PowerSGD costs, and
            approximate by up to twice the rank.
    """

    iterations: Annotated[int, Bounds("a whole number from 1", low=1)] = 1
    phases: ClassVar[int] = 2
    memory: ClassVar[type[State]] = AlternatingState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations % 2 == 0:  # each step sends as many P as Q, and P last
            object.__setattr__(self, "phases", 1)

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        ranks = [
            min(int(level), *delta.shape[1:])
            for level, delta in zip(bucket.levels, bucket.deltas, strict=True)
        ]
        rests, several = bucket.deltas, self.iterations > 1
        if several and not bucket.feedback:
            rests = [delta.clone() for delta in rests]
        # layers may differ in which factor comes next, where the optimiser has left some out
        stacks = stack_alike(
            rests, [*zip(ranks, [state.is_left for state in bucket.states], strict=True)]
        )
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in stacks]
        for half in range(self.iterations):
            if half:  # of what the half before has left
                stacks = [stack.at_present() for stack in stacks]
            lasts = [
                stack_tensors(
                    [_last_factor(bucket.states[i], ranks[i], rests[i]) for i in x.places]
                )
                for x in stacks
            ]
            bases, own, factors = orthonormalise(lasts, bucket.once), [], []
            for stack, basis in zip(stacks, bases, strict=True):
                state = bucket.states[stack.places[0]]
                new = (right_product if state.is_left else left_product)(basis, stack)
                own.append(new)
                new = new.transpose(0, 1)  # [layers, L, r, side]
                of_all = basis[:, None].expand(-1, new.shape[1], -1, -1)
                factors.append(_in_order(state, new, of_all))
            if bucket.feedback or half < self.iterations - 1:
                subtract_products_(stacks, factors)
            means = comm.mean(own, _shares(stacks, own, bucket))
            for so_far, stack, mean, basis in zip(found, stacks, means, bases, strict=True):
                so_far.append(_in_order(bucket.states[stack.places[0]], mean, basis))
            for state, factor in zip(bucket.states, unstack(stacks, means), strict=True):
                state.factor, state.is_left = factor, not state.is_left
        products = []
        for so_far, stack in zip(found, stacks, strict=True):
            p, q = (torch.cat(x, dim=1) if several else x[0] for x in zip(*so_far, strict=True))
            products.append(reconstruct(p, q, bucket.states[stack.places[0]]))
        return unstack(stacks, products)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The mean of two steps; where ``iterations`` is odd, one sends P and the other Q."""
        n, m = layer.matrix
        twice = self.iterations * (n + m) * min(int(level), n, m)
        return Traffic(twice / 2, twice * itemsize // 2)

    def phase(self, state: State) -> int:
        """1 where P was sent last, 0 where Q was."""
        return int(cast(AlternatingState, state).is_left)


def _last_factor(state: AlternatingState, rank: int, like: Tensor) -> Tensor:
    """The factor that a half-iteration takes from the half before, at this rank."""
    side, name = (1, "p") if state.is_left else (2, "q")
    return resize_rows(state.factor, rank, like.shape[side], like, (*state.key, name))


def _in_order(state: AlternatingState, new: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The two as (P, Q); the new one is Q where the last was P."""
    return (basis, new) if state.is_left else (new, basis)
