"""Counter-based random numbers: published vectors, and scipy's tests of distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from regimes.base.seeding import BLOCK, derive_seed, draw_uniform, seed_generators
from regimes.compression.sparse import top_indices

CPU = torch.device("cpu")
PUBLISHED = [  # SplitMix64 from 1234567 (rosettacode.org, "Pseudo-random numbers/Splitmix64")
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
N = 1 << 20


def passes(p: float) -> bool:
    """Fixed seeds: this never fails by chance, and hardly passes by it."""
    return p > 1e-3


def test_numbers_are_the_published_words() -> None:
    halves = [half >> 8 for word in PUBLISHED for half in (word & (2**32 - 1), word >> 32)]
    _, found = draw_uniform([(5, 3, 0), (1234567, len(halves) - 1, 0)], CPU)
    assert found.dtype == torch.float32
    assert (found * 2**24).tolist() == halves[:-1]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_stream_begins_as_torchs_own_on_each_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``torch.manual_seed`` itself, which takes half a millisecond or more."""
    gpus = tuple(torch.Generator() for _ in range(2))  # in the place of GPUs' own
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)

    def drawn() -> list[list[float]]:
        return [torch.rand(5, generator=g).tolist() for g in (torch.default_generator, *gpus)]

    with torch.random.fork_rng([]):
        torch.manual_seed(derive_seed("as torch", 1))
        for gpu in gpus:  # what torch does where they are
            gpu.manual_seed(derive_seed("as torch", 1))
        expected = drawn()
        monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("torch.manual_seed"))
        seed_generators(derive_seed("as torch", 1), torch.device(device))
        numbers = 1 if device == "cpu" else 3
        assert drawn()[:numbers] == expected[:numbers]


def test_a_gpus_numbers_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, here on a CPU: a device by another name, and all is made where it is."""
    sizes = [1, 2, 7, 2 * BLOCK, 6 * BLOCK + 3]
    wanted = [
        (seed, size, first)
        for size in sizes
        for first in (0, 1, BLOCK, 7)
        for seed in (0, 2**63 - 1, derive_seed(1, "x"))
    ]
    expected = draw_uniform(wanted, CPU)
    for name in ("empty", "arange"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *sizes, device, make=make: make(*sizes))
    found = draw_uniform(wanted, torch.device("meta"))
    assert all(map(torch.equal, found, expected))
    assert [len(numbers) for numbers in found] == [size for _, size, _ in wanted]


def test_uniform_by_chi_square_and_kolmogorov() -> None:
    numbers = (
        draw_uniform([(derive_seed(0, "layer", "quantise", 1, 0), N, 0)], CPU)[0].double().numpy()
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert passes(stats.chisquare(np.bincount((numbers * 4096).astype(int))).pvalue)
    assert passes(stats.kstest(numbers[: 1 << 17], "uniform").pvalue)
    low = (numbers * 2**24).astype(int) % 256  # the lowest bits, too
    assert passes(stats.chisquare(np.bincount(low, minlength=256)).pvalue)


def test_neighbours_and_streams_are_independent() -> None:
    """Pairs on a grid of 64 x 64: of neighbours, of a word's halves, of streams of close keys."""
    keys = [
        derive_seed(0, "layer", "quantise", step, worker) for step in (1, 2) for worker in (0, 1)
    ]
    rows = [(x * 64).long() for x in draw_uniform([(key, N, 0) for key in (*keys, 1, 2)], CPU)]
    a = rows[0]
    pairs = [
        (a[:-1], a[1:]),
        (a[0::2], a[1::2]),
        (a[:-2], a[2:]),
        (rows[4], rows[5]),
        *((a, other) for other in rows[1:4]),
    ]
    for one, other in pairs:
        assert passes(stats.chisquare((64 * one + other).bincount(minlength=4096)).pvalue)


def test_the_largest_k_of_the_draws_are_any_k_alike() -> None:
    """Random-K's choice: how often each coordinate, and each pair of neighbours, is chosen."""
    size, k, steps = 40, 10, 2000
    chosen = torch.zeros(steps, size)
    for step, row in enumerate(
        draw_uniform([(derive_seed("k", step), size, 0) for step in range(steps)], CPU)
    ):
        chosen[step, top_indices(row, k).long()] = 1
    share = k / size
    z = (chosen.sum(0) - steps * share) / (steps * share * (1 - share)) ** 0.5
    # k is fixed, so the z depend on each other: (size - 1) / size of their squares' sum is chi2
    assert passes(stats.chi2.sf(float(z.square().sum()) * (size - 1) / size, size - 1))
    both = share * (k - 1) / (size - 1)
    pairs = (chosen[:, :-1] * chosen[:, 1:]).sum(0)
    assert ((pairs - steps * both).abs() < 5 * (steps * both * (1 - both)) ** 0.5).all()
