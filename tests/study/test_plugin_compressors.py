"""Compressors that only the study compares. Oracles: DeMo's loop and algorithm 1 of Sahu et al.,
naively; scipy's DCT; the loop over numbers that processes of ``attach_shards`` are held against; in
a hook and between local steps: what moves is at least the threshold, and nothing owed is."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch
from ddp_scripts import fsdp, group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from analysis.plugins.cosine import DCTTopK, dct_basis
from analysis.plugins.scattered import ScatteredMean
from analysis.plugins.threshold import Threshold
from regimes.base.config import DENSE
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import check_order

F64, WORKERS = torch.float64, 4


def make(compressor: Compressor, shape: tuple[int, ...], workers: int = WORKERS) -> Reducer:
    """Of one layer, in float64."""
    world = World(workers)
    world.meter.dtype = F64
    return Reducer(compressor, [Layer("weight", shape)], world, seed=7)


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """Of unlike size in each worker."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.arange(1, WORKERS + 1, dtype=F64).view(-1, *[1] * len(shape))
    return sizes * torch.randn(WORKERS, *shape, generator=generator, dtype=F64)


def exchange(reducer: Reducer, grad: Tensor, level: float) -> Tensor:
    losses = torch.zeros(WORKERS, dtype=F64)
    return Exchange(reducer).exchange_step([grad], [level], losses, grad.flatten(1))[0][0].clone()


# -- TopK of a cosine transform ----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_basis_is_that_of_scipy(size: int) -> None:
    wanted = torch.from_numpy(scipy.fft.dct(np.eye(size), axis=0, norm="ortho"))
    basis = dct_basis(size, F64, torch.device("cpu"))
    torch.testing.assert_close(basis, wanted, rtol=0, atol=1e-14)


def naive(
    shape: tuple[int, ...], h: int, w: int, k: int, share: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """Updates of four steps, and what each worker still owes."""
    n, m = shape[0], int(np.prod(shape[1:]))
    owed, updates = np.zeros((WORKERS, n, m)), []
    for step in range(4):
        owed = share * owed + gradient(shape, step).flatten(2).numpy()
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


@pytest.mark.parametrize(
    ("shape", "chunk", "h", "w", "level"),
    [  # rows and columns of a block by hand
        ((12, 20), 8, 6, 5, 4),
        ((12, 20), 64, 12, 20, 50),
        ((7, 22), 6, 1, 2, 50),
        ((8, 4, 3, 3), 9, 8, 9, 4),
        ((8, 1), 4, 4, 1, 50),
    ],
)
def test_the_cosine_transform_is_the_authors_loop(
    shape: tuple[int, ...], chunk: int, h: int, w: int, level: int
) -> None:
    reducer = make(DCTTopK(chunk=chunk, error_feedback=0.9), shape)
    k = max(1, round(level / 100 * h * w))
    updates, owed = naive(shape, h, w, k, 0.9)
    for step, wanted in enumerate(updates):
        update = exchange(reducer, gradient(shape, step), level)
        torch.testing.assert_close(update, torch.from_numpy(wanted).view(shape), rtol=0, atol=1e-12)
        sent = int(np.prod(shape)) // (h * w) * k
        meter = reducer.world.meter.take_counts().layers[0]
        assert (meter.bytes, meter.floats) == (sent * (8 + 2), sent * 1.5 * WORKERS)
    torch.testing.assert_close(reducer.residuals()[0], torch.from_numpy(owed), rtol=0, atol=1e-12)


def test_demos_own_settings() -> None:
    """32 of each 64 x 64 coefficients, 0.999 of what is owed; per block 32 values and places. A
    block has as many places as 16 bits count: 181^2 = 32,761 <= 2^15 < 182^2."""
    chosen = DCTTopK()
    assert (chosen.error_feedback, chosen.linear) == (0.999, False)
    cost = chosen.cost(Layer("m", (512, 4608)), 100 * 32 / 64**2, workers=4)
    assert cost.bytes == 8 * 72 * 32 * (4 + 2)
    assert DCTTopK(chunk=181).chunk == 181
    for chunk in (0, 182):
        with pytest.raises(ConfigError, match=r"compressor\.chunk = .*from 1 to 181"):
            DCTTopK(chunk=chunk)


# -- a quantised reduce-scatter ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "table"),
    [
        (8, {"stochastic": False, "error_feedback": True}),
        (4, {"stochastic": False, "error_feedback": False}),
        (4, {}),  # stochastic: the same draws
    ],
)
def test_simulated_shards_equal_the_loop_of_processes(level: int, table: dict[str, bool]) -> None:
    """Three steps of four workers, whose number does not divide the rows; the traffic is checked
    against the formula by the reducer."""
    shape = (10, 33)
    reducer = make(ScatteredMean(block=16, **table), shape)
    loop = fsdp.Loop("weight", WORKERS, {"block": 16, **table})
    for step in range(3):
        rows = torch.stack([fsdp.given(10 * step + rank, shape).double() for rank in range(4)])
        (update,) = reducer.reduce([0], [rows], [level]).values()
        (mean,) = loop.reduce([[row] for row in rows], level)
        assert (update - mean).abs().max() < 1e-12
    assert reducer.world.meter.calls == {"mean": 0, "gather": 3, "broadcast": 0, "scatter": 3}


# -- a constant threshold ------------------------------------------------------------------------

RATES = (0.25, 0.5, 1.0, 0.125, 0.125)
LEVEL = 0.75  # of the movements


@pytest.mark.parametrize("feedback", [True, False])
def test_a_threshold_is_the_published_algorithm(feedback: bool) -> None:
    """Movements of the weights, message sizes among them: the most coordinates of a worker, eight
    bytes and an index each."""
    reducer = make(Threshold(error_feedback=feedback), (5, 7))
    owed = [[0.0] * 35 for _ in range(WORKERS)]
    for t, rate in enumerate(RATES):
        moves = [
            [rate * g + e for g, e in zip(row.flatten().tolist(), left, strict=True)]
            for row, left in zip(gradient((5, 7), t), owed, strict=True)
        ]
        sent = [[x if abs(x) >= LEVEL else 0.0 for x in row] for row in moves]
        if feedback:
            pairs = zip(moves, sent, strict=True)
            owed = [[a - b for a, b in zip(row, gone, strict=True)] for row, gone in pairs]
        wanted = [sum(column) / WORKERS for column in zip(*sent, strict=True)]
        reducer.rates = [rate]
        update = rate * exchange(reducer, gradient((5, 7), t), LEVEL).flatten()
        torch.testing.assert_close(update, torch.tensor(wanted, dtype=F64), rtol=1e-12, atol=1e-12)
        most = max(sum(x != 0 for x in row) for row in sent)
        assert reducer.world.meter.take_counts().layers[0].bytes == 4 + 12 * most


def test_the_low_level_is_the_lower_threshold() -> None:
    layers = [Layer("m", (5, 7))]
    for low in (0.1, DENSE):
        check_order(Threshold(), {"low": low, "high": 1.0}, layers, WORKERS)
    with pytest.raises(ConfigError, match="sends less; swap them"):
        check_order(Threshold(), {"low": 1.0, "high": 0.1}, layers, WORKERS)


class Straight(nn.Module):
    """Its gradient is what is given, wherever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 10, dtype=F64))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope).sum()


def job(rank: int, hooked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, movements without compression, this worker's movements that are owed), after six
    steps of which the last three have a lower rate."""
    net, moved, rate = Straight(), torch.zeros(9, 10, dtype=F64), 1.0
    sgd = torch.optim.SGD(net.parameters(), lr=rate)
    if hooked:
        model: nn.Module = DistributedDataParallel(net)
        compressor = {"name": "threshold", "levels": {"high": 0.5}}
        policy = {"name": "static", "level": "high"}
        hook = regimes.attach(model, sgd, policy=policy, compressor=compressor, every=3)
    else:
        model = net
        compressor = {"name": "threshold", "level": 0.5}
        hook = regimes.local_steps(net, sgd, policy=2, compressor=compressor)
    for t in range(6):
        rate = sgd.param_groups[0]["lr"] = 1.0 if t < 3 else 0.25
        generator = torch.Generator().manual_seed(10 * t + rank)
        slope = torch.randn(9, 10, generator=generator, dtype=F64)
        sgd.zero_grad()
        model(slope).backward()
        sgd.step()
        moved -= rate * slope
        if not hooked:
            hook.step()
    hook.close()
    (residual,) = (hook.reducer if hooked else hook.sync.reducer).residuals()
    return net.weight.detach().clone(), moved, residual[0] * (rate if hooked else 1)


def both(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [job(rank, hooked) for hooked in (True, False)]


def test_a_job_owes_less_than_the_threshold() -> None:
    """Two processes, whose messages differ in size."""
    for (one, moved, owed), (two, others, theirs) in zip(*group.run(both, 2), strict=True):
        assert torch.equal(one, two)
        debt = (owed + theirs) / 2
        torch.testing.assert_close(one - debt, (moved + others) / 2, rtol=1e-9, atol=1e-9)
        assert 0.2 < float(owed.abs().max()) < 0.5
