"""Rounds of runs within a budget (oracle: the same search without a stop)."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from regimes.errors import ConfigError, FolderInUse, RecordError
from regimes.launch import budgeted
from regimes.launch.budgeted import LOG, Ended, Round, SearchBudget, rounds_of, search_in_rounds


class Killed(BaseException):
    pass


class Runs:
    """Three rounds, whose runs depend on the results before; killed at a certain run."""

    def __init__(self, kill_at: int = -1) -> None:
        self.trained: list[str] = []
        self.kill_at = kill_at

    def choose(self, rounds: Sequence[Round]) -> tuple[list[str], Mapping[str, Any]]:
        assert not any(each.missing for each in rounds)
        done = sum(len(each.runs) for each in rounds)
        before = sum(rounds[-1].results.values()) if rounds else 0
        names = [f"{done} after {before}", f"{done + 1}"]
        return (names, {"round": len(rounds)}) if len(rounds) < 3 else ([], {})

    def train(self, chosen: Round, ended: Ended) -> None:
        for name in chosen.missing:
            if len(self.trained) == self.kill_at:
                raise Killed
            self.trained.append(name)
            ended(name, len(name))


def without_seconds(rounds: Sequence[Round]) -> list[Any]:
    return [(each.runs, each.facts, each.results) for each in rounds]


@pytest.mark.parametrize("kill_at", range(6))
def test_a_search_goes_on_where_it_was_killed(kill_at: int, tmp_path: Path) -> None:
    whole = Runs()
    expected = search_in_rounds(tmp_path / "whole", whole.choose, whole.train)
    first, second = Runs(kill_at), Runs()
    with pytest.raises(Killed):
        search_in_rounds(tmp_path / "killed", first.choose, first.train)
    found = search_in_rounds(tmp_path / "killed", second.choose, second.train)
    assert without_seconds(found) == without_seconds(expected)
    assert found == rounds_of(tmp_path / "killed")
    assert [*first.trained, *second.trained] == whole.trained, "none twice"
    assert without_seconds(search_in_rounds(tmp_path / "killed", whole.choose, first.train)) == [
        *without_seconds(expected)
    ]


def test_the_time_of_choosing_is_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(budgeted.time, "monotonic", lambda: now[0])

    class Slow(Runs):
        def choose(self, rounds: Sequence[Round]) -> tuple[list[str], Mapping[str, Any]]:
            now[0] += 7.0
            return super().choose(rounds)

        def train(self, chosen: Round, ended: Ended) -> None:
            now[0] += 2.0
            super().train(chosen, ended)

    runs = Slow()
    found = search_in_rounds(tmp_path / "slow", runs.choose, runs.train)
    assert budgeted.sum_seconds(found) == 3 * (7.0 + 2.0)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_line_is_written_again(cut: int, tmp_path: Path) -> None:
    runs = Runs()
    expected = search_in_rounds(tmp_path / "run", runs.choose, runs.train)
    log = tmp_path / "run" / LOG
    log.write_bytes(log.read_bytes()[:-cut])
    assert len(rounds_of(tmp_path / "run")[-1].results) < 2
    found = search_in_rounds(tmp_path / "run", runs.choose, runs.train)
    assert without_seconds(found) == without_seconds(expected)
    assert without_seconds(rounds_of(tmp_path / "run")) == without_seconds(expected)


def test_a_round_whose_newline_is_torn_is_written_again(tmp_path: Path) -> None:
    runs = Runs()
    expected = search_in_rounds(tmp_path / "run", runs.choose, runs.train)
    log = tmp_path / "run" / LOG
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join(lines[:7]))  # up to the third round
    found = search_in_rounds(tmp_path / "run", runs.choose, runs.train)
    assert without_seconds(found) == without_seconds(expected)
    assert without_seconds(rounds_of(tmp_path / "run")) == without_seconds(expected)


def test_a_log_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    """It would lead out of the folder that the user named."""
    (tmp_path / "theirs").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOG).symlink_to(tmp_path / "theirs")
    runs = Runs()
    with pytest.raises(RecordError, match=r"rounds\.jsonl: it is a symbolic link"):
        search_in_rounds(tmp_path / "run", runs.choose, runs.train)
    assert (tmp_path / "theirs").read_text() == ""
    assert runs.trained == []


def test_a_second_search_in_a_folder_is_refused(tmp_path: Path) -> None:
    runs = Runs()

    def train(chosen: Round, ended: Ended) -> None:
        with pytest.raises(FolderInUse, match="another search is writing to"):
            search_in_rounds(tmp_path / "run", runs.choose, runs.train)
        runs.train(chosen, ended)

    assert len(search_in_rounds(tmp_path / "run", runs.choose, train)) == 3
    assert len(search_in_rounds(tmp_path / "run", runs.choose, runs.train)) == 3


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(budgeted, "append_synced", full)
    runs = Runs()
    with pytest.raises(RecordError, match="No space left on device; the runs that have ended are"):
        search_in_rounds(tmp_path / "run", runs.choose, runs.train)


def test_another_file_is_no_log(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text(json.dumps({"run": "a", "result": 1, "seconds": 1.0}) + "\n")
    with pytest.raises(RecordError, match="line 1 is damaged: expected a round, or one"):
        rounds_of(tmp_path)


@pytest.mark.parametrize("given", [{}, {"minutes": 0.0}, {"runs": 0}, {"minutes": -1.0, "runs": 3}])
def test_a_budget_that_is_none(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SearchBudget(**given)
