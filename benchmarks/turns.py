"""A step of each kind of training with the code of a commit and of the present tree, in turns.

    python -m benchmarks.turns 62ffe26   # 20 minutes; leaves benchmarks/turns.md after each turn

Each version trains in processes of its own, with its own code, by public names alone; both take
turns, so that a busy machine hits them alike. CPU time of all processes together, on one core with
one thread each, median over the steps of a turn. Ratios are of medians over the turns, with a 95 %
interval by the bootstrap over turns.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.cases.compressors import LEVELS
from benchmarks.trees import ROOT, run_script, unpack
from regimes.records import write_output
from regimes.records.provenance import find_commit, processor_name

TURNS, STEPS, DRAWS = 9, 24, 4000
COMMON = """
import json, statistics, sys, tempfile, time
import torch, torch.distributed as dist
from torch import nn
import regimes
place, count, meeting, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    *[make() for _ in range(4)
      for make in (lambda: nn.Conv2d(16, 16, 3, padding=1), lambda: nn.BatchNorm2d(16), nn.ReLU)],
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 10),
)
x, y = torch.randn(8 * 4 * steps, 3, 8, 8), torch.randint(10, (8 * 4 * steps,))
times = []
def note():
    times.append(time.process_time())
"""
SIMULATED = """
class Steps:
    def start(self, header, rows): note()
    def step(self, epoch, done, steps): note()
    def epoch(self, row, seconds): pass
    def stop(self, message): pass
with tempfile.TemporaryDirectory() as out:
    regimes.simulate(net, (x, y), (x[:8], y[:8]), out=out + "/run", workers=4, batch_size=8,
                     epochs=1, reporters=[Steps()], **OPTIONS)
"""
JOB = """
dist.init_process_group("gloo", init_method=f"file://{meeting}/group", rank=place, world_size=count)
MAKE
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
START
for step in range(steps):
    note()
    optimizer.zero_grad()
    here = slice(8 * step, 8 * step + 8)
    nn.functional.cross_entropy(model(x[here]), y[here]).backward()
    optimizer.step()
    END
note()
CLOSE
dist.destroy_process_group()
"""
COMPRESSED = """
import inspect
from regimes.collectives.world import World
from regimes import compression
from regimes.data import models
from regimes.compression.reducer import Reducer
from regimes.training.gradients import layer_table
build = getattr(models, "build_model", None) or models.build  # earlier commits have the latter
make = getattr(compression, "make_compressor", None) or compression.compressor
layers = layer_table(build("resnet18-cifar10", classes=10, channels=3, image_size=32))
rows = [torch.randn(1, *layer.shape) for layer in layers]
levels = [LEVEL if layer.compressed else "dense" for layer in layers]
reducer = Reducer(make({"name": NAME}), layers, World(1), 0)
loss = {"loss": None} if "loss" in inspect.signature(reducer.reduce).parameters else {}  # once
for _ in range(steps // 3):
    note()
    reducer.reduce(range(len(layers)), rows, levels, **loss)
note()
"""
DDP = "model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)"
MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = net
fully_shard(model, mesh=mesh["shard"])
"""
DONE = """
taken = [b - a for a, b in zip(times, times[1:])][4:]
print(json.dumps(statistics.median(taken)))
"""


def job(make: str, start: str, end: str = "pass", close: str = "hook.close()") -> str:
    """A script of its own loop."""
    script = JOB.replace("MAKE", make).replace("START", start)
    return script.replace("END", end).replace("CLOSE", close)


def simulated(options: str) -> str:
    return f"OPTIONS = dict({options})\n{SIMULATED}"


def compressed(name: str, level: object) -> tuple[int, str]:
    """A step of a compressor on ResNet-18's layers, one worker."""
    script = COMPRESSED.replace("NAME", repr(name)).replace("LEVEL", repr(level))
    return 1, f"with torch.no_grad():{script.replace(chr(10), chr(10) + '    ')}"


RANK_2 = "compressor=regimes.PowerSGD(rank=2)"
TOPK = 'compressor="topk", levels={"low": 10, "high": 1}'
KINDS: dict[str, tuple[int, str]] = {  # name -> (processes, script)
    "simulated, PowerSGD": (1, simulated('policy={"name": "static", "level": "low"}')),
    "simulated, TopK": (1, simulated(TOPK)),
    "simulated, quantise": (1, simulated('compressor="quantise"')),
    "simulated, local steps of 4": (
        1,
        simulated('set={"sync_policy": {"name": "static", "level": "low"}, "sync_levels.low": 4}'),
    ),
    "hook, PowerSGD, 2 processes": (
        2,
        job(DDP, "hook = regimes.attach(model, compressor=regimes.PowerSGD(rank=2))"),
    ),
    "hook, TopK, 2 processes": (
        2,
        job(DDP, "hook = regimes.attach(model, compressor=regimes.TopK(percent=1))"),
    ),
    "hook, FSDP2 2 x 2, PowerSGD": (
        4,
        job(MESH, f'hook = regimes.attach_replicas(model, mesh["replicate"], {RANK_2})'),
    ),
    "local steps of 4, 2 processes": (
        2,
        job(
            "model = net",
            "local = regimes.local_steps(model, optimizer, policy=4)",
            "local.step()",
            "local.close()",
        ),
    ),
    **{
        f"compressor {name} {level}": compressed(name, level)
        for name, levels in LEVELS.items()
        for level in levels
    },
}


def measure(tree: Path, processes: int, script: str) -> float:
    """Milliseconds of a step of all processes together."""
    return 1e3 * sum(run_script(tree, processes, COMMON + script + DONE, [str(STEPS)]))


def interval(base: list[float], present: list[float]) -> tuple[float, float, float]:
    """The ratio of medians of the turns, and its 95 % interval."""
    draw, pairs = random.Random(0), list(zip(base, present, strict=True))
    ratios = []
    for _ in range(DRAWS):
        chosen = draw.choices(pairs, k=len(pairs))
        ratios.append(
            statistics.median(b for _, b in chosen) / statistics.median(a for a, _ in chosen)
        )
    cuts = statistics.quantiles(ratios, n=40)
    return statistics.median(present) / statistics.median(base), cuts[0], cuts[-1]


def main() -> None:
    """Measure all kinds, or those named, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, children included
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in given.only}
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        tree = Path(scratch, "base")
        unpack(given.base, tree)
        for turn in range(TURNS):
            for name in given.only:
                processes, script = KINDS[name]
                for place, where in enumerate((tree, ROOT)):
                    taken[name][place].append(measure(where, processes, script))
            text = page(given.base, turn + 1, taken)
            write_output(Path(__file__).with_suffix(".md"), text)
    print(text)


def page(base: str, turns: int, taken: dict[str, tuple[list[float], list[float]]]) -> str:
    """A row for each kind of step, from the turns so far."""
    lines = ["# Turns", "", f"`python -m benchmarks.turns {base}`", ""]
    lines += [
        f"{processor_name()}, one core, {turns} turns. The present tree is {find_commit()}.",
        "",
    ]
    lines += [(__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += [f"| a step of | {base}, ms | present, ms | ratio | 95 % |"]
    lines += ["|---|---:|---:|---:|---|"]
    for name, (before, after) in taken.items():
        ratio, low, high = interval(before, after)
        medians = [f"{statistics.median(x):.2f}" for x in (before, after)]
        within = f"{low:.3f} to {high:.3f}"
        lines.append(f"| {name} | {' | '.join(medians)} | {ratio:.3f} | {within} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
