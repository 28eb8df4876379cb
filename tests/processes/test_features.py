"""Models with parameters that are unused, frozen, tied, of one axis, three or none, and modules in
evaluation, under weight decay, momentum and clipping: trainer on one process and on two, and the
hook (oracle: backward passes of plain torch, and each layer's compressor alone)."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from leveled import leveled
from runs import stop_after
from tensors import close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.training import checkpoint
from regimes.training.gradients import layer_table
from regimes.training.simulate import own_training

FEATURES = (
    "never used",
    "used by turns",
    "frozen",
    "in evaluation",
    "statistics",
    "three axes",
    "scalar",
    "tied",
)
COMPRESSORS: dict[str, Any] = {  # a level of each, one that holds back much
    "dense": "dense",
    "powersgd": 1,
    "acp-sgd": 1,
    "topk": 10,
    "randomk": 20,
    "chunked-topk": 10,
    "sign": 1,
    "quantise": 2,
    "quantised-all-reduce": 4,
    "cast": "bf16",
}
WIDTH, BATCH, STEPS, EPOCHS, CLIP = 12, 4, 5, 2, 0.5


@dataclass(frozen=True)
class Case:
    """A training; ``drawn`` draws one from a seed."""

    seed: int
    features: tuple[str, ...]
    compressor: str
    optimizer: str
    workers: int = 2
    clips: bool = False
    bucket_mb: float = 25.0
    period: int = 1  # of local steps
    states: str = "keep"  # of the workers' optimisers, at a synchronisation
    union: bool = False  # one pass over the samples of all workers of a process

    @property
    def hooked(self) -> bool:
        """Can a DDP script on two processes be the same? It cannot clip what it exchanges."""
        return self.workers == 2 and not self.clips and self.period == 1


def drawn(seed: int) -> Case:
    """Every third may be clipped or have more workers than processes; compressors come in turn. A
    sum of four numbers of bfloat16 depends on their order."""
    draw = random.Random(seed)
    features = tuple(f for f in FEATURES if draw.random() < 0.6)
    compressor = [*COMPRESSORS][seed % len(COMPRESSORS)]
    plain = compressor == "dense"  # PowerSGD would amplify the rounding of another order
    return Case(
        seed,
        features,
        compressor,
        draw.choice(["sgd", "adamw"]),
        workers=draw.choice([2, 4]) if seed % 3 == 0 and compressor != "cast" else 2,
        clips=seed % 3 == 0 and draw.random() < 0.7,
        bucket_mb=draw.choice([0.001, 25.0]),
        union=plain and "used by turns" not in features,
    )


class Featured(nn.Module):
    """A network with some of the features."""

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features
        for name in ("first", "left", "right", "side", "idle", "fixed"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.fixed.requires_grad_("frozen" not in features)
        if "tied" in features:
            self.right.weight = self.left.weight
        if "never used" not in features:
            del self.idle
        if "used by turns" not in features:
            del self.side
        self.norm = nn.BatchNorm1d(WIDTH) if "statistics" in features else nn.Identity()
        self.still = nn.Identity()
        if "in evaluation" in features:
            self.still = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).eval()
        if "three axes" in features:
            self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        if "scalar" in features:
            self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        takes_side = int(x[0].abs().sum() * 1000) % 2  # by the first sample of a worker's batch
        x = self.still(self.norm(torch.tanh(self.first(x))))
        x = torch.tanh(self.left(x)) + self.right(x) + self.fixed(x)
        if "used by turns" in self.features and takes_side:
            x = x + self.side(torch.tanh(x))
        if "three axes" in self.features:
            x = x + torch.einsum("bi,eij->bj", x, self.experts) / 3
        if "scalar" in self.features:
            x = x * self.scale
        return self.head(x)


def trained_on(case: Case) -> tuple[nn.Module, Any, Any]:
    """The model, and data for training and testing."""
    torch.manual_seed(case.seed)
    model = Featured(case.features).double()
    count = BATCH * STEPS * case.workers
    x, y = torch.randn(count + 8, WIDTH).double(), torch.randint(3, (count + 8,))
    return model, (x[:count], y[:count]), (x[count:], y[count:])


def settings(case: Case) -> dict[str, Any]:
    """Arguments of `simulate`."""
    optimizer: dict[str, Any] = {"name": case.optimizer, "lr": 0.05, "weight_decay": 0.1}
    if case.optimizer == "sgd":
        optimizer |= {"momentum": 0.9, "nesterov": True}
    if case.clips:
        optimizer["clip"] = CLIP
    more: dict[str, Any] = {"dtype": "float64", "bucket_mb": case.bucket_mb, "device": "cpu"}
    if case.period > 1:
        more |= {"sync_policy": {"name": "static", "level": str(case.period)}}
        more |= {"outer.states": case.states}
    more |= {"union_pass": case.union}
    return {
        "workers": case.workers,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "compressor": case.compressor,
        "levels": {"low": COMPRESSORS[case.compressor]},
        "policy": {"name": "static", "level": "low"},
        "optimizer": optimizer,
        "seed": case.seed,
        "set": more,
    }


def own_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """As the trainer makes it; its AdamW decays no vectors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.1, nesterov=True)
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == big] for big in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, 0.05, weight_decay=0.1)


def batches_of(case: Case) -> tuple[nn.Module, Any]:
    """The model as the trainer has it, and the batches of its workers, epoch after epoch."""
    model, train, test = trained_on(case)
    config, task = own_training(model, train, test, **settings(case))
    model, batches = task.build(config), task.batches(config, torch.device("cpu"), torch.float64)
    each = (batches.epoch(epoch, range(case.workers)) for epoch in range(EPOCHS))
    return model, (batch for epoch in each for batch in epoch)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


# -- three ways ------------------------------------------------------------------------------


def simulate(case: Case, out: Path) -> dict[str, Tensor]:
    """The weights that the trainer ends with, on this process or on all of a group."""
    model, train, test = trained_on(case)
    regimes.simulate(model, train, test, out=out, **settings(case))
    saved = checkpoint.load(out)
    assert saved is not None
    state: dict[str, Tensor] = saved[1]["model"]
    return state


def hooked(rank: int, case: Case) -> dict[str, dict[str, Any]]:
    """A DDP script: its weights, and what this process has not sent yet."""
    network, batches = batches_of(case)
    model = DistributedDataParallel(
        network, find_unused_parameters=True, bucket_cap_mb=case.bucket_mb
    )
    optimizer, given = own_optimizer(case, model), settings(case)
    hook = regimes.attach(
        model,
        optimizer,
        compressor=leveled(case.compressor, given["levels"]),
        policy=given["policy"],
        seed=case.seed,
        record=regimes.RecordOptions(summary=False),
    )
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rank]), y[rank]).backward()
        optimizer.step()
    residuals = {
        layer.name: state.residual
        for layer, state in zip(hook.layers, hook.reducer.states, strict=True)
    }
    hook.close()
    return {"weights": weights(network), "residuals": residuals}


def stepwise(case: Case) -> dict[str, dict[str, Any]]:
    """The oracle; a parameter that no worker's backward has touched has no gradient, and its
    compressor is not asked."""
    model, batches = batches_of(case)
    optimizer, world = own_optimizer(case, model), World(case.workers)
    parameters = [p for p in model.parameters() if p.requires_grad]
    layers = layer_table(model)
    world.meter.dtype = torch.float64
    reducer = Reducer(make_compressor({"name": case.compressor}), layers, world, case.seed)
    for x, y in batches:
        found: list[list[Tensor | None]] = []
        for worker in range(case.workers):
            before = copy.deepcopy(dict(model.named_buffers()))
            model.zero_grad()
            F.cross_entropy(model(x[worker]), y[worker]).backward()
            found.append([p.grad for p in parameters])
            if worker:  # running statistics follow worker 0
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
        _step(case, reducer, parameters, found)
        optimizer.step()
    residuals = dict(zip((x.name for x in layers), reducer.residuals(), strict=True))
    return {"weights": weights(model), "residuals": residuals}


def _step(
    case: Case, reducer: Reducer, parameters: list[nn.Parameter], found: list[list[Tensor | None]]
) -> None:
    """Set the shared updates of the workers' gradients as ``.grad``."""
    if case.clips:
        for own in found:
            norm = torch.cat([g.flatten() for g in own if g is not None]).norm()
            own[:] = [g if g is None else g * min(1.0, CLIP / norm) for g in own]
    level = COMPRESSORS[case.compressor]
    for i, (p, *column) in enumerate(zip(parameters, *found, strict=True)):
        p.grad = None
        if all(g is None for g in column):
            continue
        stack = torch.stack([torch.zeros_like(p) if g is None else g for g in column])
        value = level if reducer.layers[i].compressed else "dense"
        p.grad = reducer.reduce([i], {i: stack}, {i: value})[i].clone()


def local(case: Case) -> dict[str, dict[str, Any]]:
    """The oracle of local steps without compression: a copy of the model for each worker, whose
    optimiser leaves alone what its own backward has not touched. A momentum is averaged where all
    have it."""
    model, batches = batches_of(case)
    models = [copy.deepcopy(model) for _ in range(case.workers)]
    optimizers = [own_optimizer(case, own) for own in models]
    for step, (x, y) in enumerate(batches, start=1):
        for worker, (own, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(own(x[worker]), y[worker]).backward()
            optimizer.step()
        if step % case.period and step < STEPS * EPOCHS:
            continue
        for column in zip(*(own.parameters() for own in models), strict=True):
            states = [o.state.get(p, {}) for o, p in zip(optimizers, column, strict=True)]
            groups = [[p.detach() for p in column]]
            if case.states == "average" and all(states):
                keys = [key for key, value in states[0].items() if torch.is_tensor(value)]
                groups += [[s[key] for s in states] for key in keys if states[0][key].ndim]
            for tensors in groups:
                mean = torch.stack(tensors).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)
    return {"weights": weights(models[0])}


def on_processes(rank: int, cases: list[Case], scratch: Path) -> list[dict[str, Any]]:
    """Each case by a script, where that can be the same, and by the trainer, which has groups of
    its own."""
    results = [hooked(rank, case) if case.hooked else {} for case in cases]
    dist.destroy_process_group()
    for case, found in zip(cases, results, strict=True):
        group.launch(rank, 2, scratch / f"meet-{case.seed}")
        found["trainer"] = simulate(case, scratch / f"run-{case.seed}")
    return results


SEEDS = [*range(len(COMPRESSORS)), 40]  # the last one is in one pass over all workers


def check(cases: list[Case], folder: Path) -> None:
    """All ways to train each case end with the same numbers."""
    real = group.run(on_processes, 2, cases, folder)
    for i, case in enumerate(cases):
        oracle = stepwise(case) if case.period == 1 else local(case)
        alone = simulate(case, folder / f"alone-{case.seed}")
        close(alone, oracle["weights"], 1e-12, case)
        for rank in range(2):
            found = real[rank][i]
            close(found["trainer"], oracle["weights"], 1e-12, (case, rank))
            if case.hooked:
                if rank == 0:  # DDP leaves each process its own last statistics
                    close(found["weights"], oracle["weights"], 1e-12, ("hook", case))
                owed = {
                    name: r if r is None else r[rank : rank + 1]
                    for name, r in oracle["residuals"].items()
                }
                close(found["residuals"], owed, 1e-12, ("hook", case, rank))


def test_trainer_processes_and_hook_are_the_same_whatever_a_model_has(tmp_path: Path) -> None:
    cases = [drawn(seed) for seed in SEEDS]
    assert {case.compressor for case in cases} == {*COMPRESSORS}
    assert {f for case in cases for f in case.features} == {*FEATURES}
    assert {case.optimizer for case in cases} == {"sgd", "adamw"}
    assert {case.union for case in cases} == {True, False}
    check(cases, tmp_path)


def test_workers_that_step_alone_leave_alone_what_they_do_not_use(tmp_path: Path) -> None:
    has = ("never used", "used by turns", "frozen", "scalar", "tied")
    kinds = [("sgd", "keep"), ("adamw", "average"), ("sgd", "average")]
    cases = [
        Case(seed, has, "dense", name, period=3, states=states)
        for seed, (name, states) in enumerate(kinds)
    ]
    check(cases, tmp_path)


@pytest.mark.parametrize("period", [1, 3])
def test_a_run_that_was_cut_off_goes_on_with_what_it_has_not_used(
    period: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of optimisers that have no state of some parameters yet."""
    case = Case(4, ("never used", "used by turns"), "topk", "adamw", period=period)
    whole = simulate(case, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            simulate(case, tmp_path / "broken")
    close(simulate(case, tmp_path / "broken"), whole, 1e-12, case)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 100, 20))
def test_more_of_the_same(first: int, tmp_path: Path) -> None:
    check([drawn(seed) for seed in range(first, first + 20)], tmp_path)
