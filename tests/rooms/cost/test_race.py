"""The race's numbers: made-up lines, and predictions by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import race, race_report

LINE = {"stage": "race", "entrant": "dense", "seed": 1, "link": 100, "rate": 0.006}
TIMES = {"steps": [10, 10, 10], "seconds": [1.0, 2.0, 3.0], "loss": [4.0, 3.0, 2.0]}
MORE = {"predicted": 0.21, "crossed": 1e5, "processor": "a processor"}


def line(**changes: Any) -> dict[str, Any]:
    return {**LINE, **TIMES, **MORE, **changes}


def test_seconds_until_a_loss_are_interpolated() -> None:
    until = race_report.seconds_until
    assert until(line(), 4.0) == 1
    assert until(line(), 3.5) == pytest.approx(2)
    assert until(line(), 6.0) == pytest.approx(0.5)  # between 8 bits and the first unit
    assert until(line(), 1.9) == float("inf")


def test_the_page_says_who_is_first_and_who_never_arrives() -> None:
    fast = line(entrant="rank 1", seconds=[0.1, 0.1, 0.1])
    never = line(entrant="sign", loss=[4.0, 3.9, 3.8])
    free = line(stage="free", entrant="DDP", link=None)
    text = race_report.page({"race-lm": [line(), never, fast, free]}, "a system")
    rows = [x.split("|")[1].strip() for x in text.splitlines() if x.startswith("| ")]
    assert rows[1:] == ["rank 1", "dense", "sign"]
    assert "| sign | 0.006 | never | never | 3.800 |" in text
    assert race_report.errors([line()]) == [pytest.approx(0.05)]


def test_a_prediction_by_hand() -> None:
    """A mean of 1 MB in a ring of four at 8 Mbit/s takes 1.5 s more than without limit."""
    free = line(stage="free", link=None, echo=0.0, calls={"mean": [10, 10, 10]})
    free["bytes"] = {"mean": [1e7, 1e7, 1e7]}
    got = race.predicted("dense", [free], 8 / race.PAYLOAD, 0.0)
    assert got == pytest.approx(5 / 20 + 1.5 * 1e6 * 8 / 8e6 - 1.5 * 8e6 / 1e10)


def test_an_all_to_all_crosses_more_of_its_parts() -> None:
    free = line(stage="free", link=None, echo=0.0, calls={"exchange": [10, 10, 10]})
    free["bytes"] = {"exchange": [1e7, 1e7, 1e7]}
    got = race.predicted("dense", [free], 8 / race.PAYLOAD, 0.0)
    assert got == pytest.approx(0.25 + 1.0 - 8e6 / 1e10, rel=1e-6)


def test_every_entrant_has_a_configuration() -> None:
    named = race.entrants()
    assert {*race.RATE_OF.values()} <= named.keys()
    assert {*race.RATE_OF, race.POWER} <= named.keys()
    short = race.shortened(race.configured("rank 1", 0.003, 5))
    assert short.data.train_size == 3 * 25 * 32 * 64 + 1
    assert (short.optimizer.lr, short.seed) == (0.003, 5)


def test_a_short_race_has_the_losses_of_the_others_and_its_own_speed() -> None:
    whole = [line(seed=1), line(seed=2, loss=[4.0, 3.2, 2.5])]
    short = line(link=20, steps=[2], seconds=[1.0], loss=[5.0], crossed=7.0)
    (runs,) = race_report.grouped([*whole, short], 20).values()
    assert [run["loss"] for run in runs] == [run["loss"] for run in whole]
    assert [run["seconds"] for run in runs] == [[5.0, 5.0, 5.0]] * 2
    assert {run["crossed"] for run in runs} == {7.0}


def test_a_period_that_changes_is_predicted_from_steps_with_and_without() -> None:
    """Steps of 0.5 s with an exchange, 0.25 s with one in eight: 0.2143 s without."""
    free = {"stage": "free", "link": None, "echo": 0.0, "rate": 0.006}
    lines = [
        line(**free, entrant=name, seconds=[0.0, 10 * each, 10 * each])
        for name, each in (("dense", 0.5), ("every 8", 0.25), ("post-local 8", 9.0))
    ]
    often = (150 + 450 / 8) / 600
    got = race.predicted("post-local 8", lines, 1e6, 0.0)
    assert got == pytest.approx(0.5 - (0.25 / (7 / 8)) * (1 - often), rel=1e-4)


def test_a_delay_counts_once_per_message() -> None:
    free = line(stage="free", link=None, echo=0.06, calls={"mean": [10, 10, 10]})
    free["bytes"] = {"mean": [1e3, 1e3, 1e3]}
    assert race.predicted("dense", [free], 20, 0.3) == pytest.approx(0.25 + 0.24, rel=0.01)
    assert race.predicted("dense", [free], 100, 0.3) == pytest.approx(0.25, rel=0.01)
