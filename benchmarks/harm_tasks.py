"""`regimes.harm` as a new user would call it, on a table, a signal and photographs of their own.

    python -m benchmarks.harm_tasks --images cifar10.tar.xz   # 20 minutes on one core

Each task is made here, and searched in three lines (`searched`). A second search has other seeds:
its mean harm must not be above the margin in a phase that the first called safe, nor below it in
one called harmful. A third has the seeds of the first and is killed at random moments (SIGKILL, all
its processes) and started again: answer and records must be the same bytes. CPU time is of all
processes of a search. It leaves ``benchmarks/harm_tasks.json`` and ``harm_tasks.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import regimes
from regimes.console.tables import Table
from regimes.records import write_output
from regimes.records.provenance import find_commit, processor_name

HERE = Path(__file__).parent
Data = tuple[Tensor, Tensor]
SEEDS = (0, 1000)  # of the first trunk of a search, and of that with other seeds
KILLS = 2
IMAGES = {"train": 120, "test": 150}  # of each class


# -- data and models, as a user has them -----------------------------------------------------


def customers(count: int, seed: int) -> Data:
    """A table: 12 numbers, some of them skewed, and 3 categories, one-hot; does a customer leave?
    It depends on thresholds and products, and one label in ten is wrong."""
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=(count, 12))
    numbers[:, :4] = np.exp(0.5 * numbers[:, :4])
    kinds = draw.integers(0, [3, 5, 8], size=(count, 3))
    hot = np.concatenate([np.eye(k)[kinds[:, i]] for i, k in enumerate((3, 5, 8))], axis=1)
    score = numbers[:, 4] * numbers[:, 5] + np.where(numbers[:, 0] > 1.2, 1.0, -0.6)
    score += np.where(kinds[:, 1] > 2, numbers[:, 6], -numbers[:, 7]) + 0.4 * np.sin(
        3 * kinds[:, 2]
    )
    leaves = (score > 0) ^ (draw.random(count) < 0.1)
    x = np.concatenate([numbers, hot], axis=1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(leaves.astype(np.int64))


def table_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(28, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def beats(count: int, seed: int) -> Data:
    """A signal of 96 samples with a drifting base line, noise and 3 to 4 beats; five kinds of beat
    that differ in width, sign and echo."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 5, count)
    time_axis = np.arange(96)
    signals = np.empty((count, 1, 96))
    for i, kind in enumerate(kinds):
        centres = draw.uniform(6, 14) + np.arange(4) * draw.uniform(22, 30)
        width = (1.5, 2.6, 1.5, 2.0, 1.5)[kind] * draw.uniform(0.85, 1.15)
        away = (time_axis[:, None] - centres) / width
        wave = np.exp(-(away**2)) * (-1 if kind == 2 else 1)
        if kind == 3:
            wave = wave * (1 - away**2)
        if kind == 4:
            wave += 0.4 * np.exp(-((away - 3.5) ** 2))
        drift = draw.normal() * np.sin(time_axis / draw.uniform(15, 40) + draw.uniform(0, 6))
        signals[i, 0] = wave.sum(1) * draw.uniform(0.7, 1.3) + drift + 0.2 * draw.normal(size=96)
    return torch.tensor(signals, dtype=torch.float32), torch.tensor(kinds)


def signal_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(1, 16, 7, stride=2, padding=3), nn.ReLU()),
        *(nn.Conv1d(16, 32, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 24, 32), nn.ReLU(), nn.Linear(32, 5)),
    )


def photographs(archive: Path) -> dict[str, Data]:
    """The first images of each class of an archive of ``train/CLASS/*`` and ``test/CLASS/*``, at 16
    x 16: ``IMAGES``."""
    from PIL import Image

    names: dict[str, list[str]] = {}
    with tarfile.open(archive) as tar:
        members = {m.name: m for m in tar if m.isfile()}
        for name in sorted(members):
            names.setdefault(name.rpartition("/")[0], []).append(name)
        folders = sorted(names)
        classes = sorted({folder.rpartition("/")[2] for folder in folders})
        found = {}
        for split, count in IMAGES.items():
            x, y = [], []
            for folder in [folder for folder in folders if f"{split}/" in folder]:
                for name in names[folder][:count]:
                    file = tar.extractfile(members[name])
                    assert file is not None
                    image = Image.open(io.BytesIO(file.read())).convert("RGB").resize((16, 16))
                    x.append(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 128 - 1)
                    y.append(classes.index(folder.rpartition("/")[2]))
            found[split] = torch.tensor(np.stack(x)), torch.tensor(y)
    return found


def shapes(count: int, seed: int) -> Data:
    """Where no photographs are given: a disc, a ring, a square or a cross of any colour, place and
    size, in noise."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 4, count)
    rows, columns = np.mgrid[0:16, 0:16]
    images = 0.7 * draw.normal(size=(count, 3, 16, 16))
    for i, kind in enumerate(kinds):
        size, (row, column) = draw.uniform(2.5, 5), draw.uniform(5, 11, size=2)
        down, across = np.abs(rows - row), np.abs(columns - column)
        away = np.hypot(down, across)
        inside = (
            away < size,
            np.abs(away - size) < 1,
            np.maximum(down, across) < 0.9 * size,
            (np.minimum(down, across) < 1) & (np.maximum(down, across) < size),
        )[kind]
        images[i] += draw.normal(size=(3, 1, 1)) * inside
    return torch.tensor(images, dtype=torch.float32), torch.tensor(kinds)


def image_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(24 * 16, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


def images(saved: Path | None) -> dict[str, Data]:
    if saved is None:
        return {"train": shapes(1200, 1), "test": shapes(1500, 2)}
    return dict(torch.load(saved, weights_only=True))


@dataclass(frozen=True)
class Task:
    """What a user has: a network, data, and how it is trained."""

    network: Callable[[], nn.Module]
    data: Callable[[Path | None], dict[str, Data]]
    training: dict[str, Any]


TASKS = {
    "table": Task(
        table_net,
        lambda _: {"train": customers(2000, 1), "test": customers(2000, 2)},
        {"epochs": 6, "batch_size": 32, "optimizer": {"lr": 0.2, "schedule": "cosine"}},
    ),
    "signal": Task(
        signal_net,
        lambda _: {"train": beats(1500, 1), "test": beats(1500, 2)},
        {"epochs": 6, "batch_size": 16, "optimizer": {"lr": 0.1, "schedule": "cosine"}},
    ),
    "image": Task(
        image_net,
        images,
        {"epochs": 6, "batch_size": 16, "optimizer": {"lr": 0.05, "schedule": "cosine"}},
    ),
}


def searched(name: str, out: Path, runs: int, seed: int, saved: Path | None) -> regimes.Harm:
    """The three lines."""
    task = TASKS[name]
    data = task.data(saved)
    given = {"runs": runs, "out": out, "first_seed": seed, **task.training}
    found = regimes.harm(task.network, data["train"], data["test"], **given)
    print(found)
    found.save()
    return found


# -- trials ----------------------------------------------------------------------------------


class Search:
    """A search in a process of its own, which leaves ``answer.json`` in its folder."""

    def __init__(self, name: str, out: Path, runs: int, seed: int, saved: Path | None) -> None:
        words = [name, str(out), str(runs), str(seed), *([str(saved)] if saved else [])]
        self.out, self.command = (
            out,
            [sys.executable, "-m", "benchmarks.harm_tasks", "--one", *words],
        )
        self.seconds, self.cpu, self.kills = 0.0, 0.0, 0

    def run(self, patience: float = math.inf) -> bool:
        """Run it, or go on with it, for so many seconds, then kill all its processes; True if it
        ended before."""
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "log.txt").open("a") as log:
            child = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            while child.poll() is None and time.monotonic() - start < patience:
                time.sleep(0.05)
            over = child.poll() is not None
            if not over:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                self.kills += 1
        self.seconds += time.monotonic() - start
        if over and child.returncode:
            raise SystemExit(f"{self.out}/log.txt: exit code {child.returncode}")
        return over

    @property
    def answer(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "answer.json").read_text()))


def records_of(out: Path) -> dict[str, bytes]:
    """The bytes of the rows of each run."""
    return {str(p.parent.relative_to(out)): p.read_bytes() for p in out.rglob("epochs.jsonl")}


def against(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The phases of one answer that the harms of another are against: by the mean of its windows in
    the phase; a phase in which it has none says nothing."""
    found = []
    for phase in one["phases"]:
        inside = [p for p in other["phases"] if set(p["units"]) & set(phase["units"]) and p["n"]]
        whole = [p for p in inside if p["call"] != "unresolved"]
        opposite = {"safe": "harmful", "harmful": "safe"}.get(phase["call"])
        same = [p for p in inside if p["units"] == phase["units"]]
        for p in same:
            high = p["harm"] >= one["margin"]
            if (opposite == "harmful" and high) or (opposite == "safe" and not high):
                found.append(f"{phase['words']}: {p['words']}")
        if not same and opposite in {p["call"] for p in whole}:
            found.append(f"{phase['words']}: another call")
    return found


def one(name: str, out: Path, runs: int, seed: int, saved: Path | None) -> None:
    """A search in this process."""
    start = time.monotonic()
    found = searched(name, out, runs, seed, saved)
    phases = []
    for line, row in zip(found.sentences(), found.table.to_dict("records"), strict=False):
        units = [*range(int(row["first"]), int(row["last"]) + 1)]
        phases.append(
            {"units": units, "call": row["call"], "harm": row["harm"], "n": int(row["n"])}
        )
        phases[-1]["words"] = " ".join(line.split())
    resource_use = os.times()
    cpu = sum(resource_use[:4])
    trunk = regimes.load(out / f"trunk/seed-{seed}")
    answer = {"text": str(found), "phases": phases, "margin": found.known.rules.margin}
    answer |= {"runs": len(found.known.harms), "cpu_seconds": cpu}
    answer |= {"seconds": time.monotonic() - start, "metric": trunk.rows[-1]["metric"]}
    write_output(out / "answer.json", json.dumps(answer, indent=1))


def trial(name: str, out: Path, runs: int, saved: Path | None) -> dict[str, Any]:
    """A task: two searches of other seeds, and one that is killed."""
    searches = [Search(name, out / name / str(seed), runs, seed, saved) for seed in SEEDS]
    for search in searches:
        search.run()
    first, other = (search.answer for search in searches)
    killed, draw = Search(name, out / name / "killed", runs, SEEDS[0], saved), random.Random(name)
    over = False
    while not over:
        soon = draw.uniform(0.2, 0.4) * searches[0].seconds
        over = killed.run(soon if killed.kills < KILLS else math.inf)
    wrong = against(first, other) + against(other, first)
    before, after = records_of(searches[0].out), records_of(killed.out)
    return {
        "task": name,
        "runs": [first["runs"], other["runs"]],
        "cpu_minutes": [round(a["cpu_seconds"] / 60, 1) for a in (first, other)],
        "metric": [first["metric"], other["metric"]],
        "answers": [first["text"], other["text"]],
        "resolved": [sum(p["call"] != "unresolved" for p in a["phases"]) for a in (first, other)],
        "phases": [len(a["phases"]) for a in (first, other)],
        "against": wrong,
        "kills": killed.kills,
        "same_records": before == after,
        "same_answer": answer_of(searches[0]) == answer_of(killed),
        "about": f"{processor_name()}, commit {find_commit()}",
    }


def answer_of(search: Search) -> tuple[Any, list[str]]:
    """Calls, harms and schedule, without the minutes that an undecided phase would take: in words,
    and in the comments of the schedule's file."""
    phases = [{k: v for k, v in p.items() if k != "words"} for p in search.answer["phases"]]
    grid = search.out / "harm.toml"
    lines = grid.read_text().splitlines() if grid.exists() else []
    return phases, [line for line in lines if not line.startswith("#")]


# -- page ------------------------------------------------------------------------------------


def page(trials: list[dict[str, Any]]) -> str:
    about = "; ".join(dict.fromkeys(each["about"] for each in trials))
    heads = ["task", "metric", "runs", "CPU minutes", "resolved", "against", "kills", "same bytes"]
    rows = []
    for each in trials:
        both = [f"{a} of {b}" for a, b in zip(each["resolved"], each["phases"], strict=True)]
        same = each["same_records"] and each["same_answer"]
        cells = [", ".join(f"{x:.3f}" for x in each["metric"]), *map(_pair, _counts(each))]
        cells += [", ".join(both), str(len(each["against"])), str(each["kills"])]
        rows.append([each["task"], *cells, "yes" if same else "no"])
    parts = [
        "# `regimes.harm` on three tasks",
        f"`python -m benchmarks.harm_tasks`; {about}. Each task is searched twice, the second time "
        "with other seeds. *Resolved* are phases called safe or harmful, *against* are phases in "
        "which the mean harm of the other search contradicts the call. A third has the seeds "
        "of the first; it is killed (SIGKILL) at random moments and started again: *same bytes* "
        "holds its records, calls, harms and schedule against the first's.",
        Table(heads, rows).markdown(),
    ]
    for each in trials:
        parts.append(f"## {each['task']}")
        parts += [f"```text\n{answer}\n```" for answer in each["answers"]]
        parts += [f"- {line}" for line in each["against"]]
    return "\n\n".join(parts) + "\n"


def _counts(each: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return each["runs"], each["cpu_minutes"]


def _pair(values: list[Any]) -> str:
    return ", ".join(map(str, values))


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        name, folder, runs, seed, *images = sys.argv[2:]
        return one(name, Path(folder), int(runs), int(seed), Path(images[0]) if images else None)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; default all")
    parser.add_argument("--runs", type=int, default=24, help="of a search")
    parser.add_argument("--images", type=Path, help="archive of train/CLASS/* and test/CLASS/*")
    parser.add_argument("--out", type=Path, help="folder to search in; default a temporary one")
    given = parser.parse_args()
    kept, trials = HERE / "harm_tasks.json", {}
    if kept.exists():
        trials = {each["task"]: each for each in json.loads(kept.read_text())}
    with contextlib.ExitStack() as stack:
        out = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        saved = out / "images.pt" if given.images else None
        if saved is not None and not saved.exists():
            out.mkdir(parents=True, exist_ok=True)
            torch.save(photographs(given.images), saved)
        for name in given.tasks or TASKS:
            trials[name] = trial(name, out, given.runs, saved)
            done = [trials[name] for name in TASKS if name in trials]
            write_output(kept, json.dumps(done, indent=1) + "\n")
            write_output(HERE / "harm_tasks.md", page(done))
    return None


if __name__ == "__main__":
    main()
