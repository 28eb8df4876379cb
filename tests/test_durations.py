"""Which cases `make test` leaves out, by recorded seconds (oracle: worked out by hand)."""

from __future__ import annotations

from pathlib import Path

import durations
import pytest

SECONDS = {"f::a[1]": 1.0, "f::a[2]": 2.0, "f::a[3]": 3.0, "f::b[1]": 4.0, "f::c": 9.0}


@pytest.mark.parametrize(
    ("budget", "left_out"),
    [
        (10.0, set()),
        (6.0, set()),  # b has no other case
        (5.9, {"f::a[3]"}),
        (0.0, {"f::a[2]", "f::a[3]"}),
    ],
)
def test_the_cheapest_cases_run_and_one_of_each_function(budget: float, left_out: set[str]) -> None:
    assert durations.cases_left_out(SECONDS, SECONDS, budget) == left_out


def test_a_case_without_a_line_runs_in_the_place_of_recorded_ones() -> None:
    found = durations.cases_left_out(SECONDS, [*SECONDS, "f::a[4]"], 0.0)
    assert found == {"f::a[1]", "f::a[2]", "f::a[3]"}


def test_cases_that_share_what_took_the_seconds_all_run() -> None:
    seconds = {"f::a[1]": 9.0, "f::b[1]": 1.0}
    collected = ["f::a[1]", "f::a[2]", "f::b[1]", "f::b[2]", "f::b[3]"]
    assert durations.cases_left_out(seconds, collected, 0.0) == set()
    assert durations.cases_left_out({**seconds, "f::b[2]": 2.0}, collected, 0.0) == {
        "f::b[1]",
        "f::b[2]",
    }


def test_what_ran_replaces_its_lines_and_what_is_gone_loses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.txt")
    (tmp_path / "f").write_text("def a(x): ...\ndef b(x): ...\n")
    durations.FILE.write_text("".join(f"{s} {name}\n" for name, s in SECONDS.items()))
    durations.write({"f::a[2]": 7.0, "f::a[4]": 0.01})
    assert durations.read() == {"f::a[2]": 7.0, "f::b[1]": 4.0}


def test_a_process_that_works_has_seconds() -> None:
    start = durations.cpu_seconds()
    while durations.cpu_seconds() - start < 0.02:
        sum(range(10000))
