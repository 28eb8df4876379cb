"""No layer costs more bytes than its own numbers: by the formula, and as the world counts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regimes.base.config import FeedbackLevel
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY, make_compressor
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.compression.traffic import costs_per_step, traffic_table

SHAPES = [(1, 1), (2, 1), (1, 5), (3, 3), (4, 4), (4, 32), (32, 4), (16, 32), (8, 1, 3, 3)]
LAYERS = [Layer(f"layer {i}", shape) for i, shape in enumerate(SHAPES)]
LEVELS: dict[str, list[Any]] = {
    "powersgd": [1, 2, 4, 64, FeedbackLevel(4, False)],
    "acp-sgd": [1, 2, 4, 64],
    "topk": [0.1, 10, 50],
    "randomk": [1, 100],
    "chunked-topk": [1, 60, 100],
    "sign": [1],
    "quantise": [2, 8, 16],
    "quantised-all-reduce": [4, 8],
    "cast": ["bf16"],
}
MORE: dict[str, list[dict[str, Any]]] = {
    "powersgd": [{"wire": "bf16"}, {"error_feedback": False}],
    "acp-sgd": [{"iterations": 2}],
    "chunked-topk": [{"bits": 32}, {"bits": 8}],
    "quantised-all-reduce": [{"block": 1}, {"stochastic": False, "error_feedback": True}],
}


def cases() -> Iterator[tuple[str, dict[str, Any], Any]]:
    assert LEVELS.keys() == {*REGISTRY} - {"dense"}
    for name, levels in LEVELS.items():
        for fields in ({}, *MORE.get(name, [])):
            for level in levels:
                yield name, fields, level


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_layer_never_costs_more_than_its_numbers(dtype: torch.dtype, workers: int) -> None:
    """Two steps. A layer that is sent whole has the mean of its gradients, to the bit."""
    for name, fields, level in cases():
        made = make_compressor({"name": name, **fields})
        world = World(workers)
        world.meter.dtype = dtype
        reducer, plain = Reducer(made, LAYERS, world, 0), Reducer(made, LAYERS, World(workers), 0)
        whole = costs_per_step(made, LAYERS, {"low": level}, workers)["low"].get("whole", [])
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            gradients = [
                torch.randn(workers, *shape, generator=generator).to(dtype) for shape in SHAPES
            ]
            updates = reducer.reduce(range(len(SHAPES)), gradients, [level] * len(SHAPES))
            exact = plain.reduce(range(len(SHAPES)), gradients, ["dense"] * len(SHAPES))
            counts = world.meter.take_counts().layers
            for i, layer in enumerate(LAYERS):
                where, cost = (name, fields, level, layer), traffic_table(made, [layer], level, 4)
                assert counts[i].bytes <= layer.size * dtype.itemsize, where
                assert cost[1] <= layer.size * 4, where
                if layer.name in whole:
                    assert torch.equal(updates[i], exact[i]), where
                    assert counts[i].floats == cost[0] == layer.size, where


def test_a_rank_of_as_many_numbers_loses_nothing() -> None:
    costs = costs_per_step(PowerSGD(), [Layer("a", (4, 4)), Layer("b", (4, 5))], {"low": 2}, 4)
    assert costs["low"] == {"floats": 34, "bytes": 136, "layers": [16, 18], "whole": ["a"]}


def test_shards_of_a_matrix_decide_alike() -> None:
    """PowerSGD joins them, whatever their rows: a rank that pays for the matrix pays on each.
    Others compress each by itself, and pay if all shards together do."""
    layer = Layer("a", (9, 64))
    for shards in (1, 2, 4, 8):
        parts = [layer.on(i, shards) for i in range(shards)]
        assert [PowerSGD().exceeds(part, 4, 2) for part in parts] == [False] * shards
        assert [PowerSGD().exceeds(part, 8, 2) for part in parts] == [True] * shards
    for name, _, level in cases():
        made, small = make_compressor({"name": name}).resolve_level(level)[0], Layer("b", (5, 2))
        plain = make_compressor({"name": name}).resolve_level(level)[1]
        for shards in (2, 4):
            parts = [small.on(i, shards) for i in range(shards)]
            assert len({made.exceeds(part, plain, 2) for part in parts}) == 1, (name, level)
            sent = traffic_table(made, [small], level, 2, shards)[1]
            assert sent <= 4 * small.size, (name, level, shards)


def test_the_papers_counts_stay() -> None:
    """Its code sends every matrix at its rank, and TopK 99 % with all its indices."""
    layer = Layer("squeeze", (4, 64))
    authors = PowerSGD(reset_on_change=True)
    assert [made.cost(layer, 4, 4).floats for made in (authors, PowerSGD())] == [272, 256]
    assert TopK().cost(layer, 99, 4).bytes == 253 * 8
    assert TopK(count="truncate").cost(Layer("a", (1, 1)), 50, 4).floats == 0
