"""What the report says: records to tables and sentences. No drawing here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from regimes.console.tables import Table
from regimes.cost.cases import cases, setting
from regimes.cost.network import Network, spell
from regimes.cost.predict import predict
from regimes.errors import RecordError, RegimesError
from regimes.monitor.watch import state
from regimes.plotting import style
from regimes.plotting.differences import between, pairs_of
from regimes.plotting.groups import Groups, decaying, groups, tested_by
from regimes.plotting.looks import styles_of
from regimes.plotting.metrics import Metric
from regimes.plotting.schedules import DASH, schedules
from regimes.records import Record, find, gathered, load, notes, progress, read_header
from regimes.training.idle_policy import inactivity_warnings

PARTS = ("compute", "compress", "communicate", "evaluate")  # further clocks follow these


@dataclass(frozen=True)
class Seen:
    """One run's folder, as far as it can be read.

    Attributes:
        place: below the folder that was asked for.
        state: "finished", or what else `watch` calls it; "damaged".
        more: why it stopped, or what is damaged.
        done: epochs that are trained.
        progress: the same in words.
    """

    place: str
    state: str
    more: str = ""
    done: int = 0
    progress: str = ""
    record: Record | None = None


@dataclass(frozen=True)
class Study:
    """All that the page is about.

    Attributes:
        place: the folder or archive; its name alone is shown.
        root: where it is read from: the same folder, or a scratch copy of the archive.
        seen: every run, readable or not.
        found: by schedule, the finished runs; the unfinished ones where there are no others.
    """

    place: Path
    root: Path
    seen: list[Seen]
    found: Groups

    @property
    def runs(self) -> list[Record]:
        return [run for runs in self.found.values() for run in runs]

    @property
    def single(self) -> bool:
        return len(self.seen) == 1

    @cached_property
    def one(self) -> Record:
        """A run that speaks for all."""
        readable = [seen.record for seen in self.seen if seen.record]
        return decaying(self.found) if self.found else readable[0]

    @property
    def silent(self) -> list[str]:
        """What policies have not done, with how many of the runs it is true of."""
        said = Counter(
            f"{run.name}: {sentence}"
            for run in self.runs
            if run.finished
            for sentence in inactivity_warnings(run.header, run.rows)
        )
        return [f"{sentence} (Runs: {n}.)" for sentence, n in said.items()]

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the averages."""
        return notes(self.runs)

    @property
    def shown(self) -> Metric:
        return tested_by(self.one)

    @property
    def title(self) -> str:
        if self.single:
            return f"{self.one.name}, seed {self.one.seed}"
        name = self.place.resolve().name
        return name.partition(".")[0] if self.place.is_file() else name

    @property
    def labels(self) -> dict[str, str]:
        """What figures call a schedule, where that is another word."""
        return {n: look.label for n, look in styles_of(self.found).items() if n != look.label}

    @property
    def unfinished(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.state != "finished"]

    @property
    def about(self) -> str:
        """One sentence: what was trained."""
        schedules = len({seen.record.name for seen in self.seen if seen.record})
        many = f"{schedules} schedule{'s' * (schedules > 1)}, {len(self.seen)} runs"
        counts = [len(runs) for runs in self.found.values()]
        seeds = f" ({style.seeds_in_words(counts)} each)" if counts else ""
        what = "One run" if self.single else f"{many}{seeds}"
        return f"{what}. {style.setting(self.one)}."


def read(root: Path, place: Path) -> Study:
    """Every run in or under a folder.

    Args:
        place: what the user named; the folder itself or an archive.

    Raises:
        RecordError: there is none that can be read, or they are of different settings.
    """
    seen = _selected([_look(path, root) for path in find(root)])
    if not seen:
        raise RecordError(f"no run in or under {place}: expected a file run.json there")
    if all(one.record is None for one in seen):
        raise RecordError(f"no run in or under {place} can be read: {seen[0].more}")
    begun = [one.record for one in seen if one.record and one.done]
    try:
        found = groups(begun, unfinished=True)
    except RecordError as error:
        raise RecordError(below(root, error)) from None
    found = {name: [run for run in runs if run.finished] or runs for name, runs in found.items()}
    return Study(place, root, seen, found)


def _selected(seen: list[Seen]) -> list[Seen]:
    """Those that the command reads (`records.reading`), each record under its schedule's name; what
    cannot be read stays."""
    known = gathered([one.record for one in seen if one.record])
    by_folder = {run.folder: run for run in known}
    return [
        replace(one, record=by_folder[one.record.folder]) if one.record else one
        for one in seen
        if one.record is None or one.record.folder in by_folder
    ]


def unit(study: Study) -> str:
    """What a row of the records is: "epoch" or "unit"."""
    return "unit" if study.one.config.get("unit_steps") else "epoch"


def below(root: Path, error: RegimesError) -> str:
    """An error's words, without the folder that all is read from."""
    return str(error).replace(f"{root}/", "")


def _look(path: Path, root: Path) -> Seen:
    place = "this run" if path == root else str(path.relative_to(root))
    try:
        header, record = read_header(path), load(path)
    except RecordError as error:
        return Seen(place, "damaged", below(root, error))
    what, more = state(path, header, record.rows)
    words = progress(header, record.rows, " of ")
    return Seen(place, what, more if what == "stopped" else "", len(record.rows), words, record)


# -- the result ------------------------------------------------------------------------------


def results(study: Study) -> Table:
    """One row per schedule: metric, n, traffic; of unfinished ones, how far they are."""
    columns = ("metric", "n", "floats", "of_base", "bytes")
    finished = [run for run in study.runs if run.finished]
    found = schedules(finished) if finished else None
    lines = []
    for name, runs in study.found.items():
        if found is not None and name in found.frame.index:
            cells = found.cells(name)
            lines.append((name, *(cells[c] for c in columns)))
        else:
            longest = max(runs, key=lambda run: len(run.rows))
            words = f"unfinished: {progress(longest.header, longest.rows, ' of ')}"
            lines.append((name, words, *[DASH] * (len(columns) - 1)))
    plain = {"metric": study.shown.heading, "of_base": "of low throughout"}
    heads = found.heads() if found is not None else plain
    return Table(("schedule", *(heads.get(c, c) for c in columns)), lines)


def differences(study: Study, baseline: str | None = None) -> Table:
    """The finished schedules against each other.

    Raises:
        RecordError: no such baseline.
    """
    runs = [run for run in study.runs if run.finished]
    names = list(dict.fromkeys(run.name for run in runs))
    if baseline is not None:
        pairs_of(names, baseline)
    found = between(runs, baseline) if runs else None
    return found or Table()


# -- time ------------------------------------------------------------------------------------


def seconds(study: Study) -> Table:
    """Per schedule, where the seconds of an epoch went, and those of a run."""
    clocks = {name: _per_epoch(runs) for name, runs in study.found.items()}
    known = dict.fromkeys(part for mean in clocks.values() for part in mean)
    if not known:
        return Table(note="The records do not say where the time went.")
    names = [p for p in PARTS if p in known] + [p for p in known if p not in PARTS]
    lines = []
    for name, mean in clocks.items():
        runs, total = study.found[name], sum(mean.values())
        epochs = sum(len(run.rows) for run in runs) / len(runs)
        parts = [mean.get(part, 0.0) for part in names]
        lines.append(
            (
                name,
                *(f"{x:.3g} ({100 * x / total:.0f} %)" if x else DASH for x in parts),
                f"{total:.3g}",
                f"{epochs * total:.3g}",
            )
        )
    return Table(("schedule", *names, f"s/{unit(study)}", "s/run"), lines)


def _per_epoch(runs: Sequence[Record]) -> dict[str, float]:
    """Mean seconds of each clock over all epochs of some runs but those that have lost theirs."""
    every = pd.concat([run.epochs.filter(like="seconds_") for run in runs])
    columns = every.dropna(how="all").fillna(0.0)
    return {str(name).removeprefix("seconds_"): float(columns[name].mean()) for name in columns}


def cost(study: Study, network: Network) -> Table:
    """Predicted seconds of an epoch on a network, and the break-even bandwidth, per level and
    schedule; schedules whose steps are not like the others' are left out, and named."""
    config, ours = study.one.config, setting(study.one)
    alike = {name: runs for name, runs in study.found.items() if setting(runs[0]) == ours}
    left_out = ", ".join(name for name in study.found if name not in alike)
    try:
        known = cases([run for runs in alike.values() for run in runs])
        frame = predict(known, network, config["workers"])
    except RecordError as error:
        return Table(note=f"No prediction: {below(study.root, error)}.")
    parts = ("compute", "compress", "communicate")
    heads = (
        "level or schedule",
        *parts,
        f"s/{unit(study)}",
        "×\N{NO-BREAK SPACE}dense",
        "pays below",
    )
    lines = [
        (
            f"{row['case']}{'' if row['kind'] == 'level' else ' (schedule)'}",
            *(f"{row['steps_per_epoch'] * row[part]:.3g}" for part in parts),
            f"{row['epoch']:.3g}",
            f"{row['speed_up']:.2f}",
            spell(row["break_even"]),
        )
        for row in frame.to_dict("records")
    ]
    note = f"{config['workers']} workers, {network}, ring all-reduce."
    return Table(heads, lines, f"{note} Of another setting: {left_out}." if left_out else note)
