"""Layers of several matrices, ``[count, n, m]``, such as experts: each matrix has factors of its
own, as if it were a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import traffic_table

LOW_RANK = [
    {"name": "powersgd"},
    {"name": "powersgd", "error_feedback": False},
    {"name": "acp-sgd"},
    {"name": "acp-sgd", "iterations": 2, "error_feedback": False},
]
SHAPES = [(4, 64, 64), (8, 64, 32), (3, 16, 9), (1, 12, 20)]
WORKERS = [1, 3]


def reducer(table: dict[str, Any], shapes: dict[str, tuple[int, ...]], workers: int) -> Reducer:
    layers = [Layer(name, shape) for name, shape in shapes.items()]
    made = Reducer(make_compressor(table), layers, World(workers), seed=1)
    made.world.meter.dtype = torch.float64
    return made


def draw(workers: int, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(workers, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("table", [*LOW_RANK[:2], *LOW_RANK[3:]], ids=str)  # one step is enough
def test_matrices_of_that_rank_come_out_exactly(
    table: dict[str, Any], shape: tuple[int, ...], workers: int
) -> None:
    count, n, m = shape
    left, right = draw(workers, (count, n, 2), 1), draw(1, (count, 2, m), 2)
    gradients = [left @ right, draw(workers, (10, 7), 3)]
    ours = reducer(table, {"experts": shape, "other": (10, 7)}, workers)
    for _ in range(4):
        update, _ = ours.reduce([0, 1], gradients, [2, 2]).values()
    assert torch.allclose(update, gradients[0].mean(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("table", LOW_RANK, ids=str)
def test_a_stack_is_compressed_as_its_matrices_alone(table: dict[str, Any], workers: int) -> None:
    shape = count, n, m = 3, 16, 9
    whole = reducer(table, {"experts": shape}, workers)
    apart = reducer(table, {f"expert{i}": (n, m) for i in range(count)}, workers)
    starts = draw(count, (2, m), 9)
    for state, start in zip(
        [*whole.states, *apart.states], [starts.flatten(0, 1), *starts], strict=True
    ):
        setattr(state, "q" if table["name"] == "powersgd" else "factor", start)
    for step in range(6):
        level = 2 if step < 3 else 1  # the rank falls, and factors are kept
        gradient = draw(workers, shape, step)
        (update,) = whole.reduce([0], [gradient], [level]).values()
        single = apart.reduce(range(count), [*gradient.unbind(1)], [level] * count)
        assert torch.allclose(update, torch.stack([*single.values()]), rtol=1e-9, atol=1e-9)
    owed, others = whole.residuals()[0], apart.residuals()
    if owed is not None:
        residual = owed.view(workers, *shape)
        for i, theirs in enumerate(others):
            assert theirs is not None
            assert torch.allclose(residual[:, i], theirs, rtol=1e-9, atol=1e-9)
    sent = [
        sum(x.world.meter.layers[i].floats for i in range(len(x.layers))) for x in (whole, apart)
    ]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("name", ["powersgd", "acp-sgd"])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 64, 64), (128, 8, 8), (64, 1, 3), (64, 32, 3)])
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_no_rank_sends_more_than_the_layer_has(
    name: str, shape: tuple[int, ...], rank: int
) -> None:
    layer, compressor = Layer("experts", shape), make_compressor({"name": name})
    floats, _ = traffic_table(compressor, [layer], rank, 2)
    assert floats <= layer.size
    ours = reducer({"name": name}, {"experts": shape}, 2)
    for step in range(2):
        ours.reduce([0], [draw(2, shape, step)], [rank])
    assert ours.world.meter.layers[0].floats == 2 * floats


def test_the_shape_tells_a_stack_from_a_convolution_over_sequences() -> None:
    assert [Layer("experts", shape).inner for shape in SHAPES] == [x[1:] for x in SHAPES]
    convolutions = [(64, 32, 3), (64, 1, 3), (8, 8, 1), (16, 4, 5), (256, 80, 7)]
    assert not any(Layer("convolution", shape).inner for shape in convolutions)
    assert Layer("matrix", (4, 64)).inner is None


def test_a_state_of_one_matrix_is_no_start_for_several() -> None:
    # what an earlier version kept of such a layer
    ours = reducer({"name": "powersgd"}, {"experts": (3, 16, 9)}, 2)
    ours.states[0].q = torch.ones(3, 144, dtype=torch.float64)
    (update,) = ours.reduce([0], [draw(2, (3, 16, 9), 1)], [2]).values()
    assert update.isfinite().all()
