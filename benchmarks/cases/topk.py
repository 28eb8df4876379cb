"""TopK on ResNet-18's layers, one worker

A step is error feedback, selection per layer, and the update from indices and values. The peers do
the same with another selection: a whole sort (the authors' way), ``torch.topk``, and
``torch.kthvalue`` as a threshold. Floor: gradient and residual read, residual and update written
once, at the measured bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Limits, Row, Step, compare, interleaved, resnet18
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK, num_kept

LEVELS = (0.1, 1, 10, 25, 99)
WHY = (
    "K = 99 % against 10 %: the selection is cheaper at 99 % (only the 1 % that stays is sought), "
    "but ten times as many values and indices are written, and added into the update."
)
TARGETS = {"argsort": 0.05, "torch.topk": 0.35, "torch.kthvalue": None}


def by_sort(magnitude: Tensor, k: int) -> Tensor:
    return magnitude.argsort(descending=True)[:k]


def by_topk(magnitude: Tensor, k: int) -> Tensor:
    return magnitude.topk(k, sorted=False).indices


def by_threshold(magnitude: Tensor, k: int) -> Tensor:
    threshold = magnitude.kthvalue(magnitude.numel() - k + 1).values
    return (magnitude >= threshold).nonzero().flatten()[:k]


PEERS = {"argsort": by_sort, "torch.topk": by_topk, "torch.kthvalue": by_threshold}


class Peer:
    """A TopK step around another selection."""

    def __init__(
        self, select: Callable[[Tensor, int], Tensor], layers: list[Layer], stack: Tensor, k: float
    ) -> None:
        self.select, self.k = select, k
        pairs = zip(stack[0].split([x.size for x in layers]), layers, strict=True)
        self.gradients = [part for part, layer in pairs if layer.compressed]
        self.residuals = [torch.zeros_like(g) for g in self.gradients]

    def __call__(self) -> list[Tensor]:
        return [self.layer(g, r) for g, r in zip(self.gradients, self.residuals, strict=True)]

    def layer(self, gradient: Tensor, residual: Tensor) -> Tensor:
        residual.add_(gradient)
        index = self.select(residual.abs(), num_kept(self.k, residual.numel()))
        update = torch.zeros_like(residual)
        update[index] = residual[index]
        residual[index] = 0
        return update


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    layers = resnet18()
    size = sum(layer.size for layer in layers)
    stack = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    floor = 1e3 * 4 * (4 * size) / limits.bandwidth
    rows, ours = [], {}
    for level in LEVELS:
        step = Step(Reducer(TopK(), layers, World(1), 0), level, stack)
        tasks = {"regimes": step} | {
            name: Peer(select, layers, stack, level) for name, select in PEERS.items()
        }
        seconds = interleaved(tasks, 1 if quick else 5)
        rows += [
            compare(f"K = {level} %", seconds, "regimes", name, target, floor=floor)
            for name, target in TARGETS.items()
        ]
        ours[f"K = {level} %"] = step
    seconds = interleaved({name: partial(step) for name, step in ours.items()}, 2 if quick else 9)
    rows.append(
        compare("K = 99 %", seconds, "K = 99 %", "K = 10 %", 1, against="K = 10 %, ours", note=WHY)
    )
    return rows
