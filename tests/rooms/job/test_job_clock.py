"""The clock of a job, by hand: a pretended time."""

from __future__ import annotations

import time

import pytest
import torch

from regimes.collectives.world import World
from regimes.job.clock import Clock


def test_the_pause_between_two_units_is_no_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of 100 s after a unit: the next one's first step counts as the mean of its others. A
    unit of one step has no others, and begins where the one before ended."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def unit(clock: Clock, steps: int) -> float:
        for _ in range(steps):
            now[0] += 2.0
            clock.start_step()
            clock.stop_step()
        return clock.of_unit(steps)["compute"]

    for steps, pause in ((3, 0.0), (1, 100.0)):
        clock = Clock(torch.device("cpu"))
        unit(clock, steps)
        now[0] += 100.0
        assert unit(clock.next_unit(steps), steps) == steps * 2.0 + pause


@pytest.mark.parametrize("steps", [2, 3, 10])
def test_the_first_iteration_counts_as_the_mean_of_the_others(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations of 30 ms, whose first bucket is full after 10: of the first only 20 are seen."""
    now, clock = [0.0], Clock(torch.device("cpu"))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for _ in range(steps):
        now[0] += 0.01
        clock.start_step()
        now[0] += 0.02
        clock.stop_step()
    assert clock.of_unit(steps)["compute"] == pytest.approx(0.03 * steps)


def test_a_wait_is_divided_into_collectives_and_compression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An iteration of 10 s, of which the script waits 4 s for an exchange, 1.5 s of them in
    collectives; another 3 s of collectives were in the background."""
    now, world, clock = [0.0], World(1), Clock(torch.device("cpu"))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock.start_step()
    now[0], world._clock = 6.0, (3.0, None)
    with clock.count_waiting(world):
        now[0], world._clock = 10.0, (4.5, None)
    clock.stop_step()
    assert clock.seconds == {"compute": 6.0, "compress": 2.5, "communicate": 1.5}


def test_no_time_of_a_loop_is_negative_and_the_sum_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that began during backward is longer than the wait that it is moved out of."""
    now, world, clock = [0.0], World(1), Clock(torch.device("cpu"))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with clock("compute"):
        now[0] = 3.0
    with clock.count_exchange(world):
        now[0], world._clock = 5.0, (4.0, None)
    clock.read_events()
    assert clock.seconds == {"compute": 3.0, "compress": 0.0, "communicate": 2.0}
