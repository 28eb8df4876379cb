"""PowerSGD's step with the code of earlier commits and of the present tree, in turns.

    python -m benchmarks.versions 694ab4a HEAD   # five minutes; leaves benchmarks/versions.md

Each version compresses ResNet-18's gradients in processes of its own, with its own code; all take
turns, so that a busy machine hits them alike. CPU time of all processes together, on one core, of a
step after memory as large as the caches has been written. Ratios are of medians over the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trees import ROOT, run_script, unpack
from regimes.records import write_output
from regimes.records.provenance import find_commit, processor_name

RANKS, WORKERS, TURNS, STEPS = (1, 2, 4), (1, 4), 7, 5
PRESENT = "the present tree"
CHILD = """
import importlib, json, statistics, sys, time
import torch, torch.distributed as dist
place, count, meeting, steps, *ranks = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{meeting}/group", rank=int(place), world_size=int(count)
)
case = importlib.import_module("benchmarks.cases.powersgd")
world = case.World(1) if count == "1" else case.ProcessWorld(int(count), torch.device("cpu"))
layers = case.resnet18()
generator = torch.Generator().manual_seed(int(place))
fresh = torch.randn(1, sum(layer.size for layer in layers), generator=generator)
stack, other = fresh.clone(), torch.zeros(2**25)
taken = {}
for rank in ranks:
    step = case.Step(case.Reducer(case.PowerSGD(), layers, world, 0), int(rank), stack)
    for turn in range(int(steps) + 1):
        stack.copy_(fresh)
        other.add_(1)
        dist.barrier()
        began = time.process_time()
        step()
        taken.setdefault(rank, []).append(time.process_time() - began)
dist.destroy_process_group()
print(json.dumps({rank: statistics.median(x[1:]) for rank, x in taken.items()}))
"""


def measure(tree: Path, workers: int) -> dict[int, float]:
    """Milliseconds of a step of all processes together, by rank."""
    answers = run_script(tree, workers, CHILD, [str(STEPS), *map(str, RANKS)])
    return {rank: 1e3 * sum(answer[str(rank)] for answer in answers) for rank in RANKS}


def page(names: Sequence[str], taken: dict[tuple[str, int, int], list[float]]) -> str:
    """A row for each number of workers and rank, a column for each version."""
    lines = ["# Versions", "", f"`python -m benchmarks.versions {' '.join(names[:-1])}`", ""]
    lines += [
        f"{processor_name()}, one core, {TURNS} turns. The present tree is {find_commit()}.",
        "",
    ]
    lines += [(__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    heads = "".join(f" {name}, ms |" for name in names)
    ratios = "".join(f" to {name} |" for name in names[:-1])
    lines += [f"| setting |{heads}{ratios}", f"|---|{'---:|' * (2 * len(names) - 1)}"]
    for workers in WORKERS:
        for rank in RANKS:
            medians = [statistics.median(taken[name, workers, rank]) for name in names]
            cells = [f"{x:.1f}" for x in medians]
            cells += [f"{medians[-1] / x:.2f}" for x in medians[:-1]]
            lines.append(f"| W = {workers}, rank {rank} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="+")
    commits = parser.parse_args().commits
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, children included
    names = [*commits, PRESENT]
    taken: dict[tuple[str, int, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        trees = [Path(scratch, str(i)) for i in range(len(commits))]
        for commit, tree in zip(commits, trees, strict=True):
            unpack(commit, tree)
        for _ in range(TURNS):
            for name, tree in zip(names, [*trees, ROOT], strict=True):
                for workers in WORKERS:
                    for rank, milliseconds in measure(tree, workers).items():
                        taken.setdefault((name, workers, rank), []).append(milliseconds)
    text = page(names, taken)
    print(text)
    write_output(Path(__file__).with_suffix(".md"), text)


if __name__ == "__main__":
    main()
