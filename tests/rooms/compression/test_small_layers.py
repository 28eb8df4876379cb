"""Vectors, which are always dense, share one call for their means."""

from __future__ import annotations

import torch
from torch import Tensor

from regimes.base.config import DENSE
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer

LAYERS = [Layer("matrix", (6, 4)), *(Layer(f"vector {i}", (3 + i,)) for i in range(5))]


class Counting(World):
    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.asked: list[int] = []

    def mean_over_workers(self, tensors: list[Tensor]) -> list[Tensor]:
        self.asked.append(len(tensors))
        return super().mean_over_workers(tensors)


def test_vectors_and_the_loss_are_one_call() -> None:
    world = Counting(4)
    reducer = Reducer(PowerSGD(), LAYERS, world, seed=0)
    sizes = [layer.size for layer in LAYERS]
    stack = torch.randn(4, sum(sizes), generator=torch.Generator().manual_seed(0))
    gradients = [
        part.view(4, *layer.shape)
        for part, layer in zip(stack.split(sizes, 1), LAYERS, strict=True)
    ]
    levels = [2, *[DENSE] * 5]
    updates, loss = Exchange(reducer).exchange_step(gradients, levels, torch.arange(4.0), stack)
    assert world.asked == [6, 1, 1]  # the loss with the vectors; P; Q
    for update, gradient in zip(updates[1:], gradients[1:], strict=True):
        assert torch.equal(update, gradient.mean(0))
    assert float(loss) == 1.5
    assert [state.step for state in reducer.states] == [1] * 6
    assert world.meter.calls["mean"] == 2  # as between processes, where rounds travel together
    assert [world.meter.layers[i].floats for i in range(6)] == [20, 3, 4, 5, 6, 7]
