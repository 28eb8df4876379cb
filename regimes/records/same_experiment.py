"""Which runs are seeds of the same experiment, and may so be averaged.

Their headers agree in everything (configuration, digest of the data, levels, metric, layers) but
the seed and

- `fields.STORAGE`: where and how often to save, how the run was started, its role in figures;
- `fields.CIRCUMSTANCES`: code, libraries, machine, processes. Runs that differ in them are
  averaged, and `write_notes` says so.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes.base.config.convert import flatten_table
from regimes.base.errors import RecordError
from regimes.records.fields import (
    SAVING,
    STORAGE,
    Fields,
    differences_text,
    differing_fields,
    identifying_fields,
    is_circumstance,
    resolve_config,
)
from regimes.records.lines import read_header
from regimes.records.reader import Record

FREE_ON_RESUME = {  # quirks show in other fields
    *SAVING,
    *("role", "device", "graphs", "bucket_mb", "quirks"),
}


def identify_experiment(run: Record) -> Fields:
    """Return the fields in which all runs of an experiment agree."""
    return run.identity


def _by_name(runs: Iterable[Record]) -> dict[str, list[Record]]:
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for run in runs:
        groups[run.name].append(run)
    return groups


def separate_experiments(runs: Iterable[Record]) -> list[Record]:
    """Tell experiments of one name apart: runs of one name that are not of the same experiment get
    the fields in which they differ as `Record.variant`, a part of their name: "low
    (optimizer.lr=0.2)".

    Raises:
        RecordError: two runs of one experiment have the same seed.
    """
    runs = list(runs)
    for _ in range(3):  # a new name may be the name of another run
        variants = _variants(runs)
        for i, run in enumerate(runs):
            if added := variants.get(id(run)):
                runs[i] = run.varied(", ".join(filter(None, (run.variant, added))))
    for name, group in _by_name(runs).items():
        by_seed: dict[int, Record] = {}
        for run in group:
            if other := by_seed.get(run.seed):
                raise RecordError(
                    f"{other.folder} and {run.folder} are both {name!r} runs of seed {run.seed}, "
                    "which would count twice: read only one of them"
                )
            by_seed[run.seed] = run
    return runs


def _variants(runs: Sequence[Record]) -> dict[int, str]:
    """What tells runs apart whose name several experiments share, by the run's id: the fields in
    which a run differs from most runs of its name; a run of the majority has all these fields."""
    variants = {}
    for group in _by_name(runs).values():
        differences = differing_fields([identify_experiment(run) for run in group])
        if not differences:
            continue
        names = _distinguishing(differences)
        rows = list(zip(*(differences[name] for name in names), strict=True))
        usual = max(dict.fromkeys(rows), key=rows.count)
        for run, row in zip(group, rows, strict=True):
            values = zip(names, row, usual, strict=True)
            own = [f"{name}={x}" for name, x, most in values if x != most or row == usual]
            variants[id(run)] = ", ".join(own)
    return variants


def _distinguishing(differences: Mapping[str, Sequence[str]]) -> list[str]:
    """A few fields, chosen greedily, in which all runs that differ can be distinguished."""

    def count(names: Iterable[str]) -> int:
        return len({*zip(*(differences[name] for name in names), strict=True)})

    chosen = list(differences)[:1]
    while count(chosen) < count(differences):
        left = [name for name in differences if name not in chosen]
        chosen.append(max(left, key=lambda name: count([*chosen, name])))
    return chosen


def list_variants(runs: Iterable[Record], name: str) -> list[str]:
    """List the names of runs that were called ``name``, but are not of one experiment."""
    return list(dict.fromkeys(r.name for r in runs if r.variant and r.config["name"] == name))


def check_same_experiment(runs: Sequence[Record]) -> None:
    """Raise RecordError unless all runs are seeds of one experiment, whatever their names."""
    for run in runs:
        if differences := differing_fields(
            [identify_experiment(runs[0]), identify_experiment(run)]
        ):
            raise RecordError(
                f"{runs[0].folder} and {run.folder} would be averaged, but differ in "
                f"{differences_text(differences)}: choose one with --where FIELD=VALUE"
            )


def check_same(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise RecordError unless the run in ``folder`` has this plain configuration."""
    recorded, wanted = resolve_config(read_header(folder)["config"]), resolve_config(config)
    keys = {*wanted, *recorded} - FREE_ON_RESUME
    differ = sorted(k for k in keys if recorded.get(k) != wanted.get(k))
    if differ:
        raise RecordError(
            f"{folder} holds a run that differs in {', '.join(differ)}: continue it with its own "
            "configuration or choose another folder (--out)"
        )


def sibling_difference(config: Mapping[str, Any], folder: Path) -> str:
    """Say in a sentence how a run that will start in ``folder`` differs from one of its name in a
    sibling folder; empty if none differs.

    Args:
        config: plain and resolved.
    """
    fields = _comparable(config)
    for path in sorted(folder.parent.glob("*/run.json")):
        if path.parent == folder:
            continue
        with contextlib.suppress(RecordError):  # a damaged record, which is not compared
            recorded = _comparable(read_header(path.parent)["config"])
            differences = differing_fields([recorded, fields])
            name = fields.get("name")
            if recorded.get("name") == name and differences:
                return (
                    f"{path.parent} is a run of the same name {name!r} that differs in "
                    f"{differences_text(differences)}: tables show them apart; choose another "
                    "--out, or name this one with --set name=..."
                )
    return ""


def _comparable(config: Mapping[str, Any]) -> Fields:
    fields = {k: v for k, v in flatten_table(resolve_config(config)).items() if k not in STORAGE}
    return identifying_fields(fields, config.get("drawn_per_seed") or ())


def write_notes(runs: Iterable[Record]) -> list[str]:
    """Write sentences on the averages: experiments of one name that are shown apart, runs of other
    code or on another machine, seeds that chose the configuration they ran."""
    groups = _by_name(runs)
    experiments: defaultdict[str, list[Fields]] = defaultdict(list)
    tuned = []
    for name, group in groups.items():
        if group[0].variant:
            experiments[group[0].config["name"]].append(identify_experiment(group[0]))
        seeds = [str(run.seed) for run in group if run.seed in (run.config.get("tuned_on") or ())]
        if seeds:
            tuned.append(
                f"{name}: seed{'s' * (len(seeds) > 1)} {', '.join(seeds)} chose this configuration "
                "(tuned_on), so the mean flatters it"
            )
    apart = [
        f"{name}: runs of {len(fields)} experiments, which differ in "
        f"{differences_text(differences)}, are shown apart; select with --where FIELD=VALUE"
        for name, fields in experiments.items()
        if (differences := differing_fields(fields))  # none: one was selected
    ]
    return [*apart, *mixed_circumstances(groups), *tuned]


def mixed_circumstances(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    """Write sentences on the groups, each averaged as one, that mix code or machines."""
    by_text: defaultdict[str, list[str]] = defaultdict(list)
    for name, runs in groups.items():
        differ = differing_fields(
            [{k: v for k, v in run.fields.items() if is_circumstance(k)} for run in runs]
        )
        if "code.digest" not in differ:  # another commit with the same code
            differ = {k: v for k, v in differ.items() if k not in ("code.commit", "code.version")}
        if differ:
            by_text[differences_text(differ)].append(name)
    return [
        f"{', '.join(names)}: averaged over runs that differ in {text}"
        for text, names in by_text.items()
    ]
