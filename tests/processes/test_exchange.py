"""Reduction during backward: equal to reduction after it and to the simulation; it does overlap;
a gradient that is not finite is heard of. Real gloo groups over loopback."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from ddp_scripts.jobs import Gate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from regimes import PowerSGD, TopK
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange, buckets_with_loss, make_buckets
from regimes.compression.reducer import Reducer
from regimes.data.classification import classification_loss
from regimes.job import clock
from regimes.training.gradients import Gradients, layer_table
from regimes.training.loop import Minibatch, take_step

WORKERS, STEPS, BATCH = 4, 4, 6
BUCKET = 0.003  # megabytes: several buckets
LEVELS = (4, 1, "dense", 2)


class Net(nn.Module):
    """Tied weights, BatchNorm, dropout, and a layer that only some passes use."""

    def __init__(self, dropout: float, seldom: bool) -> None:
        super().__init__()
        self.first, self.norm, self.tied = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.seldom, self.last = nn.Linear(16, 16), nn.Linear(16, 5)
        self.dropout, self.at_times = dropout, seldom

    def forward(self, x: Tensor) -> Tensor:
        h = self.tied(torch.relu(self.norm(self.first(x))))
        h = F.dropout(torch.tanh(F.linear(h, self.tied.weight)), self.dropout, self.training)
        return self.last(h if self.at_times and x[0, 0] < 0 else h + self.seldom(h))


@dataclass(frozen=True)
class Case:
    union: bool = False
    topk: bool = False
    micro_batch: int | None = None
    clip: float | None = None
    dropout: float = 0.0
    seldom: bool = False  # on some workers in some steps


CASES = {
    "worker by worker": Case(dropout=0.3),
    "a layer that is not used at times": Case(seldom=True),
    "union": Case(union=True),
    "micro-batches": Case(micro_batch=2),
    "micro-batches of the union": Case(union=True, micro_batch=2),
    "TopK": Case(topk=True),
    "clipped": Case(clip=0.1),
}


@dataclass
class Steps:
    """A network's gradients and their exchange."""

    gradients: Gradients
    exchange: Exchange

    def take(self, x: Tensor, y: Tensor, step: int, levels: Sequence[Any], time: Any) -> Any:
        return take_step(
            self.gradients, self.exchange, Minibatch(0, step, step, 0.1, False, x, y), levels, time
        )


def training_step(case: Case, world: World, bucket_mb: float) -> Steps:
    torch.manual_seed(0)
    model = Net(case.dropout, case.seldom).double()
    gradients = Gradients(
        model,
        classification_loss,
        world,
        union=case.union,
        seed=0,
        micro_batch=case.micro_batch,
        clip=case.clip,
    )
    compressor = TopK() if case.topk else PowerSGD()
    buckets = buckets_with_loss(gradients.parameters, bucket_mb, single=case.clip is not None)
    overlaps = world.processes > 1 and buckets is not None
    device = torch.device("cpu") if overlaps else None
    reducer = Reducer(compressor, layer_table(model), world, 0)
    exchange = Exchange(reducer, buckets, background=device)
    if overlaps:
        gradients.on_layer_complete(exchange.add_rows)
    return Steps(gradients, exchange)


def batch(step: int, world: World) -> tuple[Tensor, Tensor]:
    """Of the hosted workers."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(WORKERS, BATCH, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (WORKERS, BATCH), generator=generator)
    hosted = slice(world.hosted.start, world.hosted.stop)
    return x[hosted], y[hosted]


def steps(case: Case, world: World, bucket_mb: float) -> dict[str, Any]:
    world.meter.dtype = torch.float64
    e = training_step(case, world, bucket_mb)
    time, found, losses = clock.Clock(torch.device("cpu")), [], []
    for step in range(STEPS):
        level = 10 if case.topk and step != 2 else LEVELS[step]
        levels = [level if p.ndim > 1 else "dense" for p in e.gradients.parameters]
        updates, loss, *_ = e.take(*batch(step, world), step, levels, time)
        found.append(torch.cat([u.flatten() for u in updates]))
        losses.append(loss)
    e.exchange.close()
    meter = world.meter.take_counts()
    assert set(time.seconds) == {"compute", "compress", "communicate"}
    assert min(time.seconds.values()) >= 0
    return {
        "results": torch.stack(found),
        "losses": torch.stack(losses),
        "overlaps": e.exchange.background is not None,
        "bytes": [meter.layers[i].bytes for i in range(-1, len(levels))],
        "calls": meter.calls["mean"],
        "threads": threading.active_count(),
    }


def both(rank: int, case: Case) -> list[dict[str, Any]]:
    return [steps(case, ProcessWorld(WORKERS, torch.device("cpu")), mb) for mb in (BUCKET, 25.0)]


SLOW = [name for name in CASES if "micro" in name]


@pytest.mark.parametrize(
    "names",
    [[name for name in CASES if name not in SLOW], pytest.param(SLOW, marks=pytest.mark.slow)],
    ids=["whole batches", "micro-batches"],
)
def test_during_backward_equals_after_it_and_the_simulation(names: list[str]) -> None:
    answers = group.run_in_turn(2, *((both, CASES[name]) for name in names))
    for name, ((during, after), other) in zip(names, answers, strict=True):
        expected = steps(CASES[name], World(WORKERS), BUCKET)
        assert torch.equal(during["results"], other[0]["results"]), name
        assert torch.equal(during["results"], after["results"]), name  # two: a + b = b + a
        torch.testing.assert_close(during["results"], expected["results"], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(during["losses"], expected["losses"], rtol=1e-6, atol=0)
        assert during["bytes"] == after["bytes"] == expected["bytes"], name
        assert during["calls"] == expected["calls"]  # the simulation counts the same collectives
        assert during["overlaps"] == (CASES[name].clip is None)
        assert not after["overlaps"]
        assert (during["calls"] > after["calls"]) == during["overlaps"], name
        assert during["threads"] == after["threads"]  # the thread has ended


def test_buckets_by_hand() -> None:
    """Layers of 3, 2, 2, 1, 4, 1 numbers, from the last to the first, until 16 bytes are reached;
    the fourth is in float64."""
    sizes = {0: 3, 1: 2, 2: 2, 3: 1, 4: 4, 5: 1}
    layers = [torch.zeros(n, dtype=torch.float64 if i == 3 else None) for i, n in sizes.items()]
    assert make_buckets(layers, 16) == [[5, 4], [3], [2, 1], [0]]
    assert make_buckets(layers, 17) == [[5, 4], [3], [2, 1, 0]]
    assert make_buckets(layers, 1000) == [[3], [5, 4, 2, 1, 0]]


class Product(nn.Module):
    """Of parameters of some sizes and types, whose gradients are complete from the last to the
    first."""

    def __init__(self, sizes: Sequence[int], kinds: Sequence[torch.dtype]) -> None:
        super().__init__()
        pairs = zip(sizes, kinds, strict=True)
        self.parts = nn.ParameterList([torch.ones(n, dtype=kind) for n, kind in pairs])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * part.sum()
        return x


def buckets_of_ddp(module: nn.Module, cap: int) -> list[list[int]]:
    """Those that DDP has made by its second step, in which it calls its hook with each of them."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap / 2**20)
    index, found = {p: i for i, p in enumerate(module.parameters())}, list[list[int]]()

    def see(state: Any, bucket: Any) -> Any:
        found.append([index[p] for p in bucket.parameters()])
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    see.__annotations__ = {}  # torch wants its own classes there, or none
    ddp.register_comm_hook(None, see)
    for _ in range(2):
        found.clear()
        ddp(torch.ones(1)).sum().backward()
    return found


def test_buckets_are_those_of_ddp() -> None:
    """Each type of numbers by itself; ours come in the order in which they are complete."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    chance, kinds = random.Random(0), (torch.float32, torch.float64)
    try:
        for case in range(30):
            count, types = chance.randint(1, 12), kinds if case % 2 else kinds[:1]
            net = Product(
                [chance.randint(1, 9) for _ in range(count)],
                [chance.choice(types) for _ in range(count)],
            )
            cap = chance.choice((1, 16, 17, 40, 1000))
            ours = make_buckets([*net.parameters()], cap)
            assert sorted(ours) == sorted(buckets_of_ddp(net, cap)), case
            assert sorted(ours, key=min, reverse=True) == ours
    finally:
        dist.destroy_process_group()


# -- it does overlap -------------------------------------------------------------------------


def gated(rank: int) -> list[bool]:
    """Did a bucket's reduction end while backward still had layers to do?"""
    e = training_step(Case(), ProcessWorld(2, torch.device("cpu")), BUCKET)
    assert e.exchange.background is not None
    reduce = e.exchange.reducer.reduce
    e.exchange.reducer.reduce = lambda *given: (reduce(*given), Gate.reduced.set())[0]
    net = e.gradients.model
    net.norm.register_forward_hook(lambda module, inputs, output: Gate.apply(output))
    x, y = batch(0, e.exchange.world)
    e.take(x, y, 0, ["dense"] * len(e.gradients.parameters), clock.Clock(x.device))
    e.exchange.close()
    return [*Gate.passed]


def test_reduction_goes_on_during_backward() -> None:
    assert group.run(gated, 2) == [[True], [True]]


# -- gradients that are not finite -----------------------------------------------------------


def poisoned(rank: int, layer: str) -> float:
    e = training_step(Case(), ProcessWorld(2, torch.device("cpu")), BUCKET)
    if rank == 1:
        parameter = e.gradients.model.get_parameter(layer)
        parameter.register_hook(lambda g: g * float("nan"))
    x, y = batch(0, e.exchange.world)
    levels = ["dense"] * len(e.gradients.parameters)
    _, loss, *_ = e.take(x, y, 0, levels, clock.Clock(x.device))
    return loss.item()


def test_a_poisoned_gradient_in_any_bucket_is_heard_of_everywhere() -> None:
    works = ((poisoned, layer) for layer in ("first.weight", "last.bias"))
    for losses in group.run_in_turn(2, *works):
        assert [loss == loss for loss in losses] == [False, False]
