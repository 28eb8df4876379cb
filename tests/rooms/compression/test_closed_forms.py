"""Compressors against closed forms and other libraries."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reducers import EVERY, F64, FADING, SHAPES, gradients, layers, step, world
from torch.utils._python_dispatch import TorchDispatchMode

from regimes.base.config import DENSE
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.compression import Compressor, orthonormal, sparse
from regimes.compression.bucket import State
from regimes.compression.codes import pack_codes, unpack_codes
from regimes.compression.elementwise import Cast, Quantise, Sign
from regimes.compression.kernels import stack_tensors
from regimes.compression.orthonormal import (
    PaddedBatch,
    choose_batches,
    orthonormalise,
    orthonormalise_in_batches,
)
from regimes.compression.powersgd import ACPSGD, PowerSGD
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import (
    IN_CACHE,
    SMALL,
    RandomK,
    TopK,
    by_threshold,
    num_kept,
    select_largest,
    top_indices,
    topk_of_rows,
)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=40)
def test_orthonormal_spans_the_rows(rank: int, n: int, seed: int) -> None:
    rank = min(rank, n)
    rows = torch.randn(rank, n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    (basis,) = orthonormalise([rows[None]])[0]
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
def test_orthonormal_in_batches(cases: list[tuple[int, int, str]], seed: int) -> None:
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
    found = orthonormalise_in_batches([rows[None] for rows in matrices])
    for rows, (basis,) in zip(matrices, found, strict=True):
        torch.testing.assert_close(basis @ basis.mT, torch.eye(len(rows), dtype=F64))
        lost = torch.linalg.matrix_norm(rows - rows @ basis.mT @ basis)
        assert lost <= 1e-9 * torch.linalg.matrix_norm(rows)


EVENLY = [[7], [0, 6], [0, 6, 12], [0, 2, 4], [3, 3]]


@pytest.mark.parametrize("places", [*EVENLY, [12, 6, 0], [0, 6, 13]])
def test_stacked_is_torch_stack(places: list[int]) -> None:
    memory = torch.arange(40.0)
    parts = [memory.as_strided((2, 3), (10, 1), place) for place in places]
    assert torch.equal(stack_tensors(parts), torch.stack(parts))
    assert (stack_tensors(parts).data_ptr() == parts[0].data_ptr()) == (places in EVENLY)  # no copy
    copies = [part.clone() for part in parts]
    assert torch.equal(stack_tensors(copies), torch.stack(copies))


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_the_first_row_is_worker_0_unless_told_otherwise(
    chosen: Compressor, low: object, high: object
) -> None:
    layer = Layer("a", (6, 10))
    assert [chosen.init(layer, 7, *w).first_worker for w in ((), (0,), (2,))] == [0, 0, 2]
    assert State((7, "a")).first_worker == 0


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("tentative", [False, True])
@pytest.mark.parametrize("chosen", [PowerSGD(), ACPSGD(), ACPSGD(iterations=2)])
def test_ranks_of_layers_of_one_shape_differ_and_change(
    chosen: Compressor, tentative: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made once for a bucket in the order of a GPU is not of an earlier step."""
    layers = [Layer(str(i), (6, 10)) for i in range(5)]
    ranks = [[2, 2, 1, 2, 1], [2, 2, 1, 2, 1], [2, 2, 1, 2, 1], [1, 2, 1, 2, 2], [2] * 5, [2] * 5]
    found = []
    for gpu in (False, True):
        for module in ("kernels", "orthonormal", "bucket", "reducer"):
            monkeypatch.setattr(f"regimes.compression.{module}.on_gpu", lambda _, x=gpu: x)
        reducer = Reducer(chosen, layers, world(workers), seed=1)
        reducer.tentative = tentative
        updates = []
        for t, levels in enumerate(ranks):
            generator = torch.Generator().manual_seed(t)
            grads = [torch.randn(workers, 6, 10, generator=generator, dtype=F64) for _ in layers]
            updates += [x.clone() for x in reducer.reduce(range(5), grads, levels).values()]
        found.append((updates, reducer.residuals()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("chosen", "low", "high"), [*EVERY, FADING])
@pytest.mark.parametrize("workers", [1, 3])
def test_layers_in_batches_are_layers_one_by_one(
    chosen: Compressor, low: object, high: object, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a GPU, here on a CPU: with layers of equal shape, restored on the way."""
    shapes = [(6, 10), (8, 3, 3, 3), (5,), (6, 5, 2), (4, 1), (8, 27)]
    found = []
    for gpu in (False, True):
        for module in ("kernels", "orthonormal", "bucket", "reducer", "sparse"):
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
            (
                updates,
                [r for r in reducer.residuals() if r is not None],
                reducer.world.meter.take_counts(),
            )
        )
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-7, atol=1e-7)
    assert found[0][2] == found[1][2]  # the same traffic


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
    assert top_indices(row, k).tolist() == expected.tolist()
    index, value = select_largest(row[None], k)
    assert torch.equal(index[0].long(), expected)
    assert torch.equal(value[0], before[expected])
    assert torch.equal(row, before)
    select_largest(row[None], k, clear=True)
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
    assert topk_of_rows(rows, k).tolist() == wanted


class _Scans(TorchDispatchMode):
    """Keeps the shapes that are summed up along an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func.overloadpacket is torch.ops.aten.cumsum:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))  # type: ignore[no-any-return]


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.floats(0, 1),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, F64]),
    st.sampled_from(["normal", "few values", "equal", "not numbers"]),
    st.integers(0, 10**6),
)
@settings(max_examples=100)
def test_a_gpu_scans_all_rows_as_one_and_selects_the_same(
    count: int, size: int, share: float, dtype: torch.dtype, kind: str, seed: int
) -> None:
    """There each row of several is scanned by one block of threads, a single row by all of them."""
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if kind == "few values":
        rows = rows.round()
    elif kind == "equal":
        rows.fill_(-1)
    elif kind == "not numbers":
        rows[:, ::3] = math.nan
    k = max(1, round(share * size))
    by_rows = by_threshold(rows, k)
    with pytest.MonkeyPatch.context() as patch, _Scans() as scans:
        patch.setattr(sparse, "on_gpu", lambda _: True)
        assert torch.equal(by_threshold(rows, k), by_rows)
    assert scans.shapes == 2 * [(count * size,)]


def test_ties_in_one_of_the_parts_that_are_searched_change_nothing() -> None:
    rows = torch.randn(20, IN_CACHE // 8, generator=torch.Generator().manual_seed(0))
    rows[9] = rows[9].round()
    assert torch.equal(topk_of_rows(rows, 40), by_threshold(rows, 40))


def test_a_sample_that_misleads_costs_time_only() -> None:
    row = torch.ones(2 * SMALL, dtype=F64)
    stride = round(len(row) ** (1 / 3)) | 1
    row[::stride] = torch.arange(len(row[::stride]), dtype=F64) + 2  # what it sees is the top
    for k in (1, 100, len(row) - 100, len(row) - 1):
        assert select_largest(row[None], k)[0][0].tolist() == sorted_selection(row, k)


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
    packed = pack_codes(codes.to(torch.uint8), bits)
    assert packed.shape == (3, math.ceil(size * bits / 8))
    assert torch.equal(unpack_codes(packed, bits, size), codes.to(torch.uint8))
    for row, written in zip(codes.tolist(), packed.tolist(), strict=True):  # low bits first
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert list(number.to_bytes(len(written), "little")) == written


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


def test_padding_of_a_models_matrices_is_in_bounded_memory() -> None:
    """GPT-2's factors P at rank 4: an embedding of 50,257 rows and 48 matrices of at most 3,072.
    One batch of all would pad to 9.8 million numbers of 24 bytes; no batch has more than twice as
    many numbers as it needs, at 8 bytes each."""
    sizes = [50257, *[2304, 768, 3072, 768] * 12]
    shapes = tuple((1, 4, n) for n in sizes)
    groups = choose_batches(shapes)
    assert sorted(i for ids in groups for i in ids) == [*range(len(sizes))]
    assert len(groups) == 2
    used = 0
    for ids in groups:
        room = PaddedBatch([shapes[i] for i in ids], torch.device("cpu")).room
        used += room.numel() * room.element_size()
    assert used < 8e6


def test_a_batch_per_shape_is_the_same_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 2, 600), (3, 4, 900), (1, 1, 7), (2, 4, 40)]
    matrices = [torch.randn(size, generator=generator, dtype=F64) for size in sizes]
    together = orthonormalise_in_batches(matrices)
    choose_batches.cache_clear()
    monkeypatch.setattr(orthonormal, "FEW", 0)
    try:
        assert len(choose_batches(tuple(sizes))) > 1
        apart = orthonormalise_in_batches(matrices)
    finally:
        choose_batches.cache_clear()
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
