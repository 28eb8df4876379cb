"""Low-rank updates by power iteration: PowerSGD and ACP-SGD. The level is the rank.

A layer is one matrix, or several, of which each has factors of its own: the experts of a mixture,
``[count, n, m]`` (``Layer.inner``). A stack of matrices of one shape may have those of one layer
and of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import DENSE, Bounds, ByName, GivenLevel, Level
from regimes.base.errors import require
from regimes.base.precision import HALF
from regimes.base.seeding import make_generator
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Shard, Traffic
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket, State
from regimes.compression.kernels import (
    Stack,
    Workspace,
    left_product,
    reconstruct,
    reconstruct_and_subtract_,
    right_product,
    stack_alike,
    stack_tensors,
    subtract_products_,
    unstack,
)
from regimes.compression.orthonormal import orthonormalise


@dataclass(frozen=True, kw_only=True)
class LowRank(Compressor):
    """Is the base of the compressors that send a matrix as two factors of few columns.

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
        """Return whether the factors have as many bytes as the layer, or more. If both have equally
        many, the layer is sent whole, because this loses nothing and needs no product."""
        return compressed_bytes >= dense_bytes

    def check(self, level: Level) -> None:
        good = level == DENSE or (type(level) is int and level >= 1)
        where = f"level of {type(self).__name__}"
        require(good, where, level, 'a rank, a whole number from 1, or "dense"')

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> State:
        state = super().init(layer, seed, first_worker)
        state.inner = layer.inner
        return state

    def numbers_of_rank(self, layer: Layer, level: Level) -> int:
        """Return how many numbers the two factors of a layer have at a rank; of a stack of
        matrices, the factors of all of them."""
        n, m = layer.inner or layer.matrix
        count = layer.shape[0] if layer.inner else 1
        return count * (n + m) * min(int(level), n, m)


@dataclass
class PowerState(State):
    """Holds the right factor of a layer beside its residual.

    Attributes:
        q: The right factor of the last step, transposed to ``[rank, m]``. It is the same on every
            worker. If the layer is a stack of matrices, their factors are below one another.
    """

    replaced: ClassVar[frozenset[str]] = frozenset({"q"})
    q: Float[Tensor, "rank m"] | None = None


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Sends two small means per layer and step, ``(n + m) min(r, n, m)`` floats for rank r (Vogels,
    Karimireddy & Jaggi, 2019, algorithm 1).

    Each step makes one power iteration. It starts from the right factor Q of the last step, so Q
    follows the leading directions of the gradient. This is the paper's algorithm. In addition Q
    survives a change of rank: it gets new random columns, or loses its last ones. If a matrix is
    divided into shards of rows, each process has its rows of P, and the contributions of the shards
    to Q are added.

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
        """Return whether a level would send more bytes of a layer than "dense"; never with
        ``reset_on_change``, because the authors' code sends every matrix at its rank, as their
        Table 1 counts."""
        return not self.reset_on_change and super().exceeds(layer, level, workers)

    def before_dense(self, state: State) -> None:
        """Forget Q and the residual before a step at "dense", if ``reset_on_change`` is set.
        Otherwise nothing changes, and the step sends the residual, too."""
        if self.reset_on_change:
            state.residual = cast(PowerState, state).q = None

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        """Run one step of the paper's algorithm 1 on the deltas, which are gradients plus
        residuals; return the product of both factors for each layer."""
        matrices = bucket.once("matrices", lambda: _matrices(bucket))
        if not matrices:  # no expert is here
            return [delta[0] for delta in bucket.deltas]
        # matrices of one shape and rank are stacked: a kernel takes all of a stack at once
        keys = [(matrix.rank, matrix.shard) for matrix in matrices]
        stacks = [
            stack.at_present()
            for stack in bucket.of_deltas(
                "stacks", lambda: stack_alike(_parts(bucket.deltas, matrices), keys)
            )
        ]
        shards = [matrices[stack.places[0]].shard for stack in stacks]

        # P = delta Q, with the Q of the last step: the mean over workers, made orthonormal
        last = bucket.once("last", _Factors)
        right = self._warm_starts(bucket, matrices, stacks, last)
        own = [left_product(q, stack) for q, stack in zip(right, stacks, strict=True)]
        shares = bucket.once("left", lambda: _shares(stacks, own, bucket, matrices))
        left = self._mean(own, shares, comm)
        left = self._orthonormal(left, shards, bucket, comm)  # each [layers, r, n]

        # the new Q = delta' P: the mean over workers
        own = [right_product(p, stack) for p, stack in zip(left, stacks, strict=True)]
        shares = bucket.once("right", lambda: _shares(stacks, own, bucket, matrices, shards))
        right = self._mean_of_shards(own, shards, shares, comm)  # each [layers, r, m]

        # the update P Q'; what remains in the deltas is the residual
        every = bucket.once("workspaces", lambda: _workspaces(bucket, matrices))
        workspaces = [every[stack.places[0]] for stack in stacks]
        if bucket.feedback:
            products = reconstruct_and_subtract_(stacks, left, right, workspaces)
        else:
            products = [reconstruct(*x) for x in zip(left, right, workspaces, strict=True)]

        # Q begins the next step
        last.stacked, last.alone = right, _of_layers(bucket, matrices, unstack(stacks, right))
        for state, q in zip(bucket.states, last.alone, strict=True):
            state.q = q
        return _of_layers(bucket, matrices, unstack(stacks, products))

    def _warm_starts(
        self, bucket: Bucket, matrices: Sequence[_Matrix], stacks: Sequence[Stack], last: _Factors
    ) -> list[Float[Tensor, "layers r m"]]:
        """The right factors of the last step, stacked."""
        states = bucket.states
        if last.alone and all(x.q is q for x, q in zip(states, last.alone, strict=True)):
            return last.stacked  # else a step was undone, or a state loaded
        parts = _parts(bucket.deltas, matrices)
        starts = [
            self._warm_start(states[matrix.layer], matrix, part)
            for matrix, part in zip(matrices, parts, strict=True)
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
        self, factors: list[Tensor], shards: Sequence[Shard | None], bucket: Bucket, comm: Comm
    ) -> list[Tensor]:
        """This process's part of orthonormal bases. Where rows of a matrix are on several
        processes, all of them compute the basis of the joined factor, which is the same on each,
        completed or not."""
        divided = {i: shard for i, shard in enumerate(shards) if shard is not None}
        if not divided:
            return orthonormalise(factors, bucket.once)
        counts = {i: factors[i].shape[0] * factors[i].shape[1] for i in divided}  # of columns
        joined = comm.join_shards(
            [factors[i].flatten(0, 1).mT.reshape(-1) for i in divided],  # row by row
            [shard.chunk * counts[i] for i, shard in divided.items()],
            [shard.rows * counts[i] for i, shard in divided.items()],
        )
        whole = list(factors)
        for i, rows in zip(divided, joined, strict=True):
            whole[i] = rows.view(-1, counts[i]).mT.unflatten(0, factors[i].shape[:2])
        bases = orthonormalise(whole, bucket.once)
        pairs = zip(bases, shards, strict=True)
        return [basis if shard is None else basis[..., shard.here] for basis, shard in pairs]

    def _mean_of_shards(
        self,
        own: Sequence[Tensor],
        shards: Sequence[Shard | None],
        shares: Sequence[Mapping[int, int]],
        comm: Comm,
    ) -> list[Tensor]:
        """The workers' means of sums over shards. Each shard exchanges its share of the sum, so
        that the worker sends it once."""
        divided = [i for i, shard in enumerate(shards) if shard is not None]
        if not divided:
            return self._mean(own, shares, comm)
        sent = list(own)
        for i, part in zip(
            divided, comm.sum_shards([own[i].flatten(1) for i in divided]), strict=True
        ):
            sent[i] = part
        means = self._mean(sent, shares, comm)
        sizes = [own[i][0].numel() for i in divided]
        chunks = [-(-size // comm.world.shards) for size in sizes]
        joined = comm.join_shards([means[i] for i in divided], chunks, sizes)
        for i, q in zip(divided, joined, strict=True):
            means[i] = q.view(own[i].shape[1:])
        return means

    def _warm_start(self, state: PowerState, matrix: _Matrix, like: Tensor) -> Tensor:
        """The last step's Q of a matrix, ``[rank, m]``, with rows dropped, or added as seeded
        normal noise."""
        last, rank = matrix.own(state.q, like.shape[2]), matrix.rank
        if self.reset_on_change and last is not None and len(last) != rank:
            last = None
        return resize_rows(last, rank, like.shape[2], like, matrix.key(state, "q"))

    def finite_probe(self, update: Tensor, state: State, level: Level) -> Tensor:
        """Return the factor Q, or at "dense" the update. It is not finite if a gradient of a worker
        was not, provided that the compressor ``propagates_nonfinite``."""
        return update if level == DENSE else cast(Tensor, cast(PowerState, state).q)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        floats = self.numbers_of_rank(layer, level)
        if self.wire != "full":
            return Traffic(floats / 2, floats * 2)
        return Traffic(floats, floats * itemsize)


@dataclass
class _Factors:
    """Right factors, of each stack and of each layer: parts of one another."""

    stacked: list[Tensor] = field(default_factory=list)
    alone: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a bucket.

    Attributes:
        layer: the place of its layer among those of the bucket.
        index, count: which of how many of the layer's matrices here.
        number: of the whole layer's matrices; None: it is the only one.
        shape: of what is here of it.
        rank: of its factors.
        shard: which rows of it are here; None: all.
    """

    layer: int
    index: int
    count: int
    number: int | None
    shape: tuple[int, int]
    rank: int
    shard: Shard | None

    def own(self, factors: Tensor | None, width: int) -> Tensor | None:
        """Its part of the factors of its layer, which are below one another; None: there are none
        of this width, as in a state of an earlier version."""
        if factors is None or factors.shape[1] != width or len(factors) % self.count:
            return None
        return factors.unflatten(0, (self.count, -1))[self.index]

    def key(self, state: State, what: str) -> tuple[Any, ...]:
        """Of its random numbers."""
        return (*state.key, what, *(() if self.number is None else (self.number,)))


def _matrices(bucket: Bucket) -> list[_Matrix]:
    """The matrices of the layers, one after the other."""
    found = []
    layers = zip(bucket.states, bucket.levels, bucket.deltas, strict=True)
    for place, (state, level, delta) in enumerate(layers):
        count, m = delta.shape[1:]
        if state.inner is None:
            rows = count if state.shard is None else state.shard.rows  # of the whole matrix
            rank = min(int(level), rows, m)
            found.append(_Matrix(place, 0, 1, None, (count, m), rank, state.shard))
            continue
        first = 0 if state.shard is None else state.shard.here.start
        rank = min(int(level), *state.inner)
        found += [
            _Matrix(place, i, count, first + i, state.inner, rank, None) for i in range(count)
        ]
    return found


def _parts(
    deltas: Sequence[Float[Tensor, "hosted _ _"]], matrices: Sequence[_Matrix]
) -> list[Float[Tensor, "hosted _ _"]]:
    """The numbers of each matrix, in the memory of its layer."""
    if len(matrices) == len(deltas) and all(matrix.number is None for matrix in matrices):
        return [*deltas]
    found = []
    for matrix in matrices:
        delta = deltas[matrix.layer]
        one = delta if matrix.number is None else delta[:, matrix.index]
        found.append(one.view(len(delta), *matrix.shape))
    return found


def _of_layers(
    bucket: Bucket, matrices: Sequence[_Matrix], values: Sequence[Float[Tensor, "_ _"]]
) -> list[Tensor]:
    """What the matrices of each layer have, below one another."""
    if len(matrices) == len(bucket.deltas) and all(matrix.number is None for matrix in matrices):
        return [*values]
    found: list[list[Tensor]] = [[] for _ in bucket.deltas]
    for matrix, value in zip(matrices, values, strict=True):
        found[matrix.layer].append(value)
    return [
        own[0] if len(own) == 1 else torch.cat(own) if own else delta.new_empty((0, 1))
        for own, delta in zip(found, bucket.deltas, strict=True)
    ]


def _workspaces(bucket: Bucket, matrices: Sequence[_Matrix]) -> list[Workspace]:
    """A workspace for each matrix: that of its layer, if it is the only one."""
    return [
        bucket.states[matrix.layer] if matrix.number is None else Workspace() for matrix in matrices
    ]


def _shares(
    stacks: Sequence[Stack],
    factors: Sequence[Float[Tensor, "hosted ..."]],
    bucket: Bucket,
    matrices: Sequence[_Matrix],
    shards: Sequence[Shard | None] = (),
) -> list[dict[int, int]]:
    """How many of each factor's numbers each layer has, or of the share of them that a shard sends.
    Empty where each factor is one layer's, in their order."""
    if len(stacks) == len(bucket.layers) == len(matrices) and not any(shards):
        return []
    found = []
    for i, (stack, factor) in enumerate(zip(stacks, factors, strict=True)):
        size = factor[0].numel() // len(stack.places)
        part, shard = slice(0, factor[0].numel()), shards[i] if shards else None
        if shard is not None:
            part = replace(shard, rows=part.stop).here
        share: dict[int, int] = {}
        for at, place in enumerate(stack.places):
            start, stop = max(part.start, at * size), min(part.stop, (at + 1) * size)
            layer = bucket.layers[matrices[place].layer]
            share[layer] = share.get(layer, 0) + max(0, stop - start)
        found.append(share)
    return found


def resize_rows(
    rows: Float[Tensor, "old m"] | None, rank: int, width: int, like: Tensor, key: Sequence[Any]
) -> Float[Tensor, "rank m"]:
    """Drop rows of a factor, or add rows of normal noise that is seeded by ``key``."""
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
    """Holds the factor that was sent last, beside a layer's residual.

    Attributes:
        factor: The mean that was sent last, the same on every worker; P transposed if ``is_left``,
            else Q.
        is_left: The factor is P.
    """

    replaced: ClassVar[frozenset[str]] = frozenset({"factor"})
    factor: Float[Tensor, "rank side"] | None = None
    is_left: bool = False


@dataclass(frozen=True, kw_only=True)
class ACPSGD(LowRank):
    """Approximates a gradient by a product of two factors, P Q^T, and sends P in one step and Q in
    the next (Zhang et al., ICDCS 2023). On average a step sends ``(n + m) min(r, n, m) / 2``
    floats, half of what PowerSGD sends, in one mean instead of two that depend on each other.

    Such a half-iteration sends one factor and takes the other from the half before. The residual of
    a worker is what it had to send minus its own contribution, not minus the mean: it is subtracted
    before the mean arrives. So a step may have several halves, each on what the one before has
    left. Two halves are ``num_iters_per_step = 2`` of epfml/powersgd.

    Attributes:
        iterations: The number of half-iterations in a step. Two send as much as PowerSGD, and their
            sum has up to twice the rank.
    """

    iterations: Annotated[int, Bounds("a whole number from 1", low=1)] = 1
    phases: ClassVar[int] = 2
    memory: ClassVar[type[State]] = AlternatingState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations % 2 == 0:  # each step sends as many P as Q, and P last
            object.__setattr__(self, "phases", 1)

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        # each shard is compressed by itself
        matrices = bucket.once(
            "matrices",
            lambda: [replace(x, rank=min(x.rank, *x.shape), shard=None) for x in _matrices(bucket)],
        )
        if not matrices:
            return [delta[0] for delta in bucket.deltas]
        rests, several = _parts(bucket.deltas, matrices), self.iterations > 1
        if several and not bucket.feedback:
            rests = [rest.clone() for rest in rests]
        states = [bucket.states[matrix.layer] for matrix in matrices]
        workspaces = bucket.once("workspaces", lambda: _workspaces(bucket, matrices))
        # layers may differ in which factor comes next, where the optimiser has left some out
        kinds = zip(matrices, states, strict=True)
        stacks = stack_alike(rests, [(matrix.rank, state.is_left) for matrix, state in kinds])
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in stacks]  # (P, Q) of each half
        for half in range(self.iterations):
            if half:  # of what the half before has left
                stacks = [stack.at_present() for stack in stacks]
            lasts = [
                stack_tensors([_last_factor(states[i], matrices[i], rests[i]) for i in x.places])
                for x in stacks
            ]

            # each worker's own new factor, from the orthonormal basis of the one sent last
            bases, own, factors = orthonormalise(lasts, bucket.once), [], []
            for stack, basis in zip(stacks, bases, strict=True):
                state = states[stack.places[0]]
                new = (right_product if state.is_left else left_product)(basis, stack)
                own.append(new)
                new = new.transpose(0, 1)  # [layers, L, r, side]
                of_all = basis[:, None].expand(-1, new.shape[1], -1, -1)
                factors.append(_in_order(state, new, of_all))
            if bucket.feedback or half < self.iterations - 1:  # a worker's own contribution
                subtract_products_(stacks, factors)

            # its mean over workers, which all keep for the next half
            means = comm.mean(own, _shares(stacks, own, bucket, matrices))
            for so_far, stack, mean, basis in zip(found, stacks, means, bases, strict=True):
                so_far.append(_in_order(states[stack.places[0]], mean, basis))
            of_layers = _of_layers(bucket, matrices, unstack(stacks, means))
            for state, factor in zip(bucket.states, of_layers, strict=True):
                state.factor, state.is_left = factor, not state.is_left

        # the update: the sum of P Q' over the halves, as one product
        products = []
        for so_far, stack in zip(found, stacks, strict=True):
            p, q = (torch.cat(x, dim=1) if several else x[0] for x in zip(*so_far, strict=True))
            products.append(reconstruct(p, q, workspaces[stack.places[0]]))
        return _of_layers(bucket, matrices, unstack(stacks, products))

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return what one step of a layer sends, in floats and bytes, as the mean over two steps:
        if ``iterations`` is odd, one step ends with P and the next with Q."""
        twice = self.iterations * self.numbers_of_rank(layer, level)
        return Traffic(twice / 2, twice * itemsize // 2)

    def phase(self, state: State) -> int:
        """Return 1 if the factor P was sent last, and 0 if it was Q."""
        return int(cast(AlternatingState, state).is_left)


def _last_factor(state: AlternatingState, matrix: _Matrix, like: Tensor) -> Tensor:
    """The factor that a half-iteration takes from the half before, at this rank."""
    side, name = (1, "p") if state.is_left else (2, "q")
    width = like.shape[side]
    last = matrix.own(state.factor, width)
    return resize_rows(last, matrix.rank, width, like, matrix.key(state, name))


def _in_order(state: AlternatingState, new: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The two as (P, Q); the new one is Q where the last was P."""
    return (basis, new) if state.is_left else (new, basis)
