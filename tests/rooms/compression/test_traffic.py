"""What compressors send, metered by the world: equal to what they state beforehand."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from ddp_scripts import group
from hypothesis import given, settings
from hypothesis import strategies as st
from reducers import EVERY, F64, FADING, SHAPES, gradients, layers, step, world

from analysis.plugins.low_pass import LowPass
from regimes.base.config import DENSE
from regimes.base.config.level import FeedbackLevel
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression import Compressor
from regimes.compression.calls import sends_apart
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_whether_bytes_reach_the_others_apart_is_no_matter_of_a_levels_feedback(
    chosen: Compressor, low: Any, high: Any
) -> None:
    assert not sends_apart(chosen, [DENSE])
    apart = sends_apart(chosen, [high])
    assert sends_apart(chosen, [DENSE, high]) == apart
    if chosen.error_feedback:
        assert sends_apart(chosen, [FeedbackLevel(high, error_feedback=False)]) == apart


def test_one_round_is_one_collective_per_kind() -> None:
    """And per type."""
    w, grads = world(2, torch.float32), gradients(2, 0, torch.float32)
    step(Reducer(PowerSGD(), layers(), w, seed=0), grads, 1)
    assert w.meter.take_counts().calls == {"mean": 2, "gather": 0, "broadcast": 0}
    step(Reducer(TopK(), layers(), w, seed=0), grads, 10)
    assert w.meter.take_counts().calls == {"mean": 1, "gather": 2, "broadcast": 0}
    step(Reducer(PowerSGD(wire="bf16"), layers(), w, seed=0), grads, 1)  # the loss is float32
    assert w.meter.take_counts().calls == {"mean": 3, "gather": 0, "broadcast": 0}
    step(Reducer(PowerSGD(), layers(), world_64 := world(2), seed=0), gradients(2, 0), 1)
    assert world_64.meter.take_counts().calls == {"mean": 2, "gather": 0, "broadcast": 0}


@pytest.mark.parametrize(("chosen", "low", "high"), EVERY)
def test_updates_live_until_the_next_step(chosen: Compressor, low: object, high: object) -> None:
    """The memory of an update is used again: what a step returns must not depend on that."""
    fresh, used = (Reducer(chosen, layers(), world(2), seed=4) for _ in range(2))
    for t, level in enumerate([low, high, DENSE, high, low]):
        for state in fresh.states:
            if hasattr(state, "_buffer"):
                del state._buffer
        for a, b in zip(
            step(fresh, gradients(2, t), level), step(used, gradients(2, t), level), strict=True
        ):
            assert torch.equal(a, b)


CHANGES = [0, 1, 1, DENSE, 0, 0, 1]  # low, high


def several(world: World, rows: slice, restored: bool = False) -> list[list[torch.Tensor]]:
    """Updates and what is owed in the end, by each of ``EVERY``; a restored reducer takes over
    before every step."""
    found = []
    for case in EVERY:
        chosen, *levels = case.values
        reducer = Reducer(chosen, layers(), world, seed=6)  # type: ignore[arg-type]
        tensors: list[torch.Tensor] = []
        for t, change in enumerate(CHANGES):
            grads = [g[rows] for g in gradients(4, t)]
            level = DENSE if change == DENSE else levels[change]  # type: ignore[call-overload]
            tensors += [update.clone() for update in step(reducer, grads, level)]
            if restored:
                file = io.BytesIO()
                torch.save(reducer.state_dict(), file)
                file.seek(0)
                reducer = Reducer(chosen, layers(), world, seed=6)  # type: ignore[arg-type]
                reducer.load_state_dict(*torch.load(file, weights_only=True))
        tensors += [r for r in reducer.residuals() if r is not None]
        found.append(tensors)
    return found


def test_a_restored_reducer_goes_on_bit_for_bit() -> None:
    plain, restored = (several(world(4), slice(4), again) for again in (False, True))
    for case, mine, theirs in zip(EVERY, restored, plain, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), case.id


def hosted(rank: int, count: int) -> list[list[torch.Tensor]]:
    """`several` in one of ``count`` processes, which share four workers."""
    here = ProcessWorld(4, torch.device("cpu"))
    here.meter.dtype = F64
    return several(here, slice(here.hosted.start, here.hosted.stop))


@pytest.mark.parametrize("count", [2, 4])
def test_each_compressor_is_the_same_between_processes(count: int) -> None:
    answers = group.run(hosted, count, count)
    updates = len(CHANGES) * len(SHAPES)
    for i, simulated in enumerate(several(world(4), slice(4))):
        close = 0.1 if EVERY[i].id in ("cast", "powersgd-bf16") else 1e-12  # added in half
        for answer in answers:
            for mine, theirs in zip(answer[i][:updates], simulated, strict=False):
                torch.testing.assert_close(mine, theirs, rtol=close, atol=close)
        for j, owed in enumerate(simulated[updates:], start=updates):
            mine = torch.cat([answer[i][j] for answer in answers])
            torch.testing.assert_close(mine, owed, rtol=close, atol=close)


def test_levels_may_differ_between_layers() -> None:
    two = [Layer("a", (6, 10)), Layer("b", (6, 10))]
    g = gradients(2, 0)[0]
    apart = [
        step(Reducer(PowerSGD(), [x], world(2), seed=0), [g], r)[0]
        for x, r in zip(two, (1, 3), strict=True)
    ]
    reducer = Reducer(PowerSGD(), two, world(2), seed=0)
    stack = torch.cat([g.flatten(1)] * 2, dim=1)
    together, _ = Exchange(reducer).exchange_step([g, g], [1, 3], torch.zeros(2, dtype=F64), stack)
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("chosen", "low", "high"), [*EVERY, FADING])
@settings(max_examples=20)
@given(
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(0, 10**6),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_one_number_that_is_not_finite_is_told_at_every_level(
    chosen: Compressor, low: object, high: object, bad: float, place: int, worker: int, at: int
) -> None:
    """In any layer of any worker, at the first step or when something is owed; and in no other."""
    reducer, losses = Reducer(chosen, layers(), world(3), seed=0), torch.arange(3, dtype=F64)
    level: object
    for turn, level in enumerate([high, low, DENSE, high]):
        grads = gradients(3, turn)
        stack = torch.cat([g.flatten(1) for g in grads], dim=1)
        if turn == at:
            index = place % stack.shape[1]
            stack[worker, index] = bad
            parts = stack.split([layer.size for layer in reducer.layers], dim=1)
            grads = [p.view(g.shape) for p, g in zip(parts, grads, strict=True)]
        levels = [level if layer.compressed else DENSE for layer in reducer.layers]
        _, loss = Exchange(reducer).exchange_step(grads, levels, losses, stack)  # type: ignore[arg-type]
        if turn == at:
            assert loss.isnan()
            return
        assert loss == 1
        assert loss.dtype == F64


@pytest.mark.parametrize("chosen", [PowerSGD(), LowPass()], ids=type)
def test_updates_tell_so_that_gradients_are_not_read_again(chosen: Compressor) -> None:
    """The stack is there for compressors whose updates may hide a gradient that is not finite."""
    reducer, grads = Reducer(chosen, layers(), world(2), seed=0), gradients(2, 0)
    unread = torch.full((2, 3), math.nan, dtype=F64)
    for level in (1, DENSE):
        levels = [level if layer.compressed else DENSE for layer in reducer.layers]
        assert (
            Exchange(reducer).exchange_step(grads, levels, torch.ones(2, dtype=F64), unread)[1] == 1
        )
    (other,) = (Reducer(TopK(), layers()[:1], world(2), seed=0),)
    assert (
        Exchange(other).exchange_step(grads[:1], [50], torch.ones(2, dtype=F64), unread)[1].isnan()
    )
