"""Which runs are seeds of the same experiment, and may so be averaged. No torch.

One place decides it for every reader. Two runs are of the same experiment if they agree in
everything that their headers say (configuration, data and their digest, levels, metric, layers,
trainer or hook), but for the seed and

- `STORAGE`, which only says where and how often to save, or how the run was started;
- `CIRCUMSTANCES`: code, libraries, machine, processes. Runs that differ in them are averaged, and
  `notes` says so.

`separate` gives runs of one name that are not of the same experiment names of their own, so that
whatever groups runs by name never mixes them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.config import RunConfig, from_dict, read_value, to_dict
from regimes.config.convert import current_names
from regimes.errors import ConfigError, RecordError
from regimes.records.lines import read_header

if TYPE_CHECKING:
    from regimes.records.reader import Record

STORAGE = (
    "checkpoint_every",
    "checkpoint_seconds",
    "reporters",
    "timeout",
    "data.path",
    "data.download",
    "machine.command",
    "schema",
)
CIRCUMSTANCES = ("code", "machine", "world", "device", "bucket_mb")  # "world" but its workers
LONGEST = 24  # letters of a value in a name
YOKED = "yoked "  # controls recorded before `drawn_per_seed` was a field of configurations
Fields = dict[str, Any]


def resolved(config: Mapping[str, Any]) -> Fields:
    """A recorded configuration with the fields that an older version did not write, by default."""
    plain = dict(config)
    if plain.get("instruments") == []:  # what the first records had for none
        plain["instruments"] = {}
    try:
        return to_dict(from_dict(RunConfig, plain))
    except ConfigError:  # of a later version, or edited: as it is where it says something
        return _filled(current_names(RunConfig, plain), to_dict(RunConfig()))


def _filled(said: Mapping[str, Any], usual: Mapping[str, Any]) -> Fields:
    found = {**usual, **said}
    for table in ("data", "model", "optimizer", "outer"):
        if isinstance(said.get(table), Mapping):
            found[table] = {**usual[table], **said[table]}
    return found


def fields(run: Record) -> Fields:
    """All that a header says but name and `STORAGE`, by dotted path: ``{"optimizer.lr": 0.4,
    "data.digest": "e12f..."}``. Fields without a value are left out."""
    header = {"units": run.config.get("epochs")}  # as of a version that did not write them
    header |= {key: value for key, value in run.header.items() if key != "config"}
    if run.hooked and run.rows:  # whose rates stand in its rows alone
        rates = [row["lr"] for row in run.rows]
        header["rates"] = {"first": rates[0], "highest": max(rates)}
    config = run.config if run.hooked else resolved(run.config)  # a hook's says what is known
    return {k: v for k, v in (_flat(config) | _flat(header)).items() if k not in ("name", *STORAGE)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Fields:
    found: Fields = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def is_circumstance(field: str) -> bool:
    """May runs of the same experiment differ in it?"""
    return field != "world.workers" and field.partition(".")[0] in CIRCUMSTANCES


def identity(run: Record) -> Fields:
    """The `fields` in which all runs of an experiment agree."""
    free = run.config.get("drawn_per_seed") or ()
    if "drawn_per_seed" not in run.config and run.config["name"].startswith(YOKED):
        free = ("policy.layers",)
    return _without(run.said, free)


def _without(found: Fields, per_seed: Iterable[str]) -> Fields:
    """Without the seed, circumstances, and the fields or tables that each seed has of its own."""
    free = ("seed", *per_seed)
    return {
        field: value
        for field, value in found.items()
        if not is_circumstance(field)
        and not any(field == one or field.startswith(f"{one}.") for one in free)
    }


# -- what differs ----------------------------------------------------------------------------


def differing(tables: Sequence[Fields]) -> dict[str, list[str]]:
    """The fields in which some of the tables differ, in their order: the value of each as text."""
    names = dict.fromkeys(name for table in tables for name in table)
    found = {}
    for name in names:
        if any(table.get(name) != tables[0].get(name) for table in tables):
            found[name] = [field_text(name, table.get(name)) for table in tables]
    for name, values in found.items():
        if len({*values}) < len({json.dumps(t.get(name), sort_keys=True) for t in tables}):
            found[name] = [_whole(table.get(name)) for table in tables]  # abbreviated alike
    return found


def field_text(field: str, value: Any) -> str:
    """A value for a name: short, as ``--set`` and ``--where`` take it."""
    text = _whole(value)
    if field.endswith("digest"):
        return text[:8]
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _whole(value: Any) -> str:
    if value is None:
        return "none"
    is_text = isinstance(value, str) and read_value(value) == value  # "4" is no 4
    return value if is_text else json.dumps(value)


def _telling(differ: dict[str, list[str]]) -> list[str]:
    """Few of the fields in which runs differ, but enough to tell all of them apart."""
    kinds = len({*zip(*differ.values(), strict=True)})
    chosen = list(differ)[:1]
    while len({*zip(*(differ[n] for n in chosen), strict=True)}) < kinds:
        chosen.append(
            max(
                (name for name in differ if name not in chosen),
                key=lambda name: len({*zip(*(differ[n] for n in (*chosen, name)), strict=True)}),
            )
        )
    return chosen


def _labels(columns: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """Of each run the fields in which it is not like most of them; of most, all fields."""
    rows = list(zip(*columns, strict=True))
    usual = max(dict.fromkeys(rows), key=rows.count)
    return [
        ", ".join(
            f"{name}={value}"
            for name, value, other in zip(names, row, usual, strict=True)
            if value != other or row == usual
        )
        for row in rows
    ]


def separate(runs: Iterable[Record]) -> list[Record]:
    """The runs; those of one name that are not of the same experiment get what they differ in as
    their `Record.variant`, which is a part of their name: "low (optimizer.lr=0.2)".

    Raises:
        RecordError: two runs of one experiment have the same seed.
    """
    runs = list(runs)
    for _ in range(3):  # a name that was made may be another run's own
        if not _separate(runs):
            break
    _check_seeds(runs)
    return runs


def _separate(runs: list[Record]) -> bool:
    """Give runs of one name that differ names of their own; was there one?"""
    by_name: dict[str, list[int]] = {}
    found = False
    for place, run in enumerate(runs):
        by_name.setdefault(run.name, []).append(place)
    for places in by_name.values():
        tables = [identity(runs[place]) for place in places]
        if not (differ := differing(tables)):
            continue
        found, names = True, _telling(differ)
        for place, words in zip(
            places, _labels([differ[name] for name in names], names), strict=True
        ):
            older = runs[place].variant
            runs[place] = replace(runs[place], variant=f"{older}, {words}" if older else words)
    return found


def _check_seeds(runs: Sequence[Record]) -> None:
    known: dict[tuple[str, int], Record] = {}
    for run in runs:
        key = run.name, run.seed
        if other := known.get(key):
            raise RecordError(
                f"{other.folder} and {run.folder} are both {run.name!r} runs of seed {run.seed}, "
                "which would count twice: read only one of them"
            )
        known[key] = run


def check_one(runs: Sequence[Record]) -> None:
    """Raise RecordError unless all runs are seeds of one experiment, whatever they are called."""
    for run in runs:
        if differ := differing([identity(runs[0]), identity(run)]):
            raise RecordError(
                f"{runs[0].folder} and {run.folder} would be averaged, but differ in "
                f"{_listed(differ)}: choose one with --where FIELD=VALUE"
            )


def variants(runs: Iterable[Record], name: str) -> list[str]:
    """The names of runs that were called ``name``, but are not of one experiment."""
    return list(dict.fromkeys(r.name for r in runs if r.variant and r.config["name"] == name))


# -- what a reader should know ---------------------------------------------------------------


def notes(runs: Iterable[Record]) -> list[str]:
    """Sentences about what is averaged: runs of other code or on another machine, schedules that
    are apart because they differ, seeds that chose the configuration they ran."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return [*_apart(groups), *mixed(groups), *_chosen(groups)]


def _apart(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    by_name: dict[str, list[Record]] = {}
    for runs in groups.values():
        if runs[0].variant:
            by_name.setdefault(runs[0].config["name"], []).append(runs[0])
    said = []
    for name, ones in by_name.items():
        if not (differ := differing([identity(run) for run in ones])):
            continue  # the others of the name were left out
        said.append(
            f"{name}: runs of {len(ones)} experiments, which differ in {_listed(differ)}, are "
            "shown apart; select with --where FIELD=VALUE"
        )
    return said


def mixed(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    """Which of the groups, each averaged as one, are of other code or another machine."""
    by_words: dict[str, list[str]] = {}
    for name, runs in groups.items():
        tables = [{k: v for k, v in run.said.items() if is_circumstance(k)} for run in runs]
        differ = differing(tables)
        if "code.digest" not in differ:  # another commit with the same code
            differ = {k: v for k, v in differ.items() if k not in ("code.commit", "code.version")}
        if differ:
            by_words.setdefault(_listed(differ), []).append(name)
    return [
        f"{', '.join(names)}: averaged over runs that differ in {words}"
        for words, names in by_words.items()
    ]


def _listed(differ: Mapping[str, Sequence[str]], most: int = 4) -> str:
    """Fields, each with its values."""
    said = []
    for name, values in differ.items():
        distinct = list(dict.fromkeys(values))
        rest = f" and {len(distinct) - most} more" if len(distinct) > most else ""
        said.append(f"{name} ({', '.join(distinct[:most])}{rest})")
    return ", ".join(said)


def _chosen(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    said = []
    for name, runs in groups.items():
        seeds = [str(run.seed) for run in runs if run.seed in (run.config.get("tuned_on") or ())]
        if seeds:
            plural = "s" * (len(seeds) > 1)
            said.append(
                f"{name}: seed{plural} {', '.join(seeds)} chose this configuration (tuned_on), so "
                "the mean flatters it"
            )
    return said


def apart_from(config: Mapping[str, Any], folder: Path) -> str:
    """What sets a run that is about to start in ``folder`` apart from runs of its name in sibling
    folders, in a sentence; empty if they are of the same experiment, or there are none.

    Args:
        config: plain and resolved.
    """
    ours = _comparable(config)
    for path in sorted(folder.parent.glob("*/run.json")):
        if path.parent == folder:
            continue
        with contextlib.suppress(RecordError):  # damaged: not what this is about
            theirs = _comparable(read_header(path.parent)["config"])
            differ = differing([theirs, ours])
            if theirs.get("name") == ours.get("name") and differ:
                return (
                    f"{path.parent} is a run of the same name {ours.get('name')!r} that differs in "
                    f"{_listed(differ)}: tables show them apart; choose another --out, or name this"
                    " one with --set name=..."
                )
    return ""


def _comparable(config: Mapping[str, Any]) -> Fields:
    found = {k: v for k, v in _flat(resolved(config)).items() if k not in STORAGE}
    return _without(found, config.get("drawn_per_seed") or ())
