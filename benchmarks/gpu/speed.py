"""Part 2: milliseconds of a step, of CIFAR-10's ResNet-18 with 4 workers x 128 images and of
GPT-2 124M with 4 workers x 4 texts of 1,024 random tokens, against peers.

Ours is the trainer as users run it, data, augmentation and instruments included: the median over
units after the first two. Its workers have a pass each for TopK and 4 bits, all else one pass over
the union. Kernels and optimisers are the peers': ``deterministic`` is off. Rows "as graphs"
are the trainer with ``graphs``, which a CPU has not.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regimes
from benchmarks.gpu import peers
from benchmarks.gpu.curvature import largest
from benchmarks.gpu.place import Place, task
from benchmarks.gpu.sizes import UNITS, size, text_size
from benchmarks.gpu.timing import Timer
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError

WAYS = {  # compressor, level
    "dense": ("powersgd", "dense"),
    "powersgd 2": ("powersgd", 2),
    "powersgd 4": ("powersgd", 4),
    "topk 10 %": ("topk", 10),
    "4 bits": ("quantised-all-reduce", 4),
}
IMAGES = ("dense", "powersgd 2", "topk 10 %", "4 bits")
TEXTS = ("dense", "powersgd 4", "4 bits")
GRAPHS = 4  # vectors of levels
HALF = "bfloat16"


class Reporting:
    """A timer as a reporter of the trainer."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None:
        self.timer.step(done, steps)

    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None: ...
    def stop(self, message: str) -> None: ...


def config(place: Place, way: str, precision: str, graphs: int | None = None) -> RunConfig:
    """The preset of the paper's network, for a few units."""
    compressor, level = WAYS[way]
    s = size(place)
    fields = common(place, precision, s.steps)
    words = [
        *(f"{field}={json.dumps(value)}" for field, value in fields.items()),
        f"graphs={'none' if graphs is None else graphs}",
        f"batch_size={s.batch}",
        "data={name='folder', path='images', augment=true}",
        f"model.name={s.model}",
        f"model.width={s.width or 'none'}",
        "optimizer={lr=0.01, schedule='constant'}",
        "optimizer.warmup_from=none",
        "channels_last=true",
        "policy=static",
        f"compressor={compressor}",
    ]
    levels = (
        ["policy.level=dense"]
        if level == "dense"
        else [f"levels={{high={level}}}", "policy.level=high"]
    )
    return override(regimes.get_preset("paper-resnet18-cifar10"), [*words, *levels])


def common(place: Place, precision: str, steps: int) -> dict[str, Any]:
    """Settings of each row: the peers'."""
    return {
        "device": place.device,
        "precision": precision,
        "deterministic": False,
        "steps": UNITS * steps,
        "unit_steps": steps,
        "evaluate_every": 1000,
        "checkpoint_every": 1000,
    }


def ours(place: Place, name: str, train: Callable[[Path, Reporting], object]) -> dict[str, Any]:
    """The trainer: milliseconds, counts, memory."""
    timer = Timer(place)
    folder = place.out / "speed" / name.replace(" ", "-").replace("%", "")
    shutil.rmtree(folder, ignore_errors=True)
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    train(folder, Reporting(timer))
    return timer.row()


def on_images(place: Place, way: str, precision: str, graphs: int | None = None) -> dict[str, Any]:
    s = size(place)
    data = task(place, 4 * s.batch * s.steps, s.side)

    def train(folder: Path, reporting: Reporting) -> None:
        settings = config(place, way, precision, graphs)
        regimes.run(settings, folder, reporters=[reporting], task=data)

    return ours(place, f"{way}-{precision}-{graphs}", train)


def on_text(place: Place, way: str, precision: str, graphs: int | None = None) -> dict[str, Any]:
    (compressor, level), s = WAYS[way], text_size(place)

    def train(folder: Path, reporting: Reporting) -> None:
        regimes.simulate(
            s.network,
            s.tokens(4 * s.batch * s.steps),
            s.tokens(4),
            out=folder,
            workers=4,
            batch_size=s.batch,
            compressor=compressor,
            levels={} if level == "dense" else {"high": level},
            policy={"name": "static", "level": level if level == "dense" else "high"},
            optimizer={"name": "adamw", "lr": 1e-4},
            set={**common(place, precision, s.steps), "graphs": graphs},
            reporters=[reporting],
        )

    return ours(place, f"gpt2-{way}-{precision}-{graphs}", train)


def as_graphs(place: Place, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, or that a CPU has none; a wrong setting of it is seen in any case."""
    try:
        return measure()
    except ConfigError as error:
        if place.gpu or "none on a CPU" not in str(error):
            raise
        return {"detail": f"not measured: {error}"}


def ceilings(place: Place) -> dict[str, Any]:
    """What the device can do: bytes read and written by a copy, and a product in bfloat16."""
    many, side = (2**30, 8192) if place.large else (2**20, 128)
    source = torch.empty(many, dtype=torch.float32, device=place.device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    copy = best(place, lambda: target.copy_(source))
    product = best(place, lambda: a @ b)
    return {
        "GB_per_s": round(2 * 4 * many / copy / 1e9, 1),
        "TFLOP_per_s": round(2 * side**3 / product / 1e12, 1),
    }


def best(place: Place, work: Callable[[], object]) -> float:
    """The shortest of 10 times, in seconds."""
    seconds = []
    for _ in range(10):
        if place.gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if place.gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def eigenvalue(place: Place, backend: str) -> dict[str, Any]:
    """Seconds for the largest Hessian eigenvalue on 512 images, by us or by PyHessian; the first
    of three is not counted."""
    s, (images, side) = size(place), (512, 32) if place.large else (16, 8)
    runs = [
        largest(place.device, backend, s.model, s.width, images, side)
        for _ in range(3 if place.large else 2)
    ]
    seconds = [run["s"] for run in runs[1:]]
    return {
        "value": runs[0]["value"],
        "products": runs[0]["products"],
        "n": len(seconds),
        "s": round(statistics.median(seconds), 3),
    }


Rows = dict[str, Callable[[], dict[str, Any]]]


def rows(place: Place) -> Rows:
    """What is measured, in order of value."""
    found: Rows = {"ceilings": lambda: ceilings(place)}
    for name in ("plain loop", "DDP", "DDP, torch's fp16", "DDP, torch's PowerSGD 2"):
        found[f"{name}, {HALF}"] = lambda n=name: peers.peer(place, n, HALF)
    for way in IMAGES:
        found[f"{way}, {HALF}"] = lambda w=way: on_images(place, w, HALF)
    for name in ("plain loop", "DDP", "DDP, torch's PowerSGD 4"):
        found[f"GPT-2, {name}, {HALF}"] = lambda n=name: peers.peer(place, n, HALF, peers.texts)
    for way in TEXTS[:2]:
        found[f"GPT-2, {way}, {HALF}"] = lambda w=way: on_text(place, w, HALF)
    for backend in ("lanczos", "pyhessian"):
        found[f"eigenvalue, {backend}"] = lambda b=backend: eigenvalue(place, b)
    return found


def graph_rows(place: Place) -> Rows:
    """The same steps as CUDA graphs."""
    found: Rows = {}
    for way in IMAGES:
        found[f"{way} as graphs, {HALF}"] = lambda w=way: as_graphs(
            place, lambda: on_images(place, w, HALF, GRAPHS)
        )
    for way in TEXTS[:2]:
        found[f"GPT-2, {way} as graphs, {HALF}"] = lambda w=way: as_graphs(
            place, lambda: on_text(place, w, HALF, GRAPHS)
        )
    return found


def late_rows(place: Place) -> Rows:
    """Other precisions, and compiled networks: measured if there is time after all else."""
    found: Rows = {}
    for precision in ("tf32", "strict"):
        for name in ("plain loop", "DDP, torch's PowerSGD 2"):
            found[f"{name}, {precision}"] = lambda n=name, p=precision: peers.peer(place, n, p)
        for way in ("dense", "powersgd 2"):
            found[f"{way}, {precision}"] = lambda w=way, p=precision: on_images(place, w, p)
    found[f"GPT-2, {TEXTS[2]}, {HALF}"] = lambda: on_text(place, TEXTS[2], HALF)
    found[f"plain loop, compiled, {HALF}"] = lambda: peers.peer(place, "plain loop, compiled", HALF)
    return found
