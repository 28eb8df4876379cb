"""PowerSGD over the matrices of a GPT-2, and of tensors with three and four dimensions. Oracle: its
algorithm written naively, a matrix at a time, with numpy's factorisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from regimes.base.config import DENSE, Level
from regimes.base.seeding import make_generator
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer

F64, SEED, RANKS = torch.float64, 5, (4, 2, 3)  # by step: dropped and added


def gpt2(vocabulary: int, width: int, context: int, blocks: int) -> list[Layer]:
    """Its parameters, the head tied to the embedding."""
    found = [Layer("wte.weight", (vocabulary, width)), Layer("wpe.weight", (context, width))]
    for i in range(blocks):
        matrices = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4}
        found += [Layer(f"h.{i}.{n}.weight", (k * width, width)) for n, k in matrices.items()]
        found.append(Layer(f"h.{i}.mlp.c_proj.weight", (width, 4 * width)))
        found += [Layer(f"h.{i}.{name}.bias", (width,)) for name in ("ln_1", "ln_2")]
    return found


OTHERS = [Layer("experts", (8, 24, 16)), Layer("patches", (32, 3, 4, 4)), Layer("few", (3, 200))]


@dataclass
class Naive:
    """One matrix: residuals of all workers and the right factor, columns of Q.

    ``number``: of an expert, which is a matrix of its own.
    """

    name: str
    workers: int
    number: tuple[int, ...] = ()
    residual: np.ndarray | None = None
    q: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    def step(self, gradients: np.ndarray, level: Level) -> np.ndarray:
        """Algorithm 1 of ``[W, n, m]``; "dense" sends what is unsent, and so does a rank whose
        factors have as many numbers as the matrix."""
        delta = gradients if self.residual is None else gradients + self.residual
        n, m = delta.shape[1:]
        if level == DENSE or (n + m) * min(int(level), n, m) >= n * m:
            self.residual = None
            return delta.mean(0)
        start = self._start(min(int(level), n, m), m)
        basis = np.linalg.qr((delta @ start).mean(0))[0]
        self.q = (delta.transpose(0, 2, 1) @ basis).mean(0)
        update = basis @ self.q.T
        self.residual = delta - update
        return update

    def _start(self, rank: int, m: int) -> np.ndarray:
        kept = list(self.q.T[:rank])
        for column in range(len(kept), rank):
            generator = make_generator(SEED, self.name, "q", *self.number, column)
            kept.append(torch.randn(m, generator=generator, dtype=F64).numpy())
        return np.stack(kept, 1)


def check(layers: Sequence[Layer], workers: int, levels: Sequence[dict[str, Level]]) -> None:
    """Each step's updates and the last residuals; by step, levels by the start of a name."""
    world = World(workers)
    world.meter.dtype = F64
    reducer = Reducer(PowerSGD(), layers, world, SEED)
    naive = {x.name: _matrices(x, workers) for x in layers if x.compressed}
    draw = torch.Generator().manual_seed(1)
    for by_name in levels:
        stack = torch.randn(workers, sum(x.size for x in layers), generator=draw, dtype=F64)
        rows = stack.split([x.size for x in layers], dim=1)
        gradients = [p.view(workers, *x.shape) for p, x in zip(rows, layers, strict=True)]
        given = [_level(x, by_name) for x in layers]
        losses = torch.zeros(workers, dtype=F64)
        updates, _ = Exchange(reducer).exchange_step(gradients, given, losses, stack)
        for layer, gradient, update, level in zip(layers, gradients, updates, given, strict=True):
            expected = gradient.mean(0)
            if layer.compressed:
                own = naive[layer.name]
                shape = workers, len(own), *(layer.inner or layer.matrix)
                parts = gradient.reshape(shape).transpose(0, 1).numpy()
                found = [one.step(part, level) for one, part in zip(own, parts, strict=True)]
                expected = torch.from_numpy(np.stack(found))
            close(update, expected.view(layer.shape), layer.name)
    for layer, state in zip(layers, reducer.states, strict=True):
        if layer.compressed and state.residual is not None:
            kept = [one.residual for one in naive[layer.name] if one.residual is not None]
            owed = torch.from_numpy(np.stack(kept, 1))
            close(state.residual.flatten(), owed.flatten(), layer.name)


def _matrices(layer: Layer, workers: int) -> list[Naive]:
    if layer.name != "experts":
        return [Naive(layer.name, workers)]
    return [Naive(layer.name, workers, (i,)) for i in range(layer.shape[0])]


def _level(layer: Layer, by_name: dict[str, Level]) -> Level:
    if not layer.compressed:
        return DENSE
    return next(level for start, level in by_name.items() if layer.name.startswith(start))


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    assert (ours - theirs).abs().max() <= 1e-11 * max(1.0, float(theirs.abs().max())), name


@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_change_and_the_embedding_is_dense_for_a_step(workers: int) -> None:
    """A vocabulary 65 times the width, as GPT-2's."""
    levels: list[dict[str, Level]] = [{"": rank} for rank in RANKS]
    levels.insert(1, {"wte": DENSE, "h.0": 1, "": 4})
    check([*gpt2(2600, 40, 64, 2), *OTHERS], workers, levels)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_true_shapes(workers: int) -> None:
    """The embedding and a block of GPT-2 124M: 46 million numbers a worker, in float64."""
    check(gpt2(50_257, 768, 1024, 1), workers, [{"": 4}, {"": 2}])
