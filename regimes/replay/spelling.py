"""Detectors spelt in a line of text, ``NAME:key=value,key=value``, for a given run. No torch."""

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
FROM_RUN = ("epochs", "seed")  # fields of baselines that follow the run unless they are given


def parse(text: str) -> dict[str, Any]:
    """``NAME`` or ``NAME:key=value,key=value`` as a configuration table; values are read as TOML.

    Raises:
        ConfigError: an unknown name, or a part that is no key=value.
    """
    name, fields = text, ""
    if found := re.fullmatch(r"(.+?):(\w+\s*=.*)", text):
        name, fields = found.groups()
    if name not in KNOWN and ":" not in name:
        raise KNOWN.unknown(name)
    if name not in KNOWN and re.search(r":[^A-Za-z_]|:$|:.*[,:]", name):
        raise ConfigError(f"--detectors {text!r} needs the form NAME:key=value,key=value")
    parts = re.split(r",(?=\s*\w+\s*=)", fields) if fields else []
    pairs = [part.partition("=") for part in parts]
    return {"name": name, **{key.strip(): read_value(value.strip()) for key, _, value in pairs}}


def rule(text: str, record: Record) -> Rule:
    """The detector or policy that a text names; baselines take the epochs that the run
    has trained (a budget may have ended it), and its seed."""
    table = parse(text)
    fields = {f.name for f in dataclasses.fields(KNOWN.dataclass(table["name"])) if f.init}
    for name in FROM_RUN:
        if name in fields:
            table.setdefault(name, len(record.rows) if name == "epochs" else record.config[name])
    return KNOWN.make(table)


def defaults(runs: Sequence[Record]) -> list[str]:
    """Every detector whose signal all runs recorded, and two baselines as long as the first.

    The interval is that of the runs' own policy; else ten epochs (the paper's), at most an eighth
    of the run.
    """
    interval = runs[0].config["policy"].get("interval")
    if type(interval) is not int or interval < 1:  # somebody's own policy may mean another thing
        interval = max(1, min(10, len(runs[0].rows) // 8))
    every = [
        f"norm-change:interval={interval}",
        f"norm-change:interval={interval},statistic=norm*lr",
        f"accordion:interval={interval}",
        f"eigenvalue-change:interval={interval}",
        f"fisher-change:interval={interval}",
        f"sharpness-change:interval={interval}",
        "trace-cusum",
        "msdr-fall",
    ]
    there = [text for text in every if all(measured(run, rule(text, run)) for run in runs)]
    if not there:
        raise RecordError(f"{runs[0].folder} recorded no signal that a detector reads")
    shares = [replay(run, rule(there[0], run))["critical"].mean() for run in runs]
    share = sum(shares) / len(shares)
    return [*there, f"first-share:share={share:.2f}", f"random-windows:share={share:.2f}"]


def labels(texts: Iterable[str]) -> dict[str, str]:
    """Short names: without the fields that all detectors of that name have alike."""
    tables = {text: parse(text) for text in dict.fromkeys(texts)}
    short = {}
    for text, table in tables.items():
        same = [t for t in tables.values() if t["name"] == table["name"]]
        own = [f"{k}={v}" for k, v in table.items() if any(t.get(k) != v for t in same)]
        short[text] = " ".join([table["name"], *own])
    twice = {s for s, n in Counter(short.values()).items() if n > 1}
    return {text: text if s in twice else s for text, s in short.items()}
