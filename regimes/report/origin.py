"""Where a report's runs come from: configuration, provenance, and how to draw it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import tomli_w

from regimes import __version__
from regimes.monitor.text import unknown_text
from regimes.plotting.curves import has
from regimes.plotting.looks import order
from regimes.records import NOT_SAID, OWN, Record, read_lines
from regimes.report.content import Study


def configuration(study: Study) -> list[tuple[str, str]]:
    """(title, TOML): what all runs share, then what each schedule has of its own."""
    configs = {run.name: run.config for run in study.records}
    if study.single:
        return [(study.example.name, _toml(study.example.config) + _comments(study.example))]
    keys = {key for config in configs.values() for key in config} - {"name", "seed"}
    example = study.example.config
    same = {k for k in keys if all(c.get(k) == example.get(k) for c in configs.values())}
    parts = [("all runs", _toml(example, same) + _comments(study.example))]
    return parts + [
        (name, text) for name in order(configs) if (text := _toml(configs[name], keys - same))
    ]


def _comments(run: Record) -> str:
    """For a hook's record: the unknown fields and the learning rates, as TOML comments."""
    if not run.hooked:
        return ""
    lines = [f"# {unknown_text(run.header)}"]
    if run.rows:
        first, last = run.rows[0]["lr"], run.rows[-1]["lr"]
        lines.append(f"# learning rate: {first:g} in the first unit, {last:g} in the last")
    return "\n\n" + "\n".join(lines)


def _toml(config: dict[str, Any], keys: Iterable[str] = ()) -> str:
    shown = {k: v for k, v in config.items() if (not keys or k in keys) and v != {"name": OWN}}
    return tomli_w.dumps(_writable(shown)).strip()


def _writable(value: Any) -> Any:
    """For TOML, which has no null: without such keys, and in words in a list."""
    if isinstance(value, dict):
        return {k: _writable(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [NOT_SAID if v is None else _writable(v) for v in value]
    return value


def provenance(study: Study) -> list[tuple[str, list[str]]]:
    """(what, its distinct values over all runs)."""
    rows = [_origin(run) for run in study.records]
    values = [(key, _distinct(row[key] for row in rows)) for key in rows[0]]
    events = [e for run in study.records for e in read_lines(run.folder / "events.jsonl")]
    days = sorted(event["time"][:10] for event in events)
    trained = [("trained", [" to ".join(dict.fromkeys([days[0], days[-1]]))])] if days else []
    kept = [("checkpoints", [text])] if (text := _checkpoints(study.records)) else []
    return [*values, *trained, *kept, ("this page", [f"regimes {__version__}"])]


def _checkpoints(runs: Iterable[Record]) -> str:
    """How many there are, and their size; empty without any, as in an archive."""
    folders = [path for run in runs for path in (run.folder / "checkpoints").glob("epoch-*")]
    size = sum(file.stat().st_size for path in folders for file in path.glob("*"))
    return f"{len(folders)}, {size / 1e6:.1f} MB" if folders else ""


def _origin(run: Record) -> dict[str, str]:
    header: dict[str, Any] = {**run.header}
    code, machine, world = (header.get(k) or {} for k in ("code", "machine", "world"))
    hardware = [
        f"{machine.get('processor') or 'unknown processor'}",
        *(f"{name} {machine.get(name, '?')}" for name in ("cores", "threads")),
        str(machine.get("system", "?")),
    ]
    processes, groups = world.get("processes", 1), world.get("groups", 1)
    return {
        "version": f"regimes {code.get('version', '?')}, commit {code.get('commit') or 'unknown'}",
        "digest of the code": str(code.get("digest", "?"))[:12],
        "libraries": ", ".join(f"{n} {machine.get(n, '?')}" for n in ("torch", "numpy", "python")),
        "machine": ", ".join([*machine.get("gpus", []), *hardware]),
        "workers": f"{run.config['workers']} on {processes} process{'es' * (processes > 1)}, "
        f"{world.get('device', '?')}" + (f"; one of {groups} such groups" if groups > 1 else ""),
        "command": str(machine.get("command", "?")),
    }


def _distinct(values: Iterable[str], most: int = 5) -> list[str]:
    distinct = list(dict.fromkeys(values))
    rest = len(distinct) - most
    return distinct if rest <= 0 else [*distinct[:most], f"and {rest} more"]


def redraw(study: Study, network: str) -> list[str]:
    """Commands that draw this page and its parts again."""
    name, link = (shlex.quote(x) for x in (study.place.resolve().name, network))
    commands = [f"regimes report {name} --network {link}", f"regimes cost {name} --network {link}"]
    if not study.place.is_file():
        commands.append(f"regimes detect {name}")
    drawn = not study.unfinished and all(has(run, study.metric) for run in study.runs)
    return [*commands, f"regimes figure curves {name}"] if drawn else commands
