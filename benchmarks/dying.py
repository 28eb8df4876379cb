"""Loss against seconds while one of three replicas dies again and again: a job that goes on with
those present, and one that starts again from a checkpoint.

    python -m benchmarks.dying      # Linux; torchft must be installed; 10 minutes

Both take local steps, average every 8, and run at the same time. A step waits 50 ms, as for a
device that computes. ``dying.json`` has all curves; seeds that are there are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import regimes
from benchmarks.kills import digits, loss_of
from benchmarks.replicas import Fleet, Notes, lighthouse, manager_of, preload
from regimes.records import provenance

HERE = Path(__file__).parent
NAMES = ("a", "b", "c")
SECONDS, DEATHS = 200.0, 60.0  # of a run; between two deaths
STEP = 0.05  # seconds that a step waits
UNIT = 40  # steps between two checkpoints: two seconds
PERIOD = 8
ARMS = ("undisturbed", "goes on", "from a checkpoint")


def network(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def split() -> tuple[Any, Any]:
    """Digits to train on, and 400 to test."""
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:400], order[400:]
    return (x[train], y[train]), (x[test], y[test])


def train(
    local: Any, model: nn.Module, optimizer: Any, data: Any, draw: int, each: Callable[[], None]
) -> None:
    """Steps without an end; ``each`` is called after each."""
    while True:
        optimizer.zero_grad()
        loss_of(model, data, 1000 * local.total + draw).backward()
        optimizer.step()
        time.sleep(STEP)
        local.step()
        each()


def note(notes: Notes, model: nn.Module, test: Any, local: Any) -> None:
    if local.total % PERIOD == 0:
        with torch.no_grad():
            loss = functional.cross_entropy(model(test[0]), test[1])
        notes.add(step=local.total, loss=loss.item())


def in_a_quorum(address: str, data: Any, test: Any, seed: int, name: str, notes: Notes) -> None:
    """The life of a replica of torchft."""
    manager, (model, optimizer) = manager_of(address, name), network(seed)
    local = regimes.local_steps(model, optimizer, policy=PERIOD, every=UNIT, manager=manager)
    each = partial(note, notes, model, test, local)
    train(local, model, optimizer, data, 100 * seed + ord(name), each)


def in_a_group(out: Path, data: Any, test: Any, seed: int, name: str, notes: Notes) -> None:
    """The life of a process that ends with the others, and starts from the last checkpoint."""
    rank = NAMES.index(name)
    store = dist.FileStore(str(out / (out / "group").read_text()), 3)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30)
    )
    model, optimizer = network(seed)
    local = regimes.local_steps(model, optimizer, policy=PERIOD, every=UNIT)
    # the newest that all have: a process may have died before it wrote its own
    units = [{int(p.stem.split("-")[1]) for p in out.glob(f"{other}-*.pt")} for other in NAMES]
    if both := set.intersection(*units):
        saved = torch.load(out / f"{name}-{max(both)}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        local.load_state_dict(saved["local"])

    def each() -> None:
        note(notes, model, test, local)
        if local.total % UNIT == 0:
            parts = {"model": model, "optimizer": optimizer, "local": local}
            saved = {key: part.state_dict() for key, part in parts.items()}
            torch.save(saved, half := out / f"{name}.half")
            os.replace(half, out / f"{name}-{local.total}.pt")

    train(local, model, optimizer, data, 100 * seed + ord(name), each)


def run(out: Path, arm: str, seed: int) -> dict[str, Any]:
    """One arm with one seed; its curve from the first synchronisation on."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data, test = split()
    with lighthouse(out / "lighthouse.log") as light:
        if arm == "from a checkpoint":
            life = partial(in_a_group, out, data, test, seed)
        else:
            life = partial(in_a_quorum, light.address, data, test, seed)
        fleet = Fleet(out, life)
        start_all(fleet, out)
        start = begun(fleet)
        deaths = 0
        while (now := time.time() - start) < SECONDS:
            if arm != "undisturbed" and now > DEATHS * (deaths + 1):
                deaths += 1
                die(fleet, out, NAMES[(deaths + seed) % 3], whole=arm == "from a checkpoint")
            time.sleep(0.02)
        for name in list(fleet.alive):
            fleet.kill(name)
    return {"arm": arm, "seed": seed, "deaths": deaths, **curve(fleet, start)}


def start_all(fleet: Fleet, out: Path) -> None:
    (out / "group").write_text(f"store-{sum(fleet.lives.values())}")
    for name in NAMES:
        fleet.start(name)


def die(fleet: Fleet, out: Path, name: str, whole: bool) -> None:
    """Kill a replica and start it again: alone, or at once with all others."""
    fleet.ended()
    if name in fleet.alive:
        fleet.kill(name)
    if not whole:
        fleet.start(name)
        return
    for other in list(fleet.alive):
        fleet.kill(other)
    start_all(fleet, out)


def begun(fleet: Fleet) -> float:
    """The moment when all have synchronised once."""
    while True:
        firsts = {n["name"]: n["time"] for n in reversed(fleet.notes()) if "loss" in n}
        if len(firsts) == 3:
            return max(firsts.values())
        time.sleep(0.05)


def curve(fleet: Fleet, start: float) -> dict[str, Any]:
    """The loss and the step by time, as each replica has noted them after a synchronisation."""
    seconds, losses, steps = [], [], []
    for line in fleet.notes():
        if "loss" in line and line["time"] >= start:
            seconds.append(round(line["time"] - start, 2))
            losses.append(round(line["loss"], 4))
            steps.append(line["step"])
    return {"seconds": seconds, "losses": losses, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/dying"))
    parser.add_argument("--results", type=Path, default=HERE / "dying.json")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    runs = json.loads(chosen.results.read_text()) if chosen.results.exists() else []
    preload()
    for seed in range(chosen.seeds):
        if not any(r["seed"] == seed for r in runs):
            runs += together(chosen.out, seed)
            chosen.results.write_text(json.dumps(runs))
            print(seed, [(r["arm"], r["losses"][-1:], r["steps"][-1:]) for r in runs[-3:]])


def together(out: Path, seed: int) -> list[dict[str, Any]]:
    """All arms at the same time, so that they share the machine with the same other programs."""
    children = []
    for arm in ARMS:
        if (child := os.fork()) == 0:
            try:
                found = run(out / arm, arm, seed) | {"load": os.getloadavg()[0]}
                found |= {"processor": provenance.processor_name()}
                (out / f"{arm}.json").write_text(json.dumps(found))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads((out / f"{arm}.json").read_text()) for arm in ARMS]


if __name__ == "__main__":
    main()
