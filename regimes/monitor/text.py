"""An epoch, and a run, in words and numbers: what every reporter and ``watch`` show alike."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from regimes.console.tables import Table
from regimes.console.units import human
from regimes.policies.periods import in_words
from regimes.records import NOT_SAID, OWN, not_said, share_of_low

if TYPE_CHECKING:
    from rich.table import Table as Drawn

Row = dict[str, Any]
SHOWN = 8  # epochs in the table
STRAGGLES = 1.3  # times the others' median
DASH = "-"
SHORT = {"bits per byte": "bits/byte"}
NOTES = {  # by column
    "floats": "sent so far (the paper's count)",
    "of low": "over low\nthroughout",
    "at low": "layers at low compression",
    "period": "steps between\nsynchronisations",
    "rounds": "synchronisations",
}


def metric_text(header: Row, value: float | int | None) -> tuple[str, str]:
    """(short name, value): accuracy as a percentage, any other metric as it is, bits per byte in
    fewer letters."""
    if header["metric"] == "accuracy":
        return "acc %", format_value(None if value is None else 100 * value, ".1f")
    name = str(header["metric"])
    return SHORT.get(name, name), format_value(value, ".4g")


def format_value(value: float | int | None, form: str) -> str:
    """A number; a dash for what was not logged."""
    return DASH if value is None else f"{value:{form}}"


def at_low(header: Row, row: Row) -> tuple[int, int]:
    """(compressed layers at low compression, compressed layers) in an epoch."""
    pairs = zip(header["layers"], row["layers"]["level"], strict=True)
    levels = [level for layer, level in pairs if layer["compressed"]]
    return levels.count("low"), len(levels)


def headline(header: Row) -> str:
    """Name, seed, model, data, workers, compressor and levels in one line, and of local steps
    when workers synchronise."""
    c, world = header["config"], header["world"]
    levels = ", ".join(f"{name} {value}" for name, value in c["levels"].items())
    data = f"data {NOT_SAID}" if c["data"]["name"] == OWN else c["data"]["name"]
    plural = "" if world["processes"] == 1 else "es"
    rule = c.get("sync_policy")
    late = f", synchronised {in_words(rule, c.get('sync_levels') or {})}" if rule else ""
    return (
        f"{c['name']} (seed {c['seed']}): {c['model']['name']}, {data}, "
        f"{world['workers']} workers on {world['processes']} process{plural}, "
        f"{c['compressor']['name']} {levels}".rstrip()
        + late
    )


def not_said_text(header: Row) -> str:
    """What the record of a user's own training does not say, in one line; empty if nothing."""
    missing = not_said(header)
    return f"{NOT_SAID}: {', '.join(missing)}" if missing else ""


def straggler(processes: Row) -> str:
    """A sentence on the process that holds up the others; none where nothing stands out.

    Args:
        processes: seconds of a unit by name, one per process; empty if there is one process.
    """
    spent = processes.get("compute", [])
    if len(spent) < 2:
        return ""
    slowest = max(range(len(spent)), key=spent.__getitem__)
    usual = median([*spent[:slowest], *spent[slowest + 1 :]])
    if spent[slowest] < STRAGGLES * usual or spent[slowest] - usual < 1:
        return ""
    return (
        f"process {slowest} has computed for {spent[slowest]:.1f} s in the last unit, the others "
        f"for {usual:.1f} s: they wait for it"
    )


def cells(header: Row, rows: Sequence[Row], seconds: float | None) -> dict[str, str]:
    """The last of ``rows`` as text, one entry per column of the table."""
    row, of_low = rows[-1], share_of_low(header, rows)
    low, layers = at_low(header, row)
    has_low = "low" in header["config"]["levels"] or not row.get("sync", {}).get("level")
    name, value = metric_text(header, row["metric"])
    return {
        **_place(header, row),
        "lr": f"{row['lr']:.3g}",
        "train loss": format_value(row["train_loss"], ".3f"),
        "test loss": format_value(row["test_loss"], ".3f"),
        **({} if name == "loss" else {name: value}),  # the test loss, where no metric has a name
        "floats": human(sum(r["floats"] for r in rows)),
        **({"of low": format_value(of_low, ".2f"), "at low": f"{low}/{layers}"} if has_low else {}),
        **_rounds(row, has_low),
        "s": format_value(seconds, ".1f"),
    }


def _rounds(row: Row, beside_low: bool) -> dict[str, str]:
    """Of local steps, the period and, where the table has room, how often all have met."""
    sync = row.get("sync", {})
    if not sync.get("level"):
        return {}
    found = {"period": str(sync["period"])}
    return found if beside_low else found | {"rounds": format_value(sync.get("rounds"), "d")}


def logged_text(row: Row) -> str:
    """What else a user's own training has logged, in one line; empty if nothing."""
    return ", ".join(
        f"{name} {format_value(v, '.4g')}" for name, v in row.get("logged", {}).items()
    )


def _place(header: Row, row: Row) -> dict[str, str]:
    """The epoch, from 0 as in the record and in ``decay_epochs``; of units, the steps done."""
    if header["config"].get("unit_steps"):
        return {"step": str(row["unit"]["stop"])}
    return {"epoch": str(row["epoch"])}


def epoch_table(header: Row, rows: Sequence[Row], seconds: dict[int, float]) -> Drawn:
    """The last epochs: fits 80 columns."""
    from rich import box

    lines = [
        cells(header, rows[: i + 1], seconds.get(rows[i]["epoch"]))
        for i in range(max(0, len(rows) - SHOWN), len(rows))
    ]
    said = "; ".join(f"{name}: {words}" for name, words in NOTES.items() if name in lines[-1])
    note = f"{said}; {'units' if header['config'].get('unit_steps') else 'epochs'} count from 0"
    table = Table(tuple(lines[-1]), [tuple(line.values()) for line in lines], note, texts=0)
    return table.drawn(least=5, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
