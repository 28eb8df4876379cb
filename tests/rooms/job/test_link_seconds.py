"""The seconds that a policy follows: predicted for a trace, and measured on processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from configs import smoke
from ddp_scripts import group, links
from runs import resumed_alike, rows, same_run

import regimes
from regimes.collectives.world import World
from regimes.config import RunConfig
from regimes.cost.cases import recorded_work
from regimes.errors import ConfigError
from regimes.job.link import LinkMeter, predicted
from regimes.network import Network
from regimes.policies import LinkLadder
from regimes.records import load
from regimes.training.build import prepare_run

COMPUTE = 0.02
LEVELS = "levels={high=1, mid=2, low=4}"


def config(*settings: str) -> RunConfig:
    small = ("workers=2", "device=cpu", "data.train_size=60", "data.test_size=50", "unit_steps=2")
    return smoke(*small, LEVELS, *settings)


def traced(trace: str) -> str:
    return f"policy={{name='link', trace={trace}, compute={COMPUTE}}}"


def row(calls: float, size: float, steps: int = 1) -> dict[str, Any]:
    sent = {"calls": {"mean": calls * steps}, "bytes": {"mean": size * steps}}
    return {"steps": steps, "collectives": sent}


# -- predicted -------------------------------------------------------------------------------


def test_an_exchange_goes_on_at_the_speed_of_the_next_link() -> None:
    """By hand, two workers: 1 MB crosses a link of 8 Mbit/s in 1 s. A step computes for 0.5 s and
    sends for 0.25 s, a quarter; at a tenth of the speed the other three quarters would take 7.5 s,
    of which 1 s passes, 0.1 of all; then 0.65 s at the full speed again."""
    rule = LinkLadder(trace=((0.75, 8, 0), (1, 0.8, 0)), compute=0.5)
    found = predicted(rule, 2, row(1, 1e6), 0.0)
    assert found.exposed == pytest.approx(0.25 + 1 + 0.65)
    assert found == (0.5, found.exposed, found.exposed, 0.0)
    shifted = predicted(rule, 2, row(1, 1e6), 3 * 1.75)  # three times around
    assert shifted == pytest.approx(found)
    slow = LinkLadder(trace=((60, 8, 5),), compute=0.5)  # 2 messages of each of 3 means
    assert predicted(slow, 2, row(3, 1e6, steps=4), 7.0) == pytest.approx((0.5, 1.03, 1.03, 0.03))


def test_a_simulation_follows_predicted_seconds(tmp_path: Path) -> None:
    """The column has what `regimes cost` predicts for the recorded traffic; the level falls in an
    outage and rises after it; interrupted and resumed, and on two processes, it is the same run."""
    ours = config(traced("[[0.3, 1000, 0], [0.3, 10, 0], [60, 1000, 0]]"), "epochs=11")
    resumed_alike(ours, tmp_path, 9)
    record, elapsed = load(tmp_path / "whole"), 0.0
    for unit, (steps, work) in enumerate(recorded_work(record)):
        link = record.rows[unit]["link"]
        good, bad = (float(work.communicate(Network(x), 2)) for x in (1e9, 1e7))
        assert good * 0.999 <= link["exposed"] <= bad * 1.001
        if elapsed + steps * (COMPUTE + good) < 0.3:
            assert link["exposed"] == pytest.approx(good)
        elapsed += steps * (link["compute"] + link["exposed"])
    levels = [unit["layers"]["level"][0] for unit in record.rows]
    assert levels[:3] == ["high"] * 3
    assert levels[3] == levels[-1] == "low"
    assert "high" in levels[4:]
    forked.train(ours, tmp_path / "real", 2)
    same_run(tmp_path / "whole", tmp_path / "real")
    for mine, theirs in zip(rows(tmp_path / "whole"), rows(tmp_path / "real"), strict=True):
        assert mine["link"] == pytest.approx(theirs["link"])


def test_periods_follow_a_trace(tmp_path: Path) -> None:
    ours = config(
        "policy={name='static', level='high'}",
        f"sync_policy={{name='link', levels=['4', '2'], trace=[[9, 1000, 0]], compute={COMPUTE}}}",
        "epochs=6",
    )
    regimes.run(ours, tmp_path)
    periods = [unit["sync"]["period"] for unit in rows(tmp_path)]
    assert periods[:3] == [4] * 3
    assert periods[-1] == 2


# -- measured --------------------------------------------------------------------------------


def test_two_processes_measure_one_link_and_decide_alike() -> None:
    """Of a hook, and of local steps: one column, positive, its parts consistent; a state that was
    saved within a unit gives that unit no seconds."""
    first, second = group.run(links.jobs, 2)
    assert first == second
    for name, found in first.items():
        for link in filter(None, found["links"]):
            assert link["compute"] > 0, name
            assert 0 <= link["latency"] <= link["exchange"], name
            assert 0 <= link["exposed"] <= link["exchange"], name
        assert [link is None for link in found["links"]] == found["loaded"], name
        assert {*found["levels"]} <= {"high", "mid", "low", "8", "2"}, name


class Pretended(World):
    """Two processes, of which this one has the given numbers and the other others."""

    def __init__(self, other: tuple[Any, ...]) -> None:
        super().__init__(2, processes=2)
        self.other = other

    def gather_object(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_a_wait_for_a_slower_process_is_none_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: this process computes 1 s of a step and waits 4 s; the other computes 4.5 s and
    waits 0.5 s, all of it the link's. A fifth of the unit's bytes, those of two steps, takes the
    faster process 0.4 s more than an empty message: 0.2 s of a step are its bytes."""
    world = Pretended((True, 4.5, 5.0, 0.5, 0.1, 0.5))
    meter = LinkMeter(world, LinkLadder())
    monkeypatch.setattr(meter, "_time_gathers", lambda probe: (0.2, 0.9))
    clock = links.clock({"compute": 6.0, "compress": 4.0, "communicate": 40.0})
    meter.begin()
    world._clock = 40.0, None
    meter.stop(clock)
    found = meter.take(clock.seconds, row(1, 2e5, steps=10), [])
    assert found is not None
    assert found == pytest.approx({"compute": 4.5, "exposed": 0.5, "exchange": 0.5, "latency": 0.3})


# -- refused ---------------------------------------------------------------------------------


def test_one_process_needs_a_trace_and_two_policies_are_one_too_many() -> None:
    torch.set_num_threads(1)
    with pytest.raises(ConfigError, match="in one process without a trace"):
        prepare_run(config("policy={name='link'}"))
    both = traced("[[9, 100, 0]]"), traced("[[9, 100, 0]]").replace("policy", "sync_policy")
    words = both[1].replace("name='link'", "name='link', levels=['8', '2']")
    with pytest.raises(ConfigError, match="one of them follows the link"):
        prepare_run(config(both[0], words))
    with pytest.raises(ConfigError, match="from the longest to the shortest"):
        prepare_run(config("sync_policy={name='link'}", "sync_levels={high=8, mid=4, low=2}"))
