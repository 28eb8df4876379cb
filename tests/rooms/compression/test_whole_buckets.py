"""A compressor that takes a whole bucket: its numbers are those of each layer by itself, and the
bucket is one piece of memory after the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from reducers import gradients, layers, world
from torch import Tensor

from regimes.base.config import DENSE, Level
from regimes.collectives.layers import Layer
from regimes.compression.base import Compressor
from regimes.compression.bucket import end_to_end
from regimes.compression.elementwise import Cast
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import RandomK


@dataclass(frozen=True, kw_only=True)
class OneByOne(Cast):
    """The same, layer by layer."""

    one_level: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class RandomKOneByOne(RandomK):
    """The same, layer by layer."""

    one_level: ClassVar[bool] = False


PAIRS: dict[str, tuple[type[Compressor], type[Compressor], tuple[Level, Level]]] = {
    "cast": (Cast, OneByOne, ("bf16", "fp16")),
    "randomk": (RandomK, RandomKOneByOne, (40, 10)),
}


def steps(
    compressor: Compressor, workers: int, bucket: list[int], two: tuple[Level, Level]
) -> tuple[list[Tensor], Reducer]:
    """Updates of six steps, at levels that change, also of one layer alone."""
    reducer, found = Reducer(compressor, layers(), world(workers), seed=0), []
    a, b = two
    for step, level in enumerate((a, a, DENSE, b, b, a)):
        of_last = b if step == 4 else level
        levels = [level, of_last, DENSE, level]
        rows = gradients(workers, step)
        before = [row.clone() for row in rows]
        updates = reducer.reduce(bucket, rows, levels)
        found += [updates[i].clone() for i in range(4)]
        assert all(map(torch.equal, rows, before))
    return found, reducer


@pytest.mark.parametrize("feedback", [True, False, 0.5])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_a_bucket_end_to_end_has_the_numbers_of_its_layers(
    name: str, workers: int, feedback: float
) -> None:
    """Updates, residuals and traffic by layer, bit for bit."""
    together_class, apart_class, two = PAIRS[name]
    for bucket in ([3, 2, 1, 0], [0, 1, 2, 3]):
        ours, together = steps(together_class(error_feedback=feedback), workers, bucket, two)
        theirs, apart = steps(apart_class(error_feedback=feedback), workers, bucket, two)
        assert all(map(torch.equal, ours, theirs))
        for one, other in zip(together.residuals(), apart.residuals(), strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
        meters = together.world.meter.take_counts(), apart.world.meter.take_counts()
        assert meters[0] == meters[1]


def test_a_steady_step_copies_no_residual_together() -> None:
    """From the second step at a level on the residuals are parts of one piece of memory."""
    reducer = Reducer(Cast(), layers(), world(2), seed=0)
    places = []
    for step in range(4):
        reducer.reduce([3, 1, 0], gradients(2, step), ["bf16"] * 4)
        residuals = [r for r in reducer.residuals() if r is not None]
        assert len({r.untyped_storage().data_ptr() for r in residuals}) == 1
        places.append(residuals[0].data_ptr())
    assert len({*places}) == 1


def test_tensors_side_by_side_are_a_view_and_others_a_copy() -> None:
    whole = torch.arange(24.0).view(2, 12)
    first, second = whole[:, :6].view(2, 2, 3), whole[:, 6:10].view(2, 2, 2)
    joined = end_to_end([first, second])
    assert joined.equal(whole[:, :10])
    assert joined.data_ptr() == whole.data_ptr()
    turned = end_to_end([second, first])
    assert turned.equal(torch.cat([whole[:, 6:10], whole[:, :6]], 1))
    assert turned.data_ptr() != whole.data_ptr()
    assert end_to_end([first.mT, second]).equal(
        torch.cat([first.mT.flatten(1), second.flatten(1)], 1)
    )


def test_an_empty_shard_of_a_layer_is_left_out() -> None:
    parts = [Layer("a", (4, 2)).on(1, 2), Layer("b", (1, 2)).on(1, 2), Layer("c", (4, 3)).on(1, 2)]
    reducer = Reducer(Cast(), parts, world(1), seed=0)
    rows = [torch.ones(1, *part.shape, dtype=torch.float64) for part in parts]
    updates = reducer.reduce([0, 1, 2], rows, ["bf16"] * 3)
    assert [list(updates[i].shape) for i in range(3)] == [[2, 2], [0, 2], [2, 3]]
