"""Small jobs of each kind with what an engineer turns on: a guard, instruments, a level by hand.

A model's gradient is its input, so that tests know what is exchanged.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from ddp_scripts.fsdp import Product, flat_mesh, given, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import ConfigError, RegimesError
from regimes.collectives.sharded_models import load_parts, save_parts

SHAPE, STEPS = (10, 33), 4
TOPK = {"compressor": "topk", "level": 10}
FOUR = {"level": 4, "stochastic": False, "error_feedback": True, "block": 33}


def attached(kind: str, ranks: int, **more: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model of one layer, its optimiser and its hook."""
    net: Any = Product(*SHAPE)
    if kind == "DDP":
        net, options = DistributedDataParallel(net), TOPK
    else:
        mesh = flat_mesh(ranks)
        net, options = fully_shard(net, mesh=mesh), {"shards": mesh, "scatter": FOUR}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hook = regimes.attach(net, optimizer, every=STEPS, seed=7, **options, **more)
    return net, optimizer, hook


def numbers(rank: int, step: int) -> Tensor:
    return given(100 * step + rank, SHAPE)


def train(net: Any, optimizer: Any, rank: int, steps: range) -> list[Tensor]:
    """The shared gradient of each step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        net(numbers(rank, step)).backward()
        optimizer.step()
        found.append(whole(next(net.parameters()).grad).clone())
    return found


def ended(net: Any, hook: Any) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        hook.close()
    return {
        "weight": whole(next(net.parameters()).detach()).clone(),
        "rows": hook.rows,
        "said": said.getvalue(),
    }


def measured(rank: int, ranks: int, kind: str) -> list[dict[str, Any]]:
    """A unit with everything on, and the same without."""
    found = []
    guard = {"check_every": 2, "check_cosine": 1.0, "instruments": {"error", "residual"}}
    for options in (guard, {"summary": False}):
        net, optimizer, hook = attached(kind, ranks, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            updates = train(net, optimizer, rank, range(STEPS))
        (residual,) = hook.reducer.residuals()
        found.append(
            {
                "updates": torch.stack(updates),
                "residual": residual,
                "warned": [str(w.message) for w in caught if "cosine" in str(w.message)],
                **ended(net, hook),
            }
        )
    return found


def level_by_hand(rank: int, ranks: int, kind: str) -> dict[str, Any]:
    """Dense from the second unit on, set within the first; saved within the second, resumed, and
    given back to the policy for the third. Then on one process alone."""
    net, optimizer, hook = attached(kind, ranks, summary=False)
    first = train(net, optimizer, rank, range(2))
    hook.set_level("dense", why="it looks odd")
    first += train(net, optimizer, rank, range(2, 4))
    second = train(net, optimizer, rank, range(4, 6))
    saved, weight = hook.state_dict(), net.state_dict()
    hook.close()
    net, optimizer, hook = attached(kind, ranks, summary=False)
    net.load_state_dict(weight)
    hook.load_state_dict(saved)
    second += train(net, optimizer, rank, range(6, 8))
    hook.set_level(None)
    third = train(net, optimizer, rank, range(8, 12))
    if rank:
        hook.set_level("dense")
    alone = ""
    try:
        train(net, optimizer, rank, range(12, 14))
    except RegimesError as error:
        alone = str(error)
    try:
        hook.set_level("dens")
    except ConfigError as error:
        unknown = str(error)
    return {
        "updates": torch.stack([*first, *second, *third]),
        "layers": [row["layers"] for row in hook.rows],
        "sentences": [alone, unknown],
    }


def everything(rank: int, ranks: int, kinds: list[str]) -> dict[str, Any]:
    """All of it in one group of processes."""
    return {
        "measured": {kind: measured(rank, ranks, kind) for kind in kinds},
        "by hand": {kind: level_by_hand(rank, ranks, kind) for kind in kinds},
    }


# -- local steps -----------------------------------------------------------------------------------


def continued(rank: int) -> list[dict[str, Any]]:
    """Eight local steps; the second half of them again, from the full state; and three."""
    through = local(rank, range(8), None, 4)
    return [through, local(rank, range(4, 8), through["kept"]), local(rank, range(4), None, 3)]


def alone(rank: int, saved: Any, between: Any) -> list[Any]:
    """A full state on one process; one that was saved between two synchronisations; and local steps
    whose level the script sets."""
    said = ""
    try:
        local(rank, range(0), between)
    except ConfigError as error:
        said = str(error)
    return [local(rank, range(0), saved), said, local(rank, range(4), level="dense")]


def by_torch(rank: int, steps: range, full: Any, folder: Path) -> dict[str, Any]:
    """Eight local steps, of which four are in a checkpoint of torch; or some that continue it."""
    return local(rank, steps, full, 0 if full else 4, folder=folder)


def local(
    rank: int,
    steps: range,
    full: Any = None,
    count: int = 0,
    level: str | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Local steps of period 2 with TopK, from a full state; its own full state after ``count``. A
    ``folder`` has the state instead."""
    net: nn.Module = Product(*SHAPE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job = regimes.local_steps(
        net,
        optimizer,
        policy=2,
        compressor=regimes.TopK(percent=10),
        every=4,
        record=regimes.RecordOptions(
            instruments={"error", "residual"}, check_every=2, check_cosine=-1.0, summary=False
        ),
    )
    if full is not None:
        with torch.no_grad():
            net.load_state_dict(full["model"])
        if folder is None:
            job.load_full_state_dict(full["job"] if rank == 0 else None)
        else:
            load_parts({"local": job.sharded_state(saved=folder)}, folder)
    kept = None
    if level is not None:
        job.set_level(level)
    for step in steps:
        optimizer.zero_grad()
        net(numbers(rank, step)).backward()
        optimizer.step()
        job.step()
        if step + 1 == count:
            model = {name: t.clone() for name, t in net.state_dict().items()}
            kept = {"model": model, "job": job.full_state_dict()}
            if folder is not None:
                save_parts({"local": job.sharded_state()}, folder)
    (layer,) = job.state_dict()["parts"][0]["outer"]["layers"].values()
    job.close()
    return {
        "weight": net.state_dict()["weight"].clone(),
        "residual": layer["residual"],
        "rows": job.rows,
        "kept": kept,
    }
