"""Sparsifiers, TopK and Random-K, and the selection of the k largest magnitudes.

The level is K, the percentage of a layer's coordinates that each worker sends, in (0, 100].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from regimes.base.config import DENSE, ByName, GivenLevel, Level
from regimes.base.errors import require
from regimes.base.seeding import BLOCK, Seed, draw_uniform, halves_of_words
from regimes.base.torch_compat import foreach_add, foreach_mul
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.base import Compressor
from regimes.compression.bucket import Bucket
from regimes.compression.kernels import Workspace, on_gpu, random_rows

DRAWN = 2 * BLOCK  # random numbers that a CPU draws and compares at once
IN_CACHE = 1 << 16  # values of short rows that it searches at once
SMALL = 1 << 14  # values; for fewer the selection by a bound does not pay


def num_kept(level: Level, size: int, count: str = "round") -> int:
    """Return how many coordinates K percent of ``size`` are: the nearest number, and at least one;
    or a truncated number ("truncate"), which may be zero.

    >>> num_kept(10, 250), num_kept(0.1, 250), num_kept(0.3, 500), num_kept(0.3, 500, "truncate")
    (25, 1, 2, 1)
    >>> num_kept(0.3, 250, "truncate")
    0
    """
    exact = float(level) / 100 * size
    return int(exact) if count == "truncate" else max(1, round(exact))


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Compressor):
    """Is the base of the compressors whose level is a percentage.

    Attributes:
        percent: The percentage of the coordinates that is sent, or the percentage that each word of
            a policy stands for. In a configuration, ``levels`` has it.
    """

    percent: float | ByName | None = field(default=None, hash=False)
    level: GivenLevel | ByName | None = field(default=None, init=False, repr=False, hash=False)
    level_word: ClassVar[str] = "percent"
    usual: ClassVar[Mapping[str, Level]] = {"low": 10, "high": 1}

    def check(self, level: Level) -> None:
        number = isinstance(level, int | float) and not isinstance(level, bool)
        good = level == DENSE or (number and 0 < float(level) <= 100)
        where = f"level of {type(self).__name__}"
        require(good, where, level, 'K, a percentage in (0, 100], or "dense"')


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Lets each worker send its K % largest coordinates in magnitude, with their indices (Aji &
    Heafield, 2017). The level is K.

    >>> TopK().cost(Layer("conv", (64, 64, 3, 3)), 1, workers=4)
    Traffic(floats=2952, bytes=2952)

    Attributes:
        reduction: What is done with the workers' values: "mean", or "sum" as in the authors' code.
        count: How many coordinates K percent are. "round" is the nearest number, at least one.
            "truncate" is what the authors' code does: a layer of which K percent are less than one
            coordinate sends nothing, and without error feedback it never changes.
    """

    reduction: str = "mean"
    count: str = "round"
    one_level: ClassVar[bool] = False
    replayable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.reduction in ("mean", "sum")
        require(good, "compressor.reduction", self.reduction, '"mean" or "sum"')
        good = self.count in ("round", "truncate")
        require(good, "compressor.count", self.count, '"round" or "truncate"')

    def exceeds(self, layer: Layer, level: Level, workers: int) -> bool:
        """Return whether a level would send more bytes of a layer than "dense". The layer is then
        sent whole. This happens to small layers only, because at least one coordinate is sent."""
        # With their indices more than 50 % are more of every layer: who chooses such a level means
        # it, as the paper does its 99 %.
        if level == DENSE or float(level) > 50 or self.count == "truncate":
            return False
        return super().exceeds(layer, level, workers)

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        kept = [
            num_kept(level, size, self.count)
            for level, size in zip(bucket.levels, bucket.sizes, strict=True)
        ]
        flat, shapes = bucket.flat, [delta.shape[1:] for delta in bucket.deltas]
        some = [i for i, k in enumerate(kept) if k]
        # With error feedback the chosen coordinates are cleared: what remains is the residual.
        chosen = [select_largest(flat[i], kept[i], clear=bucket.feedback) for i in some]
        updates = {
            i: state.buffer(shapes[i], flat[i]).zero_()
            for i, state in enumerate(bucket.states)
            if not kept[i]
        }
        if some:  # the same on all processes
            shares = [{bucket.layers[i]: kept[i]} for i in some]
            values = comm.gather([value for _, value in chosen], shares)  # each [W, k]
            indices = comm.gather([index for index, _ in chosen], shares)
            weight = 1 / comm.world.workers if self.reduction == "mean" else 1
            entries = [
                (index, value, weight, shapes[i], bucket.states[i])
                for i, index, value in zip(some, indices, values, strict=True)
            ]
            updates.update(zip(some, scatter_sum(entries), strict=True))
        return [updates[i] for i in range(len(kept))]

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = num_kept(level, layer.size, self.count)
        return Traffic(2 * k * workers, k * (itemsize + 4))


def scatter_sum(
    entries: Sequence[tuple[Tensor, Tensor, float, Sequence[int], Workspace]],
) -> list[Tensor]:
    """Add, for each layer, ``values [W, k]`` at ``indices``, times a weight, in a tensor of a
    shape; on a CPU in the workspace's buffer.

    A GPU adds the numbers of one call in any order. Where workers share a coordinate, processes
    would round differently and replicas drift apart. So there one call adds one worker for all
    layers: its indices are distinct.
    """
    if not on_gpu(entries[0][1]):
        sums = []
        for indices, values, weight, shape, workspace in entries:
            total = workspace.buffer(shape, values).zero_()
            total.view(-1).index_add_(0, indices.flatten(), values.flatten(), alpha=weight)
            sums.append(total)
        return sums
    shapes = [entry[3] for entry in entries]
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(accumulate(sizes, initial=0))
    flat = entries[0][1].new_zeros(ends[-1])
    too_wide = ends[-1] > torch.iinfo(torch.int32).max  # for indices that come as int32
    indices_by_layer = [entry[0].long() if too_wide else entry[0] for entry in entries]
    places = torch.cat(foreach_add(indices_by_layer, ends[:-1]), dim=1)
    rows = torch.cat([entry[1] for entry in entries], dim=1)
    for index, row in zip(places, rows, strict=True):
        flat.index_add_(0, index, row, alpha=entries[0][2])
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RandomK(Sparsifier):
    """Sends the same K % random coordinates from all workers (Stich, Cordonnier & Jaggi, 2018). The
    level is K.

    The coordinates are drawn in each step from a stream that all workers share, so no index
    travels. Without error feedback the update is scaled by size / k, which makes it unbiased.
    """

    replayable: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def exchange(self, bucket: Bucket, comm: Comm) -> Sequence[Tensor]:
        flat, sizes = bucket.flat, bucket.sizes
        kept = [num_kept(bucket.level, size) for size in sizes]
        seeds = [state.seeds("random-k")[0] for state in bucket.states]
        chosen = _random_places([(s, x[0], k) for s, x, k in zip(seeds, flat, kept, strict=True)])
        starts = [*accumulate(sizes, initial=0)]
        places = torch.cat(foreach_add(chosen, starts[:-1]))
        if bucket.feedback:
            (mean,) = comm.mean([bucket.whole[:, places]], bucket.shares(kept))
            bucket.whole.index_fill_(1, places, 0)
        else:
            values = [x[:, index] for x, index in zip(flat, chosen, strict=True)]
            (mean,) = comm.mean([torch.cat(values, dim=1)], bucket.shares(kept))
            factors = [size / k for size, k in zip(sizes, kept, strict=True)]
            mean = torch.cat(foreach_mul(mean.split(kept), factors))
        update = mean.new_zeros(starts[-1])
        update[places] = mean
        return update.split(sizes)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = num_kept(level, layer.size)
        return Traffic(k, k * itemsize)


def _random_places(entries: Sequence[tuple[Seed, Tensor, int]]) -> list[Int64[Tensor, " k"]]:
    """For each (seed, row, k) the places of the k largest of random numbers, one for each place of
    the row, ascending."""
    if not on_gpu(entries[0][1]):
        return [_random_places_on_cpu(int(seed), len(row), k) for seed, row, k in entries]
    draws = random_rows([([seed], row) for seed, row, _ in entries])
    pairs = zip(draws, entries, strict=True)
    return [top_indices(numbers[0], k).long() for numbers, (*_, k) in pairs]


def _random_places_on_cpu(seed: int, size: int, k: int) -> Int64[Tensor, " k"]:
    """`_random_places` of one row on a CPU. Of the numbers drawn, those above a bound are kept: on
    average four standard deviations more than k, so that the k largest are very probably there."""
    bound = 1 - (k + 4 * math.sqrt(k) + 4) / size
    # compared as integers, which become numbers where they are kept
    least = max(0, math.ceil(float(np.float32(bound)) * 2**24)) << 8
    places, values = [], []
    for start in range(0, size, DRAWN):
        count = min(DRAWN, size - start)
        halves = halves_of_words(seed, start // 2, -(-count // 2))[:count]
        kept = np.flatnonzero(halves >= least)
        places.append(kept + start)
        values.append((halves.take(kept) >> 8).astype(np.float32) * np.float32(2**-24))
    found = np.concatenate(places)
    if len(found) < k:
        (drawn,) = draw_uniform([(seed, size, 0)], torch.device("cpu"))
        return top_indices(drawn, k).long()
    return torch.from_numpy(found[_select_exactly(np.concatenate(values), k, last=False)])


# -- the k largest magnitudes ----------------------------------------------------------------
# In few passes over the data. Only values above a bound are read twice; the bound comes from a
# sorted sample (Floyd & Rivest, 1975) and is checked. For large k the smallest are selected
# instead. On a CPU numpy's comparisons and ``flatnonzero`` are several times faster than torch's.
# On a GPU, where launches cost and the host must not wait, `by_threshold` takes all rows at once.


def top_indices(values: Float[Tensor, " size"], k: int) -> Int32[Tensor, " k"]:
    """Return the indices of the k largest magnitudes, ascending; ties go to the smaller index."""
    return select_largest(values[None], k)[0][0]


def select_largest(
    rows: Float[Tensor, "rows size"], k: int, *, clear: bool = False
) -> tuple[Int32[Tensor, "rows k"], Float[Tensor, "rows k"]]:
    """Return ``(indices, values)`` of each row's k largest magnitudes, by ascending index; ties go
    to the smaller index. With NaN among the values it may be any k of them.

    Args:
        clear: set them to zero in ``rows``, which otherwise stay as they are.
    """
    if rows.device.type == "cpu":
        chosen = zip(*(_largest_of_row(row, k, clear) for row in rows), strict=True)
        index, value = (torch.stack(x) if len(x) > 1 else x[0][None] for x in chosen)
        return index, value
    places = by_threshold(rows, k)
    taken = rows.gather(1, places)
    if clear:
        rows.scatter_(1, places, 0)
    return places.int(), taken


def topk_of_rows(rows: Float[Tensor, "rows size"], k: int) -> Int64[Tensor, "rows k"]:
    """Return the indices of ``by_threshold`` for many short rows; on a CPU by a shorter way for
    those rows among which none has ties."""
    if rows.device.type != "cpu":
        return by_threshold(rows, k)
    found = []
    for part in rows.split(max(1, IN_CACHE // rows.shape[1])):
        chosen = _topk_without_ties(part, k)
        ties = len(chosen) != k * len(part)
        found.append(by_threshold(part, k) if ties else torch.from_numpy(chosen).view(-1, k))
    return found[0] if len(found) == 1 else torch.cat(found)


def _topk_without_ties(rows: Float[Tensor, "rows size"], k: int) -> Int64[np.ndarray, " chosen"]:
    """Columns of the numbers from each row's k-th largest magnitude on, row after row: k of each if
    there are no ties.

    Rows are divided into groups of columns. The k-th largest of the groups' largest numbers is a
    bound: k groups have one that is no smaller. What is above it is few, and is searched alone.
    """
    keys, size = _sort_keys(rows), rows.shape[1]
    groups = 1 << (2 * k - 1).bit_length()
    if 4 * groups > size:
        bound = keys.topk(k, sorted=False).values.amin(1, keepdim=True)
        return np.flatnonzero((keys >= bound).numpy()) % size
    most = keys[:, : size // groups * groups].unflatten(1, (-1, groups)).amax(1)
    low = most.topk(k, sorted=False).values.amin(1, keepdim=True)
    above = np.flatnonzero((keys >= low).numpy())
    row, values = above // size, keys.numpy().reshape(-1)[above]
    counts = np.bincount(row, minlength=len(rows))
    place = np.arange(len(above)) - np.repeat(np.cumsum(counts) - counts, counts)
    few = np.full((len(rows), counts.max()), -1, values.dtype)
    few[row, place] = values
    place_of_k = few.shape[1] - k
    of_row = np.partition(few, place_of_k, axis=1)[:, place_of_k]
    return above[values >= of_row[row]] % size


def by_threshold(rows: Float[Tensor, "rows size"], k: int) -> Int64[Tensor, "rows k"]:
    """Return the indices of ``select_largest``, for all rows at once, on any device."""
    keys = _sort_keys(rows)
    bound = keys.topk(k, sorted=False).values.amin(1, keepdim=True)  # the k-th largest of each row
    above, ties = _count_in_rows(keys > bound), _count_in_rows(keys == bound)
    taken = above + ties.minimum(k - above[:, -1:])  # number of chosen values up to each place
    places = torch.arange(1, k + 1, dtype=torch.int32, device=rows.device)
    return torch.searchsorted(taken, places.repeat(len(rows), 1))


def _count_in_rows(chosen: Bool[Tensor, "rows size"]) -> Int32[Tensor, "rows size"]:
    """How many of its row are chosen up to each place."""
    if not on_gpu(chosen):  # by rows is faster there
        return chosen.cumsum(1, dtype=torch.int32)
    # CUDA scans each row of several in one block of threads, but a vector in all of them: rows end
    # to end, less what stands before each. Where the sum wraps around, so does the difference.
    ends = chosen.reshape(-1).cumsum(0, dtype=torch.int32).view(chosen.shape)
    return ends - torch.cat([ends.new_zeros(1), ends[:-1, -1]])[:, None]


def _sort_keys(rows: Tensor) -> Tensor:
    """Integers in the order of the magnitudes, NaN highest."""
    # IEEE floats without their sign bit compare as integers do.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.view(integer) & torch.iinfo(integer).max


def _largest_of_row(
    row: Float[Tensor, " size"], k: int, clear: bool
) -> tuple[Int32[Tensor, " k"], Float[Tensor, " k"]]:
    """`select_largest` of one row on a CPU."""
    array = row.detach().numpy()
    magnitude, n = np.abs(array), len(array)
    if 2 * k <= n:
        chosen = _index_largest(magnitude, k)
        index, value = chosen.astype(np.int32), array.take(chosen)
        if clear:
            array[chosen] = 0
    else:
        rest = _index_largest(np.negative(magnitude, out=magnitude), n - k, last=True)
        mask = np.ones(n, bool)
        mask[rest] = False
        index, value = np.arange(n, dtype=np.int32)[mask], array[mask]
        if clear:
            left = array.take(rest)
            array.fill(0)
            array[rest] = left
    return torch.from_numpy(index), torch.from_numpy(value)


def _index_largest(
    keys: Float[np.ndarray, " size"], k: int, last: bool = False
) -> Int64[np.ndarray, " k"]:
    """Indices of the k largest, ascending; ties go to the first, or to the last."""
    if len(keys) < SMALL or k == 0:
        return _select_exactly(keys, k, last)
    low, high = _bracket_largest(keys, k)
    candidates = np.flatnonzero(keys >= low)
    if len(candidates) < k:  # the bound from the sample was too high
        return _select_exactly(keys, k, last)
    return candidates[_select_exactly(keys.take(candidates), k, last, high)]


def _bracket_largest(keys: Float[np.ndarray, " size"], k: int) -> tuple[float, float]:
    """Two values that very probably enclose the k-th largest: n^(2/3) values sorted, and four
    standard deviations of a place among them."""
    sample = np.sort(keys[:: round(len(keys) ** (1 / 3)) | 1])  # an odd stride
    n, share = len(sample), 1 - k / len(keys)
    place, margin = share * n, 4 * math.sqrt(share * (1 - share) * n) + 1
    low = sample[int(place - margin)] if place > margin else -math.inf
    high = sample[int(place + margin)] if place + margin < n else math.inf
    return float(low), float(high)


def _select_exactly(
    keys: Float[np.ndarray, " size"], k: int, last: bool, high: float = math.inf
) -> Int64[np.ndarray, " k"]:
    """`_index_largest` for any keys. The k-th is first sought among those up to ``high``."""
    if k == 0:
        return np.zeros(0, np.int64)
    few = keys.take(np.flatnonzero(keys <= high))
    place = k - (len(keys) - len(few))
    if not 0 < place <= len(few):
        few, place = keys, k
    threshold = np.partition(few, len(few) - place)[len(few) - place]
    chosen = keys >= threshold
    surplus = np.count_nonzero(chosen) - k
    if surplus > 0:
        ties = np.flatnonzero(keys == threshold)
        chosen[ties[:surplus] if last else ties[-surplus:]] = False
    elif surplus < 0:  # NaN: every comparison is false
        chosen = np.arange(len(keys)) < k
    return np.flatnonzero(chosen)
