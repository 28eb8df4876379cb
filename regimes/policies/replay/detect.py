"""``regimes detect``: detectors, spelt ``NAME:key=value,key=value``, replayed over runs, in tables.

From Python: ``bench_detectors(runs, ["norm-change:interval=3"])``. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from regimes import policies
from regimes.base.config import Registry, read_value
from regimes.base.console.progress import track_progress
from regimes.base.console.stdout import make_console as new_console
from regimes.base.console.tables import Table
from regimes.base.errors import ConfigError, RecordError
from regimes.base.statistics import interval_names, t_interval
from regimes.policies import detectors
from regimes.policies.replay.compare import Comparison, compare_rules
from regimes.policies.replay.replay import Rule, has_statistics, past_epochs, replay_rule
from regimes.records import Record, load_all, separate_experiments, write_table

# -- detectors as text -----------------------------------------------------------------------------

KNOWN = Registry("detector", {**policies.REGISTRY, **detectors.REGISTRY})
KNOWN.recorded = {**policies.REGISTRY.recorded, **detectors.REGISTRY.recorded}
MOST, PART = 10, 8  # default interval: the paper's ten epochs, at most an eighth of the run
DETECTORS = (
    "norm-change",
    "norm-change:statistic=norm*lr",
    "accordion",
    "eigenvalue-change",
    "sharpness-change",
)
BASELINES = ("first-share", "random-windows")


def parse_rule(text: str) -> dict[str, Any]:
    """Parse ``NAME`` or ``NAME:key=value,key=value`` to a configuration table; values are read as
    TOML.

    Raises:
        ConfigError: an unknown name, or a part that is no key=value.
    """
    name, fields = text, ""
    # the fields begin after the first ":" before a key; one in package.module:Class has none
    if match := re.fullmatch(r"(.+?):(\w+\s*=.*)", text):
        name, fields = match.groups()
    if not KNOWN.knows(name) and ":" not in name:
        raise KNOWN.unknown(name)
    # no package.module:Class: a ":" before no letter, or more after it than a name
    if not KNOWN.knows(name) and re.search(r":[^A-Za-z_]|:$|:.*[,:]", name):
        raise ConfigError(f"--detectors {text!r} needs the form NAME:key=value,key=value")
    parts = re.split(r",(?=\s*\w+\s*=)", fields) if fields else []  # values may have commas
    table = {"name": name}
    for key, _, value in (part.partition("=") for part in parts):
        if key.strip() in table:
            raise ConfigError(f"--detectors {text!r}: it has {key.strip()} twice")
        table[key.strip()] = read_value(value.strip())
    return table


def make_rule(text: str, record: Record) -> Rule:
    """Make the detector or policy that a text names, for one run, whatever else is read beside it.

    Fields that the text leaves open are the run's: the interval as `interval_of`; the seed and the
    trained epochs (a budget may have ended it) of baselines; their share is the share of the first
    detector of `_signals_of`.
    """
    table = parse_rule(text)
    fields = {f.name for f in dataclasses.fields(KNOWN.dataclass(table["name"])) if f.init}
    for name in fields - table.keys():
        if name == "interval":
            table[name] = interval_of(record)[0]
        elif name == "epochs":
            table[name] = len(record.rows)
        elif name == "seed":
            table[name] = record.config[name]
        elif name == "share" and table["name"] in BASELINES:
            first = next(_signals_of(record), None)
            if first is not None:
                table[name] = float(
                    replay_rule(record, make_rule(first, record))["critical"].mean()
                )
    return KNOWN.make(table)


def interval_of(record: Record) -> tuple[int, str]:
    """Return the interval of detectors of a run, in units, and where it comes from: the run's
    policy; else ten (the paper's), at most an eighth of the run."""
    own = record.config["policy"].get("interval")
    if type(own) is int and own >= 1:  # a user's policy may mean another thing
        return own, "of the run's policy"
    part = len(record.rows) // PART
    if part >= MOST:
        return MOST, "the paper's"
    return max(1, part), f"an eighth of {len(record.rows)} units"


def _signals_of(record: Record) -> Iterator[str]:
    """The detectors of `DETECTORS` with a signal that the run recorded."""
    recorded = past_epochs(record)
    for text in DETECTORS:
        if has_statistics(record, make_rule(text, record), recorded):
            yield text


def default_rules(runs: Sequence[Record]) -> list[str]:
    """Name every detector with a signal that all runs recorded, and two baselines of equal length.

    Raises:
        RecordError: there is none.
    """
    recorded = {run.folder: [*_signals_of(run)] for run in runs}
    shared = [text for text in DETECTORS if all(text in texts for texts in recorded.values())]
    if shared:
        return [*shared, *BASELINES]
    some = {folder: texts for folder, texts in recorded.items() if texts}
    if none := [folder for folder in recorded if folder not in some]:
        others = f", as the other {len(none) - 1} without" if len(none) > 1 else ""
        hint = f": name the runs that have one, e.g. {next(iter(some))}" if some else ""
        raise RecordError(f"{none[0]} recorded no signal that a detector reads{others}{hint}")
    (a, of_a), (b, of_b) = _apart(some)
    raise RecordError(
        f"no detector's signal is in all runs: {a} has that of {', '.join(of_a)}, {b} that of "
        f"{', '.join(of_b)}: name runs that share one"
    )


def _apart(signals: Mapping[Path, list[str]]) -> list[tuple[Path, list[str]]]:
    """Two runs that have the least in common."""
    pairs = combinations(signals.items(), 2)
    return [*min(pairs, key=lambda pair: len({*pair[0][1]} & {*pair[1][1]}))]


def short_labels(texts: Iterable[str]) -> dict[str, str]:
    """Shorten detectors' texts: leave out the fields in which all detectors of that name agree."""
    tables = {text: parse_rule(text) for text in dict.fromkeys(texts)}
    short = {}
    for text, table in tables.items():
        same = [t for t in tables.values() if t["name"] == table["name"]]
        fields = [f"{k}={v}" for k, v in table.items() if any(t.get(k) != v for t in same)]
        short[text] = " ".join([table["name"], *fields])
    counts = Counter(short.values())
    return {text: text if counts[name] > 1 else name for text, name in short.items()}


# -- results as tables -----------------------------------------------------------------------------

NUMBERS = {
    "detectors": ("critical", "floats", "of_low", "seconds_per_epoch", "share_of_training"),
    "pairs": ("jaccard", "kappa", "lag", "best"),
}
WORD = 18  # letters that are not broken: two columns of such words and the numbers fit in 80
KEYS = {"detectors": ["schedule", "detector"], "pairs": ["schedule", "a", "b", "granularity"]}
COLUMNS = {  # of the first table: (number, digits, factor)
    "critical %": ("critical", 0, 100),
    "of low": ("of_low", 2, 1),
    "s / epoch": ("seconds_per_epoch", 3, 1),
    "% of training": ("share_of_training", 1, 100),
}
PAIR_COLUMNS = {"Jaccard": ("jaccard", 2, 1), "kappa": ("kappa", 2, 1), "lag": ("lag", 1, 1)}


def read_runs(places: Iterable[str | Path]) -> list[Record]:
    """Read the runs in or under several folders or archives; a folder named twice is read once.

    Raises:
        RecordError: a folder without a run, or a run that two of the folders hold.
    """
    places = list(dict.fromkeys(Path(place).resolve() for place in places))
    if not places:
        raise RecordError("name at least one run, or a folder of runs")
    return load_all(*places)


def bench_detectors(runs: Sequence[Record], texts: Sequence[str] = ()) -> Comparison:
    """Replay detectors over every run and compare them. The frames gain the columns schedule and
    seed, the detectors' frame also interval, with where it comes from.

    Args:
        texts: see `parse_rule`; by default ``default_rules(runs)``.
    """
    runs = separate_experiments(runs)
    names = short_labels(texts or default_rules(runs))
    parts: dict[str, list[pd.DataFrame]] = {"detectors": [], "pairs": [], "epochs": []}
    notes: dict[str, None] = {}
    for run in track_progress(runs, "replaying detectors"):
        rules = {short: make_rule(text, run) for text, short in names.items()}
        compared = compare_rules(run, rules)
        compared.detectors["interval"] = [
            _interval_text(text, rules[short], run) for text, short in names.items()
        ]
        notes |= dict.fromkeys(compared.notes)
        for part, frames in parts.items():
            frames.append(getattr(compared, part))
            frames[-1].insert(0, "schedule", run.name)
            frames[-1].insert(1, "seed", run.seed)
    joined = {part: pd.concat(frames, ignore_index=True) for part, frames in parts.items()}
    return Comparison(**joined, notes=tuple(notes))


def _interval_text(text: str, chosen: Rule, run: Record) -> str:
    """ "3 (of the run's policy)"; empty for a rule without an interval."""
    if not hasattr(chosen, "interval"):
        return ""
    source = "as given" if "interval" in parse_rule(text) else interval_of(run)[1]
    return f"{chosen.interval} ({source})"


def describe_intervals(result: Comparison, schedule: str) -> str:
    """Return "; interval 3 (of the run's policy)", for a title; empty without an interval."""
    mine = result.detectors[result.detectors["schedule"] == schedule]
    texts = [text for text in dict.fromkeys(mine["interval"]) if text]
    return f"; interval {', '.join(texts)}" if texts else ""


def over_seeds(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """Compute, per schedule and detector (or pair), n and for each number the mean and the 95 % t
    interval (of three seeds or more).

    A detector's number is undefined (nan) if one seed lacks it; a pair's leaves such seeds out, and
    ``NUMBER_n`` is the count of the others.
    """
    rows = []
    for key, group in frame.groupby(KEYS[part], sort=False):
        row: dict[str, Any] = dict(zip(KEYS[part], key, strict=True)) | {"n": len(group)}
        for name in NUMBERS[part]:
            values = group[name].dropna().tolist()
            defined = bool(values) and (part == "pairs" or len(values) == len(group))
            found = t_interval(values) if defined else (math.nan,) * 3
            row |= dict(zip((name, *interval_names(name)), found, strict=True))
            row[f"{name}_n"] = len(values)
        rows.append(row)
    return pd.DataFrame(rows)


def _cell(row: Any, name: str, digits: int = 2, times: float = 1) -> str:
    """Mean ± half the interval; a dash where it is undefined."""
    mean, high = times * row[name], times * row[interval_names(name)[1]]
    spread = "" if math.isnan(high) else f" ± {high - mean:.{digits}f}"
    return "-" if math.isnan(mean) else f"{mean:.{digits}f}{spread}"


def format_tables(result: Comparison) -> list[Table]:
    """Make two tables per schedule, legible at 80 columns; no second one for a single detector."""
    result_tables = []
    pairs = over_seeds(result.pairs, "pairs").to_dict("records")
    for schedule, rows in over_seeds(result.detectors, "detectors").groupby("schedule", sort=False):
        n = rows["n"].iloc[0]
        lines: list[Sequence[str]] = [
            (row["detector"], *(_cell(row, *column) for column in COLUMNS.values()))
            for row in rows.to_dict("records")
        ]
        title = f"{schedule}, {n} seed{'s' if n > 1 else ''}"
        title += describe_intervals(result, str(schedule))
        result_tables.append(Table(("detector", *COLUMNS), lines, title=title))
        lines = []
        for row in pairs:
            if row["schedule"] == schedule:
                by = "layer" if "layer" in row["granularity"] else "epoch"
                numbers = (_cell(row, *column) for column in PAIR_COLUMNS.values())
                lines.append((row["a"], row["b"], by, *numbers))
        if lines:
            result_tables.append(Table(("detector", "with", "by", *PAIR_COLUMNS), lines, texts=2))
    return result_tables


EXPLAINED = (
    "critical: share of epochs (and layers). of low: traffic over that of low compression in all "
    "exchanges of the run (one in each step, or in each round of local steps). "
    "s / epoch, % of training: what the signal costs in addition to compute, compression and "
    "communication. by: epoch and layer, or epoch (a detector per layer is critical when at least "
    "half of the layers are). interval: units between two comparisons. lag: epochs by which the "
    "second follows the first. "
    "±: 95 % t interval over seeds, of three or more. -: undefined."
)


def main(places: Sequence[Path], texts: Sequence[str], out: Path | None) -> Comparison:
    """Print the tables; with ``out`` also write detectors.csv, pairs.csv and epochs.csv."""
    result, console = bench_detectors(read_runs(places), texts), new_console(highlight=False)
    paths = []
    if out:  # before the tables: the pipe may be closed
        frames = {
            "detectors": over_seeds(result.detectors, "detectors"),
            "pairs": over_seeds(result.pairs, "pairs"),
            "epochs": result.epochs,
        }
        paths = [out / f"{name}.csv" for name in frames]
        for path, frame in zip(paths, frames.values(), strict=True):
            write_table(path, frame)
    for table in format_tables(result):
        console.print(table.drawn(word=WORD, padding=(0, 1, 0, 0)), "")
    console.print(EXPLAINED, *result.notes[:1], sep="\n", style="dim", markup=False)
    if paths:
        console.print(*map(str, paths), sep="\n")
    return result
