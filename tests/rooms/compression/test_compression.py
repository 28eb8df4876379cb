"""Compressors: the dense mean in the limit, what is refused. What is sent and kept adds up in
`test_compressor_options`."""

from __future__ import annotations

import pytest
import torch
from reducers import EVERY, F64, gradients, layers, step, world
from torch import Tensor

from analysis.plugins.cosine import DCTTopK
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.compression import Compressor, make_compressor
from regimes.compression.bucket import Bucket
from regimes.compression.powersgd import ACPSGD, PowerSGD, _matrices
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import RandomK, TopK, by_threshold, top_indices


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_the_order_of_a_gradient_in_memory_does_not_matter(
    chosen: Compressor, low: object, high: object
) -> None:
    """As of a matrix that its layer stores transposed; up to the order of sums in products."""
    ours, theirs = (Reducer(chosen, layers(), world(2), seed=0) for _ in range(2))
    for number, level in enumerate((high, high, low, high)):
        grads = gradients(2, number)
        turned = [g.transpose(1, -1).contiguous().transpose(1, -1) for g in grads]
        for one, other in zip(step(ours, turned, level), step(theirs, grads, level), strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(ours.residuals(), theirs.residuals(), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other)


# -- reductions to the dense mean ------------------------------------------------------------

FULL = [
    (PowerSGD(), 100),
    (TopK(), 100),
    (RandomK(), 100),
    (TopK(error_feedback=False), 100),
    (ACPSGD(iterations=2), 100),
    (DCTTopK(), 100),
]


@pytest.mark.parametrize(("chosen", "level"), FULL)
def test_the_fullest_level_is_dense(chosen: Compressor, level: object) -> None:
    reducer = Reducer(chosen, layers(), world(3), seed=2)
    for t in range(3):
        grads = gradients(3, t)
        for update, grad in zip(step(reducer, grads, level), grads, strict=True):
            torch.testing.assert_close(update, grad.mean(0), rtol=1e-12, atol=1e-12)


def test_rank_r_is_exact_for_a_gradient_of_rank_r_from_the_second_step() -> None:
    g = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(9, 2, generator=g, dtype=F64),
        torch.randn(2, 7, generator=g, dtype=F64),
    )
    matrix = (left @ right).expand(3, 9, 7).contiguous()
    reducer = Reducer(PowerSGD(), [Layer("m", (9, 7))], world(3), seed=0)
    update = step(reducer, [matrix], 2)[0]
    torch.testing.assert_close(update, matrix[0], rtol=1e-10, atol=1e-10)


def test_repeated_powersgd_without_memory_finds_the_best_rank_r_approximation() -> None:
    g = torch.Generator().manual_seed(3)
    matrix = torch.randn(1, 12, 8, generator=g, dtype=F64)
    reducer = Reducer(PowerSGD(error_feedback=False), [Layer("m", (12, 8))], world(1), seed=0)
    for _ in range(300):
        update = step(reducer, [matrix], 3)[0]
    u, s, v = torch.linalg.svd(matrix[0], full_matrices=False)
    torch.testing.assert_close(update, u[:, :3] * s[:3] @ v[:3], rtol=1e-6, atol=1e-6)


def test_q_is_kept_when_the_rank_changes() -> None:
    reducer = Reducer(PowerSGD(), [Layer("m", (6, 10))], world(2), seed=0)
    grads = gradients(2, 0)[:1]
    step(reducer, grads, 3)
    three = reducer.states[0].q.clone()  # type: ignore[attr-defined]

    def start(compressor: PowerSGD, rank: int) -> Tensor:
        bucket = Bucket([0], reducer.states, [rank], True)
        bucket.take(grads)
        (matrix,) = _matrices(bucket)
        return compressor._warm_start(reducer.states[0], matrix, grads[0])  # type: ignore[arg-type]

    assert torch.equal(start(PowerSGD(), 2), three[:2])
    assert torch.equal(start(PowerSGD(), 5)[:3], three)
    assert start(PowerSGD(), 5).shape == (5, 10)
    assert not torch.equal(start(PowerSGD(reset_on_change=True), 2), three[:2])


def test_powersgd_recovers_from_a_zero_gradient() -> None:
    reducer = Reducer(PowerSGD(), [Layer("m", (6, 10))], world(1), seed=0)
    assert step(reducer, [torch.zeros(1, 6, 10, dtype=F64)], 1)[0].count_nonzero() == 0
    grad = gradients(1, 0)[:1]
    moved = [step(reducer, grad, 1)[0] for _ in range(3)]
    assert all(m.count_nonzero() > 0 for m in moved)


# -- bad input -------------------------------------------------------------------------------


def test_stochastic_rounding_with_error_feedback_is_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        make_compressor({"name": "quantise", "error_feedback": True})


def test_bits_written_as_a_decimal_are_a_whole_number() -> None:
    """As ``bits = 2.0`` in a file."""
    chosen = make_compressor({"name": "chunked-topk", "bits": 2.0})
    assert repr(chosen.bits) == "2"  # type: ignore[attr-defined]


def test_unknown_compressor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'powersgd'"):
        make_compressor({"name": "powerSGD"})
    with pytest.raises(ConfigError, match=r"unknown key 'compressor\.ranks'"):
        make_compressor({"name": "powersgd", "ranks": 3})


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_topk_of_a_nan_still_sends_k(place: int, k: int) -> None:
    """Or the processes' gathers would differ in size, and hang instead of stopping with a word."""
    values = torch.arange(8.0)
    values[place] = float("nan")
    assert len(top_indices(values, k)) == k
    chosen = by_threshold(values[None], k)[0]
    assert len(chosen.unique()) == k
    assert chosen.max() < 8
