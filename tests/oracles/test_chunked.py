"""TopK in blocks with 2-bit values (oracle: loops over blocks and Python's floats)."""

from __future__ import annotations

import pytest
import torch

from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.chunked import ChunkedTopK, in_bins
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer

F64, WORKERS, SHAPE, CHUNK, K = torch.float64, 3, (4, 6), 2, 50


def naive(matrix: list[list[float]]) -> list[list[float]]:
    """What one worker sends: the 2 largest of each 2 x 2 block, each as the mean of those of its
    sign and its half of the range of magnitudes."""
    kept = {}
    for top in range(0, SHAPE[0], CHUNK):
        for left in range(0, SHAPE[1], CHUNK):
            places = [(top + i, left + j) for i in range(CHUNK) for j in range(CHUNK)]
            places.sort(key=lambda at: -abs(matrix[at[0]][at[1]]))
            kept |= {at: matrix[at[0]][at[1]] for at in places[:2]}
    sizes = [abs(x) for x in kept.values()]
    middle = (min(sizes) + max(sizes)) / 2
    classes: dict[tuple[bool, bool], list[float]] = {}
    for x in kept.values():
        classes.setdefault((x < 0, abs(x) >= middle), []).append(x)
    sent = [[0.0] * SHAPE[1] for _ in range(SHAPE[0])]
    for (i, j), x in kept.items():
        alike = classes[x < 0, abs(x) >= middle]
        sent[i][j] = sum(alike) / len(alike)
    return sent


def test_it_is_the_naive_one_with_decaying_feedback() -> None:
    world = World(WORKERS)
    world.meter.dtype = F64
    to = Reducer(ChunkedTopK(chunk=CHUNK), [Layer("m", SHAPE)], world, seed=0)
    owed = torch.zeros(WORKERS, *SHAPE, dtype=F64)
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        grad = torch.randn(WORKERS, *SHAPE, generator=generator, dtype=F64)
        delta = 0.95 * owed + grad
        sent = torch.tensor([naive(row.tolist()) for row in delta], dtype=F64)
        owed = delta - sent
        losses = torch.zeros(WORKERS, dtype=F64)
        ((update,), _) = Exchange(to).exchange_step([grad], [K], losses, grad.flatten(1))
        torch.testing.assert_close(update, sent.mean(0), rtol=1e-12, atol=1e-12)
        (residual,) = to.residuals()
        torch.testing.assert_close(residual, owed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_means_of_bins_never_lose_more_than_there_was(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 200, generator=generator, dtype=F64) ** 5
    values[2] = 0.0
    codes, tables = in_bins(values, bits)
    shown = tables.gather(1, codes)
    assert codes.max() < 2**bits
    assert bool(((values - shown).norm(dim=1) <= values.norm(dim=1)).all())
    torch.testing.assert_close(shown.sum(1), values.sum(1))
