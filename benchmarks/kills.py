"""Kills one of three replicas at random moments and lets it join again: does training go on, are
the replicas the same, is the record whole?

    python -m benchmarks.kills      # Linux; torchft must be installed; half an hour

It does this to a compressed mean in each step and to compressed local steps. The next kill comes
at a random moment after the last replica has joined again. Then it kills without waiting for that,
so that two or three may be dead together, and in the end the lighthouse. Sessions of 10 kills are
added to ``kills.jsonl``; those that are there are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import regimes
from benchmarks.replicas import Fleet, Notes, lighthouse, manager_of, preload, read_notes
from regimes.records import load, provenance
from regimes.records.chain import find_edit

HERE = Path(__file__).parent
NAMES = ("a", "b", "c")
BATCH, UNIT = 32, 20  # samples of a replica and step; steps of a unit
SESSION = 10  # kills
HOOK: dict[str, Any] = {"policy": "accordion", "levels": {"low": 4, "high": 1}}
LOCAL: dict[str, Any] = {"policy": 8, "compressor": "topk", "level": 10.0}
KINDS = {"PowerSGD in each step": HOOK, "TopK every 8 steps": LOCAL}


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network with running statistics, and its optimiser."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], seed: int) -> torch.Tensor:
    """Of a batch that the seed draws."""
    x, y = data
    chosen = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(seed))
    return functional.cross_entropy(model(x[chosen]), y[chosen])


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    raw = load_digits()
    return torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)


def is_over(out: Path, step: int) -> bool:
    """Has training reached the step at which it is to stop, if it is known?"""
    stop = out / "stop"
    return stop.exists() and step >= int(stop.read_text())


def each_step(out: Path, address: str, data: Any, patience: float, name: str, notes: Notes) -> None:
    """The life of a replica with a hook."""
    import torchft

    manager, (model, inner) = manager_of(address, name, patience), network()
    optimizer = torchft.Optimizer(manager, inner)
    hook = regimes.attach(
        model, optimizer=optimizer, manager=manager, every=UNIT, record=out / "record", **HOOK
    )
    while not is_over(out, step := manager.current_step()):
        optimizer.zero_grad()
        loss = loss_of(model, data, 1000 * step + ord(name))
        loss.backward()
        optimizer.step()
        hook.log(train_loss=loss.detach())
        if manager.current_step() > step:
            notes.synced(manager, model, hook)
    hook.close()
    manager.shutdown(wait=False)


def every_8(out: Path, address: str, data: Any, patience: float, name: str, notes: Notes) -> None:
    """The life of a replica with local steps."""
    manager, (model, optimizer) = manager_of(address, name, patience), network()
    local = regimes.local_steps(
        model, optimizer, manager=manager, every=UNIT, record=out / "record", **LOCAL
    )
    notes.synced(manager, model, local)
    while not is_over(out, local.total):
        step = manager.current_step()
        optimizer.zero_grad()
        loss = loss_of(model, data, 1000 * local.total + ord(name))
        loss.backward()
        optimizer.step()
        local.step()
        local.log(train_loss=loss.detach())
        if manager.current_step() > step:
            notes.synced(manager, model, local, total=local.total)
        time.sleep(0.005)  # a step of this network would take no time
    local.close()
    notes.synced(manager, model, local, total=local.total)
    manager.shutdown(wait=False)


LIVES = {"PowerSGD in each step": each_step, "TopK every 8 steps": every_8}


def session(
    out: Path, kind: str, kills: int, seed: int, one_at_a_time: bool = True
) -> dict[str, Any]:
    """So many kills of a new job; what became of it.

    Args:
        one_at_a_time: wait until the last replica has joined again before a kill.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    draw, data = random.Random(seed), digits()
    with lighthouse(out / "lighthouse.log") as light:
        fleet = Fleet(out, partial(LIVES[kind], out, light.address, data, 600.0))
        for name in NAMES:
            fleet.start(name)
        wait_for(fleet, 3)
        died: dict[str, int] = {}
        for _ in range(kills):
            time.sleep(draw.uniform(0.1, 2.5))
            died |= (ended := fleet.ended())
            for name in ended:
                fleet.start(name)
            fleet.kill(name := draw.choice(NAMES))
            time.sleep(draw.choice([0.0, draw.uniform(0, 2.0)]))
            fleet.start(name)
            if one_at_a_time:
                wait_for(fleet, fleet.lives[name], name)
        wait_for(fleet, fleet.lives[name], name)
        (out / "stops").write_text(str(last_step(fleet) + 2 * UNIT))
        (out / "stops").rename(out / "stop")  # whole, when a replica reads it
        codes = fleet.join(300)
    about = {"kind": kind, "kills": kills, "seed": seed, "one at a time": one_at_a_time}
    return about | judged(fleet, out, died, codes)


def last_step(fleet: Fleet) -> int:
    return max(note.get("total", note.get("step", 0)) for note in fleet.notes())


def wait_for(fleet: Fleet, life: int, name: str = "", seconds: float = 300) -> None:
    """Until this life of a replica has synchronised, or all three have."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        notes = [note for note in fleet.notes() if "fingerprint" in note]
        if name and any((n["name"], n["life"]) == (name, life) for n in notes):
            return
        if not name and {n["name"] for n in notes} == {*NAMES}:
            return
        time.sleep(0.1)


def judged(fleet: Fleet, out: Path, died: dict[str, int], codes: dict[str, int]) -> dict[str, Any]:
    """Counts of a session, from the replicas' notes and the record."""
    notes = fleet.notes()
    synced = [note for note in notes if "fingerprint" in note]
    same = defaultdict(set)
    for note in synced:
        same[note["quorum"], note["step"]].add(note["fingerprint"])
    moments = sorted(note["time"] for note in synced)
    pauses = [b - a for a, b in itertools.pairwise(moments)]
    rows = load(out / "record").epochs
    replicas = [row["replicas"] for row in rows_of(out)]
    births = [note for note in notes if "born" in note]
    firsts: dict[Any, float] = {}
    for note in synced:
        firsts.setdefault((note["name"], note["life"]), note["time"])
    waits = [
        firsts[n["name"], n["life"]] - n["time"]
        for n in births[3:]
        if (n["name"], n["life"]) in firsts
    ]
    final = {n["name"]: n["fingerprint"] for n in synced}
    spans = [row["unit"] for row in rows_of(out)]
    whole = all(a["stop"] == b["first"] for a, b in itertools.pairwise(spans))
    return {
        "steps": max(note["step"] for note in synced),
        "synchronisations": len(same),
        "differing": sum(len(prints) > 1 for prints in same.values()),
        "equal at the end": len({*final.values()}) == 1 and len(final) == 3,
        "longest pause": round(max(pauses), 2),
        "seconds paused above 1": [round(p, 1) for p in pauses if p > 1],
        "lives that joined": len(firsts),
        "seconds to join, median": round(statistics.median(waits), 2) if waits else None,
        "ended by themselves": len(died),
        "ended badly": {name: code for name, code in codes.items() if code},
        "errors": sorted(
            {note["error"].replace(str(out), "FOLDER")[:200] for note in notes if "error" in note}
        ),
        "units": len(rows),
        "began again": began_again(out),
        "record": "whole" if whole and find_edit(out / "record") is None else "BROKEN",
        "joined": sum(r["joined"] for r in replicas),
        "left": sum(r["left"] for r in replicas),
        "uncommitted": sum(r["uncommitted"] for r in replicas),
        "lost residual": [round(r["lost_residual"], 4) for r in replicas if r["left"]],
    }


def rows_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "record" / "epochs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def began_again(out: Path) -> int:
    """How often the record begins again from unit 0, because no replica with a state was left."""
    lines = (out / "record" / "events.jsonl").read_text().splitlines()
    return sum(
        event["event"] == "resume" and not event["epoch"] for event in map(json.loads, lines)
    )


def without_lighthouse(out: Path, kind: str) -> dict[str, Any]:
    """What the replicas say when the lighthouse is killed."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with lighthouse(out / "lighthouse.log") as light:
        fleet = Fleet(out, partial(LIVES[kind], out, light.address, digits(), 30.0))
        for name in NAMES:
            fleet.start(name)
        wait_for(fleet, 3)
        time.sleep(1)
        killed = time.time()
        light.kill()
        codes = fleet.join(150)
    errors = [note for note in fleet.notes() if "error" in note]
    events = (out / "record" / "events.jsonl").read_text().splitlines()
    return {
        "kind": kind,
        "lighthouse": True,
        "codes": codes,
        "seconds": [round(note["time"] - killed, 1) for note in errors],
        "said": sorted({note["error"][:400] for note in errors}),
        "last event": json.loads(events[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each kind")
    parser.add_argument("--together", type=int, default=30, help="likewise, without waiting")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--results", type=Path, default=HERE / "kills.jsonl")
    parser.add_argument("--lighthouse", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    done = read_notes(chosen.results)
    preload()
    for kills, alone in ((chosen.kills, True), (chosen.together, False)):
        for number, kind in itertools.product(range(-(-kills // SESSION)), KINDS):
            key = kind, number, alone
            if not any((d["kind"], d.get("seed"), d.get("one at a time")) == key for d in done):
                left = kills - SESSION * number
                found = session(chosen.out, kind, min(SESSION, left), number, alone)
                add(chosen.results, found)
    for kind in KINDS if chosen.lighthouse else ():
        if not any(d["kind"] == kind and d.get("lighthouse") for d in done):
            add(chosen.results, without_lighthouse(chosen.out, kind))


def add(results: Path, found: dict[str, Any]) -> None:
    found |= {"processor": provenance.processor_name()}
    print(json.dumps(found), flush=True)
    with results.open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
