"""An epoch and a run as text, shared by reporters, ``watch`` and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich import box

from regimes.base.config import as_level
from regimes.base.console.tables import FoldingTable, Table
from regimes.base.console.units import format_quantity
from regimes.policies.schedules import in_words
from regimes.records import NOT_RECORDED, OWN, Header, Row, Sent, unknown_fields
from regimes.records.schema import is_hooked

EPOCHS = 8  # in the table
STRAGGLES = 1.3  # times the median of the other processes
DASH, NOTHING = "-", Sent()
SHORT = {"bits per byte": "bits/byte"}
NOTES = {  # by column
    "floats": "sent so far (the paper's count)",
    "MB": "sent so far by a process",
    "of dense": "share of what\nno compression would send",
    "of low": "share of\nlow's floats",
    "at low": "layers at low compression",
    "period": "steps between\nsynchronisations",
    "rounds": "synchronisations",
}


def metric_text(header: Header, value: float | None) -> tuple[str, str]:
    """Write (short name, value) of the metric: accuracy is a percentage."""
    name = header["metric"]
    if name == "accuracy":
        return "acc %", _format_value(None if value is None else 100 * value, ".1f")
    return SHORT.get(name, name), _format_value(value, ".4g")


def _format_value(value: float | None, form: str) -> str:
    """A number; a dash if it was not logged."""
    return DASH if value is None else f"{value:{form}}"


def at_low(header: Header, row: Row) -> tuple[int, int]:
    """Count (compressed layers at low compression, compressed layers) in an epoch."""
    pairs = zip(header["layers"], row["layers"]["level"], strict=True)
    levels = [level for layer, level in pairs if layer["compressed"]]
    return levels.count("low"), len(levels)


def describe_run(header: Header) -> str:
    """Name the schedule, seed, model, data, workers, compressor, levels and, of local steps, the
    rule."""
    c, world = header["config"], header["world"]
    levels = ", ".join(f"{name} {as_level(value)}" for name, value in c["levels"].items())
    data = f"data {NOT_RECORDED}" if c["data"]["name"] == OWN else c["data"]["name"]
    what = "nodes" if c.get("nodes") else "replicas"
    replicas = f" in {what} of {world['shards']}" if world.get("shards", 1) > 1 else ""
    plural, rule = "" if world["processes"] == 1 else "es", c.get("sync_policy")
    sync = f", synchronised {in_words(rule, c.get('sync_levels') or {})}" if rule else ""
    return (
        f"{c['name']} (seed {c['seed']}): {c['model']['name']}, {data}, "
        f"{world['workers']} workers on {world['processes']} process{plural}{replicas}, "
        f"{c['compressor']['name']} {levels}".rstrip()
    ) + sync


def unknown_text(header: Header) -> str:
    """List the fields that a hook's record lacks, in one line; empty if none."""
    missing = unknown_fields(header)
    return f"{NOT_RECORDED}: {', '.join(missing)}" if missing else ""


def describe_straggler(processes: Mapping[str, Sequence[float]]) -> str:
    """Say in a sentence that a process is much slower than the others; empty if none is.

    Args:
        processes: seconds of a unit by name, one per process; empty if there is one process.
    """
    seconds = processes.get("compute", [])
    if len(seconds) < 2:
        return ""
    *others, most = sorted(seconds)
    usual = median(others)
    if most < STRAGGLES * usual or most - usual < 1:
        return ""
    return (
        f"process {seconds.index(most)} has computed for {most:.1f} s in the last unit, the others "
        f"for {usual:.1f} s: they wait for it"
    )


def format_row(header: Header, row: Row, seconds: float | None, sent: Sent) -> dict[str, str]:
    """Write a row as text by column. Epochs count from 0 as in the record; for units, the column is
    the steps done.

    Args:
        sent: up to the row, itself included.
    """
    by_steps = header["config"].get("unit_steps")
    low, layers = at_low(header, row)
    sync = row.get("sync", {})
    has_low = "low" in header["config"]["levels"] or not sync.get("level")
    name, value = metric_text(header, row["metric"])
    texts = {
        "step" if by_steps else "epoch": str(row["unit"]["stop"] if by_steps else row["epoch"]),
        "lr": f"{row['lr']:.3g}",
        "train loss": _format_value(row["train_loss"], ".3f"),
        "test loss": _format_value(row["test_loss"], ".3f"),
    }
    if name != "loss":  # else it is the test loss
        texts[name] = value
    if is_hooked(header):  # the count of the paper is for comparisons of runs
        texts |= {
            "MB": _format_megabytes(sent),
            "of dense": _format_value(sent.of_dense(header), ".2f"),
        }
    else:
        texts["floats"] = format_quantity(sent.floats)
    if has_low:
        share = {} if is_hooked(header) else {"of low": _format_value(sent.of_low(header), ".2f")}
        texts |= {**share, "at low": f"{low}/{layers}"}
    if sync.get("level"):
        texts["period"] = str(sync["period"])
        if not has_low:  # with the columns of low, 80 characters have no room for it
            texts["rounds"] = _format_value(sync.get("rounds"), "d")
    return texts | {"s": _format_value(seconds, ".1f")}


def _format_megabytes(sent: Sent) -> str:
    """What was sent, in megabytes of three digits or more."""
    megabytes = sent.bytes / 1e6
    return f"{megabytes:.3g}" if megabytes < 999.5 else f"{megabytes:,.0f}"  # rounded to 1000


def logged_text(row: Row) -> str:
    """Write the further values that a user's training has logged, in one line."""
    values = row.get("logged", {}).items()
    return ", ".join(f"{name} {_format_value(value, '.4g')}" for name, value in values)


def epoch_table(
    header: Header, rows: Sequence[Row], seconds: Mapping[int, float], before: Sent = NOTHING
) -> FoldingTable:
    """Make a table of the last epochs, in 80 columns.

    Args:
        before: what was sent before the first of ``rows``.
    """
    sent, lines = before, []
    for i, row in enumerate(rows):
        sent = sent.after(row)
        if i >= len(rows) - EPOCHS:
            lines.append(format_row(header, row, seconds.get(row["epoch"]), sent))
    notes = "; ".join(f"{name}: {words}" for name, words in NOTES.items() if name in lines[-1])
    note = f"{notes}; {'units' if header['config'].get('unit_steps') else 'epochs'} count from 0"
    table = Table(tuple(lines[-1]), [tuple(line.values()) for line in lines], note, texts=0)
    return table.drawn(least=5, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
