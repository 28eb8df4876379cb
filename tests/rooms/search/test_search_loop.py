"""The loop of all searches (oracles: the same search without a stop, seconds by hand)."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regimes.base.errors import ConfigError, FolderInUse, RecordError
from regimes.search import rounds
from regimes.search.rounds import LOG, BudgetLeft, Search, SearchBudget, SearchLog, read_log


class Killed(BaseException):
    pass


class Rounds(Search[str]):
    """Three rounds, whose runs depend on the results before; killed at a certain run."""

    kind = "rounds"

    def __init__(self, out: Path, kill_at: int = -1, **question: Any) -> None:
        self.out, self.question = out, question
        self.trained: list[str] = []
        self.kill_at = kill_at

    def choose(self, log: SearchLog[str], left: BudgetLeft) -> tuple[list[str], dict[str, Any]]:
        assert not log.missing
        done = sum(len(each.runs) for each in log.rounds)
        before = sum(log.results[run] for run in log.rounds[-1].runs) if log.rounds else 0
        names = [f"{done} after {before}", f"{done + 1}"]
        return (names, {"round": len(log.rounds)}) if len(log.rounds) < 3 else ([], {})

    def train(self, runs: Sequence[str], ended: Callable[[str, Any], None]) -> None:
        for name in runs:
            if len(self.trained) == self.kill_at:
                raise Killed
            self.trained.append(name)
            ended(name, len(name))

    def searched(self) -> tuple[Any, ...]:
        return known(self.run_rounds(None, lambda line, share: None))


def known(log: SearchLog[str]) -> tuple[Any, ...]:
    """What a log says, without seconds."""
    return log.rounds, log.results


def read(folder: Path) -> SearchLog[str]:
    return read_log(folder, lambda names, facts: names)


@pytest.mark.parametrize("kill_at", range(6))
def test_a_search_goes_on_where_it_was_killed(kill_at: int, tmp_path: Path) -> None:
    whole = Rounds(tmp_path / "whole")
    expected = whole.searched()
    first, second = Rounds(tmp_path / "killed", kill_at), Rounds(tmp_path / "killed")
    with pytest.raises(Killed):
        first.searched()
    assert second.searched() == expected
    assert known(read(tmp_path / "killed")) == expected
    assert [*first.trained, *second.trained] == whole.trained, "none twice"
    assert Rounds(tmp_path / "killed", kill_at=0).searched() == expected


def test_the_time_of_choosing_is_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is told in units of work, at the speed so far."""
    now, lefts, shares = [0.0], [], []
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])

    class Slow(Rounds):
        seconds_before = 3.0

        def choose(self, log: SearchLog[str], left: BudgetLeft) -> tuple[list[str], dict[str, Any]]:
            now[0] += 7.0
            lefts.append(left)
            return super().choose(log, left)

        def train(self, runs: Sequence[str], ended: Callable[[str, Any], None]) -> None:
            now[0] += 2.0
            super().train(runs, ended)

        def cost(self, run: str) -> float:
            return 4.5

    show = lambda line, share: shares.append(share)  # noqa: E731
    log = Slow(tmp_path / "slow").run_rounds(SearchBudget(1.0, 7), show)
    assert log.seconds == 3 * (7.0 + 2.0)
    units = [(60 - 3 - 9 * n) * (2 * 4.5) / 9 for n in range(1, 4)]
    assert lefts == [
        BudgetLeft(math.inf, 7),
        *(BudgetLeft(u, 7 - 2 * n) for n, u in enumerate(units, 1)),
    ]
    by_time = [(3 + 9 * (1 + n // 2)) / 60 for n in range(6)]
    assert shares == [max(t, (1 + n) / 7) for n, t in enumerate(by_time)]
    assert rounds.read_log(tmp_path / "slow", lambda names, facts: names).seconds == log.seconds


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_line_is_written_again(cut: int, tmp_path: Path) -> None:
    expected = Rounds(tmp_path).searched()
    log = tmp_path / LOG
    log.write_bytes(log.read_bytes()[:-cut])
    assert read(tmp_path).missing
    assert Rounds(tmp_path).searched() == expected
    assert known(read(tmp_path)) == expected


def test_a_round_whose_newline_is_torn_is_written_again(tmp_path: Path) -> None:
    expected = Rounds(tmp_path).searched()
    log = tmp_path / LOG
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join(lines[:7]))  # up to the third round
    assert Rounds(tmp_path).searched() == expected
    assert known(read(tmp_path)) == expected


def test_a_log_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    """It would lead out of the folder that the user named."""
    (tmp_path / "theirs").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOG).symlink_to(tmp_path / "theirs")
    runs = Rounds(tmp_path / "run")
    with pytest.raises(RecordError, match=r"rounds\.jsonl: it is a symbolic link"):
        runs.searched()
    assert (tmp_path / "theirs").read_text() == ""
    assert runs.trained == []


def test_a_second_search_in_a_folder_is_refused(tmp_path: Path) -> None:
    class Twice(Rounds):
        def train(self, runs: Sequence[str], ended: Callable[[str, Any], None]) -> None:
            with pytest.raises(FolderInUse, match="another search is writing to"):
                Rounds(tmp_path).searched()
            super().train(runs, ended)

    assert len(Twice(tmp_path).searched()[0]) == 3
    assert len(Rounds(tmp_path).searched()[0]) == 3


def test_a_search_of_another_kind_or_question_is_refused(tmp_path: Path) -> None:
    expected = Rounds(tmp_path, ends=[1, 2]).searched()
    with pytest.raises(RecordError, match=r"with ends \[1, 2\], not \[1, 3\]: choose another"):
        Rounds(tmp_path, ends=(1, 3)).searched()

    class Other(Rounds):
        kind = "other"

    with pytest.raises(RecordError, match="holds another search: choose another folder"):
        Other(tmp_path, ends=[1, 2]).searched()
    assert Rounds(tmp_path, kill_at=0, ends=[1, 2]).searched() == expected


def test_processes_of_a_launcher_search_together_and_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Rounds(tmp_path)
    with pytest.MonkeyPatch.context() as second:
        second.setattr(rounds, "read_launch", lambda: SimpleNamespace(rank=1))
        expected = other.searched()
    assert not [*tmp_path.iterdir()]
    assert Rounds(tmp_path).searched() == expected


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rounds, "append_synced", full)
    with pytest.raises(RecordError, match="No space left on device; the runs that have ended are"):
        Rounds(tmp_path / "run").searched()


def test_another_file_is_no_log(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text(json.dumps({"run": "a", "result": 1, "seconds": 1.0}) + "\n")
    with pytest.raises(RecordError, match="line 1 is damaged: expected a round, or one"):
        read(tmp_path)


@pytest.mark.parametrize("given", [{}, {"minutes": 0.0}, {"runs": 0}, {"minutes": -1.0, "runs": 3}])
def test_a_budget_that_is_none(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SearchBudget(**given)
