"""Growth with units, layers and runs: decisions, loading, the report, detectors, figures, watching.

    python -m benchmarks.scale --report benchmarks/scale.json   # six minutes on one core

Records of random numbers, with levels that ACCORDION has chosen: of 62 layers (ResNet-18's
tensors), up to 20,000 units, and 1,000 runs of 24 units and 14 layers (10 schedules, 100 seeds);
10,000 runs are ten copies of these with seeds of their own. Each task runs in a process of its own.
Times are CPU seconds of that process, without its imports; the exponent e is in cost ~ size^e
between the last two sizes. Of a hook's checkpoint: the units, the time to make and pack it, and its
size. Of a PowerSGD step of rank 4 (`benchmarks.large`): the parameters, the time of the second
step, and memory above gradients and residuals, most of which is the update, as large as a gradient;
at W = 2 of one of two processes. Of ``ablate --jobs 2``: runs of smoke, the time by the clock, and
as goal the time in which two cores would be busy for 90 % of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401 -- not of a task's seconds
import pandas  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regimes
from benchmarks.harness import peak_memory
from benchmarks.large import steps
from regimes.cli import html_report as report
from regimes.cli import monitor as watch
from regimes.plotting import offered
from regimes.policies import REGISTRY, Decision, Policy, make_policy
from regimes.policies.controller import Controller, ModelController
from regimes.policies.history import level_costs
from regimes.policies.replay import detect
from regimes.records import RecordWriter, Row, load, write_output
from regimes.records.provenance import processor_name

LAYERS = 62
UNITS, RUNS, SHORT = (24, 1_000, 20_000), (100, 1_000), 24
MOST_RUNS = 10_000  # that are compared and drawn
LEVELS: dict[str, Any] = {"low": 4, "mid": 2, "high": 1}
SCHEDULES = (*LEVELS, "accordion", *(f"accordion-{i}" for i in range(2, 8)))


# -- records of random numbers ---------------------------------------------------------------


def header(name: str, seed: int, units: int, layers: int, **config: Any) -> dict[str, Any]:
    """``run.json`` of a synthetic run."""
    per_layer = {level: [9.0 * rank] * layers for level, rank in {**LEVELS, "dense": 64}.items()}
    return {
        "config": {
            "name": name,
            "seed": seed,
            "epochs": units,
            "workers": 4,
            "batch_size": 8,
            "signal": "update",
            "levels": LEVELS,
            "compressor": {"name": "powersgd"},
            "policy": {"name": "accordion"},
            "data": {"name": "digits"},
            "model": {"name": "vgg7"},
            "optimizer": {"lr": 0.4, "decay_epochs": [units * 5 // 8]},
            **config,
        },
        "layers": [
            {"name": f"layers.{i}.weight", "shape": [64, 64], "compressed": i % 3 != 2}
            for i in range(layers)
        ],
        "world": {"workers": 4, "processes": 1},
        "data": {"digest": "none", "train": 40, "test": 20},
        "metric": "accuracy",
        "steps_per_epoch": 10,
        "per_step": {
            level: {"floats": sum(floats), "bytes": 4 * sum(floats), "layers": floats}
            for level, floats in per_layer.items()
        },
    }


def rows(head: dict[str, Any]) -> Iterator[Row]:
    """Rows with levels that a policy has chosen from random norms."""
    config, layers = head["config"], head["layers"]
    draw = random.Random(f"{config['name']} {config['seed']}")
    controller, done = controller_of(make_policy(config["policy"]), head), list[Any]()
    decay = config["optimizer"]["decay_epochs"][0]
    scale = [draw.uniform(0.5, 2) for _ in layers]
    for unit in range(config["epochs"]):
        levels = controller.decide(done)
        floats = [10 * head["per_step"][x]["layers"][i] for i, x in enumerate(levels.names)]
        row: Any = {
            "epoch": unit,
            "lr": 0.4 if unit < decay else 0.04,
            "next_lr": 0.4 if unit + 1 < decay else 0.04,
            "batch_size": 8,
            "steps": 10,
            "train_loss": draw.uniform(1, 2),
            "test_loss": draw.uniform(1, 2),
            "metric": 1 - draw.uniform(0.2, 0.4) / (1 + unit / 9),
            "floats": sum(floats),
            "bytes": int(4 * sum(floats)),
            "collectives": {
                "calls": {"mean": 20, "gather": 0},
                "bytes": {"mean": int(4 * sum(floats)), "gather": 0},
            },
            "layers": {
                "level": levels.names,
                "floats": floats,
                "bytes": [int(4 * x) for x in floats],
                "why": levels.why,
            },
            "statistics": {"norm:update": [x * draw.uniform(0.3, 1) for x in scale]},
        }
        done.append(row)
        yield row


def controller_of(rule: Policy, head: dict[str, Any]) -> Controller:
    compressed = [i for i, layer in enumerate(head["layers"]) if layer["compressed"]]
    names, costs = [x["name"] for x in head["layers"]], level_costs(head["per_step"], compressed)
    return Controller(rule, names, compressed, "update", costs)


def write(folder: Path, head: dict[str, Any]) -> Path:
    """A record; its lines are not forced to the disk one by one."""
    RecordWriter.create(folder, head).close()
    (folder / "chain.jsonl").unlink()
    lines, clocks = [], []
    for row in rows(head):
        lines.append(json.dumps(row) + "\n")
        seconds = {"compute": 1.0, "compress": 0.1, "communicate": 0.2, "evaluate": 0.3}
        clocks.append(json.dumps({"epoch": row["epoch"], **seconds, "instruments": 0.1}) + "\n")
    (folder / "epochs.jsonl").write_text("".join(lines))
    (folder / "seconds.jsonl").write_text("".join(clocks))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": "2026-01-01T00:00:00", "event": "end"}) + "\n")
    return folder


def write_many(folder: Path, count: int) -> Path:
    """Runs of ten schedules."""
    for i in range(count):
        name, seed = SCHEDULES[i % len(SCHEDULES)], i // len(SCHEDULES)
        own = {"name": "static", "level": name} if name in LEVELS else {"name": "accordion"}
        if name not in LEVELS:
            own |= {"interval": 2, "eta": 0.3 + 0.05 * SCHEDULES.index(name)}
        write(folder / name / f"seed-{seed}", header(name, seed, SHORT, 14, policy=own))
    return folder


def write_copies(folder: Path, count: int) -> Path:
    """As many runs as ``count``: copies of those in a folder, with seeds of their own."""
    runs = [*folder.glob("*/seed-*")]
    for i in range(count // len(runs) - 1):
        for run in runs:
            head = json.loads((run / "run.json").read_text())
            head["config"]["seed"] += (i + 1) * len(runs)
            copy = run.with_name(f"seed-{head['config']['seed']}")
            shutil.copytree(run, copy, copy_function=os.link)  # their rows are the same files
            (copy / "run.json").unlink()
            (copy / "run.json").write_text(json.dumps(head))
    return folder


# -- what is measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """One measurement.

    Attributes:
        size: units or runs.
        seconds: of CPU.
        megabytes: that the process grew by, at most; 0 where it is not asked.
        most: the goal, in seconds; None where there is none at this size.
    """

    task: str
    size: int
    seconds: float
    megabytes: float = 0.0
    most: float | None = None


def decisions(size: int) -> list[Cost]:
    """The mean of 20 decisions after so many units, by each policy and by a stranger's."""
    head = header("accordion", 0, 40, LAYERS)
    past, draw = list(rows(head)), random.Random(0)
    for row in past:  # what other policies read
        for level, lost in {"low": 0.2, "mid": 0.4, "high": 0.6}.items():
            errors = [lost * draw.uniform(0.5, 1.5) for _ in head["layers"]]
            row["statistics"][f"error:{level}"] = [*errors]
        row["model"] = {"msdr": draw.uniform(0.5, 1)}
    long = [past[i % len(past)] for i in range(size)]
    found = []
    for name, rule in rules().items():
        whole = name in WHOLE
        controller = (
            ModelController(rule, "update", WHOLE[name]) if whole else controller_of(rule, head)
        )
        done = list(long)
        controller.decide(done)
        gc.collect()  # or one of all 20,000 units, 0.14 s, falls to whichever policy is timed then
        began = time.process_time()
        for more in past[:20]:
            done.append(more)
            controller.decide(done)
        found.append(Cost(f"decide: {name}", size, (time.process_time() - began) / 20, 0, 3e-3))
    return found


SYNC = dict.fromkeys(("post-local", "qsr"), "sync")
WHOLE = {"accordion-batch": "batch", "smith": "batch", **SYNC}
FIELDS: dict[str, dict[str, Any]] = {
    "windows": {"windows": [[0, 6]]},
    "by-layer": {"groups": {"layers.1*": {"name": "accordion"}}},
    "qsr": {"alpha": 0.1},
}


@dataclass(frozen=True)
class Stranger:
    """A policy as a user writes it: it reads a layer's last two norms out of the plain history."""

    needs = ("norm",)
    names = ("low", "high")

    def decide(self, history: Any, layers: Any) -> list[Decision]:
        if len(history) < 2:
            return [Decision("low")] * len(layers)
        pairs = ((past.value("norm", i) for past in history[-2:]) for i in range(len(layers)))
        return [Decision("low" if a > b else "high") for a, b in pairs]


def rules() -> dict[str, Policy]:
    known = {name: make_policy({"name": name, **FIELDS.get(name, {})}) for name in sorted(REGISTRY)}
    return {**known, "a user's own": Stranger()}


def refreshed(folder: Path) -> float:
    """Seconds of a refresh of ``watch`` after one more row, the mean of five."""
    taken = []
    for _ in range(6):
        for name in ("epochs.jsonl", "seconds.jsonl"):
            with (folder / name).open("rb+") as file:
                file.seek(-(2**16), io.SEEK_END)
                row = json.loads(file.read().splitlines()[-1])
                file.write((json.dumps({**row, "epoch": row["epoch"] + 1}) + "\n").encode())
        began = time.process_time()
        watch._one(folder)
        taken.append(time.process_time() - began)
    return statistics.fmean(taken[1:])


def task(name: str, folder: Path) -> tuple[float, float]:
    """CPU seconds of one task, and megabytes that it has added."""
    before = peak_memory()
    if name.startswith("hook checkpoint"):
        return hook_checkpoint(folder, int(name.split()[-1]))
    seconds = timed(name, folder)
    return seconds, peak_memory() - before


def timed(name: str, folder: Path) -> float:
    """CPU seconds of one task."""
    began = time.process_time()
    if name == "json.loads":
        with (folder / "epochs.jsonl").open("rb") as file:
            kept = [json.loads(line) for line in file]
        assert kept
    elif name == "load":
        load(folder)
    elif name == "load, table of layers":
        assert len(load(folder).layers)
    elif name == "report":
        report.write_report(folder, "10Gbit/s,50us", folder.parent / "report.html")
    elif name == "detect":
        detect.main([folder], [], None)
    elif name == "figure curves":
        offered.begin_figure("curves", [str(folder), "--out", str(folder.parent)])
    elif name == "compare":
        assert len(regimes.compare(folder))
    elif name == "plot":
        assert regimes.plot(folder).axes
    elif name == "watch, a refresh":
        return refreshed(folder)
    elif name == "watch, a refresh of the folder":
        watch._many(folder, 40)
        began = time.process_time()
        watch._many(folder, 40)
    return time.process_time() - began


def hook_checkpoint(folder: Path, units: int) -> tuple[float, float]:
    """Seconds and megabytes of a recorded job's checkpoint after so many units."""
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    hook = regimes.attach(
        model,
        policy="accordion",
        record=folder / str(units),
        compressor=regimes.PowerSGD(rank={"low": 4, "high": 1}),
    )
    for _ in range(2):  # the record opens with the first unit, the second is open
        model(torch.ones(2, 64)).sum().backward()
        hook.epoch_end(lr=0.1)
    assert hook.recorder is not None
    first = hook.rows[-1]
    for unit in range(len(hook.rows), units):  # as units end, without their steps
        hook.rows.append({**first, "epoch": unit, "unit": {"first": unit, "stop": unit + 1}})
        hook.recorder.write_pending()
        hook.recorder.add_row(hook.rows[-1], {"compute": 1.0}, {})
    began, buffer = time.process_time(), io.BytesIO()
    torch.save(hook.state_dict(), buffer)
    taken = time.process_time() - began
    hook.close()
    dist.destroy_process_group()
    return taken, len(buffer.getvalue()) / 2**20


BUSY = 0.9
AT_ONCE = 20  # runs of ``ablate --jobs 2``
CHECKPOINTS = (20, 2_000, 20_000)
GOALS = {  # seconds at the largest size, at the one before
    "json.loads": (None, None),
    "load": (2.5, None),
    "load, table of layers": (None, None),
    "watch, a refresh": (0.02, 0.02),
    "detect": (None, None),
    "report": (60, 10),
}
OF_MANY = {
    "report": (25, None),
    "detect": (20, None),
    "figure curves": (8, None),
    "compare": (0.5, None),
    "plot": (0.5, None),
    "watch, a refresh of the folder": (None, None),
}


def alone(name: str, folder: Path, size: int, most: float | None) -> Cost:
    """A task in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--task", name, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, megabytes = map(float, done.stdout.splitlines()[-1].split())
    print(f"{name}, {size}: {seconds:.3g} s", flush=True)
    return Cost(name, size, seconds, megabytes, most)


def two_at_a_time() -> Cost:
    """``ablate --jobs 2``, from its start to its table."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    with tempfile.TemporaryDirectory() as place:
        grid = Path(place, "grid.toml")
        grid.write_text('base = "smoke"\n[schedules]\nlow.policy = {name="static", level="low"}\n')
        command = [sys.executable, "-m", "regimes", "ablate", str(grid), "--jobs", "2"]
        command += ["--seeds", str(AT_ONCE), "--out", str(Path(place, "runs"))]
        before, began = spent(), time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken = time.monotonic() - began
    return Cost("ablate --jobs 2", AT_ONCE, taken, most=(spent() - before) / 2 / BUSY)


def measure() -> list[Cost]:
    costs = [cost for size in UNITS for cost in decisions(size)]
    with tempfile.TemporaryDirectory() as place:
        for i, size in enumerate((20_000, 2_000)):
            folder = Path(place, "one", str(size), "run")
            write(folder, header("accordion", 0, size, LAYERS))
            for name, goals in GOALS.items():
                if name == "watch, a refresh":  # of a run that goes on
                    head = json.loads((folder / "run.json").read_text())
                    head["config"]["epochs"] = 2 * size
                    (folder / "run.json").write_text(json.dumps(head))
                costs.append(alone(name, folder, size, goals[i]))
        for i, size in enumerate(reversed(RUNS)):
            folder = write_many(Path(place, str(size), "runs"), size)
            for name, goals in OF_MANY.items():
                many = alone(name, folder, size, goals[i])
                costs.append(replace(many, task=f"{name}, many runs"))
            if size == max(RUNS):
                write_copies(folder, MOST_RUNS)
                for name in ("compare", "plot"):
                    many = alone(name, folder, MOST_RUNS, 5.0)
                    costs.append(replace(many, task=f"{name}, many runs"))
        for units in CHECKPOINTS:
            one = alone(f"hook checkpoint, units: {units}", Path(place), units, None)
            costs.append(replace(one, task="hook checkpoint"))
    costs.append(two_at_a_time())
    for name, workers, size, seconds, megabytes in steps():
        costs.append(Cost(f"PowerSGD step, W = {workers}: {name}", size, seconds, megabytes))
    return costs


# -- the page --------------------------------------------------------------------------------


def page(costs: list[Cost]) -> str:
    machine = f"{processor_name()}, one core, Python {platform.python_version()}"
    lines = ["# Scale", "", "`python -m benchmarks.scale --report benchmarks/scale.json`", ""]
    lines += [f"{machine}.", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    by_task: dict[str, list[Cost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.size):
        by_task.setdefault(cost.task, []).append(cost)
    lines += ["| task | size: ms (MB) | e | goal, ms | |", "|---|---|---:|---:|---|"]
    for task, found in by_task.items():
        e = f"{exponent(*found[-2:]):.2f}" if len(found) > 1 else ""
        sizes = "; ".join(
            f"{x.size:,}: {1e3 * x.seconds:.3g}" + (f" ({x.megabytes:.3g})" if x.megabytes else "")
            for x in found
        )
        goals = [x for x in found if x.most is not None]
        goal = ", ".join(dict.fromkeys(f"{1e3 * (x.most or 0):.3g}" for x in goals))
        reached = all(x.seconds <= (x.most or 0) for x in goals)
        verdict = ("reached" if reached else "missed") if goals else ""
        lines.append(f"| {task} | {sizes} | {e} | {goal} | {verdict} |")
    return "\n".join([*lines, ""])


def exponent(small: Cost, large: Cost) -> float:
    return math.log(large.seconds / small.seconds) / math.log(large.size / small.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--report", type=Path, default=Path("benchmarks/scale.json"))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        with contextlib.redirect_stdout(io.StringIO()):
            seconds, megabytes = task(arguments.task, arguments.folder)
        print(seconds, megabytes)
        return
    costs = measure()
    write_output(arguments.report, json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    write_output(arguments.report.with_suffix(".md"), page(costs))


if __name__ == "__main__":
    main()
