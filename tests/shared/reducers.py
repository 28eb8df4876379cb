"""One reducer of each family of compressors, and the gradients that it is given, for tests."""

from __future__ import annotations

import pytest
import torch

from analysis.plugins.cosine import DCTTopK
from analysis.plugins.low_pass import LowPass
from analysis.plugins.threshold import Threshold
from regimes.base.config import DENSE
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.all_reduce import QuantisedAllReduce
from regimes.compression.chunked import ChunkedTopK
from regimes.compression.elementwise import Cast, Quantise, Sign
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import ACPSGD, PowerSGD
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import RandomK, TopK

F64 = torch.float64
EVERY = [  # one case per family: compressor, a level that sends more, a level that sends less
    pytest.param(PowerSGD(), 4, 1, id="powersgd"),
    pytest.param(PowerSGD(wire="bf16"), 4, 1, id="powersgd-bf16"),
    pytest.param(ACPSGD(), 4, 1, id="acp-sgd"),
    pytest.param(ACPSGD(iterations=2), 4, 1, id="acp-sgd-twice"),
    pytest.param(TopK(), 40, 5.0, id="topk"),
    pytest.param(RandomK(), 40, 5.0, id="randomk"),
    pytest.param(DCTTopK(error_feedback=True, chunk=3), 60, 5.0, id="dct-topk"),
    pytest.param(ChunkedTopK(error_feedback=True, chunk=3), 60, 5.0, id="chunked-topk"),
    pytest.param(Threshold(), 0.5, 1.5, id="threshold"),
    pytest.param(Sign(), DENSE, 1, id="sign"),
    pytest.param(Quantise(), 8, 2, id="qsgd"),
    pytest.param(Quantise(stochastic=False, error_feedback=True), 8, 2, id="nearest"),
    pytest.param(QuantisedAllReduce(block=7), 8, 4, id="quantised-all-reduce"),
    pytest.param(
        QuantisedAllReduce(block=7, stochastic=False, error_feedback=True),
        8,
        4,
        id="quantised-all-reduce-nearest",
    ),
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
    return Exchange(reducer).exchange_step(
        grads, levels, torch.zeros(rows, dtype=stack.dtype), stack
    )[0]  # type: ignore[arg-type]
