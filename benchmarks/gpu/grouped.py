"""The checks of a group that torchrun has started, on one machine or several:

    torchrun --nproc-per-node 2 -m benchmarks.gpu --parts correct

Each process has a GPU of its own, so that all collectives are NCCL's; on CPUs they are gloo's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch.distributed as dist

import regimes
from benchmarks.gpu import child
from benchmarks.gpu.correct import ROUNDED, within, without_calls
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.place import Place, rows, short, trained


def check(place: Place) -> bool:
    """All checks, one after the other; process 0 prints a line each. Have all passed?"""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lines = Lines(place.out / "lines.jsonl")
    if rank == 0:  # before the first check, in which all processes meet
        shutil.rmtree(place.out / "group", ignore_errors=True)
    found: dict[str, Callable[[], str]] = {
        "hook": lambda: said(child.hook, place.device),
        "islands of one shard": lambda: said(child.island, place.device),
        "one island": lambda: said(child.island, place.device, str(count)),
        "processes = simulation": lambda: simulation(place, rank),
        "processes = simulation, in buckets": lambda: simulation(place, rank, "bucket_mb=0.02"),
    }
    passed = True
    for name, measure in found.items():
        try:
            what = {"ok": True, "detail": measure()}
        except Exception as error:
            what = {"ok": False, "detail": f"{type(error).__name__}: {error}"}
            print(f"process {rank}, {name}: {what['detail']}", flush=True)
        passed = passed and bool(what["ok"])
        if rank == 0:
            lines.add("group", f"{name}, {count} processes", **what)
    if dist.is_initialized():
        dist.destroy_process_group()
    return passed


def said(run: Callable[..., None], *words: str) -> str:
    """What a child's function leaves to be said: that it has ended well."""
    run(*words)
    return f"ended well over {dist.get_backend()}"


def simulation(place: Place, rank: int, *words: str) -> str:
    """The run on all processes; process 0 compares it with the simulated workers."""
    if dist.is_initialized():
        dist.destroy_process_group()
    count = int(os.environ["WORLD_SIZE"])
    config = short(place.device, "dtype=float64", f"workers={count}", *words)
    folder = place.out / "group" / "-".join(("run", *words))
    regimes.run(config, folder / "real")
    if rank > 0:
        return ""
    saved = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        simulated = trained(config, folder / "simulated")
    finally:
        os.environ.update(saved)
    return within(ROUNDED, without_calls(rows(folder / "real")), without_calls(simulated))
