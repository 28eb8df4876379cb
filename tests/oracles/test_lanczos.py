"""Lanczos on explicit matrices. Oracles: the spectrum put in, and scipy's dense eigensolver."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regimes.base.errors import ConfigError
from regimes.base.seeding import make_generator
from regimes.instruments.hessian import lanczos as algorithm
from regimes.instruments.hessian.lanczos import Eigenpairs, inner_products, lanczos, vector_norm

# Spectra, each with the reason it is here.
SPECTRA = {
    "outliers over a bulk, as networks have": [*np.linspace(-0.5, 0.5, 120), 30, 20, 19.9, 5, -8],
    "positive definite, the smallest end clustered": [*np.geomspace(0.1, 100, 60)],
    "negative definite: the largest magnitude is the wrong end": [*np.linspace(-50, -1, 40)],
    "indefinite and symmetric about zero": [*np.linspace(-1, 1, 50)],
    "low rank: the Krylov space is exhausted early": [7.0, 3.0, -2.0, *[0.0] * 80],
    "degenerate": [5.0, 5.0, 5.0, 1.0, 1.0, -3.0, -3.0],
    "the identity": [2.0] * 9,
    "zero": [0.0] * 6,
    "one dimension": [-4.0],
}


def matrix(spectrum: list[float], seed: int = 0) -> Tensor:
    n = len(spectrum)
    q = torch.linalg.qr(torch.randn(n, n, generator=make_generator(seed), dtype=torch.float64)).Q
    return q @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ q.mT


def solve(h: Tensor, **options) -> Eigenpairs:
    options = {"generator": make_generator(1), "dtype": h.dtype, "tolerance": 1e-9} | options
    return lanczos(lambda v: h @ v, len(h), **options)


@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())
def test_both_ends_of_known_spectra(spectrum):
    h = matrix(spectrum)
    k = min(3, len(spectrum))
    found = solve(h, largest=k, smallest=k, max_products=500)
    exact = torch.from_numpy(scipy.linalg.eigvalsh(h.numpy()))
    scale = float(exact.abs().max()) or 1.0
    assert found.converged
    assert torch.allclose(found.largest, exact.flip(0)[:k], rtol=0, atol=1e-11 * scale)
    assert torch.allclose(found.smallest, exact[:k], rtol=0, atol=1e-11 * scale)


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30),
    st.integers(0, 2),
    st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_any_spectrum(spectrum, largest, smallest):
    h = matrix(spectrum)
    found = solve(h, largest=largest, smallest=smallest, max_products=200)
    scale = max(map(abs, spectrum)) or 1.0
    values = torch.cat([found.largest, found.smallest])
    left = (found.vectors @ h - values[:, None] * found.vectors).norm(dim=1)
    assert torch.all(left <= 2 * found.residuals + 1e-12 * scale)
    assert torch.allclose(found.vectors.norm(dim=1), torch.ones(len(values), dtype=h.dtype))
    exact = torch.linalg.eigvalsh(h)
    nearest = (values[:, None] - exact).abs().min(dim=1).values
    assert torch.all(nearest <= found.residuals + 1e-12 * scale)  # true of any Ritz pair


@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_the_tolerance_is_kept_and_not_much_more(tolerance):
    """Residuals computed anew, from many starts: some end just below the tolerance."""
    h, shares = matrix([*np.linspace(-1, 1, 80)]), []
    for seed in range(20):
        found = solve(h, largest=1, smallest=1, tolerance=tolerance, generator=make_generator(seed))
        values = torch.cat([found.largest, found.smallest])
        left = (found.vectors @ h - values[:, None] * found.vectors).norm(dim=1)
        assert torch.allclose(left, found.residuals, rtol=1e-6)
        shares.append(float((left / (tolerance * values.abs())).max()))
    assert 0.5 < max(shares) <= 1 + 1e-9


def test_float32_and_the_square_law_of_the_error():
    h = matrix(SPECTRA["outliers over a bulk, as networks have"])
    found = solve(h.float(), largest=2, smallest=1, tolerance=1e-3)
    exact = torch.tensor([30.0, 20.0, -8.0], dtype=torch.float64)
    values = torch.cat([found.largest, found.smallest])
    assert found.vectors.dtype == torch.float32
    assert torch.allclose(values, exact, rtol=1e-5)


def test_float32_sums_over_millions_of_terms(monkeypatch):
    """H = 30 uu' + D with D = diag(+-1) and u'Du = 0: the top is that of [[30, 1], [1, 0]]."""
    d = 2**22
    signs = torch.tensor([1.0, -1.0]).repeat(d // 2)

    def operator(v):
        return 30 * float(v.double().mean()) + signs * v  # u = ones / sqrt(d)

    monkeypatch.setattr(algorithm, "BASIS", 6)
    found = lanczos(operator, d, tolerance=1e-4, generator=make_generator(2))
    assert found.converged
    assert float(found.largest[0]) == pytest.approx(15 + 226**0.5, rel=1e-6)
    assert float(found.vectors[0].double().norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_sum_over_millions_is_that_of_float64():
    w = torch.randn(2**23 + 5, generator=make_generator(4))
    exact = float(w.double() @ w.double())
    assert float(inner_products(w[None], w)) == pytest.approx(exact, rel=1e-6)
    assert vector_norm(w) ** 2 == pytest.approx(exact, rel=1e-6)


def test_restarts_reach_the_same_values(monkeypatch):
    h = matrix([*np.linspace(-1, 1, 200)])
    start = torch.randn(200, generator=make_generator(3), dtype=torch.float64)
    monkeypatch.setattr(algorithm, "BASIS", 1)
    found = solve(h, largest=2, smallest=2, start=start, max_products=900)
    exact = torch.linalg.eigvalsh(h)
    assert found.converged
    assert found.products > 24  # more than it can hold
    assert torch.allclose(found.largest, exact.flip(0)[:2], atol=1e-12)
    assert torch.allclose(found.smallest, exact[:2], atol=1e-12)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 30), st.integers(2, 30))
def test_a_restart_keeps_what_is_wanted_and_leaves_room(largest, smallest, size, capacity):
    ends = algorithm._Ends(largest, smallest)
    if sum(ends) == 0 or capacity < 2 * sum(ends):
        return
    wanted = {*range(size)[:smallest], *range(size)[max(size - largest, 0) :]}
    kept = ends.after_restart(size, capacity)
    assert wanted <= set(kept) <= set(range(size))
    assert len(kept) == len(set(kept)) < size or len(wanted) == size


def test_a_warm_start_needs_fewer_products():
    h = matrix(SPECTRA["outliers over a bulk, as networks have"])
    cold = solve(h, largest=3, smallest=1, tolerance=1e-3)
    moved = h + 1e-3 * matrix([*np.linspace(-1, 1, len(h))], seed=5)
    warm = solve(moved, largest=3, smallest=1, tolerance=1e-3, start=cold.vectors.sum(0))
    assert warm.products < solve(moved, largest=3, smallest=1, tolerance=1e-3).products
    assert torch.allclose(warm.largest, torch.linalg.eigvalsh(moved).flip(0)[:3], rtol=1e-5)


def test_the_same_seed_gives_the_same_bits():
    h = matrix(SPECTRA["indefinite and symmetric about zero"])
    a, b = solve(h, largest=2), solve(h, largest=2)
    assert torch.equal(a.largest, b.largest)
    assert torch.equal(a.vectors, b.vectors)


@pytest.mark.parametrize("limit", [3, 5, 8])
def test_a_budget_of_products_is_kept_and_said(limit):
    h = matrix([*np.linspace(-1, 1, 300)])
    calls = []
    found = lanczos(
        lambda v: calls.append(1) or h @ v,
        300,
        largest=2,
        smallest=1,
        max_products=limit,
        generator=make_generator(1),
        dtype=torch.float64,
    )
    assert found.stopped == "max_products"
    assert not found.converged
    assert found.products == len(calls) == limit


def test_a_budget_of_seconds_is_kept_and_said():
    h = matrix([*np.linspace(-1, 1, 300)])
    found = solve(h, largest=3, max_seconds=0.0)
    assert found.stopped == "max_seconds"
    assert found.products == 1
    assert torch.isfinite(found.largest[:1]).all()
    assert torch.isnan(found.largest[1:]).all()  # not reached, and not made up


@pytest.mark.parametrize(("seconds", "products"), [(2.9, 2), (3.0, 3), (3.1, 3)])
def test_no_product_begins_that_would_end_too_late(monkeypatch, seconds, products):
    """By a clock that only products move, by one second each."""
    now, h = [100.0], matrix([*np.linspace(-1, 1, 50)])
    monkeypatch.setattr(algorithm.time, "perf_counter", lambda: now[0])

    def product(v: Tensor) -> Tensor:
        now[0] += 1
        return h @ v

    found = lanczos(product, 50, generator=make_generator(1), dtype=h.dtype, max_seconds=seconds)
    assert (found.products, found.stopped) == (products, "max_seconds")
    assert found.seconds == products


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"largest": 11}, "dimension 10"),
        ({"largest": 0}, "at least one in all"),
        ({"largest": 3, "max_products": 2}, "at least 3, one a value"),
        ({"start": torch.zeros(9)}, r"shape of start = \(9,\): expected \(10,\)"),
    ],
)
def test_bad_input_is_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        solve(torch.eye(10), **options)
