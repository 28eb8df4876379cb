"""The chunked DCT. Oracle: scipy's DCT, and the loop of DeMo's authors written naively with it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch

from analysis.plugins.cosine import DCTTopK, dct_basis
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer

F64 = torch.float64
CPU = torch.device("cpu")
WORKERS, STEPS = 3, 4
CASES = [  # shape, chunk, rows and columns of a block, by hand
    ((12, 20), 8, 6, 5),
    ((12, 20), 64, 12, 20),
    ((7, 22), 6, 1, 2),
    ((8, 4, 3, 3), 9, 8, 9),
    ((8, 1), 4, 4, 1),
]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_basis_is_that_of_scipy(size: int) -> None:
    wanted = scipy.fft.dct(np.eye(size), axis=0, norm="ortho")
    torch.testing.assert_close(
        dct_basis(size, F64, CPU), torch.from_numpy(wanted), rtol=0, atol=1e-14
    )


def gradients(shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORKERS, *shape, generator=generator, dtype=F64)


def naive(
    shape: tuple[int, ...], h: int, w: int, k: int, share: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """Updates, and what each worker still owes."""
    n, m = shape[0], int(np.prod(shape[1:]))
    owed, updates = np.zeros((WORKERS, n, m)), []
    for step in range(STEPS):
        owed = share * owed + gradients(shape, step).flatten(2).numpy()
        update = np.zeros((n, m))
        for worker in range(WORKERS):
            for i in range(0, n, h):
                for j in range(0, m, w):
                    block = scipy.fft.dctn(owed[worker, i : i + h, j : j + w], norm="ortho")
                    least = np.sort(np.abs(block), axis=None)[-k]
                    sent = scipy.fft.idctn(np.where(abs(block) >= least, block, 0), norm="ortho")
                    owed[worker, i : i + h, j : j + w] -= sent
                    update[i : i + h, j : j + w] += sent / WORKERS
        updates.append(update)
    return updates, owed


@pytest.mark.parametrize(("shape", "chunk", "h", "w"), CASES)
@pytest.mark.parametrize("level", [4, 50])
def test_it_is_the_authors_loop(
    shape: tuple[int, ...], chunk: int, h: int, w: int, level: int
) -> None:
    world = World(WORKERS)
    world.meter.dtype = F64
    chosen, layer = DCTTopK(chunk=chunk, error_feedback=0.9), Layer("m", shape)
    reducer = Reducer(chosen, [layer], world, seed=0)
    k = max(1, round(level / 100 * h * w))
    updates, owed = naive(shape, h, w, k, 0.9)
    for step, wanted in enumerate(updates):
        grad = gradients(shape, step)
        losses = torch.zeros(WORKERS, dtype=F64)
        ((update,), _) = Exchange(reducer).exchange_step([grad], [level], losses, grad.flatten(1))
        theirs = torch.from_numpy(wanted).view(shape)
        torch.testing.assert_close(update, theirs, rtol=0, atol=1e-12)
        blocks = layer.size // (h * w)
        meter = world.meter.take_counts()
        assert meter.layers[0].bytes == blocks * k * (8 + 2)
        assert meter.layers[0].floats == blocks * k * 1.5 * WORKERS
    torch.testing.assert_close(reducer.residuals()[0], torch.from_numpy(owed), rtol=0, atol=1e-12)


def test_demos_own_settings() -> None:
    """32 of each 64 x 64 coefficients, 0.999 of what is owed; per block 32 values and places."""
    chosen, layer = DCTTopK(), Layer("m", (512, 4608))
    assert chosen.error_feedback == 0.999
    cost = chosen.cost(layer, 100 * 32 / 64**2, workers=4)
    assert cost.bytes == 8 * 72 * 32 * (4 + 2)
    assert not chosen.linear


def test_a_block_has_as_many_places_as_16_bits_count() -> None:
    assert DCTTopK(chunk=181).chunk == 181  # 181^2 = 32,761 <= 2^15 < 182^2
    for chunk in (0, 182):
        with pytest.raises(ConfigError, match=r"compressor\.chunk = .*from 1 to 181"):
            DCTTopK(chunk=chunk)
