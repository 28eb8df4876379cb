"""Compressors: what is not sent is kept, the dense mean in the limit, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reducers import EVERY, F64, FADING, SHAPES, gradients, layers, step, world
from torch import Tensor

from analysis.plugins.cosine import DCTTopK
from regimes.base.config import DENSE
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.compression import Compressor, make_compressor
from regimes.compression.bucket import Bucket
from regimes.compression.elementwise import Cast
from regimes.compression.powersgd import ACPSGD, PowerSGD, _matrices
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import RandomK, TopK, by_threshold, top_indices

# -- conservation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "low", "high"),
    [c for c in EVERY if c.values[0].error_feedback],  # type: ignore[attr-defined]
)
@pytest.mark.parametrize("workers", [1, 3])
def test_sum_of_updates_and_mean_residual_is_the_sum_of_mean_gradients(
    chosen: Compressor, low: object, high: object, workers: int
) -> None:
    reducer = Reducer(chosen, layers(), world(workers), seed=1)
    total = [torch.zeros(s, dtype=F64) for s in SHAPES]
    sent = [torch.zeros(s, dtype=F64) for s in SHAPES]
    for t, level in enumerate([low, low, high, high, low, DENSE, high]):
        grads = gradients(workers, t)
        for i, update in enumerate(step(reducer, grads, level)):
            total[i] += grads[i].mean(0)
            sent[i] += update
    tolerance = 1e-2 if isinstance(chosen, Cast) else 1e-12  # the mean itself is in half precision
    for i, residual in enumerate(reducer.residuals()):
        owed = 0 if residual is None else residual.mean(0).view(SHAPES[i])
        torch.testing.assert_close(sent[i] + owed, total[i], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("chosen", "low", "high"),
    [c for c in EVERY if c.values[0].error_feedback],  # type: ignore[attr-defined]
)
def test_a_share_of_the_residual_is_kept_whatever_sends(
    chosen: Compressor, low: object, high: object
) -> None:
    fading = dataclasses.replace(chosen, error_feedback=0.75)
    reducer = Reducer(fading, layers()[:2], world(3), seed=1)
    owed = [torch.zeros(shape, dtype=F64) for shape in SHAPES[:2]]
    tolerance = 1e-2 if isinstance(chosen, Cast) else 1e-12  # the mean itself is in half precision
    for t, level in enumerate([low, high, high, DENSE, low, high]):
        grads = gradients(3, t)[:2]
        for i, update in enumerate(step(reducer, grads, level)):
            left = reducer.residuals()[i]
            rest = torch.zeros_like(owed[i]) if left is None else left.mean(0).view(SHAPES[i])
            wanted = 0.75 * owed[i] + grads[i].mean(0)
            torch.testing.assert_close(update + rest, wanted, rtol=tolerance, atol=tolerance)
            owed[i] = rest.clone()


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


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_dense_after_compression_pays_the_residual_once(
    chosen: Compressor, low: object, high: object
) -> None:
    reducer = Reducer(chosen, layers()[:1], world(2), seed=1)
    step(reducer, gradients(2, 0)[:1], high)
    owed = reducer.residuals()[0]
    owed = 0 if owed is None else owed.mean(0).clone()
    grads = gradients(2, 1)[:1]
    update = step(reducer, grads, DENSE)[0]
    torch.testing.assert_close(update, grads[0].mean(0) + owed)
    assert reducer.residuals()[0] is None
    torch.testing.assert_close(step(reducer, grads, DENSE)[0], grads[0].mean(0))


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_gradients_are_left_as_they_are(chosen: Compressor, low: object, high: object) -> None:
    reducer = Reducer(chosen, layers(), world(3), seed=1)
    for level in (low, high, DENSE, high):
        grads = gradients(3, 5)
        step(reducer, grads, level)
        for mine, original in zip(grads, gradients(3, 5), strict=True):
            assert torch.equal(mine, original)


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


def test_authors_quirk_dense_forgets_the_residual() -> None:
    reducer = Reducer(PowerSGD(reset_on_change=True), [Layer("m", (6, 10))], world(2), seed=0)
    step(reducer, gradients(2, 0)[:1], 1)
    grads = gradients(2, 1)[:1]
    torch.testing.assert_close(step(reducer, grads, DENSE)[0], grads[0].mean(0))


# -- the simulated short cut -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "low", "high"),
    [
        *(c for c in EVERY if c.values[0].linear),
        FADING,  # type: ignore[attr-defined]
    ],
)
def test_linear_compressors_need_only_the_mean(
    chosen: Compressor, low: object, high: object
) -> None:
    apart, together = (Reducer(chosen, layers(), world(4), seed=3) for _ in range(2))
    for t, level in enumerate([low, high, DENSE, high, low] * 10):
        grads = gradients(4, t)
        mean = [g.mean(0, keepdim=True) for g in grads]
        for a, b in zip(step(apart, grads, level), step(together, mean, level), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level", "part"),
    [
        ("powersgd", 0, "a rank"),
        ("powersgd", -1, "a rank"),
        ("powersgd", 1.5, "a rank"),
        ("powersgd", True, "a rank"),
        ("acp-sgd", 0, "a rank"),
        ("acp-sgd", 1.5, "a rank"),
        ("topk", 0, "percentage"),
        ("topk", 101, "percentage"),
        ("topk", "fp16", "percentage"),
        ("randomk", -3, "percentage"),
        ("dct-topk", 100.5, "percentage"),
        ("sign", 2, "1 (bit)"),
        ("quantise", 3, "2, 4, 8 or 16"),
        ("cast", 16, "fp16"),
        ("dense", 1, "no other level"),
        ("low-pass", 0, "a share"),
        ("low-pass", 1.5, "a share"),
        ("low-pass", True, "a share"),
    ],
)
def test_a_level_of_another_compressor_is_refused(name: str, level: object, part: str) -> None:
    with pytest.raises(ConfigError, match="level") as error:
        make_compressor({"name": name}).check(level)  # type: ignore[arg-type]
    assert part in str(error.value)


def test_stochastic_rounding_with_error_feedback_is_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        make_compressor({"name": "quantise", "error_feedback": True})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("acp-sgd", "iterations", 0), ("dct-topk", "chunk", 0), ("dct-topk", "chunk", 182)],
)
def test_a_field_out_of_bounds_is_refused(name: str, field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"compressor\.{field} = {value}: expected a whole"):
        make_compressor({"name": name, field: value})


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
