"""Compressors: closed forms, torch as oracle, conservation, reductions, traffic formulas."""

from __future__ import annotations

import copy
import dataclasses
import io
import math

import pytest
import torch
from ddp_scripts import group
from hypothesis import given, settings
from hypothesis import strategies as st

from regimes.collectives.processes import ProcessWorld
from regimes.collectives.requests import Layer, Traffic
from regimes.collectives.world import World
from regimes.compression import Compressor, compressor
from regimes.compression.alternating import ACPSGD
from regimes.compression.base import State
from regimes.compression.batched import stacked
from regimes.compression.cosine import DCTTopK
from regimes.compression.dense import LowPass
from regimes.compression.orthonormal import in_one_batch, orthonormal
from regimes.compression.powersgd import PowerSGD
from regimes.compression.quantised import Cast, Quantise, Sign, pack, unpack
from regimes.compression.reducer import Reducer
from regimes.compression.selection import SMALL, by_threshold, in_each, largest, top_indices
from regimes.compression.sparse import RandomK, TopK, num_kept
from regimes.config import DENSE
from regimes.errors import ConfigError

F64 = torch.float64
EVERY = [  # one case per family: compressor, a level that sends more, a level that sends less
    pytest.param(PowerSGD(), 4, 1, id="powersgd"),
    pytest.param(PowerSGD(wire="bf16"), 4, 1, id="powersgd-bf16"),
    pytest.param(ACPSGD(), 4, 1, id="acp-sgd"),
    pytest.param(ACPSGD(iterations=2), 4, 1, id="acp-sgd-twice"),
    pytest.param(TopK(), 40, 5.0, id="topk"),
    pytest.param(RandomK(), 40, 5.0, id="randomk"),
    pytest.param(DCTTopK(error_feedback=True, chunk=3), 60, 5.0, id="dct-topk"),
    pytest.param(Sign(), DENSE, 1, id="sign"),
    pytest.param(Quantise(), 8, 2, id="qsgd"),
    pytest.param(Quantise(stochastic=False, error_feedback=True), 8, 2, id="nearest"),
    pytest.param(Cast(), "fp16", "bf16", id="cast"),
    pytest.param(LowPass(), 0.9, 0.3, id="low-pass"),
]
FADING = pytest.param(PowerSGD(error_feedback=0.75), 4, 1, id="powersgd-fading")
SHAPES = [(6, 10), (8, 3, 3, 3), (5,), (4, 1)]


def world(workers: int, dtype: torch.dtype = F64) -> World:
    w = World(workers)
    w.meter.dtype = dtype
    return w


def layers() -> list[Layer]:
    return [Layer(f"layer{i}", shape) for i, shape in enumerate(SHAPES)]


def gradients(workers: int, step: int, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return [torch.randn(workers, *shape, generator=g, dtype=dtype) for shape in SHAPES]


def step(reducer: Reducer, grads: list[torch.Tensor], level: object) -> list[torch.Tensor]:
    rows = len(grads[0])
    levels = [level if layer.compressed else DENSE for layer in reducer.layers]
    stack = torch.cat([g.flatten(1) for g in grads], dim=1)
    return reducer.step(grads, levels, torch.zeros(rows, dtype=stack.dtype), stack)[0]  # type: ignore[arg-type]


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
    start = PowerSGD()._warm_start(reducer.states[0], 2, grads[0])  # type: ignore[arg-type]
    assert torch.equal(start, three[:2])
    start = PowerSGD()._warm_start(reducer.states[0], 5, grads[0])  # type: ignore[arg-type]
    assert torch.equal(start[:3], three)
    assert start.shape == (5, 10)
    start = PowerSGD(reset_on_change=True)._warm_start(reducer.states[0], 2, grads[0])  # type: ignore[arg-type]
    assert not torch.equal(start, three[:2])


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


# -- closed forms and other libraries --------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=40)
def test_orthonormal_spans_the_rows(rank: int, n: int, seed: int) -> None:
    rank = min(rank, n)
    rows = torch.randn(rank, n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    (basis,) = orthonormal([(rows,)])
    torch.testing.assert_close(basis @ basis.mT, torch.eye(rank, dtype=F64))
    torch.testing.assert_close(rows @ basis.mT @ basis, rows)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.integers(1, 12),
            st.sampled_from(
                ["normal", "zero", "equal rows", "tiny", "huge", "units", "nearly dependent"]
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10**6),
)
@settings(max_examples=150)
def test_orthonormal_in_one_batch(cases: list[tuple[int, int, str]], seed: int) -> None:
    """What a GPU does, here on a CPU."""
    generator, matrices = torch.Generator().manual_seed(seed), []
    for rank, n, kind in cases:
        rows = torch.randn(min(rank, n), n, generator=generator, dtype=F64)
        if kind == "equal rows":
            rows = rows[:1].expand(len(rows), -1)
        elif kind == "units":
            rows = torch.eye(n, dtype=F64)[:1].repeat(len(rows), 1)
        elif kind == "nearly dependent":
            rows = rows[:1] + 1e-9 * rows
        scale = {"zero": 0, "tiny": 1e-30, "huge": 1e30}.get(kind, 1)
        matrices.append((scale * rows).contiguous())
    for rows, basis in zip(matrices, in_one_batch(matrices), strict=True):
        torch.testing.assert_close(basis @ basis.mT, torch.eye(len(rows), dtype=F64))
        lost = torch.linalg.matrix_norm(rows - rows @ basis.mT @ basis)
        assert lost <= 1e-9 * torch.linalg.matrix_norm(rows)


EVENLY = [[7], [0, 6], [0, 6, 12], [0, 2, 4], [3, 3]]


@pytest.mark.parametrize("places", [*EVENLY, [12, 6, 0], [0, 6, 13]])
def test_stacked_is_torch_stack(places: list[int]) -> None:
    memory = torch.arange(40.0)
    parts = [memory.as_strided((2, 3), (10, 1), place) for place in places]
    assert torch.equal(stacked(parts), torch.stack(parts))
    assert (stacked(parts).data_ptr() == parts[0].data_ptr()) == (places in EVENLY)  # no copy
    copies = [part.clone() for part in parts]
    assert torch.equal(stacked(copies), torch.stack(copies))


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_the_first_row_is_worker_0_unless_told_otherwise(
    chosen: Compressor, low: object, high: object
) -> None:
    layer = Layer("a", (6, 10))
    assert [chosen.init(layer, 7, *w).first_worker for w in ((), (0,), (2,))] == [0, 0, 2]
    assert State((7, "a")).first_worker == 0


@pytest.mark.parametrize(("chosen", "low", "high"), [*EVERY, FADING])
@pytest.mark.parametrize("workers", [1, 3])
def test_layers_in_batches_are_layers_one_by_one(
    chosen: Compressor, low: object, high: object, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a GPU, here on a CPU: with layers of equal shape, restored on the way."""
    shapes = [(6, 10), (8, 3, 3, 3), (5,), (6, 5, 2), (4, 1), (8, 27)]
    found = []
    for gpu in (False, True):
        for module in ("batched", "factors", "orthonormal", "reducer", "sparse"):
            monkeypatch.setattr(f"regimes.compression.{module}.on_gpu", lambda _, x=gpu: x)
        reducer = Reducer(
            chosen, [Layer(str(i), s) for i, s in enumerate(shapes)], world(workers), seed=1
        )
        updates = []
        for t, level in enumerate([low, high, low, DENSE, high, low]):
            generator = torch.Generator().manual_seed(t)
            grads = [torch.randn(workers, *s, generator=generator, dtype=F64) for s in shapes]
            updates += [update.clone() for update in step(reducer, grads, level)]
            reducer.load_state_dict(*copy.deepcopy(reducer.state_dict()))
        found.append(
            (updates, [r for r in reducer.residuals() if r is not None], reducer.world.meter.take())
        )
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-7, atol=1e-7)
    assert found[0][2] == found[1][2]  # the same traffic


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=40), st.floats(0.5, 100))
@settings(max_examples=200)
def test_top_indices_against_a_stable_sort(values: list[int], percent: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    k = num_kept(percent, len(values))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert top_indices(tensor, k).tolist() == sorted(order[:k])


def sorted_selection(row: torch.Tensor, k: int) -> list[int]:
    """The slow and obvious one."""
    order = sorted(range(len(row)), key=lambda i: (-abs(row[i].item()), i))
    return sorted(order[:k])


@given(
    st.integers(1, 3 * SMALL),
    st.sampled_from([0.01, 0.1, 1, 10, 50, 51, 90, 99, 99.99, 100]),
    st.sampled_from(["normal", "few values", "zeros", "ordered"]),
    st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_the_fast_selection_is_the_sorted_one(
    size: int, percent: float, kind: str, seed: int
) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=F64)
    if kind == "few values":
        row = row.round()
    elif kind == "zeros":
        row[: size * 9 // 10] = 0
    elif kind == "ordered":  # misleads a sample by strides as little as any
        row = row.sort().values
    k, before = num_kept(percent, size), row.clone()
    expected = torch.tensor(sorted_selection(row, k))
    index, value = largest(row[None], k)
    assert torch.equal(index[0].long(), expected)
    assert torch.equal(value[0], before[expected])
    assert torch.equal(row, before)
    largest(row[None], k, clear=True)
    assert torch.equal(row, before.index_fill(0, expected, 0))


@given(
    st.integers(1, 3),
    st.integers(1, 300),
    st.floats(0, 1),
    st.sampled_from([torch.float16, torch.float32, F64]),
    st.sampled_from(["normal", "few values", "zeros", "infinite"]),
    st.integers(0, 10**6),
)
@settings(max_examples=100)
def test_the_selection_by_threshold_is_the_sorted_one(
    count: int, size: int, share: float, dtype: torch.dtype, kind: str, seed: int
) -> None:
    """What a GPU does, here on a CPU."""
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if kind == "few values":
        rows = rows.round()
    elif kind == "zeros":
        rows[:, : size * 9 // 10] = -0.0
    elif kind == "infinite":
        rows[:, ::3] = math.inf
    k = max(1, round(share * size))
    wanted = [sorted_selection(row, k) for row in rows]
    assert by_threshold(rows, k).tolist() == wanted
    assert in_each(rows, k).tolist() == wanted


def test_a_sample_that_misleads_costs_time_only() -> None:
    row = torch.ones(2 * SMALL, dtype=F64)
    stride = round(len(row) ** (1 / 3)) | 1
    row[::stride] = torch.arange(len(row[::stride]), dtype=F64) + 2  # what it sees is the top
    for k in (1, 100, len(row) - 100, len(row) - 1):
        assert largest(row[None], k)[0][0].tolist() == sorted_selection(row, k)


def test_top_indices_against_torch_topk() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for k in (1, 100, 5_000, 9_900, 10_000):
        expected = values.abs().topk(k).indices.sort().values
        assert torch.equal(top_indices(values, k).long(), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_top_indices_survive_what_is_not_finite(bad: float) -> None:
    values = torch.tensor([1.0, bad, bad, 2.0])
    assert len(top_indices(values, 2)) == 2


def test_topk_mean_and_sum_over_workers() -> None:
    grad = torch.tensor([[[3.0, 0.1], [0.2, 0.3]], [[0.1, -5.0], [0.2, 0.3]]], dtype=F64)
    for reduction, factor in (("mean", 0.5), ("sum", 1.0)):
        reducer = Reducer(TopK(reduction=reduction), [Layer("m", (2, 2))], world(2), seed=0)
        update = step(reducer, [grad], 25)[0]
        assert update.tolist() == [[3.0 * factor, -5.0 * factor], [0.0, 0.0]]


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 50), st.integers(0, 10**6))
@settings(max_examples=60)
def test_pack_and_unpack_are_inverse(bits: int, size: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, size), generator=torch.Generator().manual_seed(seed))
    packed = pack(codes.to(torch.uint8), bits)
    assert packed.shape == (3, math.ceil(size * bits / 8))
    assert torch.equal(unpack(packed, bits, size), codes.to(torch.int32))


def test_sign_is_the_mean_magnitude_with_the_sign() -> None:
    grad = torch.tensor([[[1.0, -2.0], [3.0, -6.0]]], dtype=F64)
    update = step(Reducer(Sign(), [Layer("m", (2, 2))], world(1), seed=0), [grad], 1)[0]
    assert update.tolist() == [[3.0, -3.0], [3.0, -3.0]]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_nearest_quantisation_is_within_half_a_step(bits: int) -> None:
    grad = gradients(1, 0)[:1]
    chosen = Quantise(stochastic=False)
    update = step(Reducer(chosen, layers()[:1], world(1), seed=0), grad, bits)[0]
    half = grad[0].abs().max() / (2 ** (bits - 1) - 1) / 2
    assert (update - grad[0][0]).abs().max() <= half * (1 + 1e-9)


@pytest.mark.parametrize("bits", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stochastic_quantisation_is_unbiased(bits: int) -> None:
    grad = gradients(2, 0)[:1]
    reducer = Reducer(Quantise(), layers()[:1], world(2), seed=0)
    n = 400
    mean = sum(step(reducer, grad, bits)[0] for _ in range(n)) / n
    width = grad[0].abs().amax() / (2 ** (bits - 1) - 1)  # the error's sd is at most width / 2
    assert (mean - grad[0].mean(0)).abs().max() < 5 * width / 2 / math.sqrt(n)  # type: ignore[union-attr]


def test_workers_round_independently() -> None:
    grad = gradients(1, 0)[0].expand(2, -1, -1).contiguous()
    one = step(Reducer(Quantise(), layers()[:1], world(1), seed=0), [grad[:1]], 2)[0]
    two = step(Reducer(Quantise(), layers()[:1], world(2), seed=0), [grad], 2)[0]
    assert not torch.equal(one, two)


def test_randomk_scales_without_memory_and_is_unbiased() -> None:
    grad = gradients(2, 0)[:1]
    reducer = Reducer(RandomK(error_feedback=False), layers()[:1], world(2), seed=0)
    n = 300
    mean = sum(step(reducer, grad, 20)[0] for _ in range(n)) / n
    sd = grad[0].mean(0).abs() * math.sqrt((1 - 0.2) / 0.2 / n)
    assert ((mean - grad[0].mean(0)).abs() <= 5 * sd + 1e-12).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_the_factors_of_powersgd_travel_rounded(wire: str) -> None:
    """One step from the full one's Q, by hand; what the rounding loses stays owed."""
    (shape, *_), dtype = SHAPES, {"fp16": torch.float16, "bf16": torch.bfloat16}[wire]
    chosen, (grad, *_) = PowerSGD(wire=wire), gradients(3, 0, torch.float32)
    reducer = Reducer(chosen, layers()[:1], world(3, torch.float32), seed=0)
    q = torch.randn(2, shape[1], generator=torch.Generator().manual_seed(1))
    reducer.states[0].load_shared_state({"q": q})
    (update,) = step(reducer, [grad], 2)
    p = (q @ grad.mT).to(dtype).float().mean(0).to(dtype).float()
    p = torch.linalg.qr(p.mT)[0].mT
    right = (p @ grad).to(dtype).float().mean(0).to(dtype).float()
    torch.testing.assert_close(update, p.mT @ right, rtol=1e-5, atol=1e-5)
    residual = reducer.residuals()[0]
    torch.testing.assert_close(residual, grad - update)
    assert not chosen.linear
    assert PowerSGD().linear
    with pytest.raises(ConfigError, match="wire"):
        PowerSGD(wire="int8")


def test_cast_is_torch_rounding() -> None:
    grad = gradients(1, 0, torch.float32)[:1]
    update = step(Reducer(Cast(), layers()[:1], world(1, torch.float32), seed=0), grad, "bf16")[0]
    assert torch.equal(update, grad[0][0].bfloat16().float())


# -- traffic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_metered_equals_computed_at_each_level_and_across_changes(
    chosen: Compressor, low: object, high: object, dtype: torch.dtype
) -> None:
    by_bits = isinstance(chosen, Sign | Quantise | Cast) or chosen == PowerSGD(wire="bf16")
    w = world(4, dtype)
    reducer = Reducer(chosen, layers(), w, seed=1)
    steps = 2 if chosen == ACPSGD() else 1  # of which one sends P, the other Q
    for t, level in enumerate([low, high, DENSE, high, low]):
        for _ in range(steps):
            step(reducer, gradients(4, t, dtype), level)
        meter = w.meter.take()
        for i, layer in enumerate(reducer.layers):
            once = chosen.cost(layer, level, 4, dtype.itemsize)  # type: ignore[arg-type]
            expected = Traffic(steps * once.floats, steps * once.bytes)
            assert meter.layers[i].bytes == expected.bytes, (layer, level)
            if dtype == torch.float32 or not by_bits:
                assert meter.layers[i].floats == expected.floats, (layer, level)


def test_one_round_is_one_collective_per_kind() -> None:
    """And per type."""
    w, grads = world(2, torch.float32), gradients(2, 0, torch.float32)
    step(Reducer(PowerSGD(), layers(), w, seed=0), grads, 1)
    assert w.meter.take().calls == {"mean": 2, "gather": 0, "broadcast": 0}
    step(Reducer(TopK(), layers(), w, seed=0), grads, 10)
    assert w.meter.take().calls == {"mean": 1, "gather": 2, "broadcast": 0}
    step(Reducer(PowerSGD(wire="bf16"), layers(), w, seed=0), grads, 1)  # the loss is float32
    assert w.meter.take().calls == {"mean": 3, "gather": 0, "broadcast": 0}
    step(Reducer(PowerSGD(), layers(), world_64 := world(2), seed=0), gradients(2, 0), 1)
    assert world_64.meter.take().calls == {"mean": 2, "gather": 0, "broadcast": 0}


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_updates_live_until_the_next_step(chosen: Compressor, low: object, high: object) -> None:
    """The memory of an update is used again: what a step returns must not depend on that."""
    fresh, used = (Reducer(chosen, layers(), world(2), seed=4) for _ in range(2))
    for t, level in enumerate([low, high, DENSE, high, low]):
        for state in fresh.states:
            if hasattr(state, "_buffer"):
                del state._buffer
        for a, b in zip(
            step(fresh, gradients(2, t), level), step(used, gradients(2, t), level), strict=True
        ):
            assert torch.equal(a, b)


CHANGES = [0, 1, 1, DENSE, 0, 0, 1]  # low, high


def several(world: World, rows: slice, restored: bool = False) -> list[list[torch.Tensor]]:
    """Updates and what is owed in the end, by each of ``EVERY``; a restored reducer takes over
    before every step."""
    found = []
    for case in EVERY:
        chosen, *levels = case.values
        reducer = Reducer(chosen, layers(), world, seed=6)  # type: ignore[arg-type]
        tensors: list[torch.Tensor] = []
        for t, change in enumerate(CHANGES):
            grads = [g[rows] for g in gradients(4, t)]
            level = DENSE if change == DENSE else levels[change]  # type: ignore[call-overload]
            tensors += [update.clone() for update in step(reducer, grads, level)]
            if restored:
                file = io.BytesIO()
                torch.save(reducer.state_dict(), file)
                file.seek(0)
                reducer = Reducer(chosen, layers(), world, seed=6)  # type: ignore[arg-type]
                reducer.load_state_dict(*torch.load(file, weights_only=True))
        tensors += [r for r in reducer.residuals() if r is not None]
        found.append(tensors)
    return found


def test_a_restored_reducer_goes_on_bit_for_bit() -> None:
    plain, restored = (several(world(4), slice(4), again) for again in (False, True))
    for case, mine, theirs in zip(EVERY, restored, plain, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), case.id


def hosted(rank: int, count: int) -> list[list[torch.Tensor]]:
    """`several` in one of ``count`` processes, which share four workers."""
    here = ProcessWorld(4, torch.device("cpu"))
    here.meter.dtype = F64
    return several(here, slice(here.hosted.start, here.hosted.stop))


@pytest.mark.parametrize("count", [2, 4])
def test_each_compressor_is_the_same_between_processes(count: int) -> None:
    answers = group.run(hosted, count, count)
    updates = len(CHANGES) * len(SHAPES)
    for i, simulated in enumerate(several(world(4), slice(4))):
        close = 0.1 if EVERY[i].id in ("cast", "powersgd-bf16") else 1e-12  # added in half
        for answer in answers:
            for mine, theirs in zip(answer[i][:updates], simulated, strict=False):
                torch.testing.assert_close(mine, theirs, rtol=close, atol=close)
        for j, owed in enumerate(simulated[updates:], start=updates):
            mine = torch.cat([answer[i][j] for answer in answers])
            torch.testing.assert_close(mine, owed, rtol=close, atol=close)


def test_levels_may_differ_between_layers() -> None:
    two = [Layer("a", (6, 10)), Layer("b", (6, 10))]
    g = gradients(2, 0)[0]
    apart = [
        step(Reducer(PowerSGD(), [x], world(2), seed=0), [g], r)[0]
        for x, r in zip(two, (1, 3), strict=True)
    ]
    reducer = Reducer(PowerSGD(), two, world(2), seed=0)
    stack = torch.cat([g.flatten(1)] * 2, dim=1)
    together, _ = reducer.step([g, g], [1, 3], torch.zeros(2, dtype=F64), stack)
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_the_loss_tells_of_a_gradient_that_is_not_finite() -> None:
    reducer = Reducer(PowerSGD(), layers()[:1], world(2), seed=0)
    grads = gradients(2, 0)[:1]
    stack = grads[0].flatten(1)
    _, loss = reducer.step(grads, [1], torch.tensor([1.0, 2.0], dtype=F64), stack)
    assert loss.item() == 1.5
    stack[1, 3] = math.inf
    _, loss = reducer.step(grads, [1], torch.tensor([1.0, 2.0], dtype=F64), stack)
    assert math.isnan(loss.item())


@pytest.mark.parametrize(("chosen", "low", "high"), [*EVERY, FADING])
@settings(max_examples=20)
@given(
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(0, 10**6),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_one_number_that_is_not_finite_is_told_at_every_level(
    chosen: Compressor, low: object, high: object, bad: float, place: int, worker: int, at: int
) -> None:
    """In any layer of any worker, at the first step or when something is owed; and in no other."""
    reducer, losses = Reducer(chosen, layers(), world(3), seed=0), torch.arange(3, dtype=F64)
    level: object
    for turn, level in enumerate([high, low, DENSE, high]):
        grads = gradients(3, turn)
        stack = torch.cat([g.flatten(1) for g in grads], dim=1)
        if turn == at:
            index = place % stack.shape[1]
            stack[worker, index] = bad
            parts = stack.split([layer.size for layer in reducer.layers], dim=1)
            grads = [p.view(g.shape) for p, g in zip(parts, grads, strict=True)]
        levels = [level if layer.compressed else DENSE for layer in reducer.layers]
        _, loss = reducer.step(grads, levels, losses, stack)  # type: ignore[arg-type]
        if turn == at:
            assert loss.isnan()
            return
        assert loss == 1
        assert loss.dtype == F64


@pytest.mark.parametrize("chosen", [PowerSGD(), LowPass()], ids=type)
def test_updates_tell_so_that_gradients_are_not_read_again(chosen: Compressor) -> None:
    """The stack is there for compressors whose updates may hide a gradient that is not finite."""
    reducer, grads = Reducer(chosen, layers(), world(2), seed=0), gradients(2, 0)
    unread = torch.full((2, 3), math.nan, dtype=F64)
    for level in (1, DENSE):
        levels = [level if layer.compressed else DENSE for layer in reducer.layers]
        assert reducer.step(grads, levels, torch.ones(2, dtype=F64), unread)[1] == 1
    (other,) = (Reducer(TopK(), layers()[:1], world(2), seed=0),)
    assert other.step(grads[:1], [50], torch.ones(2, dtype=F64), unread)[1].isnan()


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
        compressor({"name": name}).check(level)  # type: ignore[arg-type]
    assert part in str(error.value)


def test_stochastic_rounding_with_error_feedback_is_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        compressor({"name": "quantise", "error_feedback": True})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("acp-sgd", "iterations", 0), ("dct-topk", "chunk", 0), ("dct-topk", "chunk", 182)],
)
def test_a_field_out_of_bounds_is_refused(name: str, field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"compressor\.{field} = {value}: expected a whole"):
        compressor({"name": name, field: value})


def test_unknown_compressor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'powersgd'"):
        compressor({"name": "powerSGD"})
    with pytest.raises(ConfigError, match=r"unknown key 'compressor\.rank'"):
        compressor({"name": "powersgd", "rank": 3})


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
