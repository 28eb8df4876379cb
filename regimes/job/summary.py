"""What a job says of itself as it ends, in a few lines: what was sent, and what was waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from regimes.base.console.units import format_quantity
from regimes.records import Header, Row, describe_uncompressed_layers, sum_sent


def job_summary(
    header: Header, rows: Sequence[Row], seconds: Mapping[str, float], folder: Path | None
) -> str:
    """Write what a job has sent, and waited for, in a few lines for a terminal.

    Args:
        rows: one or more.
        seconds: of the units that this start of the job has trained, by name (``job.clock``);
            empty: not known.
        folder: of the record, if there is one.
    """
    total, world = sum_sent(rows), header["world"]
    share = total.of_dense(header)
    of_dense = "" if share is None else f", {share:.2f} of what no compression would send"
    divided = "node" if header["config"].get("nodes") else "replica"
    whole = "process" if world.get("shards", 1) == 1 else divided
    lines = {"sent": f"{format_quantity(total.bytes, 'B')} by each {whole}{of_dense}"}
    if spent := sum(seconds.values()):
        waited, pressed = seconds.get("communicate", 0.0), seconds.get("compress", 0.0)
        text = f"{_format_seconds(waited)} of {_format_seconds(spent)} for other processes"
        lines["waited"] = f"{text}, {_format_seconds(pressed)} for compression"
    levels = Counter(rows[-1]["layers"]["level"])
    lines["levels"] = ", ".join(f"{name} for {n}" for name, n in levels.items()) + " of the layers"
    if sentences := describe_uncompressed_layers(header):
        lines["whole"] = f"\n{' ' * 10}".join(sentences)
    if folder is not None:
        if doubt := _doubt_result(header, rows):
            lines["result"] = doubt
        lines["record"] = f"{folder} (regimes watch, regimes report)"
    units = f"{len(rows)} unit{'s' * (len(rows) != 1)}"
    head = f"regimes: {total.steps} steps in {units}, {world['processes']} processes"
    return "\n".join([head, *(f"  {name:8}{text}" for name, text in lines.items())])


def _doubt_result(header: Header, rows: Sequence[Row]) -> str:
    """What is strange about the results of a recorded job; empty if nothing is."""
    metric = header["metric"]
    logged = dict.fromkeys(name for row in rows for name in row.get("logged", {}))
    values = [row["metric"] for row in rows if row["metric"] is not None]
    if logged and not values:
        name = "test_loss" if metric == "loss" else metric
        return f"none: {', '.join(logged)} was logged, and {name} is the record's metric: log it so"
    if metric == "accuracy" and max(values, default=0.0) > 1:
        return f"accuracy {max(values):g}: log a share of one, which figures write in per cent"
    return ""


def _format_seconds(seconds: float) -> str:
    """Seconds with three digits, or hours and minutes."""
    if seconds < 600:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
