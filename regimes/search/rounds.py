"""The loop of every search: rounds of runs within a budget, each chosen from what is known so far.

`Search` has the loop, the folder and the clock. A subclass says what a run is, and which ones come
next (`tune`, `harms/search`, `plans/search`). A folder has the lock of one search and
``rounds.jsonl``: a line for each round before it starts, and one for each run that has ended. A
search for harm may begin so (its first line shortened)::

    {"runs": ["trunk/seed-0"], "facts": {"search": "harm", "parts": 4, ...}}
    {"run": "trunk/seed-0", "result": null, "seconds": 41.3}
    {"runs": ["high, 3 units from 0/seed-0", "high, 3 units from 3/seed-0"], "facts": {...}}

So a search that was stopped goes on with the runs that it had chosen, and ends in the records of
one that was not; one that is started again with a larger budget goes on from there. The time of a
run that was killed does not count. No torch.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from regimes.base.config import to_dict
from regimes.base.errors import RecordError, TrainingError, require
from regimes.collectives.launcher import read_launch
from regimes.records import check_same, load
from regimes.records.files import append_synced, make_folder
from regimes.records.lines import complete_lines, parse_line
from regimes.records.writer import hold_folder
from regimes.search import sweep
from regimes.training.quirks import resolve_quirks

if TYPE_CHECKING:
    from regimes.data.task import Task

LOG = "rounds.jsonl"
NOT_FINITE = "is not finite"  # in the error of a training that broke

# what a search calls a run: a name in `tune`, a pulse and a seed in `harms`, a probe in `plans`
R = TypeVar("R", bound=Hashable)
Show = Callable[[str, float], None]  # a line about a run, and the share of the budget that is spent


@dataclass(frozen=True)
class SearchBudget:
    """Limits what a search may spend.

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
class BudgetLeft:
    """Holds what is left of a budget.

    Attributes:
        units: of work, as `Search.cost` counts it, for all processes together.
        runs: that can still be trained.
    """

    units: float = math.inf
    runs: float = math.inf


@dataclass(frozen=True)
class Round(Generic[R]):
    """Holds runs that were chosen together.

    Attributes:
        runs: the runs, in the order of training.
        facts: what else the round's line of the log says.
        line_number: of that line, from 1 on; 0: the round was chosen now, not read.
    """

    runs: tuple[R, ...]
    facts: Mapping[str, Any]
    line_number: int = field(default=0, compare=False)


@dataclass
class SearchLog(Generic[R]):
    """Holds what is known so far.

    Attributes:
        results: of the runs that have ended, in plain types.
        seconds: that these took, side by side, with the choice of what to train.
    """

    rounds: list[Round[R]] = field(default_factory=list)
    results: dict[R, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def missing(self) -> list[R]:
        """Return the runs of the last round that have not ended."""
        last = self.rounds[-1].runs if self.rounds else ()
        return [run for run in last if run not in self.results]

    @property
    def ended(self) -> list[R]:
        """Return the runs that have ended, in the order of the rounds; in which order they ended is
        chance."""
        runs = dict.fromkeys(run for each in self.rounds for run in each.runs)
        return [run for run in runs if run in self.results]


Decode = Callable[[Sequence[str], Mapping[str, Any]], Sequence[R]]


def read_log(folder: Path, decode: Decode[R]) -> SearchLog[R]:
    """Read what a folder says of its search.

    Args:
        decode: the runs of a round, from their names and the facts of its line.

    Raises:
        RecordError: the log is damaged.
    """
    log, named = SearchLog[R](), dict[str, R]()  # the runs of the last round, by name
    follows_round = False  # the entry before is a round: none of its runs has ended yet
    for number, text in enumerate(complete_lines(folder / LOG), start=1):
        entry = parse_line(text)
        if entry is None:  # it was torn by a kill
            continue
        with refuse_damage(folder, number):
            if "runs" in entry:
                names, facts = [as_text(name) for name in entry["runs"]], {**entry["facts"]}
                if follows_round and [*named] == names:
                    # A kill tore only the newline of this round. The search that went on did not
                    # read it (`complete_lines`), chose the same runs, and `_write` ended the first
                    # line before it wrote the second.
                    log.rounds.pop()
                expect(bool(names) and not log.missing)
                runs, follows_round = decode(names, facts), True
                named = dict(zip(names, runs, strict=True))
                log.rounds.append(Round(tuple(runs), facts, number))
            else:
                run, seconds = named[entry["run"]], as_number(entry["seconds"])
                expect(seconds >= 0)
                log.results[run] = entry["result"]
                log.seconds += seconds
                follows_round = False
    return log


@contextlib.contextmanager
def refuse_damage(folder: Path, number: int) -> Iterator[None]:
    """Turn an error of Python, where the content of the log's line has another shape, into a
    RecordError that names the line."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise RecordError(
            f"{folder / LOG}, line {number} is damaged: expected a round, or one of its runs; "
            "choose another folder"
        ) from None


def expect(good: bool) -> None:
    """Raise ValueError unless good."""
    if not good:
        raise ValueError


def as_number(value: Any) -> float:
    """Return a finite number of the log; ValueError for another value."""
    expect(type(value) in (int, float) and math.isfinite(value))
    return float(value)


def as_integer(value: Any, least: int = 0) -> int:
    """Return a whole number of the log; ValueError for another value, or one below the least."""
    expect(type(value) is int and least <= value < 2**63)
    return int(value)


def as_text(value: Any) -> str:
    """Return a text of the log; ValueError for another value."""
    expect(isinstance(value, str))
    return str(value)


class Search(abc.ABC, Generic[R]):
    """Searches by rounds in its folder; a subclass says what a run is, and which ones come next.

    Attributes:
        kind: of search, "harm"; a folder of another one is refused.
        out: the folder.
        question: what the search is about, in plain types; a folder with another is refused.
        jobs: runs at a time.
        seconds_before: those of the budget that were spent before any run.
        speed: units of work that a second is expected to do before any run has ended; infinite:
            not known.
    """

    kind: ClassVar[str]
    out: Path
    question: Mapping[str, Any]
    jobs: int = 1
    seconds_before: float = 0.0
    speed: float = math.inf

    # -- what a search is --------------------------------------------------------------------

    @abc.abstractmethod
    def choose(self, log: SearchLog[R], left: BudgetLeft) -> tuple[Sequence[R], Mapping[str, Any]]:
        """Choose the next runs, and what the log's line says of them, in plain types; without runs
        the search is over."""

    @abc.abstractmethod
    def train(self, runs: Sequence[R], ended: Callable[[R, Any], None]) -> None:
        """Train runs, and call ``ended`` with each as it ends and its result, in plain types."""

    def name(self, run: R) -> str:
        """Name a run, in the log and as its folder."""
        return str(run)

    def decode(self, names: Sequence[str], facts: Mapping[str, Any]) -> Sequence[Any]:
        """Return the runs of a round from their names, as `choose` has written them; ValueError and
        its like for what it has not."""
        return names

    def check_result(self, run: R, result: Any) -> None:
        """Raise ValueError or its like unless a run may have this result."""

    def cost(self, run: R) -> float:
        """Return how many units of work a run takes."""
        return 1.0

    def describe_run(self, run: R, log: SearchLog[R]) -> str:
        """Say in words what a run has given."""
        return self.name(run)

    # -- the loop ----------------------------------------------------------------------------

    def load_log(self) -> SearchLog[R]:
        """Read and check what this search knows so far.

        Raises:
            RecordError: the folder holds another search, or its log is damaged.
        """
        log = read_log(self.out, self._decode_named)
        for each in log.rounds:
            with refuse_damage(self.out, each.line_number):
                for run in each.runs:
                    if run in log.results:
                        self.check_result(run, log.results[run])
        for each in log.rounds[:1]:
            with refuse_damage(self.out, each.line_number):  # an earlier version had no "question"
                asked = {**each.facts, **each.facts.get("question", {})}
            if asked.get("search", self.kind) != self.kind:
                raise self._of_another()
            for key, value in json.loads(json.dumps(dict(self.question))).items():
                if (held := asked.get(key, value)) != value:
                    raise RecordError(
                        f"{self.out} holds a search with {key} {held!r}, not {value!r}: choose "
                        "another folder"
                    )
        return log

    def _decode_named(self, names: Sequence[str], facts: Mapping[str, Any]) -> Sequence[R]:
        runs = self.decode(names, facts)
        if [self.name(run) for run in runs] != [*names]:
            raise self._of_another()
        return runs

    def _of_another(self) -> RecordError:
        return RecordError(f"{self.out} holds another search: choose another folder")

    def left(self, budget: SearchBudget | None, log: SearchLog[R]) -> BudgetLeft:
        """Return what is left of a budget; without a budget there is no end."""
        if budget is None:
            return BudgetLeft()
        runs = math.inf if budget.runs is None else budget.runs - len(log.results)
        if budget.minutes is None:
            return BudgetLeft(runs=runs)
        seconds = max(0.0, 60 * budget.minutes - self.seconds_before - log.seconds)
        if not log.results:
            return BudgetLeft(seconds * self.speed, runs)
        return BudgetLeft(seconds * sum(map(self.cost, log.results)) / max(log.seconds, 1e-9), runs)

    def run_rounds(self, budget: SearchBudget | None, show: Show) -> SearchLog[R]:
        """Train rounds of runs until nothing is chosen.

        Raises:
            FolderInUse: another search writes to the folder.
            RecordError: it holds another search, or its log is damaged, or cannot be written.
            TrainingError: a run could not end.
        """
        with contextlib.ExitStack() as stack:
            if read_launch().rank == 0:  # all processes of a launcher decide the same
                self.out.parent.mkdir(parents=True, exist_ok=True)
                make_folder(self.out)
                stack.enter_context(hold_folder(self.out, "search"))
            return self._run_rounds(budget, show)

    def _run_rounds(self, budget: SearchBudget | None, show: Show) -> SearchLog[R]:
        log, last = self.load_log(), time.monotonic()

        def ended(run: R, result: Any) -> None:
            nonlocal last
            now = time.monotonic()
            seconds, last = now - last, now
            log.results[run] = result
            log.seconds += seconds
            self._write({"run": self.name(run), "result": result, "seconds": seconds})
            minutes, most = (budget.minutes, budget.runs) if budget else (None, None)
            by_time = (self.seconds_before + log.seconds) / 60 / minutes if minutes else 0.0
            spent = max(by_time, len(log.results) / most if most else 0.0)
            show(self.describe_run(run, log), spent)

        while True:
            if not log.missing:
                runs, facts = self.choose(log, self.left(budget, log))
                if not runs:
                    return log
                if not log.rounds:
                    facts = {**facts, "search": self.kind, "question": dict(self.question)}
                log.rounds.append(Round(tuple(runs), facts))
                self._write({"runs": [self.name(run) for run in runs], "facts": dict(facts)})
            self.train(log.missing, ended)
            if log.missing:
                name = self.name(log.missing[0])
                raise TrainingError(f"{name} has not ended: start the search again")

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry as a line. What a kill left without a newline is ended by one first.

        Raises:
            RecordError: the disk is full, or the log is a link, which would lead out of the folder.
        """
        path = self.out / LOG
        if read_launch().rank > 0:
            return
        try:
            torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            append_synced(path, b"\n" * torn + json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise RecordError(
                f"cannot write {path}: {error.strerror}; the runs that have ended are kept, and "
                "the same search goes on from them"
            ) from None


class RecordSearch(Search[R]):
    """Searches among runs that are records: `cell` says where each is, and its configuration.

    Attributes:
        task: model and data in place of those that the configurations name; None: those.
        devices: of the configurations.
    """

    task: Task | None = None
    devices: Sequence[str] = ()

    @abc.abstractmethod
    def cell(self, run: R) -> sweep.Cell:
        """Return the folder and the configuration of a run."""

    def result(self, run: R, error: str | None) -> Any:
        """Return what the log has of a run that is in its record; its error, if it may fail."""
        return error

    def may_fail(self, run: R, error: str) -> bool:
        """Answer whether the search goes on after this error."""
        return NOT_FINITE in error

    def run_rounds(self, budget: SearchBudget | None, show: Show) -> SearchLog[R]:
        """Train rounds of runs, or find them finished, until nothing is chosen.

        Raises:
            FolderInUse, RecordError: as for every search; or a record of it has another
                configuration, model or data, or another process trains it.
            TrainingError: a run could not end for another reason than one that it may have.
        """
        require(self.jobs >= 1, "jobs", self.jobs, "at least 1")
        done = self.load_log().ended
        for run in done:
            folder, config = self.cell(run)
            check_same(folder, to_dict(resolve_quirks(config)))
        if done and self.task is not None:  # of other data the next runs would be another search's
            from regimes.training.state import check_same_task  # torch, so late

            folder, config = self.cell(done[0])
            self.task.build(config)  # whose weights the header then has
            check_same_task(folder, load(folder).header["data"], self.task.header())
        with sweep.make_trainer(self.jobs, self.devices, self.task) as self._trainer:
            return super().run_rounds(budget, show)

    def train(self, runs: Sequence[R], ended: Callable[[R, Any], None]) -> None:
        todo: dict[Path, tuple[R, sweep.Cell]] = {}
        for run in runs:
            cell = self.cell(run)
            if sweep.is_finished(*cell):
                ended(run, self.result(run, None))
            else:
                todo[cell[0]] = run, cell

        def progress(folder: Path, error: str | None) -> None:
            run, _ = todo[folder]
            if isinstance(error, sweep.InUse):
                raise RecordError(f"{error}: start the same command again when it has ended")
            if error is not None and not self.may_fail(run, error):
                raise TrainingError(f"{self.name(run)}: {error}")
            ended(run, self.result(run, error))

        self._trainer([cell for _, cell in todo.values()], progress)
