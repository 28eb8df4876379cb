"""Processes that hold one thing differently: what each way of training hears of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ddp_scripts import cases, own_loop
from ddp_scripts.cases import Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import RegimesError
from regimes.policies import Decision
from regimes.training.build import prepare_run

CASE = Case()


@dataclass(frozen=True)
class Weekly:
    """A policy of one's own."""

    days: int = 7
    needs: tuple[str, ...] = ()
    names: tuple[str, ...] = ("low",)

    def decide(self, history: Any, layers: Any) -> list[Decision]:
        return [Decision("low")] * len(layers)


class Loose:
    """A policy that is no dataclass."""

    needs: tuple[str, ...] = ()
    names = ("low",)

    def __init__(self, weeks: int, own: int) -> None:
        self.weeks, self._own = weeks, own
        self.memory = object()

    def decide(self, history: Any, layers: Any) -> list[Decision]:
        return [Decision("low")] * len(layers)


def heard(action: Callable[[], Any]) -> str:
    try:
        action()
    except RegimesError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attached(rank: int, *, ddp: Any = None, make: Any = None, **options: Any) -> None:
    """A hook of seed 0 with the given options, and a step of training."""
    net = DistributedDataParallel(cases.build(CASE), **(ddp or {}))
    optimizer = (make or cases.sgd)(net)
    regimes.attach(net, optimizer, **{"every": 2, "policy": "accordion", **options})
    cases.step_of(net, optimizer, CASE, 0, rank)


def adamw(decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=decay)


def two_groups(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        first, *others = net.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": rate}], lr=0.1)

    return make


class Scaler:
    def get_scale(self) -> float:
        return 1.0


def hook(rank: int) -> dict[str, str]:
    """A hook on each of two processes, by what is not the same; and two that are."""
    ways: dict[str, dict[str, Any]] = {
        "seed": {"seed": rank},
        "compressor": {"compressor": ("powersgd", "acp-sgd")[rank]},
        "compressor option": {"compressor": {"name": "topk", "error_feedback": bool(rank)}},
        "level": {"levels": {"low": 4 - rank, "high": 1}},
        "policy": {"policy": {"name": "accordion", "eta": 0.5 + rank}},
        "own policy": {"policy": Weekly(7 - rank)},
        "loose policy": {"policy": Loose(4 - rank, 0)},
        "signal": {"signal": ("update", "global")[rank]},
        "start": {"start_compressing_after": rank},
        "unit": {"every": 2 + rank},
        "unit by hand": {"every": (2, "epoch")[rank]},
        "optimizer": {"make": (cases.sgd, adamw(0.1))[rank]},
        "weight decay": {"make": adamw(0.1 * rank)},
        "rate": {"make": two_groups(0.1 + rank)},
        "scaler": {"scaler": (None, Scaler())[rank]},
        "buckets": {"ddp": {"bucket_cap_mb": 25 - rank}},
    }
    found = {name: heard(lambda way=way: attached(rank, **way)) for name, way in ways.items()}
    found["alike"] = heard(lambda: attached(rank, policy=Loose(4, rank), record=None))
    found["timeouts"] = heard(lambda: attached(rank, timeout=60.0 + rank))
    return found


def drifted(rank: int) -> str:
    """The rate of one process falls after the first unit, by a scheduler of its own loss."""
    net = DistributedDataParallel(cases.build(CASE))
    optimizer = cases.sgd(net)
    regimes.attach(net, optimizer, policy="accordion", every=2)
    for step in range(2):
        cases.step_of(net, optimizer, CASE, step, rank)
    optimizer.param_groups[0]["lr"] /= 1 + rank
    return heard(lambda: cases.step_of(net, optimizer, CASE, 2, rank))


def by_hand(rank: int) -> dict[str, str]:
    """Levels that the scripts set differently: before the first step, after it, of one alone."""
    found = {}
    for name, at, level in (("first", 0, "low"), ("second", 2, "low"), ("alone", 0, None)):
        net = DistributedDataParallel(cases.build(CASE))
        optimizer = cases.sgd(net)
        hook = regimes.attach(net, optimizer, policy="accordion", every=2)

        def train(
            net: Any = net,
            optimizer: Any = optimizer,
            hook: Any = hook,
            at: int = at,
            level: str | None = level,
        ) -> None:
            for step in range(4):
                if step == at:
                    hook.set_level("high" if rank else level)
                cases.step_of(net, optimizer, CASE, step, rank)

        found[name] = heard(train)
    network = own_loop.model()
    own = own_loop.optimizer(network, "sgd")
    steps = regimes.local_steps(network, own, policy=2, compressor=regimes.PowerSGD(rank=2))

    def train_alone() -> None:
        steps.set_level("dense" if rank else None)
        for x, y in own_loop.batches(rank, 4):
            own_loop.take(network, own, x, y)
            steps.step()

    return {**found, "local": heard(train_alone)}


def local(rank: int) -> dict[str, str]:
    """The same of local steps."""
    ways: dict[str, dict[str, Any]] = {
        "seed": {"seed": rank},
        "policy": {"policy": 2 + rank},
        "periods": {"policy": "post-local", "periods": {"low": 1, "high": 8 + rank}},
        "outer": {"outer": {"lr": 1.0 - 0.5 * rank}},
        "compressor": {"compressor": ("powersgd", "topk")[rank], "level": 1},
        "level": {"compressor": "powersgd", "level": 1 + rank},
        "unit": {"every": 5 + rank},
        "momentum": {"momentum": 0.9 - 0.4 * rank},
        "dtype": {"dtype": (torch.float32, torch.float64)[rank]},
        "loose policy": {"policy": Loose(4, rank), "periods": {"low": 2}},
    }

    def start(momentum: float = 0.9, dtype: Any = torch.float64, **options: Any) -> None:
        network = own_loop.model().to(dtype)
        own = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum, nesterov=False)
        regimes.local_steps(network, own, **options)

    return {name: heard(lambda way=way: start(**way)) for name, way in ways.items()}


def local_drifted(rank: int) -> str:
    """The rate of one process falls after the first unit."""
    network = own_loop.model()
    own = own_loop.optimizer(network, "sgd")
    steps = regimes.local_steps(network, own, policy=2, every=2)

    def train() -> None:
        for done, (x, y) in enumerate(own_loop.batches(rank, 4)):
            own.param_groups[0]["lr"] = 0.1 / (1 + rank * (done >= 2))
            own_loop.take(network, own, x, y)
            steps.step()

    return heard(train)


def trainer(rank: int, config: RunConfig, settings: list[str]) -> str:
    """A run whose process 1 has other settings; it is refused before it trains."""
    own = override(config, settings) if rank else config
    return heard(lambda: prepare_run(own).close())
