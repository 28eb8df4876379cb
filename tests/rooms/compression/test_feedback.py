"""What compressors remember from step to step: residuals and factors worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regimes.base.config import DENSE, AnyLevel, FeedbackLevel, Level
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import Compressor, graphs, make_compressor
from regimes.compression.elementwise import Cast
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerSGD, resize_rows
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.job import choices

LAYER = Layer("m", (4, 6))
LARGER = Layer("m", (8, 12))  # of which rank 3 sends less than all


def reducer(compressor: Compressor, layer: Layer = LAYER) -> Reducer:
    world = World(2)
    world.meter.dtype = torch.float64
    return Reducer(compressor, [layer], world, seed=3)


def step(to: Reducer, grad: torch.Tensor, level: AnyLevel) -> torch.Tensor:
    losses = torch.zeros(2, dtype=torch.float64)
    return Exchange(to).exchange_step([grad], [level], losses, grad.flatten(1))[0][0].clone()


def gradient(key: int, layer: Layer = LAYER) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    return torch.randn(2, *layer.shape, generator=generator, dtype=torch.float64)


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
    to = reducer(PowerSGD(reset_on_change=forgets), LARGER)
    step(to, gradient(0, LARGER), 2)
    (owed,) = to.residuals()
    assert owed is not None
    fresh = step(reducer(PowerSGD(), LARGER), gradient(1, LARGER) + owed, rank)
    assert torch.allclose(step(to, gradient(1, LARGER), rank), fresh) == forgets


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
            make_compressor({**table, "error_feedback": share})


# -- levels with error feedback of their own: a plain loop ---------------------------------------

KEPT = [True, True, False, False, True, None, True, False]  # by step; None: dense


def topk_of(delta: torch.Tensor, _memory: dict[str, torch.Tensor]) -> torch.Tensor:
    """What two workers send of their 24 numbers: the 6 largest."""
    sent = torch.zeros_like(delta)
    for row, own in zip(sent, delta, strict=True):
        places = own.abs().flatten().topk(6).indices
        row.view(-1)[places] = own.reshape(-1)[places]
    return sent


def rank_1_of(delta: torch.Tensor, memory: dict[str, torch.Tensor]) -> torch.Tensor:
    """PowerSGD's algorithm 1: what both workers send is the same."""
    mean = delta.mean(0)
    column = mean @ memory["q"]
    column = column / column.norm()
    memory["q"] = mean.mT @ column
    return torch.outer(column, memory["q"]).expand_as(delta)


@pytest.mark.parametrize(
    ("base", "send", "level"),
    [
        (TopK(), topk_of, 25),
        (TopK(error_feedback=False), topk_of, 25),
        (PowerSGD(), rank_1_of, 1),
        (PowerSGD(residual="update"), rank_1_of, 1),
    ],
    ids=["topk", "topk, none by itself", "powersgd", "powersgd, movements"],
)
def test_levels_keep_and_drop(base: Compressor, send: Any, level: Level) -> None:
    """Nothing is lost in silence: updates, what levels without feedback drop and the residual in
    the end are all gradients together."""
    to, owed = reducer(base), torch.zeros(2, *LAYER.shape, dtype=torch.float64)
    like = torch.zeros(1, dtype=torch.float64)
    memory = {"q": resize_rows(None, 1, LAYER.shape[1], like, (3, "m", "q"))[0]}
    given, received, dropped = (torch.zeros_like(owed[0]) for _ in range(3))
    for key, kept in enumerate(KEPT):
        delta = gradient(key) + owed
        sent = delta if kept is None else send(delta, memory)
        owed = delta - sent
        if kept is False:
            dropped, owed = dropped + owed.mean(0), torch.zeros_like(owed)
        value = DENSE if kept is None else FeedbackLevel(level, kept)
        update = step(to, gradient(key), value)
        given, received = given + gradient(key).mean(0), received + update
        torch.testing.assert_close(update, sent.mean(0), rtol=0, atol=1e-12)
        (residual,) = to.residuals()
        assert (residual is None) == (kept is not True)
        if residual is not None:
            torch.testing.assert_close(residual, owed, rtol=0, atol=1e-12)
    assert dropped.norm() > 1  # or the sum below shows nothing
    torch.testing.assert_close(received + dropped + owed.mean(0), given, rtol=0, atol=1e-12)


def test_layers_end_to_end_keep_and_drop_as_each_alone() -> None:
    """``Cast`` reduces a bucket's layers as one; bfloat16 keeps 8 bits."""
    layers = [Layer("a", (4, 6)), Layer("b", (3, 5))]
    to, owed = Reducer(Cast(), layers, World(2), seed=0), [torch.zeros(2, *x.shape) for x in layers]
    for key, kept in enumerate([True, False, True, True]):
        drawn = torch.Generator().manual_seed(key)
        grads = [torch.randn(2, *x.shape, generator=drawn) for x in layers]
        sums = [grad + rest for grad, rest in zip(grads, owed, strict=True)]
        rounded = [each.bfloat16() for each in sums]
        owed = [kept * (a - b.float()) for a, b in zip(sums, rounded, strict=True)]
        updates = to.reduce([0, 1], grads, [FeedbackLevel("bf16", kept)] * 2)
        for i, sent in enumerate(rounded):
            torch.testing.assert_close(updates[i], sent.float().mean(0), rtol=1e-2, atol=1e-3)
            residual = to.residuals()[i]
            assert (residual is None) == (not kept)
            if residual is not None:
                assert torch.equal(residual.view(2, -1), owed[i].view(2, -1))


def test_wrong_levels_are_one_sentence() -> None:
    table = {"name": "powersgd"}
    for given, said in (
        ({"level": 1}, "levels.early = {'level': 1}.* it has no error_feedback"),
        (
            {"level": 1, "error_feedback": 2},
            r"error_feedback of a level = 2.0: .*share in \(0, 1\]",
        ),
        ({"level": "dense", "error_feedback": False}, 'the level "dense" sends everything'),
        ({"level": 1.5, "error_feedback": False}, "level of PowerSGD = 1.5"),
        ({"level": 1, "error_feedback": False, "rank": 2}, "levels.early.rank"),
    ):
        with pytest.raises(ConfigError, match=said):
            choices.pick_levels(make_compressor(table), {"early": given})
    for share in (None, "most", 0, float("nan")):
        with pytest.raises(ConfigError, match=r"error_feedback of a level = .*share in \(0, 1\]"):
            FeedbackLevel(1, share)  # type: ignore[arg-type]
    stochastic = {"name": "quantised-all-reduce"}
    with pytest.raises(ConfigError, match=r"stochastic and .* exclude each other"):
        choices.pick_levels(
            make_compressor(stochastic), {"late": {"level": 4, "error_feedback": True}}
        )


def test_a_replayed_step_leaves_the_fields_of_one_that_is_not() -> None:
    """The host's part of a replay: the unit of a residual that begins, after a dense step and at
    another rate, is that of the rate. The oracle is the step itself."""
    to = reducer(PowerSGD(residual="update"))
    (state,) = to.states
    for key, (rate, level) in enumerate([(0.1, 1), (0.1, DENSE)]):
        to.rates = [rate]
        step(to, gradient(key), level)
    assert state.residual is None
    to.rates, before = [0.01], dict(vars(state))
    step(to, gradient(2), 1)
    after = dict(vars(state))
    left = [graphs._remembered(state)]
    vars(state).update(before)
    to.set_rates([0])
    graphs.set_fields(to, [0], left)
    assert after["residual_rate"] == 0.01
    assert vars(state).keys() == after.keys()
    for name, value in after.items():
        assert getattr(state, name) is value or getattr(state, name) == value, name
