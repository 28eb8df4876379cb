"""The tables and sentences of the report, from records."""

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
from regimes.records import Record, find, load, notes, progress, select_and_separate
from regimes.training.idle_policy import inactivity_warnings

PARTS = ("compute", "compress", "communicate", "evaluate")  # other clocks follow


@dataclass(frozen=True)
class RunEntry:
    """One run's folder, as far as it can be read."""

    place: str  # relative to the folder of the study
    state: str  # "damaged", or as `watch.state` calls it
    more: str = ""  # why it stopped, or what is damaged
    done: int = 0  # trained epochs
    progress: str = ""  # the same in words
    record: Record | None = None


@dataclass(frozen=True)
class Study:
    """The runs of a page."""

    place: Path  # the folder or archive; the page shows its name alone
    root: Path  # the same folder, or a scratch copy of the archive
    entries: list[RunEntry]  # every run, readable or not
    groups: Groups  # by schedule, the finished runs; the unfinished ones where none is finished

    @property
    def runs(self) -> list[Record]:
        return [run for runs in self.groups.values() for run in runs]

    @property
    def single(self) -> bool:
        return len(self.entries) == 1

    @cached_property
    def example(self) -> Record:
        """The run whose configuration and metric stand for all."""
        return decaying(self.groups) if self.groups else self.records[0]

    @property
    def records(self) -> list[Record]:
        """Of all entries that can be read."""
        return [entry.record for entry in self.entries if entry.record]

    @property
    def inactive(self) -> list[str]:
        """Warnings for policies that changed nothing, each with its number of runs."""
        warnings = Counter(
            f"{run.name}: {sentence}"
            for run in self.runs
            if run.finished
            for sentence in inactivity_warnings(run.header, run.rows)
        )
        return [f"{sentence} (Runs: {n}.)" for sentence, n in warnings.items()]

    @property
    def notes(self) -> list[str]:
        return notes(self.runs)

    @property
    def metric(self) -> Metric:
        return tested_by(self.example)

    @property
    def title(self) -> str:
        if self.single:
            return f"{self.example.name}, seed {self.example.seed}"
        name = self.place.resolve().name
        return name.partition(".")[0] if self.place.is_file() else name

    @property
    def labels(self) -> dict[str, str]:
        """The labels of schedules in figures, where they differ from the names."""
        return {n: look.label for n, look in styles_of(self.groups).items() if n != look.label}

    @property
    def unfinished(self) -> list[RunEntry]:
        return [entry for entry in self.entries if entry.state != "finished"]

    @property
    def about(self) -> str:
        """One sentence on what was trained."""
        schedules = len({run.name for run in self.records})
        many = f"{schedules} schedule{'s' * (schedules > 1)}, {len(self.entries)} runs"
        counts = [len(runs) for runs in self.groups.values()]
        seeds = f" ({style.seeds_in_words(counts)} each)" if counts else ""
        what = "One run" if self.single else f"{many}{seeds}"
        return f"{what}. {style.setting(self.example)}."


def read(root: Path, place: Path) -> Study:
    """Every selected run in or under a folder, the content of ``place``; RecordError if none can be
    read, or they are of different settings."""
    entries = [_entry(path, root) for path in find(root)]
    selected = select_and_separate([entry.record for entry in entries if entry.record])
    by_folder = {run.folder: run for run in selected}  # with the names of separate experiments
    entries = [
        replace(entry, record=by_folder[entry.record.folder]) if entry.record else entry
        for entry in entries
        if entry.record is None or entry.record.folder in by_folder
    ]
    if not entries:
        raise RecordError(f"no run in or under {place}: expected a file run.json there")
    if all(entry.record is None for entry in entries):
        raise RecordError(f"no run in or under {place} can be read: {entries[0].more}")
    begun = [entry.record for entry in entries if entry.record and entry.done]
    try:
        by_name = groups(begun, unfinished=True)
    except RecordError as error:
        raise RecordError(relative(root, error)) from None
    shown = {name: [run for run in runs if run.finished] or runs for name, runs in by_name.items()}
    return Study(place, root, entries, shown)


def _entry(path: Path, root: Path) -> RunEntry:
    place = "this run" if path == root else str(path.relative_to(root))
    try:
        record = load(path)
    except RecordError as error:
        return RunEntry(place, "damaged", relative(root, error))
    what, more = state(path, record.header, record.rows)
    words = progress(record.header, record.rows, " of ")
    more = more if what == "stopped" else ""
    return RunEntry(place, what, more, len(record.rows), words, record)


def unit(study: Study) -> str:
    """What a row of the records is: "epoch" or "unit"."""
    return "unit" if study.example.config.get("unit_steps") else "epoch"


def relative(root: Path, error: RegimesError) -> str:
    """An error's text, with paths relative to the study's folder."""
    return str(error).replace(f"{root}/", "")


def results(study: Study) -> Table:
    """One row per schedule: metric, n, traffic; or how far it is."""
    columns = ("metric", "n", "floats", "of_base", "bytes")
    finished = [run for run in study.runs if run.finished]
    summary = schedules(finished) if finished else None
    lines = []
    for name, runs in study.groups.items():
        if summary is not None and name in summary.frame.index:
            cells = summary.cells(name)
            lines.append((name, *(cells[c] for c in columns)))
        else:
            longest = max(runs, key=lambda run: len(run.rows))
            words = f"unfinished: {progress(longest.header, longest.rows, ' of ')}"
            lines.append((name, words, *[DASH] * (len(columns) - 1)))
    plain = {"metric": study.metric.heading, "of_base": "of low throughout"}
    heads = summary.heads() if summary is not None else plain
    return Table(("schedule", *(heads.get(c, c) for c in columns)), lines)


def differences(study: Study, baseline: str | None = None) -> Table:
    """The finished schedules against each other; RecordError for an unknown baseline."""
    runs = [run for run in study.runs if run.finished]
    if baseline is not None:
        pairs_of(list(dict.fromkeys(run.name for run in runs)), baseline)
    return (between(runs, baseline) if runs else None) or Table()


def seconds(study: Study) -> Table:
    """Per schedule, the seconds of an epoch by clock, and those of a run."""
    clocks = {name: _per_epoch(runs) for name, runs in study.groups.items()}
    known = dict.fromkeys(part for mean in clocks.values() for part in mean)
    if not known:
        return Table(note="The records do not say where the time went.")
    names = [p for p in PARTS if p in known] + [p for p in known if p not in PARTS]
    lines = []
    for name, mean in clocks.items():
        runs, total = study.groups[name], sum(mean.values())
        epochs = sum(len(run.rows) for run in runs) / len(runs)
        parts = [mean.get(part, 0.0) for part in names]
        texts = [f"{x:.3g} ({100 * x / total:.0f} %)" if x else DASH for x in parts]
        lines.append((name, *texts, f"{total:.3g}", f"{epochs * total:.3g}"))
    return Table(("schedule", *names, f"s/{unit(study)}", "s/run"), lines)


def _per_epoch(runs: Sequence[Record]) -> dict[str, float]:
    """Mean seconds of each clock over all epochs that have any."""
    clocks = pd.concat([run.epochs.filter(like="seconds_") for run in runs])
    columns = clocks.dropna(how="all").fillna(0.0)
    return {str(name).removeprefix("seconds_"): float(columns[name].mean()) for name in columns}


def cost(study: Study, network: Network) -> Table:
    """Predicted seconds of an epoch on a network, and the break-even bandwidth, per level and
    schedule. Schedules of another setting than the example's are named in the note instead."""
    config, ours = study.example.config, setting(study.example)
    alike = {name: runs for name, runs in study.groups.items() if setting(runs[0]) == ours}
    left_out = ", ".join(name for name in study.groups if name not in alike)
    try:
        known = cases([run for runs in alike.values() for run in runs])
        frame = predict(known, network, config["workers"])
    except RecordError as error:
        return Table(note=f"No prediction: {relative(study.root, error)}.")
    parts = ("compute", "compress", "communicate")
    per_unit = f"s/{unit(study)}"
    heads = ("level or schedule", *parts, per_unit, "×\N{NO-BREAK SPACE}dense", "pays below")
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
