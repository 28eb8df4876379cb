"""Detectors as a line of text, ``NAME:key=value,key=value``, for a given run. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from regimes import detectors, policies
from regimes.config import Registry, read_value
from regimes.errors import ConfigError, RecordError
from regimes.records import Record
from regimes.replay.replay import Rule, measured, replay

KNOWN = Registry("detector", {**detectors.REGISTRY, **policies.REGISTRY})
FROM_RUN = ("epochs", "seed")  # fields of baselines whose default is the run's


def parse(text: str) -> dict[str, Any]:
    """``NAME`` or ``NAME:key=value,key=value`` as a configuration table; values are read as TOML.

    Raises:
        ConfigError: an unknown name, or a part that is no key=value.
    """
    name, fields = text, ""
    if match := re.fullmatch(r"(.+?):(\w+\s*=.*)", text):
        name, fields = match.groups()
    if name not in KNOWN and ":" not in name:
        raise KNOWN.unknown(name)
    if name not in KNOWN and re.search(r":[^A-Za-z_]|:$|:.*[,:]", name):
        raise ConfigError(f"--detectors {text!r} needs the form NAME:key=value,key=value")
    parts = re.split(r",(?=\s*\w+\s*=)", fields) if fields else []
    pairs = [part.partition("=") for part in parts]
    return {"name": name, **{key.strip(): read_value(value.strip()) for key, _, value in pairs}}


def rule(text: str, record: Record) -> Rule:
    """The detector or policy that a text names; baselines take the run's seed and its trained
    epochs (a budget may have ended it)."""
    table = parse(text)
    fields = {f.name for f in dataclasses.fields(KNOWN.dataclass(table["name"])) if f.init}
    for name in FROM_RUN:
        if name in fields:
            table.setdefault(name, len(record.rows) if name == "epochs" else record.config[name])
    return KNOWN.make(table)


def defaults(runs: Sequence[Record]) -> list[str]:
    """Every detector whose signal all runs recorded, and two baselines as long as the first.

    The interval is that of the runs' policy; else ten epochs (the paper's), at most an eighth of
    the run.
    """
    interval = runs[0].config["policy"].get("interval")
    if type(interval) is not int or interval < 1:  # a user's policy may mean another thing
        interval = max(1, min(10, len(runs[0].rows) // 8))
    changes = ("norm-change", "accordion", "eigenvalue-change", "fisher-change", "sharpness-change")
    texts = [f"{name}:interval={interval}" for name in changes]
    texts.insert(1, f"{texts[0]},statistic=norm*lr")
    texts += ["trace-cusum", "msdr-fall"]
    texts = [text for text in texts if all(measured(run, rule(text, run)) for run in runs)]
    if not texts:
        raise RecordError(f"{runs[0].folder} recorded no signal that a detector reads")
    shares = [replay(run, rule(texts[0], run))["critical"].mean() for run in runs]
    share = sum(shares) / len(shares)
    return [*texts, f"first-share:share={share:.2f}", f"random-windows:share={share:.2f}"]


def labels(texts: Iterable[str]) -> dict[str, str]:
    """Short names: without the fields in which all detectors of that name agree."""
    tables = {text: parse(text) for text in dict.fromkeys(texts)}
    short = {}
    for text, table in tables.items():
        same = [t for t in tables.values() if t["name"] == table["name"]]
        fields = [f"{k}={v}" for k, v in table.items() if any(t.get(k) != v for t in same)]
        short[text] = " ".join([table["name"], *fields])
    counts = Counter(short.values())
    return {text: text if counts[name] > 1 else name for text, name in short.items()}
