"""``regimes cost --model``: seconds of a step by each method, before anything has been trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from regimes.base.console.stdout import make_console as new_console
from regimes.base.console.tables import Table
from regimes.base.console.units import format_quantity
from regimes.base.errors import ConfigError, is_integer, require
from regimes.cost.advice import tabulate_clocks, write_advice
from regimes.cost.methods import (
    WIDE,
    describe_uncompressed_layers,
    describe_workers,
    parse_methods,
    tabulate_methods,
    tabulate_seconds,
    usual_methods,
)
from regimes.cost.models import MOST_FLOPS, Model, read_model
from regimes.cost.network import FASTEST, Network, format_bandwidth
from regimes.cost.nodes import (
    BETWEEN,
    WITHIN,
    DataParallelJob,
    Priced,
    check_counts,
    memory_of_step,
    parse_seconds,
    read_device,
    read_links,
    require_link,
)
from regimes.cost.nodes import USUAL as USUAL_DEVICE
from regimes.cost.options import JobOptions
from regimes.records import write_output, write_table

SMALLEST = 1e-3  # MiB of a bucket
HALF = 2  # bytes of a number in bfloat16
ITEMS = 10**15  # of one device's step
BANDWIDTHS = np.logspace(6, 12, 121)  # bits/s: 1 Mbit/s to 1 Tbit/s
COMPRESSION = {
    "device": "Compression at the speed of the device's memory, a lower bound",
    "step": "Compression at the speed of the memory that the step implies; of large batches it is "
    "less with --device",
    "assumed": f"Compression at the speed of an {USUAL_DEVICE}'s memory, a lower bound. The "
    "bandwidth below which a method pays depends on your device: give --device",
}
HEADS = (
    *("", "compress", "network", "hidden", "step", "a day", "× dense", "to a loss"),
    "pays below",
)


def make_job(options: JobOptions, algorithm: str = FASTEST) -> DataParallelJob:
    """Make the job that the options describe.

    Raises:
        ConfigError: an option out of its range, or none that gives the seconds of a step.
    """
    require(options.model is not None, "--model", options.model, "a model")
    check_counts(options)
    good = 0 < options.utilisation <= 1
    require(good, "--utilisation", options.utilisation, "a share in (0, 1]")
    good = SMALLEST <= options.bucket_mb < math.inf
    require(good, "--bucket-mb", options.bucket_mb, f"above 0, from {SMALLEST:g}")
    model = read_model(str(options.model))
    if options.flops is not None:
        good = 0 < options.flops <= MOST_FLOPS
        require(good, "--flops", options.flops, f"above 0, up to {MOST_FLOPS:g}")
        model = replace(model, flops=options.flops)
    if options.items is not None:
        good = is_integer(options.items, 1) and options.items <= ITEMS
        require(good, "--items", options.items, f"at least 1, at most {ITEMS:g}")
    _refuse_idle(options, model)
    compute, memory, priced = _device(options, model)
    return DataParallelJob(
        model,
        compute,
        memory,
        options.nodes,
        options.gpus,
        itemsize=WIDE if options.dtype == "float32" else HALF,
        bucket=options.bucket_mb * 2**20,
        algorithm=algorithm,
        priced=priced,
        worker=options.worker,
        **_links(options),
    )


def _refuse_idle(options: JobOptions, model: Model) -> None:
    """Raise ConfigError where an option that was given changes no number."""
    usual = JobOptions()
    timed = options.step is not None
    beside = "beside --step and --device" if options.device else "beside --step without --items"
    for name in ("items", "flops", "utilisation"):
        idle = timed and (options.device is not None or options.items is None)
        if idle and getattr(options, name) != getattr(usual, name):
            raise ConfigError(f"--{name} changes nothing {beside}: leave it out")
    if timed and options.items is not None and not model.counted:
        raise ConfigError(
            f"--items changes nothing beside --step, because the operations of a {model.item} of "
            f"{model.name} are not known: add them, e.g. --flops 8e9, or leave --items out"
        )
    if options.worker is not None and 1 in (options.nodes, options.gpus):
        raise ConfigError(
            "--worker changes nothing with --nodes 1 or --gpus 1: a device and a node are the same "
            "there: leave it out"
        )
    if options.within is not None and options.gpus == 1:
        raise ConfigError("--within changes nothing with --gpus 1: leave it out")
    if options.between is not None and options.nodes == 1:
        raise ConfigError(
            "--between changes nothing with --nodes 1: leave it out, or give --within"
        )
    needed = {"within": options.gpus > 1, "between": options.nodes > 1}
    if options.links and all(getattr(options, x) for x, needs in needed.items() if needs):
        raise ConfigError(
            f"--links {options.links} changes nothing beside the links that are given: leave it out"
        )


def _device(options: JobOptions, model: Model) -> tuple[float, float, Priced]:
    """Seconds of a step's compute, bytes per second of the memory, and the name of the device.

    If a device is given, the memory is its own. If the seconds of a step and its items are given,
    the memory is an A100's, slowed down as the step is. If only the seconds are given, it is an
    A100's, because a step of many items moves far more than the model. It is never less than
    `memory_of_step`.
    """
    chosen = read_device(options.device or USUAL_DEVICE)
    predicted = None
    if options.items is not None:
        predicted = model.step_flops(options.items) / (chosen.flops * options.utilisation)
    if options.step is None:
        if predicted is None:
            raise ConfigError(
                "the seconds of a step are missing: give them, e.g. --step 0.4s, or the "
                f"{model.item}s of one device's step, e.g. --items 8192"
            )
        return predicted, chosen.memory, "device" if options.device else "assumed"
    compute = parse_seconds(options.step)
    if options.device is not None:
        return compute, chosen.memory, "device"
    least = memory_of_step(model.size, compute)
    if predicted is None:
        return compute, max(least, chosen.memory), "assumed"
    return compute, max(least, chosen.memory * predicted / compute), "step"


def _links(options: JobOptions) -> dict[str, Network]:
    """The links of the options; else of the file, else the usual ones.

    Raises:
        ConfigError: the job needs a link that the file does not have.
    """
    usual = {"within": WITHIN, "between": BETWEEN}
    links = {} if options.links is None else read_links(options.links)
    for name in usual:
        text = getattr(options, name)
        if text is not None:
            links[name] = Network.parse(text)
    needed = {"within": options.gpus > 1, "between": options.nodes > 1}
    for name in [name for name in usual if needed[name] and options.links is not None]:
        count = "--gpus 1" if name == "within" else "--nodes 1"
        give = f"give --{name}, e.g. --{name} 10Gbit/s,50us, or {count}"
        require_link(name, links, cast("Path", options.links), give)
    return usual | links


def main(options: JobOptions, algorithm: str = FASTEST, csv: Path | None = None) -> pd.DataFrame:
    """Print the table and the advice, and write the files that are asked for.

    Args:
        csv: file for the numbers in full precision.
    """
    job = make_job(options, algorithm)
    given = options.methods
    methods = usual_methods(job) if given is None else parse_methods(given)
    frame = tabulate_methods(job, methods)
    console, sentence = new_console(highlight=False), write_advice(job, methods, frame)
    # before anything is printed: the pipe may be closed
    if csv:
        write_table(csv, frame)
    if options.json:
        write_output(options.json, _json(options, job, frame, sentence))
    if options.figure:
        from regimes.plotting.bandwidth import save_bandwidth

        title = sentence.partition(":")[0] + f" at {job.link}"
        numbers = tabulate_seconds(job, methods, BANDWIDTHS)
        save_bandwidth(
            options.figure,
            numbers,
            frame,
            float(job.link.bandwidth),
            title,
            _describe_job(job),
        )
    console.print(_describe_job(job), markup=False)
    console.print(_format_table(frame, job).drawn(padding=(0, 0, 0, 1)))
    console.print(tabulate_clocks(job, methods).drawn(word=20, padding=(0, 1, 0, 0)), "", sep="\n")
    for note in (*describe_uncompressed_layers(job, methods), *describe_workers(frame)):
        console.print(f"note: {note}", markup=False)
    console.print(sentence, markup=False)
    return frame


def _describe_job(job: DataParallelJob) -> str:
    """The job in a sentence: model, replicas, links, step.

    It is the first line of the table and the figure's caption.
    """
    model = job.model
    assumed = f" (an {USUAL_DEVICE} is assumed)" if job.priced == "assumed" else ""
    links = f"{job.within} within"
    if job.nodes > 1:
        links = f"{job.between} between {job.nodes} nodes, {links}"
    how = "ring or tree" if job.algorithm == FASTEST else job.algorithm
    how += f" all-reduce in {job.buckets} bucket{'s' * (job.buckets > 1)}"
    return (
        f"{model.name}: {format_quantity(model.size)} parameters in {len(model.layers)} layers; "
        f"{job.replicas} replicas; "
        f"{links}; {1e3 * job.compute:.3g} ms of compute a step{assumed}; {how}"
    )


def _format_table(frame: pd.DataFrame, job: DataParallelJob) -> Table:
    """A table of 80 columns: milliseconds of a step, bytes a day on each node's slow link, of one
    node on a device's."""
    lines: list[Sequence[str]] = []
    for row in frame.to_dict("records"):
        parts = [f"{1e3 * row[name]:.3g}" for name in ("compress", "communicate")]
        lines.append(
            (
                str(row["method"]),
                *parts,
                f"{100 * row['hidden']:.0f} %",
                f"{1e3 * row['seconds']:.4g}",
                format_quantity(row["bytes_per_day"], "B"),
                f"{row['speed_up']:.2f}",
                "-" if math.isnan(row["speed"]) else f"{row['speed']:.2f}",
                "-" if math.isnan(row["break_even"]) else format_bandwidth(row["break_even"]),
            )
        )
    whose = "node" if job.nodes > 1 else "device"
    note = (
        "ms of a step; hidden: share of the network's time that runs during the backward pass; a "
        f"day: sent by each {whose}; to a loss: × dense times the clock. "
        f"{COMPRESSION[job.priced]}"
    )
    return Table(HEADS, lines, note)


def _json(options: JobOptions, job: DataParallelJob, frame: pd.DataFrame, sentence: str) -> str:
    """The job, one object per method and the advice; numbers that are infinite or unknown as
    null."""
    rows = [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        for row in frame.to_dict("records")
    ]
    given: dict[str, Any] = {k: v for k, v in asdict(options).items() if v is not None}
    content = {
        "job": {name: str(v) if isinstance(v, Path) else v for name, v in given.items()},
        "parameters": job.model.size,
        "replicas": job.replicas,
        "compute": job.compute,
        "buckets": job.buckets,
        "methods": rows,
        "advice": sentence,
    }
    return json.dumps(content, indent=1) + "\n"
