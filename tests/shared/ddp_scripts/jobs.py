"""What the processes of the hook's tests do; each returns tensors and plain types."""

from __future__ import annotations

import io
import os
import random
import runpy
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ddp_scripts import cases
from ddp_scripts.cases import Case
from ddp_scripts.group import launch
from leveled import leveled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes import attach
from regimes.base.config import Level, RunConfig
from regimes.base.errors import RegimesError
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.collectives.process_group import GATHER
from regimes.compression import Compressor, State
from regimes.compression.bucket import Bucket
from regimes.data import load_task
from regimes.training.learning_rate import LearningRate

SMALL = {"bucket_cap_mb": 0.004}


# -- the trainer's own experiment ------------------------------------------------------------


def smoke(rank: int, config: RunConfig) -> dict[str, Any]:
    """A run of the trainer as a plain DDP script; what it ends with."""
    task = load_task(config)
    dtype = getattr(torch, config.dtype)
    batches = task.batches(config, torch.device("cpu"), dtype)
    model = DistributedDataParallel(task.build(config).to(dtype), bucket_cap_mb=0.05)
    hook = attach(
        model,
        policy=config.policy,
        compressor=leveled(config.compressor, config.levels),
        signal=config.signal,
        seed=config.seed,
        start_compressing_after=config.start_compressing_after,
    )
    o = config.optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), lr=o.lr, momentum=o.momentum, nesterov=True, weight_decay=o.weight_decay
    )
    used = []
    for epoch in range(config.epochs):
        rate = LearningRate(o, 1, config.epochs)
        lr, next_lr = rate(epoch), rate(epoch + 1)
        optimizer.param_groups[0]["lr"] = lr
        used.append(list(hook.levels.values()))
        for x, y in batches.epoch(epoch, [rank]):
            optimizer.zero_grad()
            F.cross_entropy(model(x[0]), y[0]).backward()
            optimizer.step()
        hook.epoch_end(lr=lr, next_lr=next_lr)
    return {"weights": cases.weights(model.module), "levels": used, "rows": hook.rows}


def trainer(rank: int, config: RunConfig, count: int, out: Path) -> None:
    """The trainer itself on real processes."""
    launch(rank, count, out.parent / "meet")
    regimes.run(config, out)


# -- collectives -----------------------------------------------------------------------------


@contextmanager
def spied(seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Every all-reduce and all-gather that Python issues goes through ``seen`` first."""
    reduce, gather = dist.all_reduce, getattr(dist, GATHER)

    def all_reduce(tensor: Tensor, **other: Any) -> Any:
        if "op" not in other:  # meetings take the maximum, and are no traffic of the training
            seen("mean", tensor)
        return reduce(tensor, **other)

    def all_gather(everyone: Tensor, own: Tensor, **other: Any) -> Any:
        seen("gather", own)
        return gather(everyone, own, **other)

    dist.all_reduce = all_reduce
    setattr(dist, GATHER, all_gather)
    try:
        yield
    finally:
        dist.all_reduce = reduce
        setattr(dist, GATHER, gather)


def order(rank: int, case: Case) -> list[list[Any]]:
    """The collectives in the order of issue, each after a random pause of its own."""
    model, _, optimizer = cases.wrap(case)
    issued: list[list[Any]] = []
    pauses = random.Random(rank)

    def seen(kind: str, tensor: Tensor) -> None:
        issued.append([kind, tensor.numel()])
        time.sleep(pauses.random() * 0.005)

    with spied(seen):
        for step in range(6):
            time.sleep(pauses.random() * 0.01)
            cases.step_of(model, optimizer, case, step, rank)
    return issued


class Gate(torch.autograd.Function):
    """Backward passes only when ``reduced`` is set."""

    reduced = threading.Event()
    passed: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Gate.passed = (*Gate.passed, Gate.reduced.wait(20))
        return grad


class Gated(nn.Module):
    """Two layers with a gate between them."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.open = nn.Linear(40, 40), nn.Linear(40, 40), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(x)
        return self.late(x if self.open else Gate.apply(x))


def overlap(rank: int) -> list[bool]:
    """Did a reduction end while backward still had layers to do?"""
    torch.manual_seed(0)
    net = Gated()
    model = DistributedDataParallel(net, bucket_cap_mb=0.004)
    hook = attach(model, policy="accordion")
    model(torch.randn(2, 40)).sum().backward()  # after it, DDP makes more buckets than one
    net.open = False
    reduce = hook.reducer.reduce

    def told(*args: Any) -> Any:
        updates = reduce(*args)
        Gate.reduced.set()
        return updates

    hook.reducer.reduce = told
    model(torch.randn(2, 40)).sum().backward()
    return list(Gate.passed)


# -- mixed precision and non-finite gradients ------------------------------------------------

BAD = 4  # the step that is poisoned, or left out


def scaled(
    rank: int, case: Case, poison: float | None, scaler_on: bool, told: bool, leave_out: bool
) -> dict[str, Any]:
    """Train with a GradScaler whose scale grows; worker 1's smallest gradient is ``poison`` once.

    Without ``poison``, the step is left out; without ``scaler_on``, there is no scaler.
    """
    model = DistributedDataParallel(cases.build(case), **case.ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaler_on)
    hook = attach(
        model,
        policy=case.policy,
        compressor=leveled(case.compressor, dict(case.levels)),
        scaler=scaler if told else None,
    )
    optimizer, spoilt, scales = cases.sgd(model), {"now": False}, []
    model.module.inner.weight.register_hook(lambda g: _spoil(g, poison) if spoilt["now"] else g)
    for step in range(9):
        if leave_out and step == BAD:
            continue
        optimizer.zero_grad()
        spoilt["now"] = poison is not None and step == BAD and rank == 1
        scaler.scale(cases.loss_of(model, case, step, 0, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step % 3 == 2:
            hook.epoch_end(lr=0.1)
    return {
        "weights": cases.weights(model.module),
        "scales": scales,
        "statistics": [row["statistics"] for row in hook.rows],
        "skipped": [row["skipped"] for row in hook.rows],
    }


def _spoil(gradient: Tensor, value: float | None) -> Tensor:
    spoilt = gradient.clone()
    spoilt.view(-1)[gradient.abs().argmin()] = value
    return spoilt


def all_skipped(rank: int) -> dict[str, Any]:
    """An epoch of nothing but non-finite steps, between two good ones."""
    warnings.filterwarnings("ignore", ".*has the training diverged.*")
    model, hook, optimizer = cases.wrap(Case())
    for epoch in range(3):
        for step in range(2):
            optimizer.zero_grad()
            loss = cases.loss_of(model, Case(), step, 0, rank)
            (loss * (torch.inf if epoch == 1 and rank == 0 else 1)).backward()
            if all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad):
                optimizer.step()
        hook.epoch_end(lr=0.1)
    finite = all(w.isfinite().all() for w in cases.weights(model.module).values())
    return {
        "skipped": [row["skipped"] for row in hook.rows],
        "finite": bool(finite),
        "statistics": [sorted(row["statistics"]) for row in hook.rows],
    }


def decay(rank: int) -> list[Any]:
    """Rates as a script tells them after ``scheduler.step()``, then with both named."""
    model, hook, optimizer = cases.wrap(Case(workers=1))
    rules = []
    zero = {"lr": np.float32(0.125), "next_lr": torch.tensor(0.0)}, {"lr": 0}
    for rates in ({"lr": 0.2}, {"lr": 0.2}, {"lr": 0.02}, {"lr": 0.02, "next_lr": 0.002}, *zero):
        cases.step_of(model, optimizer, Case(workers=1), 0, rank)
        decisions = hook.epoch_end(**rates)
        rules.append((decisions["head.weight"].why or {"rule": "kept"})["rule"])
    return [[row["lr"], row["next_lr"], rule] for row, rule in zip(hook.rows, rules, strict=True)]


@dataclass
class CountingState(State):
    """Counts its steps in a tensor, in place."""

    count: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Counting(Compressor):
    """A user's compressor: sends the gradient, the less of it the later."""

    def check(self, level: Level) -> None:
        pass

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> CountingState:
        return CountingState((seed, layer.name), first_worker, count=torch.zeros(1))

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        parts = []
        for delta, state in zip(bucket.deltas, bucket.states, strict=True):
            assert isinstance(state, CountingState)
            assert state.count is not None
            parts.append(delta / state.count.add_(1).double())
        bucket.subtract(parts)
        return comm.mean(parts)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        return Traffic(layer.size, layer.size * itemsize)


# -- what cannot be done ---------------------------------------------------------------------


def sentence(action: Callable[[], Any]) -> str:
    try:
        action()
    except RegimesError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def killed(rank: int) -> dict[str, Any]:
    """Process 1 dies in the middle of a backward pass."""
    case = Case(ddp=SMALL)
    model, _, optimizer = cases.wrap(case)
    cases.step_of(model, optimizer, case, 0, rank)
    if rank == 1:
        model.module.inner.weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    heard = sentence(lambda: cases.step_of(model, optimizer, case, 1, rank))
    return {"heard": heard, "seconds": time.monotonic() - start}


# -- the stock script ------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[3] / "examples" / "mnist_ddp.py"


def stock(rank: int, words: list[str], die: tuple[int, str, int] | None) -> str:
    """``examples/mnist_ddp.py`` as it is, in this group; what it prints, or why it ended.

    Args:
        die: (rank, "step" or "save", n): that process is killed at its n-th step or checkpoint.
    """
    dist.init_process_group = lambda *_: None  # the group is there already
    warnings.filterwarnings("ignore", ".*units of a job that did not end")  # of its first save
    if die is not None and die[0] == rank:
        owner, name = {"step": (torch.optim.SGD, "step"), "save": (torch, "save")}[die[1]]
        _die_at(owner, name, die[2])
    out = io.StringIO()
    with redirect_stdout(out):
        heard = sentence(lambda: runpy.run_path(str(EXAMPLE))["main"](words))
    return out.getvalue() if heard == "no error" else heard


def _die_at(owner: Any, name: str, at: int) -> None:
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
