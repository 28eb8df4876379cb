"""Trainings that a release began and saved, and that are continued: by the release itself, which
gives the expected numbers (`tests/data/states/make.py`), and by the present code (the tests).

Only names that all releases have are used, so that the same lines run with the code of each. A case
whose folder holds a state goes on from it; in an empty folder it begins, and saves.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import corpora
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import regimes

Outcome = dict[str, Any]  # "weights" by name, "losses" of the continued steps, "rows" of all units
ROW = ("epoch", "lr", "next_lr", "batch_size", "train_loss", "test_loss", "metric", "floats")

# -- runs of the trainer ---------------------------------------------------------------------

CUT = 2  # units of a run before it was stopped
SHORT = (
    "epochs=4",
    "dtype=float64",
    "data.train_size=120",
    "data.test_size=100",
    "model.width=1",
    "policy.interval=1",
    "optimizer.decay_epochs=[3]",
)
TOPK = ("compressor=topk", "levels.low=50", "levels.high=2")
DILOCO = ("outer.lr=0.7", "outer.momentum=0.9", "outer.nesterov=true")
LOCAL = ("policy=static", "policy.level=low", "sync_policy=static", "sync_policy.level=low")
LSTM = (
    'data={name="wikitext-2",path="text",sequence=10,drop_last=false}',
    'model={name="lstm",width=4,depth=1}',
    "batch_size=3",
    "optimizer.lr=1.0",
)


def run(folder: Path, *settings: str) -> None:
    """The smoke preset, cut short, in float64."""
    os.chdir(folder)
    if "wikitext-2" in " ".join(settings):
        corpora.random_walk(folder / "text")
    config = regimes.override(regimes.get_preset("smoke"), [*SHORT, *settings])
    regimes.run(config, folder / "run", resume=(folder / "run").exists())


def branch(folder: Path, anew: bool = False) -> None:
    """A branch from unit 1 on; its trunk is trained to its end before.

    Args:
        anew: what the branch has trained is thrown away, and it begins at its trunk once more.
    """
    if anew:
        shutil.rmtree(folder / "run")
    if not (folder / "trunk").exists():
        config = regimes.override(regimes.get_preset("smoke"), [*SHORT, "checkpoint_keep=[1]"])
        regimes.run(config, folder / "trunk")
    regimes.branch(
        folder / "trunk", at=1, out=folder / "run", set=["policy={name='static',level='high'}"]
    )


def simulate(folder: Path, shards: int = 1) -> None:
    """A user's own model and tensors."""
    inputs, targets = (torch.cat(x) for x in zip(*(batch(s, 0) for s in range(16)), strict=True))
    regimes.simulate(
        build,
        (inputs[:48], targets[:48]),
        (inputs[48:], targets[48:]),
        out=folder / "run",
        workers=2,
        batch_size=4,
        epochs=4,
        levels={"low": 2, "high": 1},
        policy={"name": "accordion", "interval": 1},
        set={"dtype": "float64"},
        shards=shards,
    )


# -- scripts of a user -----------------------------------------------------------------------

RATE, UNIT, FIRST, LAST = 0.05, 3, 4, 9  # steps: of a unit; before it was saved; in the end
ACCORDION = {"name": "accordion", "interval": 1, "eta": 0.2}
LADDER = {"name": "error-ladder", "levels": ["high", "low"], "error": 0.9}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Net(nn.Module):
    """A convolution and two linear layers, the last of which no number of shards divides. Smooth,
    so that other last bits of a processor stay last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.inner = nn.Linear(18, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.head(torch.tanh(self.inner(x)))


def build(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(4, 1, 3, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (4,), generator=generator)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def outcome(net: nn.Module, losses: list[float], rows: list[Any]) -> Outcome:
    weights = {name: whole(p.detach()).clone() for name, p in net.named_parameters()}
    return {"weights": weights, "losses": losses, "rows": [numbers(row) for row in rows]}


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of the training, without clocks and bytes."""
    found = {key: row.get(key) for key in ROW}
    layers = {key: row["layers"][key] for key in ("level", "floats")}
    return {**found, "layers": layers, "statistics": row["statistics"]}


def hook(folder: Path, *, every: str = "file", until: int = FIRST, **options: Any) -> Outcome:
    """A DDP script with the hook.

    Args:
        every: "file": each process has a file of its own state; "full": one file for all.
        until: steps before it is saved.
    """
    rank = dist.get_rank()
    net = DistributedDataParallel(build())
    if options.pop("record", False):
        options["record"] = str(folder / "record")
    chosen = {"policy": ACCORDION, "levels": {"low": 2, "high": 1}, "seed": 7, **options}
    hooked, own = regimes.attach(net, **chosen), sgd(net)
    file = folder / (f"{rank}.pt" if every == "file" else "0.pt")
    begins = not file.exists()
    dist.barrier()
    if not begins:
        saved = torch.load(file, weights_only=True)
        net.module.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        if every == "file":
            hooked.load_state_dict(saved["hook"])
        else:
            hooked.load_full_state_dict(saved["hook"] if rank == 0 else None)
    losses = []
    for step in range(until) if begins else range(until, LAST):
        own.zero_grad()
        loss = cross_entropy(net(batch(step, rank)[0]), batch(step, rank)[1])
        loss.backward()
        own.step()
        losses.append(loss.item())
        if step % UNIT == UNIT - 1:
            hooked.epoch_end(lr=RATE)
    if begins:
        state = hooked.state_dict() if every == "file" else hooked.full_state_dict()
        saved = {"model": net.module.state_dict(), "optimizer": own.state_dict(), "hook": state}
        if every == "file" or rank == 0:
            torch.save(saved, file)
    return outcome(net.module, losses, hooked.rows)


def islands(folder: Path, shards: int = 2, **options: Any) -> Outcome:
    """A script with FSDP2 within islands and the hook between them, in the layout of DCP."""
    net, mesh = sharded(shards)
    own = sgd(net)
    chosen = {"policy": ACCORDION, "levels": {"low": 2, "high": 1}, "seed": 7, **options}
    replicas = mesh["replicate"]
    hooked = regimes.attach(net, replicas=replicas, optimizer=own, every=UNIT, **chosen)
    file = folder / "dcp"
    begins = not file.exists()
    dist.barrier()

    def parts(saved: Path | None) -> dict[str, Any]:
        model, state = get_state_dict(net, own)
        return {"model": model, "optimizer": state, "hook": hooked.sharded_state(saved=saved)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if not begins:
            dcp.load(found := parts(file), checkpoint_id=file)
            model, state = found["model"], found["optimizer"]
            set_state_dict(net, own, model_state_dict=model, optim_state_dict=state)
        losses = []
        for step in range(FIRST) if begins else range(FIRST, LAST):
            own.zero_grad()
            loss = loss_of_part(net, mesh, step)
            loss.backward()
            own.step()
            losses.append(loss.item())
        if begins:
            dcp.save(parts(None), checkpoint_id=file)
    return outcome(net, losses, hooked.rows)


def local(folder: Path, *, streamed: bool = False, **options: Any) -> Outcome:
    """A script with local steps; each process has a file of its own state."""
    net = build(1 + dist.get_rank())
    own = torch.optim.AdamW(net.parameters(), lr=RATE / 10)
    outer = {**OUTER, "fragments": 2, "delay": 1, "mixing": 0.5} if streamed else OUTER
    steps = regimes.local_steps(net, own, **{"policy": 3, "outer": outer, "every": 4, **options})
    file = folder / f"{dist.get_rank()}.pt"
    begins = not file.exists()
    if not begins:
        saved = torch.load(file, weights_only=True)
        net.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        steps.load_state_dict(saved["local"])
    losses = []
    for step in range(FIRST) if begins else range(FIRST, LAST):
        own.zero_grad()
        loss = cross_entropy(net(batch(step, dist.get_rank())[0]), batch(step, dist.get_rank())[1])
        loss.backward()
        own.step()
        steps.step()
        losses.append(loss.item())
    if begins:
        states = {"model": net.state_dict(), "optimizer": own.state_dict()}
        torch.save({**states, "local": steps.state_dict()}, file)
    steps.close()
    return outcome(net, losses, steps.rows)


def local_islands(folder: Path, shards: int = 2) -> Outcome:
    """Local steps between islands of FSDP2, in the layout of DCP."""
    net, mesh = sharded(shards)
    own = sgd(net)
    replicas, island = mesh["replicate"], f"island {mesh['replicate'].get_local_rank()}"
    options: dict[str, Any] = {"compressor": "topk", "level": 20, "outer": OUTER, "every": 4}
    steps = regimes.local_steps(net, own, replicas=replicas, policy=3, **options)
    file = folder / "dcp"
    begins = not file.exists()
    dist.barrier()

    def parts() -> dict[str, Any]:
        model, state = get_state_dict(net, own)
        return {island: {"model": model, "optimizer": state}, "local": steps.sharded_state()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if not begins:
            found = parts()
            states = found.pop("local")
            dcp.load(found, checkpoint_id=file)
            model, state = found[island]["model"], found[island]["optimizer"]
            set_state_dict(net, own, model_state_dict=model, optim_state_dict=state)
            dcp.load({"local": states}, checkpoint_id=file)
        losses = []
        for step in range(FIRST) if begins else range(FIRST, LAST):
            own.zero_grad()
            loss = loss_of_part(net, mesh, step)
            loss.backward()
            own.step()
            steps.step()
            losses.append(loss.item())
        if begins:
            dcp.save(parts(), checkpoint_id=file)
    steps.close()
    return outcome(net, losses, steps.rows)


def sharded(shards: int) -> tuple[Any, DeviceMesh]:
    """The network, divided within islands, and the mesh of all processes."""
    shape = dist.get_world_size() // shards, shards
    mesh, net = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")), build()
    fully_shard(net.inner, mesh=mesh["shard"])
    return fully_shard(net, mesh=mesh["shard"]), mesh


def loss_of_part(net: nn.Module, mesh: DeviceMesh, step: int) -> Tensor:
    """The loss of this process's part of its island's batch."""
    x, y = batch(step, mesh["replicate"].get_local_rank())
    size = len(y) // mesh["shard"].size()
    rows = slice(size * (first := mesh["shard"].get_local_rank()), size * (first + 1))
    return cross_entropy(net(x[rows]), y[rows])


# -- the cases -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A training that is saved, and the ways it is continued.

    Attributes:
        work: called on each process with the folder of the state.
        processes: that began it.
        continued: by name, the number of processes that continue it, and further arguments.
        since: the first release that has it.
        trains: is it a run of the trainer, which meets by itself and leaves a record?
    """

    work: Callable[..., Any]
    processes: int = 1
    continued: Mapping[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    since: str = "0.2"
    trains: bool = False

    @property
    def ways(self) -> Mapping[str, tuple[int, dict[str, Any]]]:
        return self.continued or {"same": (self.processes, {})}


def _run(*settings: str, processes: int = 1, **more: Any) -> Case:
    return Case(_Run(settings), processes, trains=True, **more)


@dataclass(frozen=True)
class _Run:
    settings: tuple[str, ...]

    def __call__(self, folder: Path) -> None:
        run(folder, *self.settings)


RESIZED = {"same": (2, {}), "one": (1, {}), "three": (3, {})}
CASES = {
    "run-powersgd": _run(),
    "run-topk": _run(*TOPK, processes=2, continued={"same": (2, {}), "one": (1, {})}),
    "run-adamw": _run("optimizer.name=adamw", "optimizer.lr=0.01", "union_pass=false"),
    "run-local": _run(*LOCAL, "sync_levels={low=3}", *DILOCO, processes=2),
    "run-streamed": _run(
        *LOCAL,
        "sync_levels={low=4}",
        *DILOCO,
        "outer.fragments=2",
        "outer.delay=1",
        "outer.mixing=0.5",
        since="0.3",
    ),
    "run-lstm": _run(*LSTM),
    "branch": Case(
        branch, 1, {"same": (1, {}), "anew": (1, {"anew": True})}, since="0.3", trains=True
    ),
    "simulate": Case(simulate, since="0.3", trains=True),
    "simulate-shards": Case(
        partial(simulate, shards=2),
        4,
        {"same": (4, {}), "without": (1, {"shards": 1})},
        since="0.3",
        trains=True,
    ),
    "hook-powersgd": Case(hook, 2),
    "hook-topk": Case(
        partial(hook, compressor="topk", levels={"low": 50, "high": 10}, signal="global"), 2
    ),
    "hook-ladder": Case(partial(hook, policy=LADDER, until=UNIT), 2),
    "hook-record": Case(partial(hook, record=True), 2),
    "hook-full": Case(partial(hook, every="full"), 2, RESIZED),
    "islands-powersgd": Case(
        islands,
        4,
        {"same": (4, {}), "whole": (2, {"shards": 1}), "one-island": (2, {})},
        since="0.3",
    ),
    "islands-topk": Case(
        partial(islands, compressor="topk", levels={"low": 50, "high": 10}), 4, since="0.3"
    ),
    "local": Case(partial(local, compressor="topk", level=20), 2),
    "local-powersgd": Case(partial(local, compressor="powersgd", level=1), 2),
    "local-streamed": Case(partial(local, streamed=True, policy=4), 2, since="0.3"),
    "local-islands": Case(local_islands, 4, since="0.3"),
}


def continued(rank: int, name: str, way: str, folder: Path) -> Outcome | None:
    """What one process does that continues a case, in the folder of its state; of a run's outcome
    its record tells."""
    case = CASES[name]
    return case.work(folder, **case.ways[way][1])
