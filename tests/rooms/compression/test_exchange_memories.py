"""What an exchange does to memories: tentative equals in place, undone equals never done, whichever
layer arrives first and whether a thread exchanges or not."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from reducers import EVERY, gradients, layers, world
from torch import Tensor, nn

from regimes.base.config import DENSE, Level
from regimes.compression import Compressor
from regimes.compression.exchange import Exchange, Transfer
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.hook.ddp.loss_scale import LossScale
from regimes.hook.ddp.steps import HookSteps

CPU = torch.device("cpu")
BUCKETS = [[3, 2], [1], [0]]


class Model:
    """What the steps of a hook ask of a model; counts how often gradients are released."""

    device, bucket_bytes = CPU, 1

    def __init__(self) -> None:
        self.parameters = {x.name: nn.Parameter(torch.zeros(x.shape).double()) for x in layers()}
        self.local, self.released = [*self.parameters.values()], 0

    def release_gradients(self) -> None:
        self.released += 1

    def mark_unused(self, layers: Sequence[int]) -> None:
        return None

    def note_unused(self, shares: Any) -> None:
        pass


def make(
    compressor: Compressor, *, written: bool = False, background: torch.device | None = None
) -> Exchange:
    reducer = Reducer(compressor, layers(), world(1), seed=3)
    if not written:
        return Exchange(reducer, BUCKETS, background=background)
    model: Any = Model()
    steps = HookSteps(model, reducer, [], loss_scale=LossScale())
    steps.buckets = BUCKETS
    if background is None:
        steps.background = None
    return steps


def finish(exchange: Exchange) -> Transfer:
    if isinstance(exchange, HookSteps):
        exchange.finish_step()
        assert exchange.transfer is not None
        return exchange.transfer
    return exchange.finish_transfer()


def take(
    exchange: Exchange, rows: Sequence[Tensor], level: Level, unapplied: Sequence[int] = ()
) -> list[Tensor]:
    """The updates of a step that is settled."""
    order = list(range(len(rows)))
    random.Random(len(rows)).shuffle(order)
    exchange.begin_transfer(
        [level if layer.compressed else DENSE for layer in exchange.reducer.layers]
    )
    for i in order:
        exchange.add_rows({i: rows[i]})
    step = finish(exchange)
    exchange.settle_transfer(unapplied)
    written = isinstance(exchange, HookSteps)
    return [step.rows[i][0] if written else step.updates[i].clone() for i in range(len(rows))]


def released(steps: HookSteps) -> int:
    model: Any = steps.source
    count: int = model.released
    return count


def memories(exchange: Exchange) -> list[dict[str, Any]]:
    exchange.wait_for_transfers()
    identity = ("key", "hosted", "shard")
    return [
        {name: copy.deepcopy(x) for name, x in vars(state).items() if name not in identity}
        for state in exchange.reducer.states
    ]


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


HOWS = {
    "in place, in a thread": {"background": CPU},
    "tentative, written": {"written": True},
    "tentative, in a thread": {"written": True, "background": CPU},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("compressor", "low", "high"), EVERY)
def test_every_way_gives_the_same_updates_and_memories(
    compressor: Compressor, low: Level, high: Level, how: str
) -> None:
    plain, other = make(compressor), make(compressor, **HOWS[how])
    for step, level in enumerate((low, high, high, DENSE, low)):
        rows, given = gradients(1, step), gradients(1, step)
        expected = take(plain, rows, level)
        assert_same(take(other, given, level), expected)
        if not isinstance(other, HookSteps):
            assert_same(given, rows)
        assert_same(rows, gradients(1, step))
    assert_same(memories(other), memories(plain))
    other.close()


@pytest.mark.parametrize(("compressor", "low", "high"), EVERY)
def test_an_undone_step_was_never_taken(compressor: Compressor, low: Level, high: Level) -> None:
    """Also where it is of another level, and of some layers only."""
    ours, theirs = (make(compressor, written=True) for _ in range(2))
    for exchange in (ours, theirs):
        take(exchange, gradients(1, 0), low)
    before = memories(theirs)
    take(ours, gradients(1, 1), high)
    assert ours.reducer.undo_step([0, 2]) == {0, 2}
    assert ours.reducer.undo_step() == {1, 3}
    assert ours.reducer.undo_step() == set()
    assert_same(memories(ours), before)
    expected = take(theirs, gradients(1, 2), high)
    assert_same(take(ours, gradients(1, 2), high), expected)


def test_a_layer_that_is_not_applied_keeps_its_memory() -> None:
    ours, theirs = (make(PowerSGD(), written=True) for _ in range(2))
    for exchange in (ours, theirs):
        take(exchange, gradients(1, 0), 2)
    kept = memories(ours)[1]
    take(ours, gradients(1, 1), 2, unapplied=[1])
    take(theirs, gradients(1, 1), 2)
    assert_same(memories(ours)[1], kept)
    assert_same(memories(ours)[0], memories(theirs)[0])
    assert not memories(theirs)[1]["residual"].equal(kept["residual"])


def test_residuals_of_tentative_steps_take_turns_in_two_places() -> None:
    """One more residual, and no third: the next step writes to the one before the last."""
    exchange = make(PowerSGD(), written=True)
    places = []
    for step in range(6):
        take(exchange, gradients(1, step), 2)
        residual = exchange.reducer.states[0].residual
        assert residual is not None
        places.append(residual.data_ptr())
    assert len({*places[1:]}) == 2


def test_fragments_on_their_way_at_once_come_back_as_one_by_one() -> None:
    """Two transfers of other layers, the second begun before the first has come back; each with
    losses of its own."""
    rows, losses = gradients(3, 0), torch.arange(6.0).view(3, 2).double()
    made = Reducer(PowerSGD(), layers(), world(3), seed=3)
    flying = Exchange(made, background=CPU)
    first, second = (flying.begin_transfer([2, 2, DENSE, 2], part) for part in ([0, 1], [2, 3]))
    flying.send_transfer({i: rows[i] for i in (0, 1)}, first, losses)
    flying.send_transfer({i: rows[i] for i in (2, 3)}, second)
    flying.wait_for_transfers()
    reducer = Reducer(PowerSGD(), layers(), world(3), seed=3)
    expected = {
        **reducer.reduce([0, 1], rows, [2, 2, DENSE, 2]),
        **reducer.reduce([2, 3], rows, [2, 2, DENSE, 2]),
    }
    assert_same({**first.updates, **second.updates}, expected)
    assert first.means is not None
    assert_same(first.means, losses.mean(0))
    assert second.means is None
    flying.close()


# -- gradients that are not finite, and errors -----------------------------------------------------


@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize(("compressor", "low", "high"), EVERY)
def test_one_broken_number_fills_its_bucket_and_is_known(
    compressor: Compressor, low: Level, high: Level, broken: int
) -> None:
    """A GradScaler sees it where it is written; memories are as the step before has left them."""
    exchange = make(compressor, written=True)
    assert isinstance(exchange, HookSteps)
    take(exchange, gradients(1, 0), low)
    before = memories(exchange)
    rows = gradients(1, 1)
    rows[broken].view(-1)[2] = torch.inf
    exchange.begin_transfer(
        [low if layer.compressed else DENSE for layer in exchange.reducer.layers]
    )
    exchange.add_rows(dict(enumerate(rows)))
    exchange.finish_step()
    exchange.settle_transfer(range(len(rows)))
    assert not exchange.finite
    bucket = next(bucket for bucket in BUCKETS if broken in bucket)
    assert all(rows[i].isnan().all() for i in bucket)
    assert all(rows[i].isfinite().all() for i in range(4) if i not in bucket)
    assert_same(memories(exchange), before)
    assert released(exchange) == 2


def test_an_error_in_the_thread_is_raised_where_the_caller_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = make(PowerSGD(), written=True, background=CPU)
    assert isinstance(exchange, HookSteps)

    def fails(*given: Any) -> Iterator[Any]:
        raise ArithmeticError("no room")

    monkeypatch.setattr(exchange.reducer, "reduce", fails)
    exchange.begin_transfer([2, 2, DENSE, 2])
    exchange.add_rows(dict(enumerate(gradients(1, 0))))
    with pytest.raises(ArithmeticError, match="no room"):
        exchange.finish_step()
    assert released(exchange) >= 1
    assert exchange.failed


def test_memories_can_be_read_after_the_end() -> None:
    exchange = make(PowerSGD(), background=CPU)
    take(exchange, gradients(1, 0), 1)
    before = memories(exchange)
    exchange.close()
    after: list[Any] = []
    reader = threading.Thread(target=lambda: after.append(memories(exchange)), daemon=True)
    reader.start()
    reader.join(10)
    assert_same(after, [before])
