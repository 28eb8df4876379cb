"""Passes whose gradients are exchanged and then cleared without a step: what follows has the bits
that it has without them. On a group of one process, whose compressors hold back all the same."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import states
import torch
from leveled import leveled
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

import regimes
from regimes.compression import REGISTRY
from regimes.hook.ddp import Hook

pytestmark = pytest.mark.usefixtures("one_process")

LEVELS = {"cast": "bf16", "dense": "dense"}  # of compressors without usual ones
STEPS = 5


@dataclass(frozen=True)
class Reads:
    """A constant level, and statistics that are measured for it."""

    needs: tuple[str, ...] = ()
    names: tuple[str, ...] = ("high",)

    def decide(self, history: Any, layers: Any) -> list[Any]:
        return [regimes.policies.Decision("high", {"rule": "constant"}) for _ in layers]


def level_of(name: str) -> Any:
    usual = dict(REGISTRY.make({"name": name}).usual)
    return usual.get("high", LEVELS.get(name))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8)).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(step)
    x, z = torch.randn(2, 6, 10, generator=seed, dtype=torch.float64)
    return x, z


def trained(
    extra: Callable[[nn.Module, torch.optim.Optimizer, Tensor], None] | None,
    compressor: str = "powersgd",
    needs: tuple[str, ...] = (),
    given: bool = True,
    view: bool = False,
    scaled: bool = False,
    passes: int = 1,
) -> tuple[list[Tensor], Hook]:
    """The updates of all steps, before each of which ``extra`` is called; the last unit is open."""
    net = network()
    model = DistributedDataParallel(net, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if scaled else None
    level = level_of(compressor)
    policy = Reads(needs) if needs else {"name": "static", "level": "high"}
    hook = regimes.attach(
        model,
        optimizer=optimizer if given else None,
        every=2 if given else "epoch",
        compressor=leveled(compressor, {"high": level}),
        policy=policy,
        scaler=scaler,
    )
    updates = []
    for step in range(STEPS):
        x, z = data(step)
        if extra is not None and (given or step):
            extra(model, optimizer, z)
        for _ in range(passes):
            loss = model(x).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
        updates.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return updates, hook


def thrown_away(set_to_none: bool = True) -> Callable[..., None]:
    def extra(model: nn.Module, optimizer: torch.optim.Optimizer, z: Tensor) -> None:
        for _ in range(2):
            (-100 * model(z).mean()).backward()
            optimizer.zero_grad(set_to_none=set_to_none)

    return extra


def same(first: tuple[list[Tensor], Hook], second: tuple[list[Tensor], Hook]) -> bool:
    """Updates, memories, statistics and counts."""
    (updates, hook), (others, other) = first, second
    assert [row["steps"] for row in hook.rows] == [row["steps"] for row in other.rows]
    assert [row["statistics"] for row in hook.rows] == [row["statistics"] for row in other.rows]
    assert [row["model"] for row in hook.rows] == [row["model"] for row in other.rows]
    for mine, theirs in zip(hook.reducer.states, other.reducer.states, strict=True):
        assert mine.shared_state().keys() == theirs.shared_state().keys()
        for name, value in mine.shared_state().items():
            if not name.startswith("_"):
                assert _equal(value, theirs.shared_state()[name]), name
        assert _equal(mine.residual, theirs.residual)
    assert (hook.steps.in_unit, hook.steps.total) == (other.steps.in_unit, other.steps.total)
    return all(map(torch.equal, updates, others))


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


@pytest.mark.parametrize("name", REGISTRY)
def test_a_pass_without_a_step_leaves_no_trace(name: str) -> None:
    """It does in the traffic: it was sent."""
    plain = trained(None, name)
    with_passes = trained(thrown_away(), name)
    assert same(plain, with_passes)
    assert with_passes[1].traffic.bytes > plain[1].traffic.bytes
    if REGISTRY.make({"name": name}).error_feedback and level_of(name) != "dense":
        assert any(state.residual is not None for state in plain[1].reducer.states)


@pytest.mark.parametrize(
    "options",
    [
        {"view": True},
        {"scaled": True},
        {"given": False},
        {"needs": ("norm", "msdr", "error:high")},
        {"passes": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_in_any_kind_of_training(options: dict[str, Any], set_to_none: bool) -> None:
    """Gradients inside the bucket, a GradScaler, an optimiser that only its first step has shown,
    statistics, and steps of several passes whose gradients add up without no_sync."""
    assert same(trained(None, **options), trained(thrown_away(set_to_none), **options))


def sam(perturbed_alone: bool) -> list[Tensor]:
    """Sharpness-aware minimisation; with ``perturbed_alone`` the first pass is not exchanged."""
    net = network()
    model, base = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.05)
    regimes.attach(
        model, base, every=2, policy=Reads(), compressor=regimes.PowerSGD(rank={"high": 1})
    )
    parameters, updates = [*net.parameters()], []
    for step in range(STEPS):
        x, _ = data(step)
        if not perturbed_alone:
            model(x).square().mean().backward()
        moves = [torch.full_like(p, 0.01) for p in parameters]  # alike in both
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        base.zero_grad()
        model(x).square().mean().backward()
        updates.append(torch.cat([p.grad.flatten() for p in parameters]))
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        base.step()
        base.zero_grad()
    return updates


def test_the_first_pass_of_sam() -> None:
    assert all(map(torch.equal, sam(False), sam(True)))


def test_trial_closures_count_once() -> None:
    """Of the closures within one step the last is kept: L-BFGS calls 1 + 3 here."""
    net = network()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    hook = regimes.attach(model, optimizer, every=3, policy="static")
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(data(0)[0]).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert calls == 12
    assert hook.steps.in_unit == 3
    assert {state.step for state in hook.reducer.states} == {3}


class Pair(nn.Module):
    """A generator and a discriminator in one module, as Lightning wraps them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = (nn.Linear(10, 10).double() for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.d(self.g(x)) if both else self.d(x)


def pair(leaks: bool, both_given: bool) -> tuple[list[Tensor], list[Any]]:
    net = Pair()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    og, od = (torch.optim.SGD(part.parameters(), lr) for part, lr in ((net.g, 0.05), (net.d, 0.1)))
    given = [og, od] if both_given else og
    hook = regimes.attach(
        model, given, every=2, compressor=regimes.PowerSGD(rank={"low": 2, "high": 1})
    )
    for step in range(STEPS):
        x, z = data(step)
        model(z, both=False).square().mean().backward()
        od.step()
        od.zero_grad()
        if not leaks:
            net.d.requires_grad_(False)
        model(x, both=True).square().mean().backward()
        net.d.requires_grad_(True)
        og.step()
        og.zero_grad()
        od.zero_grad()
    assert [row.get("group_lr") for row in hook.rows] == [[0.05, 0.1] if both_given else None] * 4
    return [p.detach() for p in net.parameters()], [row["statistics"] for row in hook.rows]


@pytest.mark.parametrize("both_given", [True, False])
def test_two_optimisers_of_one_model(both_given: bool) -> None:
    """The generator's pass counts as a step of the generator's layers alone. A record has the rates
    of all optimisers that it was given."""
    (clean, rows), (leaking, others) = pair(False, both_given), pair(True, both_given)
    assert all(map(torch.equal, clean, leaking))
    assert rows == others


def test_a_step_that_the_script_skips() -> None:
    """A batch that is left out because its gradient is too large."""

    def skipped(model: nn.Module, optimizer: torch.optim.Optimizer, z: Tensor) -> None:
        model(100 * z).square().mean().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.zero_grad(set_to_none=False)

    assert same(trained(None), trained(skipped))


def test_without_an_optimiser_one_warning_says_what_to_do() -> None:
    model = DistributedDataParallel(network())
    hook = regimes.attach(model, policy="static")

    def passes() -> None:
        for step in range(3):
            model(data(step)[0]).square().mean().backward()
            model.zero_grad()

    with pytest.warns(UserWarning, match=r"cleared, .*optimizer=optimizer\)") as seen:
        passes()
    assert len(seen) == 1
    assert hook.steps.in_unit == 3


def _rebind(p: Any) -> None:
    p.data = p.data - 0.1 * p.grad


BY_HAND: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.sub_(0.1 * p.grad),
    # which leave no version
    "data": lambda p: p.data.sub_(0.1 * p.grad),
    "rebound": _rebind,
    "numpy": lambda p: np.subtract(p.detach().numpy(), 0.1 * p.grad.numpy(), p.detach().numpy()),
}


@pytest.mark.parametrize("way", [*BY_HAND, None])
def test_steps_that_are_written_by_hand_are_steps(way: str | None) -> None:
    """As are passes at a level that holds nothing back."""
    model = DistributedDataParallel(network())
    hook = regimes.attach(model, policy={"name": "static", "level": "low" if way else "dense"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            model(data(step)[0]).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters() if way else ():
                    BY_HAND[way](p)
            model.zero_grad()
    assert hook.steps.in_unit == 3


def test_a_state_saved_after_a_pass_that_is_thrown_away() -> None:
    kept: list[Any] = []
    (_, plain), (_, hook) = trained(None), trained(lambda *given: kept.extend(given[:2]))
    thrown_away()(kept[0], kept[1], data(9)[1])
    mine, theirs = hook.state_dict(), plain.state_dict()
    assert mine["steps"] == theirs["steps"]
    for name, residual in states.owed(theirs).items():
        assert _equal(states.owed(mine)[name], residual), name


def test_the_hooks_of_a_model_that_is_gone_are_gone() -> None:
    net = network()
    before = {*_global_optimizer_post_hooks}
    model = DistributedDataParallel(net)
    hook = regimes.attach(model, policy="static")
    (own,) = {*_global_optimizer_post_hooks} - before
    gone = weakref.ref(hook.steps)
    del model, hook
    gc.collect()
    assert gone() is None
    assert own not in _global_optimizer_post_hooks
    assert not any(p._backward_hooks for p in net.parameters())
    copy.deepcopy(net)
