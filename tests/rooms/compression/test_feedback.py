"""What compressors remember from step to step: residuals and factors worked out by hand."""

from __future__ import annotations

import pytest
import torch

from regimes.collectives.requests import Layer
from regimes.collectives.world import World
from regimes.compression import Compressor, compressor
from regimes.compression.elementwise import Cast
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.config import DENSE, Level
from regimes.errors import ConfigError
from regimes.exchange.exchange import Exchange

LAYER = Layer("m", (4, 6))


def reducer(compressor: Compressor) -> Reducer:
    world = World(2)
    world.meter.dtype = torch.float64
    return Reducer(compressor, [LAYER], world, seed=3)


def step(to: Reducer, grad: torch.Tensor, level: Level) -> torch.Tensor:
    losses = torch.zeros(2, dtype=torch.float64)
    return Exchange(to).step([grad], [level], losses, grad.flatten(1))[0][0].clone()


def gradient(key: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    return torch.randn(2, *LAYER.shape, generator=generator, dtype=torch.float64)


def test_a_worker_keeps_what_its_own_cast_has_lost() -> None:
    """bfloat16 has 8 significant bits: 1 + 1/512 becomes 1, 3 + 1/64 stays, 256 + 1/2 becomes 256;
    what the mean of the workers was does not matter."""
    first, second = torch.zeros(4, 6), torch.zeros(4, 6)
    first[0, :3] = torch.tensor([1 + 1 / 512, 3 + 1 / 64, 256.5])
    second[0, :3] = torch.tensor([-5.0, 1 / 3, 7.0])
    to = reducer(Cast())
    update = step(to, torch.stack([first, second]).double(), "bf16")
    (residual,) = to.residuals()
    assert residual is not None
    assert residual[0, 0, :3].tolist() == [1 / 512, 0.0, 0.5]
    third = 1 / 3 - 171 / 512  # 1.01010101 | 01... in binary, rounded down or up to 171 / 512
    assert residual[1, 0, :3].tolist() == pytest.approx([0.0, third, 0.0], abs=1e-7)
    assert update[0, 0] == -2
    assert residual[:, 1:].count_nonzero() == 0


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_change_of_rank_keeps_or_forgets_the_factor(forgets: bool, rank: int) -> None:
    """Forgotten: the next step is that of a compressor that has never stepped before, with the
    residual put on top of its gradient."""
    to = reducer(PowerSGD(reset_on_change=forgets))
    step(to, gradient(0), 2)
    (owed,) = to.residuals()
    assert owed is not None
    fresh = step(reducer(PowerSGD()), gradient(1) + owed, rank)
    assert torch.allclose(step(to, gradient(1), rank), fresh) == forgets


@pytest.mark.parametrize("forgets", [False, True])
def test_the_same_rank_keeps_the_factor(forgets: bool) -> None:
    to = reducer(PowerSGD(reset_on_change=forgets, error_feedback=False))
    first, second = step(to, gradient(0), 2), step(to, gradient(0), 2)
    mean = gradient(0).mean(0)
    assert float((second - mean).norm()) < 0.99 * float((first - mean).norm())  # it iterates


@pytest.mark.parametrize("forgets", [False, True])
def test_a_dense_step_sends_the_residual_or_forgets_all(forgets: bool) -> None:
    to = reducer(PowerSGD(reset_on_change=forgets))
    step(to, gradient(0), 2)
    (owed,) = to.residuals()
    assert owed is not None
    wanted = gradient(1) if forgets else gradient(1) + owed
    torch.testing.assert_close(step(to, gradient(1), DENSE), wanted.mean(0))
    fresh = step(reducer(PowerSGD()), gradient(2), 2)
    assert torch.allclose(step(to, gradient(2), 2), fresh) == forgets


def test_a_share_of_what_is_owed_is_kept() -> None:
    """By hand: half of (0, 2) is 1, so the second coordinate comes to 2, 3, 3.5 and never to 4."""
    gradient = torch.tensor([4.0, 2.0], dtype=torch.float64).expand(2, 1, 2).contiguous()
    sent, owed = {}, {}
    for share in (True, 1.0, 0.5):
        to = Reducer(TopK(error_feedback=share), [Layer("m", (1, 2))], World(2), seed=0)
        to.world.meter.dtype = torch.float64
        levels: list[Level] = [50, 50, 50, DENSE, 50]
        steps = [(step(to, gradient, level)[0].tolist(), to.residuals()[0]) for level in levels]
        sent[share] = [update for update, _ in steps]
        owed[share] = steps[-1][1]
    assert sent[0.5] == [[4, 0], [4, 0], [4, 0], [4, 3.75], [4, 0]]
    assert sent[True] == [[4, 0], [4, 0], [0, 6], [8, 2], [4, 0]]
    assert sent[1.0] == sent[True]
    assert owed[0.5][:, 0].tolist() == [[0, 2], [0, 2]]


@pytest.mark.parametrize("share", [0.0, 1.5, -0.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    for table in ({"name": "powersgd"}, {"name": "topk"}, {"name": "sign"}):
        with pytest.raises(ConfigError, match=r"error_feedback = .*share in \(0, 1\]"):
            compressor({**table, "error_feedback": share})
