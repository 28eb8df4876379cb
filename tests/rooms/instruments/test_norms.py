"""Norms of gradients summed over two steps, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from contexts import with_gradients as context

from regimes.collectives.world import World
from regimes.instruments.gradient_norm import Norms

FIRST = [[3.0, 0.0, 1.0], [1.0, 0.0, -1.0]]  # two workers; layers of two and of one
SECOND = [[0.0, 4.0, 0.0], [0.0, 4.0, 2.0]]  # in sum 3 4 1 and 1 4 1; their mean is 2 4 1
ALONE, BOTH = (5.0, 1.0), (20**0.5, 1.0)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (1, {"global": ALONE, "local-mean": ALONE, "worker0": ALONE}),
        (2, {"global": BOTH, "local-mean": (21**0.5, 1.0), "worker0": ALONE}),
        (4, {"global": BOTH, "local-mean": (21**0.5, 1.0), "worker0": ALONE}),  # each twice
    ],
)
def test_norms_of_sums(workers: int, expected: dict[str, tuple[float, float]]) -> None:
    gauge = Norms().start(context([[0.0, 0.0, 0.0]], 2, World(workers)))
    for _ in range(2):  # an epoch does not know of the one before
        for rows in (FIRST, SECOND):
            stack = torch.tensor([rows[worker % 2] for worker in range(workers)])
            gauge.step(stack, [torch.tensor([6.0, 0.0]), torch.tensor([1.5])])
        found = gauge.read(0).layers
        for reading, norms in expected.items():
            assert found[f"norm:{reading}"] == pytest.approx(norms), reading
        assert found["norm:update"] == [12.0, 3.0]
