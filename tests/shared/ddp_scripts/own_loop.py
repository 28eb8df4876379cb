"""Somebody's own loop on each process: with local steps, and as one would write it down."""

from __future__ import annotations

import copy
import io
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regimes
from regimes.base.errors import RegimesError


def model() -> nn.Module:
    torch.manual_seed(3 + dist.get_rank())  # others than process 0's are not used
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def batches(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield (
            torch.randn(5, 6, generator=draw, dtype=torch.float64),
            torch.randint(0, 3, (5,), generator=draw),
        )


def optimizer(of: nn.Module, kind: str) -> Any:
    """``kind``: "sgd", "adamw", or "muon" for matrices and AdamW for all else."""
    if kind == "muon":
        matrices, others = (
            [p for p in of.parameters() if (p.ndim == 2) == is_2d] for is_2d in (1, 0)
        )
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    if kind == "adamw":
        return torch.optim.AdamW(of.parameters(), lr=0.03)
    return torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9)


def take(of: nn.Module, own: Any, x: Tensor, y: Tensor) -> float:
    of.zero_grad()
    loss = nn.functional.cross_entropy(of(x), y)
    loss.backward()
    for one in own if isinstance(own, tuple) else (own,):
        one.step()
    return loss.item()


def flat(of: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in of.parameters()])


def trained(rank: int, steps: int, kind: str, options: dict[str, Any]) -> list[Any]:
    """The parameters after local steps, the running mean, floats, and the rows."""
    network = model()
    own = optimizer(network, kind)
    local = regimes.local_steps(network, own, **options)
    for x, y in batches(rank, steps):
        loss = take(network, own, x, y)
        local.step()
        local.log(train_loss=loss)
    local.close()
    (running,) = (b for name, b in network.named_buffers() if name.endswith("running_mean"))
    return [flat(network), running, local.traffic.floats, local.rows]


class Replaced(nn.Module):
    """A layer whose forward pass makes new tensors of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(0, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        self.last = x.detach()
        return x


def replaced_buffers(rank: int, steps: int, options: dict[str, Any]) -> list[Any]:
    """Such a buffer after local steps, and the last one of a shape that had changed."""
    network = nn.Sequential(*model(), layer := Replaced())
    network[-1], network[-2] = network[-2], network[-1]
    own = optimizer(network, "sgd")
    local = regimes.local_steps(network, own, **options)
    for x, y in batches(rank, steps):
        take(network, own, x, y)
        local.step()
    local.close()
    return [layer.seen, layer.last]


def slow(rank: int, folder: Path, pause: float) -> None:
    """Three units of four steps, each of which takes at least so many seconds."""
    network = model()
    own = optimizer(network, "sgd")
    local = regimes.local_steps(network, own, policy=4, every=4, record=folder)
    for x, y in batches(rank, 12):
        time.sleep(pause)
        take(network, own, x, y)
        local.step()
    local.close()


def as_written(
    rank: int, steps: int, kind: str, period: int, outer: tuple[float, float, bool]
) -> Tensor:
    """DiLoCo, or local SGD where the outer optimiser is (1, 0, False), with plain collectives."""
    network = model()
    for t in [*network.parameters(), *network.buffers()]:
        dist.broadcast(t.data, 0)
    own, (lr, momentum, nesterov) = optimizer(network, kind), outer
    start, velocity = flat(network), torch.zeros_like(flat(network))
    for done, (x, y) in enumerate(batches(rank, steps), start=1):
        take(network, own, x, y)
        if done % period and done < steps:
            continue
        mean = flat(network)
        dist.all_reduce(mean)
        movement = start - mean / dist.get_world_size()
        velocity = momentum * velocity + movement
        start = start - lr * (movement + momentum * velocity if nesterov else velocity)
        nn.utils.vector_to_parameters(start.clone(), network.parameters())
    return start


def streamed(
    rank: int, steps: int, period: int, outer: dict[str, Any], parts: list[list[int]]
) -> Tensor:
    """Streaming DiLoCo with plain collectives; the parts are sent at equal distances."""
    network, delay, mixing = model(), outer["delay"], outer["mixing"]
    for t in [*network.parameters(), *network.buffers()]:
        dist.broadcast(t.data, 0)
    own, live = optimizer(network, "adamw"), [p.data for p in network.parameters()]
    start = [t.clone() for t in live]
    velocity = [torch.zeros_like(t) for t in live]
    flights: dict[int, tuple[int, list[Tensor]]] = {}
    dues = [-(-period * (k + 1) // len(parts)) for k in range(len(parts))]

    def arrive(k: int) -> None:
        for i, movement in zip(parts[k], flights.pop(k)[1], strict=True):
            velocity[i] = outer["momentum"] * velocity[i] + movement
            start[i] = start[i] - outer["lr"] * (movement + outer["momentum"] * velocity[i])
            live[i].copy_(mixing * live[i] + (1 - mixing) * start[i])

    def send(k: int, done: int) -> None:
        means = [live[i].clone() for i in parts[k]]
        for mean in means:
            dist.all_reduce(mean)
        moved = [start[i] - m / dist.get_world_size() for i, m in zip(parts[k], means, strict=True)]
        flights[k] = done + delay, moved
        dues[k] = done + period

    for done, (x, y) in enumerate(batches(rank, steps), start=1):
        take(network, own, x, y)
        for k in [k for k in range(len(parts)) if dues[k] == done]:
            send(k, done)
        for k in [k for k, (due, _) in flights.items() if due == done]:
            arrive(k)
    for k in [*flights]:
        arrive(k)
    for k in [k for k in range(len(parts)) if dues[k] - period < steps]:
        send(k, steps)
        arrive(k)
    return torch.cat([t.flatten() for t in start])


def ends_of_units(rank: int) -> list[bool]:
    """Whether the thread was still sending, whenever a unit ended or a state was saved."""
    network = model()
    own = optimizer(network, "sgd")
    outer = {"delay": 3, "mixing": 0.5}
    local = regimes.local_steps(network, own, policy=4, every=5, outer=outer)
    sending, seen = threading.Event(), list[bool]()
    reduce, end = local.sync.reducer.reduce, local._end_unit
    saved = local.sync.reducer.state_dict

    def slowly(*args: Any) -> Any:
        sending.set()
        time.sleep(0.2)
        result = reduce(*args)
        sending.clear()
        return result

    def watched(task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        seen.append(sending.is_set())
        return task(*args, **options)

    local.sync.reducer.reduce = slowly  # type: ignore[method-assign,assignment]
    local._end_unit = partial(watched, end)  # type: ignore[method-assign]
    local.sync.reducer.state_dict = partial(watched, saved)  # type: ignore[method-assign]
    for done, (x, y) in enumerate(batches(rank, 10), start=1):
        take(network, own, x, y)
        local.step()
        if done == 8:
            local.state_dict()
    local.close()
    return seen


def torchs_own(rank: int, steps: int, period: int) -> Tensor:
    """torch's PostLocalSGDOptimizer, whose count of steps begins so that it averages after
    ``period`` steps for the first time."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    with warnings.catch_warnings():  # of TorchScript, in the same package
        warnings.simplefilter("ignore")
        from torch.distributed.optim import PostLocalSGDOptimizer

    network = model()
    for t in [*network.parameters(), *network.buffers()]:
        dist.broadcast(t.data, 0)
    averager = PeriodicModelAverager(period=period)
    averager.step = 1
    own: Any = PostLocalSGDOptimizer(optimizer(network, "sgd"), averager)
    for x, y in batches(rank, steps):
        take(network, own, x, y)
    return flat(network)


def shared_gradients(rank: int, steps: int, period: int) -> list[Tensor]:
    """Gradients that all share, with and without averaging parameters every ``period`` steps."""
    found = []
    for averages in (False, True):
        network = model()
        for t in [*network.parameters(), *network.buffers()]:
            dist.broadcast(t.data, 0)
        own = optimizer(network, "sgd")
        local = regimes.local_steps(network, own, policy=period) if averages else None
        for x, y in batches(rank, steps):
            own.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            for p in network.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            own.step()
            if local is not None:
                local.step()
        found.append(flat(network))
    return found


def resumed(rank: int, folder: Path, stop: int) -> list[Any]:
    """As ``trained``, but saved after ``stop`` steps, and continued by other objects."""
    options = {
        "policy": 4,
        "outer": {"lr": 0.7, "momentum": 0.9},
        "every": 5,
        "compressor": "powersgd",
        "level": 1,
    }
    data, steps = list(batches(rank, 13)), 13
    record = regimes.RecordOptions(folder / "run") if folder.exists() else None
    network = model()
    own = optimizer(network, "adamw")
    local = regimes.local_steps(network, own, record=record, **options)
    for done, (x, y) in enumerate(data, start=1):
        take(network, own, x, y)
        local.step()
        if done == stop:
            parts = [network.state_dict(), own.state_dict(), local.state_dict()]
            file = io.BytesIO()
            torch.save(parts, file)
            local.close()
            network = model()
            own = optimizer(network, "adamw")
            local = regimes.local_steps(network, own, record=record, **options)
            file.seek(0)
            theirs, its, mine = torch.load(file, weights_only=True)
            network.load_state_dict(theirs)
            own.load_state_dict(its)
            local.load_state_dict(mine)
    local.close()
    assert steps == local.total
    return [flat(network), local.traffic.floats, local.rows]


def saved_after_each_step(rank: int, places: list[tuple[int, int, float]]) -> list[Any]:
    """Where a job that continues from a state differs from the one that has saved it after that
    step, for each (fragments, delay, mixing)."""
    different, data = list[Any](), list(batches(rank, 18))

    def job(outer: dict[str, Any], state: Any, first: int) -> tuple[Any, list[Any]]:
        """What it ends with, and its states after each step."""
        network = model()
        own = optimizer(network, "adamw")
        rule = {"name": "accordion", "interval": 1, "eta": 0.5}
        options = {"periods": {"low": 6, "high": 8}, "compressor": "topk", "level": 30}
        local = regimes.local_steps(network, own, policy=rule, outer=outer, every=6, **options)
        if state is not None:
            for part, saved in zip((network, own, local), copy.deepcopy(state), strict=True):
                part.load_state_dict(saved)
        states = []
        for x, y in data[first:]:
            take(network, own, x, y)
            local.step()
            if state is None:
                parts = [part.state_dict() for part in (network, own, local)]
                states.append(copy.deepcopy(parts))
        local.close()
        return [flat(network).tolist(), local.rows], states

    for fragments, delay, mixing in places:
        outer = {"fragments": fragments, "delay": delay, "mixing": mixing, "momentum": 0.9}
        outer |= {"lr": 0.7, "nesterov": True}
        whole, states = job(outer, None, 0)
        for done, state in list(enumerate(states, start=1))[3:-2]:
            if job(outer, state, done)[0] != whole:
                different.append((fragments, delay, done))
    return different


def by_the_loss(rank: int, folder: str | None, stop: int) -> list[Any]:
    """The rows of 24 steps of AdaComm in units of six, each process with losses of its own; by
    other objects after ``stop`` steps."""
    options: dict[str, Any] = {"policy": {"name": "adacomm", "base": 4}, "every": 6}

    def job() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        network = model()
        own = optimizer(network, "sgd")
        return network, own, regimes.local_steps(network, own, record=folder, **options)

    parts = job()
    for done, (x, y) in enumerate(batches(rank, 24), start=1):
        take(*parts[:2], x, y)
        parts[2].step()
        parts[2].log(train_loss=torch.tensor((1 + rank) / done))
        if done == stop:
            saved = copy.deepcopy([part.state_dict() for part in parts])
            parts[2].close()
            parts = job()
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
    parts[2].close()
    return parts[2].rows


# -- processes in different places -----------------------------------------------------------------


def apart(rank: int, closes: bool) -> str:
    """What both are told where one has a batch more than the other, or a parameter that is not
    finite."""
    network = model()
    own = optimizer(network, "sgd")
    local = regimes.local_steps(network, own, policy=2)
    try:
        for x, y in batches(rank, 2 + 2 * rank * closes):
            take(network, own, x, y)
            if rank == 1 and not closes:
                next(network.parameters()).data[0, 0] = torch.inf
            local.step()
        local.close()
        if rank == 0:
            local.load_state_dict(local.state_dict())
    except RegimesError as error:
        return str(error)
    return ""
