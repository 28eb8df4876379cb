"""``regimes cost --model``: seconds of a step by each method, before anything has been trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regimes.console.stdout import console as new_console
from regimes.console.tables import Table
from regimes.console.units import human
from regimes.cost.job import HALF, Job, device, read_links, seconds
from regimes.cost.methods import WIDE, advice, curves, parse, table, usual
from regimes.cost.models import read
from regimes.cost.network import FASTEST, Network, spell
from regimes.cost.options import JobOptions
from regimes.errors import ConfigError, is_whole, require
from regimes.records import write_output, write_table

BANDWIDTHS = np.logspace(6, 12, 121)  # bits/s: 1 Mbit/s to 1 Tbit/s
HEADS = ("", "compress", "network", "hidden", "step", "a day", "× dense", "pays below")


def job(options: JobOptions, algorithm: str = FASTEST) -> Job:
    """The job that the options describe.

    Raises:
        ConfigError: an option out of its range, or none that gives the seconds of a step.
    """
    require(options.model is not None, "--model", options.model, "a model")
    good = 0 < options.utilisation <= 1
    require(good, "--utilisation", options.utilisation, "a share in (0, 1]")
    require(options.bucket_mb > 0, "--bucket-mb", options.bucket_mb, "above 0")
    model, chosen = read(str(options.model)), device(options.device)
    if options.flops is not None:
        require(options.flops > 0, "--flops", options.flops, "above 0")
        model = replace(model, flops=options.flops)
    if options.step is not None:
        compute = seconds(options.step)
    elif options.items is None:
        raise ConfigError(
            "the seconds of a step are missing: give them, e.g. --step 0.4s, or the "
            f"{model.item}s of one device's step, e.g. --items 8192"
        )
    else:
        require(is_whole(options.items, 1), "--items", options.items, "at least 1")
        compute = model.step_flops(options.items) / (chosen.flops * options.utilisation)
    links = {name: Network.parse(getattr(options, name)) for name in ("within", "between")}
    if options.links is not None:
        links |= read_links(options.links)
    return Job(
        model,
        compute,
        chosen.memory,
        options.nodes,
        options.gpus,
        options.shards,
        itemsize=WIDE if options.dtype == "float32" else HALF,
        bucket=options.bucket_mb * 2**20,
        algorithm=algorithm,
        **links,
    )


def main(options: JobOptions, algorithm: str = FASTEST, csv: Path | None = None) -> pd.DataFrame:
    """Print the table and the advice, and write the files that are asked for.

    Args:
        csv: file for the numbers in full precision.
    """
    planned = job(options, algorithm)
    methods = [parse(text) for text in options.methods] or usual(planned)
    frame = table(planned, methods)
    console, sentence = new_console(highlight=False), advice(planned, frame)
    console.print(about(planned), markup=False)
    console.print(drawn(frame, planned.nodes).drawn(padding=(0, 0, 0, 1)))
    console.print(sentence, markup=False)
    if csv:
        write_table(csv, frame)
    if options.json:
        write_output(options.json, _json(options, planned, frame, sentence))
    if options.figure:
        from regimes.plotting.bandwidth import save

        fastest = frame["method"].iloc[int(frame["seconds"].argmin())]
        title = f"{fastest}: the fewest seconds of a step at {planned.link}"
        numbers = curves(planned, methods, BANDWIDTHS)
        save(options.figure, numbers, frame, float(planned.link.bandwidth), title, about(planned))
    return frame


def about(planned: Job) -> str:
    """The job in a sentence: model, replicas, links, step.

    It is the first line of the table and the figure's caption.
    """
    model, spread = planned.model, ""
    if planned.shards > 1:
        spread = f" of {planned.shards} devices each"
    links = f"{planned.within} within"
    if planned.nodes > 1:
        links = f"{planned.between} between {planned.nodes} nodes, {links}"
    how = "ring or tree" if planned.algorithm == FASTEST else planned.algorithm
    return (
        f"{model.name}: {human(model.size)} parameters in {len(model.layers)} layers; "
        f"{planned.replicas} replicas{spread}; {links}; {1e3 * planned.compute:.3g} ms of compute "
        f"a step; {how} all-reduce in {planned.buckets} "
        f"bucket{'s' * (planned.buckets > 1)}"
    )


def drawn(frame: pd.DataFrame, nodes: int) -> Table:
    """A table of 80 columns: milliseconds of a step, bytes a day on each node's slow link.

    Args:
        nodes: with one, the bytes are those of a device's link.
    """
    lines: list[Sequence[str]] = []
    for row in frame.to_dict("records"):
        parts = [f"{1e3 * row[name]:.3g}" for name in ("compress", "communicate")]
        lines.append(
            (
                str(row["method"]),
                *parts,
                f"{100 * row['hidden']:.0f} %",
                f"{1e3 * row['seconds']:.4g}",
                human(row["bytes_per_day"], "B"),
                f"{row['speed_up']:.2f}",
                spell(row["break_even"]),
            )
        )
    whose = "node" if nodes > 1 else "device"
    note = (
        "ms of a step; hidden: share of the network's time that runs during the backward pass; a "
        f"day: sent by each {whose}. Compression at the speed of the memory, a lower bound"
    )
    return Table(HEADS, lines, note)


def _json(options: JobOptions, planned: Job, frame: pd.DataFrame, sentence: str) -> str:
    """The job, one object per method and the advice; numbers that are infinite as null."""
    rows = [
        {name: None if value == np.inf else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]
    given: dict[str, Any] = {k: v for k, v in asdict(options).items() if v is not None}
    content = {
        "job": {name: str(v) if isinstance(v, Path) else v for name, v in given.items()},
        "parameters": planned.model.size,
        "replicas": planned.replicas,
        "compute": planned.compute,
        "buckets": planned.buckets,
        "methods": rows,
        "advice": sentence,
    }
    return json.dumps(content, indent=1) + "\n"
