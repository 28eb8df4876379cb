"""The race (oracles: its committed lines; `test_benchmark_pages` writes its page again)."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.common import markov
from benchmarks import race, race_notes, race_report
from regimes.data import tokens
from regimes.presets import get_grid

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


def test_committed_predictions_are_computed_again() -> None:
    """From committed probes, of a race of most entrants; other races were predicted from probes
    that later ones have replaced."""
    again = set()
    for grid in race.COURSES:
        lines = race.read(grid)
        for own in lines:
            if own["stage"] == "race" and own["link"] != 1000:
                found = race.predicted(own, lines, sum(own["steps"]))
                if found == pytest.approx(own["predicted"], rel=1e-9):
                    again.add(own["entrant"])
    local = {"every 8", "every 32", "4 bits every 8", "diloco 32", "post-local 8", "qsr"}
    peers = {"DDP", "DDP, fp16 hook", "DDP, PostLocalSGD", "DDP, PowerSGD hook", "HSDP"}
    ranks = {"rank 1", "rank 2", "rank 4", "rate 2-1", "l-greco", "accordion"}
    assert again >= {"dense", "half", "4 bits", "8 bits"} | ranks | local | peers


def test_the_text_of_the_race_is_the_one_whose_markov_models_are_quoted() -> None:
    data = race.configured("dense", 0.006, 1).data
    if tokens.load_tokens(data).digest != race_notes.TEXT:
        pytest.skip("the standard library of this Python is another text")
    assert markov.known()[race_notes.TEXT].test == data.test_size
    assert data.train_size == race_notes.STEPS * 32 * 64 + 1


# -- the grids of equal seconds --------------------------------------------------------------


@pytest.mark.parametrize("seconds", [30, 60, 120])
def test_schedules_are_stretched_by_measured_seconds(seconds: int) -> None:
    """Steps times the seconds of a step of the larger model's races at 100 Mbit/s."""
    names = {"DDP": "DDP", "fp16": "DDP, fp16 hook"}
    names |= {x: x for x in ("4 bits", "rank 4", "every 8", "4 bits every 8")}
    lines = [x for x in race.read("race-lm-460k") if x["stage"] == "race" and x["link"] == 100]
    for name, entrant in names.items():
        (step,) = {race_report.step_seconds(x) for x in lines if x["entrant"] == entrant}
        steps = get_grid(f"equal-seconds-{seconds}")[name].steps
        assert steps * step == pytest.approx(seconds, rel=0.01), name
