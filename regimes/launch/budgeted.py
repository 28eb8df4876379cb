"""Runs within a budget: rounds of runs, each round chosen from what is known so far. No torch.

What is chosen, and what a run's result is, the caller knows; here are the log and the clock.
``rounds.jsonl`` has a line for each round before it starts, and one for each run that has ended. So
a search that was stopped goes on with the runs that it had chosen, and ends in the records of one
that was not; one that is started again with a larger budget goes on from there. The time of a run
that was killed does not count.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regimes.errors import RecordError, TrainingError, require
from regimes.launch import sweep
from regimes.records.files import append_synced, make_folder
from regimes.records.lines import complete_lines, parse_line
from regimes.records.writer import hold_folder

LOG = "rounds.jsonl"
NOT_FINITE = "is not finite"  # in the error of a training that broke


@dataclass(frozen=True)
class SearchBudget:
    """What a search may spend.

    Attributes:
        minutes: of time, of all processes together side by side; None: any.
        runs: that are trained; None: any.

    Raises:
        ConfigError: none of both, or not a positive, finite number.
    """

    minutes: float | None = None
    runs: int | None = None

    def __post_init__(self) -> None:
        good = self.minutes is None or (math.isfinite(self.minutes) and self.minutes > 0)
        require(good, "minutes", self.minutes, "above 0, and finite")
        require(self.runs is None or self.runs > 0, "runs", self.runs, "above 0")
        some = self.minutes is not None or self.runs is not None
        require(some, "minutes", None, "a number of minutes, or of runs")


@dataclass(frozen=True)
class Round:
    """Runs that were chosen together.

    Attributes:
        runs: their names, in the order of training.
        facts: what else the caller has written of it, in plain types.
        results: of the runs that have ended, by name; in plain types.
        seconds: that these took, side by side, with the choice of what to train.
        line: of the log, from 1 on; 0: it is not written yet.
    """

    runs: tuple[str, ...]
    facts: Mapping[str, Any]
    results: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    line: int = field(default=0, compare=False)

    @property
    def missing(self) -> list[str]:
        """The runs that have not ended."""
        return [name for name in self.runs if name not in self.results]

    def with_result(self, name: str, result: Any, seconds: float) -> Round:
        """The round after one more of its runs."""
        results = {**self.results, name: result}
        return replace(self, results=results, seconds=self.seconds + seconds)


Choose = Callable[[Sequence[Round]], tuple[Sequence[str], Mapping[str, Any]]]
Ended = Callable[[str, Any], None]
Train = Callable[[Round, Ended], None]


def rounds_of(folder: Path) -> list[Round]:
    """The rounds of a search so far.

    Raises:
        RecordError: the log is damaged.
    """
    found: list[Round] = []
    for number, text in enumerate(complete_lines(folder / LOG), start=1):
        line = parse_line(text)
        if line is None:  # it was torn by a kill
            continue
        with refuse_damage(folder, number):
            if "runs" in line:
                names, facts = tuple(map(_text, line["runs"])), {**line["facts"]}
                if found and found[-1].runs == names and not found[-1].results:
                    found.pop()  # its newline was torn by a kill, and it was written again
                expect(bool(names) and not (found and found[-1].missing))
                found.append(Round(names, facts, line=number))
            else:
                expect(line["run"] in found[-1].runs)
                seconds = as_number(line["seconds"])
                expect(seconds >= 0)
                found[-1] = found[-1].with_result(line["run"], line["result"], seconds)
    return found


@contextlib.contextmanager
def refuse_damage(folder: Path, number: int) -> Iterator[None]:
    """RecordError, which names the log's line, where its content has another shape."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise RecordError(
            f"{folder / LOG}, line {number} is damaged: expected a round, or one of its runs; "
            "choose another folder"
        ) from None


def expect(good: bool) -> None:
    """ValueError unless good."""
    if not good:
        raise ValueError


def as_number(value: Any) -> float:
    """A finite number of the log; ValueError for another value."""
    expect(type(value) in (int, float) and math.isfinite(value))
    return float(value)


def as_whole(value: Any, least: int = 0) -> int:
    """A whole number of the log; ValueError for another value, or one below the least."""
    expect(type(value) is int and least <= value < 2**63)
    return int(value)


def _text(value: Any) -> str:
    expect(isinstance(value, str))
    return str(value)


def search_in_rounds(folder: Path, choose: Choose, train: Train) -> list[Round]:
    """Train rounds of runs until nothing is chosen.

    Args:
        choose: names of the next runs, and facts in plain types that their line gets, from the
            rounds so far; no names: the search is over.
        train: trains the missing runs of a round, and calls with the name and the result of each as
            it ends.

    Raises:
        FolderInUse: another search writes to the folder.
        RecordError: its log is damaged, or cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    with hold_folder(folder, "search"):
        return _search(folder, choose, train)


def _search(folder: Path, choose: Choose, train: Train) -> list[Round]:
    found, last = rounds_of(folder), time.monotonic()
    while True:
        if not found or not found[-1].missing:
            names, facts = choose(found)
            if not names:
                return found
            found.append(Round(tuple(names), facts))
            _write(folder, {"runs": list(names), "facts": dict(facts)})

        def ended(name: str, result: Any) -> None:
            nonlocal last
            now = time.monotonic()
            seconds, last = now - last, now
            found[-1] = found[-1].with_result(name, result, seconds)
            _write(folder, {"run": name, "result": result, "seconds": seconds})

        train(found[-1], ended)
        if found[-1].missing:
            raise TrainingError(f"{found[-1].missing[0]} has not ended: start the search again")


def sum_seconds(rounds: Sequence[Round]) -> float:
    """That the runs have taken, side by side, and choosing them."""
    return sum(each.seconds for each in rounds)


def report_shares(budget: SearchBudget, rounds: Sequence[Round]) -> Callable[[], float]:
    """What gives, each time that one more run has ended, the share of the budget that is spent.

    Args:
        rounds: so far, the one that is being trained among them.
    """
    counter = itertools.count(1 + sum(len(each.results) for each in rounds))
    spent, start = sum_seconds(rounds), time.monotonic()

    def share() -> float:
        count = next(counter)
        by_runs = count / budget.runs if budget.runs else 0.0
        if not budget.minutes:
            return by_runs
        return max(by_runs, (spent + time.monotonic() - start) / 60 / budget.minutes)

    return share


def train_cells(
    train: sweep.Train,
    cells: Mapping[str, sweep.Cell],
    ended: Callable[[str, str | None], None],
    must_end: Callable[[str], bool] = lambda name: False,
) -> None:
    """Train runs that are records, or find them finished.

    Args:
        cells: by the runs' names.
        ended: called with the name of each as it ends, and its error if its loss was not finite.
        must_end: may a loss of this run not be anything but finite?

    Raises:
        TrainingError: a run could not end for another reason, or one that must.
        RecordError: another process trains it, or its folder holds another run.
    """
    names = {folder: name for name, (folder, _) in cells.items()}
    todo = []
    for name, cell in cells.items():
        if sweep.is_finished(*cell):
            ended(name, None)
        else:
            todo.append(cell)

    def progress(folder: Path, error: str | None) -> None:
        name = names[folder]
        if isinstance(error, sweep.InUse):
            raise RecordError(str(error))
        if error is not None and (NOT_FINITE not in error or must_end(name)):
            raise TrainingError(f"{name}: {error}")
        ended(name, error)

    train(todo, progress)


def _write(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line; a torn one of a kill before is no line, and is ended first.

    Raises:
        RecordError: the disk is full, or the log is a link, which would lead out of the folder.
    """
    path = folder / LOG
    try:
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        append_synced(path, b"\n" * torn + json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}; the runs that have ended are kept, and the "
            "same search goes on from them"
        ) from None
