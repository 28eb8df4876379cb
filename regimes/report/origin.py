"""Where a report's runs come from: configuration, provenance, and how to draw it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import tomli_w

from regimes import __version__
from regimes.monitor.text import not_said_text
from regimes.plotting.curves import has
from regimes.plotting.looks import order
from regimes.records import NOT_SAID, OWN, Record, read_lines
from regimes.report.content import Study


def configuration(study: Study) -> list[tuple[str, str]]:
    """(title, TOML): what all runs share, then what each schedule has of its own."""
    configs = {seen.record.name: seen.record.config for seen in study.seen if seen.record}
    if study.single:
        return [(study.one.name, _toml(study.one.config) + _said(study.one))]
    keys = {key for config in configs.values() for key in config} - {"name", "seed"}
    one = study.one.config
    same = {key for key in keys if all(c.get(key) == one.get(key) for c in configs.values())}
    parts = [("all runs", _toml(one, same) + _said(study.one))]
    return parts + [
        (name, text) for name in order(configs) if (text := _toml(configs[name], keys - same))
    ]


def _said(run: Record) -> str:
    """Of a user's own training, as comments: the rates that it had, and what is not said."""
    if not run.hooked:
        return ""
    lines = [f"# {not_said_text(run.header)}"]
    if run.rows:
        first, last = run.rows[0]["lr"], run.rows[-1]["lr"]
        lines.append(f"# learning rate: {first:g} in the first unit, {last:g} in the last")
    return "\n\n" + "\n".join(lines)


def _toml(config: dict[str, Any], keys: Iterable[str] = ()) -> str:
    shown = {k: v for k, v in config.items() if (not keys or k in keys) and v != {"name": OWN}}
    return tomli_w.dumps(_spelt(shown)).strip()


def _spelt(value: Any) -> Any:
    """As TOML can say it: without the keys that are null, and null in a list in words."""
    if isinstance(value, dict):
        return {k: _spelt(v) for k, v in value.items() if v is not None}
    return (
        [NOT_SAID if v is None else _spelt(v) for v in value] if isinstance(value, list) else value
    )


def provenance(study: Study) -> list[tuple[str, list[str]]]:
    """(what, its distinct values over all runs)."""
    runs = [seen.record for seen in study.seen if seen.record]
    rows = [_origin(run) for run in runs]
    keys = dict.fromkeys(key for row in rows for key in row)
    found = [(key, _distinct(row[key] for row in rows if key in row)) for key in keys]
    days = sorted(e["time"][:10] for run in runs for e in read_lines(run.folder / "events.jsonl"))
    trained = [("trained", [" to ".join(dict.fromkeys([days[0], days[-1]]))])] if days else []
    return [*found, *trained, ("this page", [f"regimes {__version__}"])]


def _origin(run: Record) -> dict[str, str]:
    code, machine, world = (run.header.get(k) or {} for k in ("code", "machine", "world"))
    processes, groups = world.get("processes", 1), world.get("groups", 1)
    return {
        "version": f"regimes {code.get('version', '?')}, commit {code.get('commit') or 'unknown'}",
        "digest of the code": str(code.get("digest", "?"))[:12],
        "libraries": ", ".join(f"{n} {machine.get(n, '?')}" for n in ("torch", "numpy", "python")),
        "machine": ", ".join(
            [
                *machine.get("gpus", []),
                f"{machine.get('processor') or 'unknown processor'}",
                f"cores {machine.get('cores', '?')}",
                f"threads {machine.get('threads', '?')}",
                str(machine.get("system", "?")),
            ]
        ),
        "workers": f"{run.config['workers']} on {processes} process{'es' * (processes > 1)}, "
        f"{world.get('device', '?')}" + (f"; one of {groups} such groups" if groups > 1 else ""),
        "command": str(machine.get("command", "?")),
    }


def _distinct(values: Iterable[str], most: int = 5) -> list[str]:
    found = list(dict.fromkeys(values))
    rest = len(found) - most
    return found if rest <= 0 else [*found[:most], f"and {rest} more"]


def redraw(study: Study, network: str) -> list[str]:
    """Commands that draw this page and its parts again."""
    name, link = (shlex.quote(x) for x in (study.place.resolve().name, network))
    commands = [f"regimes report {name} --network {link}", f"regimes cost {name} --network {link}"]
    if not study.place.is_file():
        commands.append(f"regimes detect {name}")
    drawn = not study.unfinished and all(has(run, study.shown) for run in study.runs)
    return [*commands, f"regimes figure curves {name}"] if drawn else commands
