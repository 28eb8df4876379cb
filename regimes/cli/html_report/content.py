"""The tables and sentences of the report, and where its runs come from, from records."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from regimes import __version__
from regimes.base.console.progress import track_progress
from regimes.base.console.tables import Table
from regimes.base.console.units import format_quantity
from regimes.base.errors import RecordError, RegimesError
from regimes.cli.monitor import describe_state
from regimes.cost.cases import compared_fields, make_cases
from regimes.cost.network import Network, format_bandwidth
from regimes.cost.predict import predict_seconds
from regimes.job.run_warnings import run_warnings
from regimes.plotting import style
from regimes.plotting.curves import has_metric
from regimes.plotting.groups import Groups, group_runs, tested_by, typical_run
from regimes.plotting.looks import Metric, order_schedules, styles_of
from regimes.plotting.schedules import DASH, differences_between, pairs_of, tabulate_schedules
from regimes.plotting.text import unknown_text
from regimes.records import (
    NOT_RECORDED,
    OWN,
    Record,
    find_runs,
    format_progress,
    load,
    read_events,
    select_and_separate,
)

PARTS = ("compute", "compress", "communicate", "evaluate")  # other clocks follow


@dataclass(frozen=True)
class RunEntry:
    """Describes one run's folder, as far as it can be read."""

    place: str  # relative to the folder of the study
    state: str  # "damaged", or as `cli.monitor.describe_state` calls it
    more: str = ""  # why it stopped, or what is damaged
    progress: str = ""  # trained epochs, in words
    record: Record | None = None


@dataclass(frozen=True)
class Study:
    """Holds the runs of a page."""

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
        """Return the run with the configuration and metric that stand for all."""
        return typical_run(self.groups) if self.groups else self.records[0]

    @property
    def records(self) -> list[Record]:
        """Return the records of all entries that can be read."""
        return [entry.record for entry in self.entries if entry.record]

    @property
    def warnings(self) -> list[str]:
        """Return what is odd about finished runs, such as a policy that changed nothing, each with
        its number of runs."""
        warnings = Counter(
            f"{run.name}: {sentence}"
            for run in self.runs
            if run.finished
            for sentence in run_warnings(run.header, run.rows)
        )
        return [f"{sentence} (Runs: {n}.)" for sentence, n in warnings.items()]

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
        """Return the labels of schedules in figures, where they differ from the names."""
        return {n: look.label for n, look in styles_of(self.groups).items() if n != look.label}

    @property
    def unfinished(self) -> list[RunEntry]:
        return [entry for entry in self.entries if entry.state != "finished"]

    @property
    def about(self) -> str:
        """Say in one sentence what was trained."""
        schedules = len({run.name for run in self.records})
        many = f"{schedules} schedule{'s' * (schedules > 1)}, {len(self.entries)} runs"
        counts = [len(runs) for runs in self.groups.values()]
        seeds = f" ({style.seeds_in_words(counts)} each)" if counts else ""
        what = "One run" if self.single else f"{many}{seeds}"
        return f"{what}. {style.describe_setting(self.example)}."


def read_study(root: Path, place: Path) -> Study:
    """Read every selected run in or under a folder, the content of ``place``; RecordError if none
    can be read, or they are of different settings."""
    entries = [_read_entry(path, root) for path in track_progress(find_runs(root), "reading runs")]
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
    begun = [entry.record for entry in entries if entry.record and entry.record.rows]
    try:
        by_name = group_runs(begun, unfinished=True)
    except RecordError as error:
        raise RecordError(shorten_paths(root, error)) from None
    by_schedule = {
        name: [run for run in runs if run.finished] or runs for name, runs in by_name.items()
    }
    return Study(place, root, entries, by_schedule)


def _read_entry(path: Path, root: Path) -> RunEntry:
    place = "this run" if path == root else str(path.relative_to(root))
    try:
        record = load(path)
    except RecordError as error:
        return RunEntry(place, "damaged", shorten_paths(root, error))
    what, more = describe_state(path, record.header, record.rows)
    trained = format_progress(record.header, record.rows, " of ")
    return RunEntry(place, what, more if what == "stopped" else "", trained, record)


def name_unit(study: Study) -> str:
    """Name what a row of the records is: "epoch" or "unit"."""
    return "unit" if study.example.config.get("unit_steps") else "epoch"


def shorten_paths(root: Path, error: RegimesError) -> str:
    """Write an error's text, with paths relative to the study's folder."""
    return str(error).replace(f"{root}/", "")


def tabulate_results(study: Study) -> Table:
    """Make a table with one row per schedule: metric, n, traffic; for an unfinished schedule how
    far it is."""
    columns = ("metric", "n", "floats", "of_base", "bytes")
    table = Table(("schedule", study.metric.heading, "n", "floats", "of low throughout", "bytes"))
    if finished := [run for run in study.runs if run.finished]:
        table = tabulate_schedules(finished).table(columns)
    rows = {row[0]: row for row in table.rows}
    for name, runs in study.groups.items():
        longest = max(runs, key=lambda run: len(run.rows))
        trained = f"unfinished: {format_progress(longest.header, longest.rows, ' of ')}"
        rows.setdefault(name, (name, trained, *[DASH] * (len(columns) - 1)))
    return Table(table.heads, [rows[name] for name in study.groups])


def tabulate_differences(study: Study, baseline: str | None = None) -> Table:
    """Compare the finished schedules with each other; RecordError for an unknown baseline."""
    runs = [run for run in study.runs if run.finished]
    if baseline is not None:
        pairs_of(list(dict.fromkeys(run.name for run in runs)), baseline)  # raises if it is unknown
    return (differences_between(runs, baseline) if runs else None) or Table()


def tabulate_seconds(study: Study) -> Table:
    """Make a table with, per schedule, the seconds of an epoch, by clock and in all, and the
    seconds of a run."""
    means = {}  # by schedule: the mean of each clock over the epochs that have any clock
    for name, runs in study.groups.items():
        clocks = pd.DataFrame([run.clock.get(row["epoch"], {}) for run in runs for row in run.rows])
        means[name] = clocks.dropna(how="all").fillna(0.0).mean()
    known = dict.fromkeys(part for mean in means.values() for part in mean.index)
    if not known:
        return Table(note="The records do not say where the time went.")
    names = [p for p in PARTS if p in known] + [p for p in known if p not in PARTS]
    lines = []
    for name, mean in means.items():
        runs, total = study.groups[name], mean.sum()
        epochs = sum(len(run.rows) for run in runs) / len(runs)
        parts = mean.reindex(names, fill_value=0.0)
        texts = [f"{x:.3g} ({100 * x / total:.0f} %)" if x else DASH for x in parts]
        sums = (f"{x:.3g}" if total else DASH for x in (total, epochs * total))
        lines.append((name, *texts, *sums))
    return Table(("schedule", *names, f"s/{name_unit(study)}", "s/run"), lines)


def tabulate_cost(study: Study, network: Network) -> Table:
    """Predict the seconds of an epoch on a network, and the break-even bandwidth, per level and
    schedule. Schedules of another setting than the example's are named in the note instead."""
    config, ours = study.example.config, compared_fields(study.example)
    alike = {name: runs for name, runs in study.groups.items() if compared_fields(runs[0]) == ours}
    left_out = ", ".join(name for name in study.groups if name not in alike)
    try:
        known = make_cases([run for runs in alike.values() for run in runs])
        frame = predict_seconds(known, network, config["workers"])
    except RecordError as error:
        return Table(note=f"No prediction: {shorten_paths(study.root, error)}.")
    parts, speed_up = ("compute", "compress", "communicate"), "×\N{NO-BREAK SPACE}dense"
    heads = ("level or schedule", *parts, f"s/{name_unit(study)}", speed_up, "pays below")
    lines = [
        (
            f"{row['case']}{'' if row['kind'] == 'level' else ' (schedule)'}",
            *(f"{row['steps_per_epoch'] * row[part]:.3g}" for part in parts),
            f"{row['epoch']:.3g}",
            f"{row['speed_up']:.2f}",
            format_bandwidth(row["break_even"]),
        )
        for row in frame.to_dict("records")
    ]
    note = f"{config['workers']} workers, {network}, ring all-reduce."
    return Table(heads, lines, f"{note} Of another setting: {left_out}." if left_out else note)


def other_methods(study: Study, network: Network) -> Table:
    """Predict the milliseconds of a step of the example's job by its own levels and other
    methods."""
    from regimes.cost.recorded import tabulate_alternatives

    try:
        frame = tabulate_alternatives(study.example, network)
    except RegimesError as error:  # such as of a compressor that is not installed
        return Table(note=f"No prediction: {shorten_paths(study.root, error)}.")
    lines = [
        (
            row["method"],
            *(f"{1e3 * row[name]:.3g}" for name in ("compress", "communicate", "seconds")),
            format_quantity(row["bytes"], "B"),
            f"{row['speed_up']:.2f}",
            format_bandwidth(row["break_even"]),
        )
        for row in frame.to_dict("records")
    ]
    heads = ("method", "compress", "communicate", "ms/step", "a step", "×\N{NO-BREAK SPACE}dense")
    return Table((*heads, "pays below"), lines)


# -- where the runs come from ----------------------------------------------------------------


def write_configuration(study: Study) -> list[tuple[str, str]]:
    """Write (title, TOML): what all runs share, then what each schedule has of its own."""
    configs = {run.name: run.config for run in study.records}
    example = study.example.config
    if study.single:
        text = _write_toml(example, example) + _write_comments(study.example)
        return [(study.example.name, text)]
    keys = {key for config in configs.values() for key in config} - {"name", "seed"}
    same = {k for k in keys if all(c.get(k) == example.get(k) for c in configs.values())}
    parts = [("all runs", _write_toml(example, same) + _write_comments(study.example))]
    return parts + [
        (name, text)
        for name in order_schedules(configs)
        if (text := _write_toml(configs[name], keys - same))
    ]


def _write_comments(run: Record) -> str:
    """For a hook's record: the unknown fields and the learning rates, as TOML comments."""
    if not run.hooked:
        return ""
    lines = [f"# {unknown_text(run.header)}"]
    if run.rows:
        first, last = run.rows[0]["lr"], run.rows[-1]["lr"]
        lines.append(f"# learning rate: {first:g} in the first unit, {last:g} in the last")
    return "\n\n" + "\n".join(lines)


def _write_toml(config: dict[str, Any], keys: Iterable[str]) -> str:
    recorded = {k: v for k, v in config.items() if k in keys and v != {"name": OWN}}
    return tomli_w.dumps(_without_nulls(recorded)).strip()


def _without_nulls(value: Any) -> Any:
    """A value that TOML, which has no null, can hold: a key with None is left out, and a None in a
    list becomes words."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [NOT_RECORDED if v is None else _without_nulls(v) for v in value]
    return value


def tabulate_provenance(study: Study) -> list[tuple[str, list[str]]]:
    """Make pairs of what the runs come from and its distinct values over all runs."""
    rows = [_describe_origin(run) for run in study.records]
    values = [(key, _list_distinct(row[key] for row in rows)) for key in rows[0]]
    events = [e for run in study.records for e in read_events(run.folder)]
    days = sorted(event["time"][:10] for event in events)
    trained = [("trained", [" to ".join(dict.fromkeys([days[0], days[-1]]))])] if days else []
    # an archive has no checkpoints
    folders = [p for run in study.records for p in (run.folder / "checkpoints").glob("epoch-*")]
    size = sum(file.stat().st_size for path in folders for file in path.glob("*"))
    saved = [("checkpoints", [f"{len(folders)}, {size / 1e6:.1f} MB"])] if folders else []
    return [*values, *trained, *saved, ("this page", [f"regimes {__version__}"])]


def _describe_origin(run: Record) -> dict[str, str]:
    header: dict[str, Any] = {**run.header}
    code, machine, world = (header.get(k) or {} for k in ("code", "machine", "world"))
    hardware = [machine.get("processor") or "unknown processor"]
    hardware += [f"{name} {machine.get(name, '?')}" for name in ("cores", "threads")]
    hardware.append(str(machine.get("system", "?")))
    processes, groups = world.get("processes", 1), world.get("groups", 1)
    held = "nodes" if run.config.get("nodes") else "replicas"
    return {
        "version": f"regimes {code.get('version', '?')}, commit {code.get('commit') or 'unknown'}",
        "digest of the code": str(code.get("digest", "?"))[:12],
        "libraries": ", ".join(f"{n} {machine.get(n, '?')}" for n in ("torch", "numpy", "python")),
        "machine": ", ".join([*machine.get("gpus", []), *hardware]),
        "workers": f"{run.config['workers']} on {processes} process{'es' * (processes > 1)}"
        + (f" in {held} of {shards}, " if (shards := world.get("shards", 1)) > 1 else ", ")
        + f"{world.get('device', '?')}"
        + (f"; one of {groups} such groups" if groups > 1 else ""),
        "command": str(machine.get("command", "?")),
    }


def _list_distinct(values: Iterable[str], most: int = 5) -> list[str]:
    distinct = list(dict.fromkeys(values))
    rest = len(distinct) - most
    return distinct if rest <= 0 else [*distinct[:most], f"and {rest} more"]


def redraw_commands(
    study: Study, network: str, baseline: str | None = None, where: Sequence[str] = ()
) -> list[str]:
    """Write the commands that draw this page and its parts again, of the same runs."""
    name = study.place.resolve().name
    page = [] if baseline is None else ["--baseline", baseline]
    commands = [
        ["report", name, "--network", network, *page],
        ["cost", name, "--network", network],
    ]
    if not study.place.is_file():
        commands.append(["detect", name])
    if not study.unfinished and all(has_metric(run, study.metric) for run in study.runs):
        commands.append(["figure", "curves", name])
    runs = [word for text in where for word in ("--where", text)]
    return [shlex.join(["regimes", *command, *runs]) for command in commands]
