"""A quorum as a world, with replicas that are threads of this process and no torchft.

Oracle: the simulated world of the replicas that contribute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quorums import Group, Manager

from regimes.collectives.group import on_manager
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.quorum import ManagedGroup, Quorum, StepLost
from regimes.collectives.world import World
from regimes.errors import ConfigError


@pytest.fixture(autouse=True)
def _without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManagedGroup, "torch_group", property(lambda group: group.manager.group))


def replicas(count: int) -> list[ProcessWorld]:
    return [on_manager(Manager(count, i), torch.device("cpu")) for i in range(count)]


def quorum(world: ProcessWorld) -> Quorum:
    assert world.quorum is not None
    return world.quorum


def together(worlds: list[ProcessWorld], act: Callable[[int, ProcessWorld], Any]) -> list[Any]:
    """A step of all: what each returns, or the error that it raises."""
    shared = SimpleNamespace(condition=threading.Condition(), rounds={}, aborted=False)
    ends = [None] * len(worlds)

    def run(i: int) -> None:
        manager = quorum(worlds[i]).manager
        manager.group, manager.error = Group(len(worlds), i, shared), None
        manager.count, manager.rank = len(worlds), i
        try:
            quorum(worlds[i]).enter_quorum(worlds[i])
            ends[i] = act(i, worlds[i])
        except (ConfigError, StepLost) as error:
            ends[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(worlds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


@pytest.mark.parametrize("kind", ["mean_over_workers", "all_gather", "all_to_all"])
@pytest.mark.parametrize("idle", [None, 0, 1])
def test_collectives_are_those_of_the_replicas_that_contribute(kind: str, idle: int | None) -> None:
    """Another one takes part in them and contributes nothing."""
    there = [i for i in range(3) if i != idle]
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(there), 2), (len(there), 1, 3), (len(there),)]
    types = [torch.float32, torch.float64, torch.float32]
    given = [
        [torch.randn(1, *s, generator=generator).to(t) for s, t in zip(shapes, types, strict=True)]
        for _ in range(3)
    ]

    def act(i: int, world: ProcessWorld) -> Any:
        quorum(world).agree_on_facts(world, 0.0, moved=i != idle)
        assert world.workers == len(there)
        return getattr(world, kind)(given[i])

    ends = together(replicas(3), act)
    stacked = [torch.cat(rows) for rows in zip(*(given[i] for i in there), strict=True)]
    expected = getattr(World(len(there)), kind)(stacked)
    for place, i in enumerate(there):
        for found, one in zip(ends[i], expected, strict=True):
            mine = one[place : place + 1] if kind == "all_to_all" else one
            torch.testing.assert_close(found, mine, rtol=1e-6, atol=1e-6)
    if idle is not None and kind != "all_to_all":  # it hears what the others have sent
        for found, one in zip(ends[idle], expected, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-6, atol=1e-6)


def test_all_meet_where_one_has_joined_or_left_or_wants_it() -> None:
    """And otherwise none; afterwards all know who has come and gone, and with which residual."""
    worlds = replicas(3)

    def step(present: list[int], wants: int | None = None) -> list[bool]:
        def act(i: int, world: ProcessWorld) -> bool:
            met = quorum(world).must_agree(world, present[i] == wants)
            if met:
                quorum(world).agree_on_facts(world, float(present[i]))
            return met

        return together([worlds[i] for i in present], act)

    quorums = [quorum(world) for world in worlds]
    names = [each.name for each in quorums]
    assert step([0, 1]) == [True, True]
    assert step([0, 1]) == [False, False]
    assert step([0, 1], wants=1) == [True, True]
    assert step([0, 2]) == [True, True]  # as many, but one is another
    assert step([0]) == [True]
    assert step([0]) == [False]
    gone = [[one["replica"] for one in change["left"]] for change in quorums[0].changes]
    assert gone == [[], [names[1]], [names[2]]]
    assert [change["joined"] for change in quorums[0].changes] == [[], [names[2]], []]
    assert quorums[0].changes[2]["left"][0]["residual"] == 2.0
    quorums[1].note_loaded_state(quorums[0].members, dropped=0.0)
    assert step([0, 1]) == [True, True]
    quorums[1].note_loaded_state(quorums[0].members, dropped=7.0)  # it has missed a step
    assert step([0, 1]) == [True, True]
    assert quorums[0].changes[-1]["joined"] == [names[1]]
    assert quorums[0].changes[-1]["left"] == [{"replica": names[1], "residual": 7.0}]
    assert [change["replicas"] for change in quorums[0].changes] == [2, 2, 1, 2, 2]


def test_one_that_joins_with_other_facts_ends_alone() -> None:
    worlds = replicas(3)
    assert together(
        worlds[:2], lambda i, world: quorum(world).agree_on_facts(world, 0.0, seed=0)
    ) == [
        None,
        None,
    ]
    ends = together(
        worlds, lambda i, world: quorum(world).agree_on_facts(world, 0.0, seed=int(i == 2))
    )
    assert [type(end) for end in ends] == [StepLost, StepLost, ConfigError]
    assert "seed = 1" in str(ends[2])


def test_a_collective_that_fails_ends_the_step_on_all() -> None:
    """The others do not wait for a replica that has given up."""

    def act(i: int, world: ProcessWorld) -> Any:
        if i == 1:
            quorum(world).group.leave_step("it has")
        return world.mean_over_workers([torch.ones(1, 2)])

    worlds = replicas(3)
    assert [type(end) for end in together(worlds, act)] == [StepLost] * 3
    assert all(quorum(world).manager.errored() is not None for world in worlds)
    for found in together(
        worlds, lambda i, world: world.mean_over_workers([torch.full((1, 2), float(i))])
    ):
        assert torch.equal(found[0], torch.ones(2))
