"""The k largest magnitudes of a layer: TopK's selection, in few passes over the data.

For `sparse`, `cosine` and instruments that compare supports. Only values above a bound are read
twice; the bound comes from a sorted sample (Floyd & Rivest, 1975) and is checked. For large k the
smallest are selected instead. On a CPU numpy's comparisons and ``flatnonzero`` are several times
faster than torch's. On a GPU, where launches cost and the host must not wait, `by_threshold` takes
all rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

SMALL = 1 << 14  # values; for fewer a bound does not pay


def top_indices(values: Float[Tensor, " size"], k: int) -> Int32[Tensor, " k"]:
    """Indices of the k largest magnitudes, ascending; ties go to the smaller index."""
    return largest(values[None], k)[0][0]


def largest(
    rows: Float[Tensor, "rows size"], k: int, *, clear: bool = False
) -> tuple[Int32[Tensor, "rows k"], Float[Tensor, "rows k"]]:
    """``(indices, values)`` of each row's k largest magnitudes, by ascending index; ties go to the
    smaller index. With NaN among the values, any k.

    Args:
        clear: set them to zero in ``rows``, which otherwise stay as they are.
    """
    if rows.device.type == "cpu":
        index, value = zip(*(_of_row(row, k, clear) for row in rows), strict=True)
        return _stacked(index), _stacked(value)
    chosen = by_threshold(rows, k)
    taken = rows.gather(1, chosen)
    if clear:
        rows.scatter_(1, chosen, 0)
    return chosen.int(), taken


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """As ``torch.stack``, but one row is not copied."""
    return torch.stack(list(rows)) if len(rows) > 1 else rows[0][None]


def in_each(rows: Float[Tensor, "rows size"], k: int) -> Int64[Tensor, "rows k"]:
    """`by_threshold` of many short rows; on a CPU a shorter way if no row has ties."""
    if rows.device.type == "cpu":
        keys, bound = _keys_and_bound(rows, k)
        chosen = np.flatnonzero((keys >= bound).numpy())
        if len(chosen) == len(rows) * k:
            return torch.from_numpy(chosen).view(-1, k) % rows.shape[1]
    return by_threshold(rows, k)


def by_threshold(rows: Float[Tensor, "rows size"], k: int) -> Int64[Tensor, "rows k"]:
    """The indices of `largest`, of all rows at once, on any device. k is at least 1."""
    keys, bound = _keys_and_bound(rows, k)
    above = (keys > bound).cumsum(1, dtype=torch.int32)
    ties = (keys == bound).cumsum(1, dtype=torch.int32)
    taken = above + ties.minimum(k - above[:, -1:])  # number of chosen values up to each place
    places = torch.arange(1, k + 1, dtype=torch.int32, device=rows.device)
    return torch.searchsorted(taken, places.repeat(len(rows), 1))


def _keys_and_bound(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Integers in the order of the magnitudes, NaN highest, and the k-th largest of each row."""
    # IEEE floats without their sign bit compare as integers do.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    keys = rows.view(integer) & torch.iinfo(integer).max
    return keys, keys.topk(k, sorted=False).values.amin(1, keepdim=True)


def _of_row(
    row: Float[Tensor, " size"], k: int, clear: bool
) -> tuple[Int32[Tensor, " k"], Float[Tensor, " k"]]:
    """`largest` of one row on a CPU."""
    array = row.detach().numpy()
    magnitude, n = np.abs(array), len(array)
    if 2 * k <= n:
        chosen = _largest(magnitude, k)
        index, value = chosen.astype(np.int32), array.take(chosen)
        if clear:
            array[chosen] = 0
    else:
        rest = _largest(np.negative(magnitude, out=magnitude), n - k, last=True)
        mask = np.ones(n, bool)
        mask[rest] = False
        index, value = np.arange(n, dtype=np.int32)[mask], array[mask]
        if clear:
            left = array.take(rest)
            array.fill(0)
            array[rest] = left
    return torch.from_numpy(index), torch.from_numpy(value)


def _largest(
    keys: Float[np.ndarray, " size"], k: int, last: bool = False
) -> Int64[np.ndarray, " k"]:
    """Indices of the k largest, ascending; ties go to the first, or to the last."""
    if len(keys) < SMALL or k == 0:
        return _exactly(keys, k, last)
    low, high = _bounds(keys, k)
    candidates = np.flatnonzero(keys >= low)
    if len(candidates) < k:  # the bound from the sample was too high
        return _exactly(keys, k, last)
    return candidates[_exactly(keys.take(candidates), k, last, high)]


def _bounds(keys: Float[np.ndarray, " size"], k: int) -> tuple[float, float]:
    """Two values that very probably enclose the k-th largest: n^(2/3) values sorted, and four
    standard deviations of a place among them."""
    sample = np.sort(keys[:: round(len(keys) ** (1 / 3)) | 1])  # an odd stride
    n, share = len(sample), 1 - k / len(keys)
    place, margin = share * n, 4 * math.sqrt(share * (1 - share) * n) + 1
    low = sample[int(place - margin)] if place > margin else -math.inf
    high = sample[int(place + margin)] if place + margin < n else math.inf
    return float(low), float(high)


def _exactly(
    keys: Float[np.ndarray, " size"], k: int, last: bool, high: float = math.inf
) -> Int64[np.ndarray, " k"]:
    """As `_largest`, for any keys; the k-th is first sought among those up to ``high``."""
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
