"""Local steps over a quorum, without torchft: what an attempt that does not count leaves behind.

Oracle: the same steps of which each synchronisation counts at once.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quorums import Group, Manager
from torch import nn

import regimes
from regimes.collectives.quorum import ManagedGroup

AT_COMMIT = 0  # the collectives of an attempt count from 1
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
OUTERS = {"whole": DILOCO, "fragments": {**DILOCO, "fragments": 3, "mixing": 0.5}}
SENT = [{}, {"compressor": "topk", "level": 20.0}, {"compressor": "powersgd", "level": 1}]
SENT += [{"compressor": "quantised-all-reduce", "level": 4}]


@pytest.fixture(autouse=True)
def _without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManagedGroup, "torch_group", property(lambda group: group.manager.group))


class Breaking(Group):
    """A group of one replica, whose collective with a number fails."""

    def __init__(self, fails: int | None) -> None:
        shared = SimpleNamespace(condition=threading.Condition(), rounds={}, aborted=False)
        super().__init__(1, 0, shared)
        self.fails = fails

    def getBackendName(self) -> str:
        return "gloo"

    def swap(self, value: Any) -> list[Any]:
        if self.round + 1 == self.fails:
            raise RuntimeError("Connection closed by peer")
        return super().swap(value)


class Losing(Manager):
    """Some attempts do not count: by their number, from 0, where they are lost."""

    def __init__(self, lost: dict[int, int]) -> None:
        super().__init__(1, 0)
        self.lost, self.attempts, self.steps, self.group = lost, -1, 0, Breaking(None)

    def register_state_dict_fn(self, *_: Any) -> None: ...

    def start_quorum(self) -> None:
        self.attempts, self.error = self.attempts + 1, None
        self.group = Breaking(self.lost.get(self.attempts))

    def should_commit(self) -> bool:
        commits = self.attempts not in self.lost
        assert commits is (self.error is None) or self.lost[self.attempts] == AT_COMMIT
        self.steps += commits
        return commits

    def current_step(self) -> int:
        return self.steps


def trained(
    manager: Losing, steps: int = 10, **options: Any
) -> tuple[Any, nn.Module, list[torch.Tensor]]:
    """Some steps with a period of 3; the job, its model, and what instruments have seen last."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = regimes.local_steps(model, optimizer, manager=manager, policy=3, every=4, **options)
    for _ in range(steps):
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
        local.step()
    local.close()
    stack, updates = local.sync.take_seen()
    return local, model, [stack, *updates]


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent.get("compressor", "dense"))
def test_an_attempt_that_does_not_count_leaves_no_trace(sent: dict[str, Any], outer: str) -> None:
    """Lost at the commit, in a collective of a movement, twice in a row, and at the end."""
    lost = {1: AT_COMMIT, 3: 4, 4: AT_COMMIT, 6: 3, 8: 1}
    options = {"outer": OUTERS[outer], **sent}
    ours, model, seen = trained(breaks := Losing(lost), **options)
    theirs, other, expected = trained(smooth := Losing({}), **options)
    assert breaks.attempts == smooth.attempts + len(lost)
    assert max(lost) < breaks.attempts
    assert ours.membership.attendance.uncommitted == 0  # the last unit has ended
    assert sum(row["replicas"]["uncommitted"] for row in ours.rows) == len(lost)
    for name in ("statistics", "unit", "sync"):  # traffic was sent, whether it counts or not
        assert [row[name] for row in ours.rows] == [row[name] for row in theirs.rows]
    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(model.state_dict(), other.state_dict(), **exact)
    torch.testing.assert_close(seen, expected, **exact)
    for mine, one in zip(ours.sync.reducer.states, theirs.sync.reducer.states, strict=True):
        assert mine.key == one.key
        both = [{**vars(state), "key": None} for state in (mine, one)]
        torch.testing.assert_close(*both, **exact)
    assert ours.sync.fragment_steps == theirs.sync.fragment_steps


@pytest.mark.parametrize("outer", OUTERS)
def test_a_replica_that_joins_has_all_but_the_residual(outer: str) -> None:
    options = {"outer": OUTERS[outer], "compressor": "powersgd", "level": 1}
    gave, model, _ = trained(Losing({}), **options)
    got, other, _ = trained(Losing({}), steps=0, **options)
    got.membership.load_from_replica(gave.membership.save_for_replica())
    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **exact)
    assert got.rows == gave.rows
    assert got.sync.fragment_steps == gave.sync.fragment_steps
    assert any(r.any() for r in gave.sync.reducer.residuals() if r is not None)
    for mine, one in zip(got.sync.reducer.states, gave.sync.reducer.states, strict=True):
        assert mine.residual is None
        torch.testing.assert_close(mine.shared_state(), one.shared_state(), **exact)
