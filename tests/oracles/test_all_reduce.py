"""Quantised all-reduce (oracles: one written with Python's integers and lists, bounds, means over
many draws, formulas of its bytes)."""

from __future__ import annotations

import math

import pytest
import torch
from ddp_scripts import group
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression import all_reduce, codes
from regimes.compression.all_reduce import QuantisedAllReduce
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.cost.network import Network, Work

SHAPE, BLOCK = (7, 11), 6
SIZE = math.prod(SHAPE)


def gradient(workers: int, key: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(key)
    scales = torch.logspace(-3, 2, SIZE, dtype=dtype).view(SHAPE)  # each block at a scale
    return scales * torch.randn(workers, *SHAPE, generator=generator, dtype=dtype)


def reducer(world: World, dtype: torch.dtype = torch.float64, **fields: object) -> Reducer:
    world.meter.dtype = dtype
    chosen = QuantisedAllReduce(block=BLOCK, **fields)  # type: ignore[arg-type]
    return Reducer(chosen, [Layer("m", SHAPE)], world, seed=5)


def step(to: Reducer, grad: Tensor, bits: int) -> Tensor:
    losses = torch.zeros(len(grad), dtype=grad.dtype)
    return Exchange(to).exchange_step([grad], [bits], losses, grad.flatten(1))[0][0].clone()


def rounded(numbers: list[float], bits: int) -> list[float]:
    """Block by block, to the nearest multiple of the largest magnitude over 2^(bits - 1) - 1."""
    steps, found = 2 ** (bits - 1) - 1, []
    for start in range(0, len(numbers), BLOCK):
        block = numbers[start : start + BLOCK]
        scale = max(map(abs, block))
        found += [math.floor(x / scale * steps + 0.5) * (scale / steps) for x in block]
    return found


def naive(rows: list[list[float]], bits: int) -> tuple[list[float], list[list[float]]]:
    """(update, what each worker has sent)."""
    workers = len(rows)
    part = -(-SIZE // workers)
    update, sent = [], [[] for _ in rows]  # type: list[float], list[list[float]]
    for owner in range(workers):
        codes = [rounded(row[owner * part : (owner + 1) * part], bits) for row in rows]
        mean = [sum(column) / workers for column in zip(*codes, strict=True)]
        shown = rounded(mean, bits)
        update += shown
        for worker, own in enumerate(codes):
            lost = [workers * (a - b) for a, b in zip(mean, shown, strict=True)]
            owns = worker == owner
            sent[worker] += [a - b * owns for a, b in zip(own, lost, strict=True)]
    return update, sent


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_naive_one(workers: int, bits: int) -> None:
    """With feedback, over three steps: updates and what each worker is owed."""
    to = reducer(World(workers), stochastic=False, error_feedback=True)
    owed = [[0.0] * SIZE for _ in range(workers)]
    for t in range(3):
        grad = gradient(workers, t)
        rows = [
            [a + b for a, b in zip(left, row.flatten().tolist(), strict=True)]
            for left, row in zip(owed, grad, strict=True)
        ]
        update, sent = naive(rows, bits)
        owed = [
            [a - b for a, b in zip(row, gone, strict=True)]
            for row, gone in zip(rows, sent, strict=True)
        ]
        ours = step(to, grad, bits).flatten()
        torch.testing.assert_close(ours, torch.tensor(update).to(ours), rtol=1e-6, atol=1e-6)
        (residual,) = to.residuals()
        assert residual is not None
        wanted = torch.tensor(owed, dtype=torch.float64)
        torch.testing.assert_close(residual.flatten(1), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_each_block_errs_within_its_bound(bits: int, stochastic: bool) -> None:
    """Twice half a multiple of the block's scale, or twice a whole one."""
    workers, grad = 4, gradient(4)
    error = (step(reducer(World(workers), stochastic=stochastic), grad, bits) - grad.mean(0)).abs()
    steps, part = 2 ** (bits - 1) - 1, -(-SIZE // workers)
    one = (1.0 if stochastic else 0.5) / steps
    for owner in range(workers):
        for start in range(owner * part, min((owner + 1) * part, SIZE), BLOCK):
            stop = min(start + BLOCK, (owner + 1) * part)
            scales = grad.flatten(1)[:, start:stop].abs().amax(1)
            sums = float(scales.mean()) * (1 + one)  # the largest that the mean can have
            bound = one * (float(scales.mean()) + sums)
            assert float(error.flatten()[start:stop].max()) <= bound * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_random_rounding_is_unbiased(bits: int) -> None:
    """The mean of 2000 draws lies within five of its standard errors; nearest rounding does not."""
    grad, draws = gradient(2), 2000
    noisy, fixed = reducer(World(2)), reducer(World(2), stochastic=False)
    updates = torch.stack([step(noisy, grad, bits) for _ in range(draws)])
    off = (updates.mean(0) - grad.mean(0)).abs()
    spread = updates.std(0) / draws**0.5
    assert bool((off <= 5 * spread + 1e-12).all())
    assert not bool(((step(fixed, grad, bits) - grad.mean(0)).abs() <= 5 * spread).all())


def tour(world: World) -> list[Tensor]:
    hosted, found = slice(world.hosted.start, world.hosted.stop), []
    for dtype in (torch.float32, torch.float64):
        for fields in ({}, {"stochastic": False, "error_feedback": True}):
            to = reducer(world, dtype, **fields)
            found += [
                step(to, gradient(4, t, dtype)[hosted], bits) for t, bits in enumerate((8, 4))
            ]
            calls = world.meter.take_counts().calls
            assert (calls["exchange"], calls["gather"]) == (2, 2)
            (residual,) = to.residuals()
            found.append(torch.zeros(len(to.world.hosted)) if residual is None else residual)
    return found


def process(rank: int) -> list[Tensor]:
    return tour(ProcessWorld(4, torch.device("cpu")))


@pytest.mark.parametrize("count", [2, 4])
def test_processes_are_the_simulation_bit_for_bit(count: int) -> None:
    simulated, answers = tour(World(4)), group.run(process, count)
    for i, ours in enumerate(simulated):
        theirs = [answer[i] for answer in answers]
        whole = torch.cat(theirs) if i % 3 == 2 else theirs[0]  # the residuals of either's workers
        assert torch.equal(whole, ours), i
        assert i % 3 == 2 or all(torch.equal(x, theirs[0]) for x in theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_do_not_grow_with_the_workers(bits: int) -> None:
    """On a ring both phases carry (W - 1) / W of the packed layer: below twice it at any W.
    Gathered codes carry it W - 1 times."""
    layer, chosen = Layer("m", (64, 576)), QuantisedAllReduce()
    packed = layer.size * bits / 8 + 4 * layer.size / chosen.block
    for workers in (2, 4, 8, 16):
        traffic = chosen.traffic(layer, bits, workers)
        assert traffic.floats == pytest.approx(packed / 4, rel=0.01)
        assert traffic.bytes == pytest.approx(packed, rel=0.01)  # W - 1 parts, and the mean of one
        sent = {"exchange": packed * (1 - 1 / workers), "gather": packed / workers}
        work = Work(0, 0, dict.fromkeys(sent, 1.0), sent)
        wire = 8 * packed * 2 * (workers - 1) / workers
        assert work.communicate(Network(1e6), workers) == pytest.approx(wire / 1e6)


def test_half_precision_is_added_in_float32() -> None:
    """257 numbers of 1 and -1 in bfloat16, whose sum ends at 256."""
    grad = torch.ones(257, 1, 2, dtype=torch.bfloat16)
    to = Reducer(QuantisedAllReduce(stochastic=False), [Layer("m", (1, 2))], World(257), seed=0)
    losses = torch.zeros(257)
    ((update,), _) = Exchange(to).exchange_step([grad], [8], losses, grad.flatten(1))
    assert update.tolist() == [[1.0, 1.0]]
    assert update.dtype == torch.bfloat16


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_mean_of_one_worker_is_what_it_has_sent(bits: int, drawn: bool) -> None:
    """Rounded once: each number is a whole multiple of its own block's scale, to the last bit."""
    grad, steps = gradient(1), 2 ** (bits - 1) - 1
    update = step(reducer(World(1), stochastic=drawn), grad, bits).flatten()
    for own, block in zip(grad.flatten().split(BLOCK), update.split(BLOCK), strict=True):
        unit = own.abs().max() / steps
        codes = (block / unit).round()
        assert torch.equal(codes * unit, block)
        assert ((codes - own / unit).abs() < (1 if drawn else 0.5 + 1e-9)).all()


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 90)),
    bits=st.sampled_from([4, 8]),
    block=st.integers(1, 20),
    chunk=st.sampled_from([8, 24, 64, 1 << 17]),
    drawn=st.booleans(),
)
def test_chunks_do_not_change_a_bit(
    shape: tuple[int, int, int], bits: int, block: int, chunk: int, drawn: bool
) -> None:
    """Any division into chunks gives the codes and values of all numbers at once."""
    generator = torch.Generator().manual_seed(shape[2])
    numbers = torch.randn(shape, generator=generator)
    noise = torch.rand(shape, generator=generator) if drawn else 0.5
    found = []
    for size in (chunk, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codes, "CHUNK", size)
            values = torch.empty_like(numbers)
            wire = all_reduce.quantise_rows(numbers, bits, block, noise, values)
            assert torch.equal(all_reduce.quantise_rows(numbers, bits, block, noise), wire)
            assert torch.equal(
                all_reduce.dequantise_rows(wire, bits, block, shape[2], numbers.dtype), values
            )
            mean = all_reduce.in_order_sum(wire, bits, block, shape[2], numbers.dtype, shape[1])
            found.append((wire, values, mean))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.testing.assert_close(found[0][2], found[0][1].mean(1), rtol=1e-6, atol=1e-6)
