"""What numbers depend on is the same on all processes, or one sentence names the field and the
values, before anything is trained: in the hook, in local steps and in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from configs import smoke as config
from ddp_scripts import cases, group, own_loop
from ddp_scripts.cases import Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import RegimesError
from regimes.collectives.agreement import describe_difference
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
    decide = Weekly.decide

    def __init__(self, weeks: int, own: int) -> None:
        self.weeks, self._own, self.memory = weeks, own, object()


class Scaler:
    def get_scale(self) -> float:
        return 1.0


def adamw(decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=decay)


def two_groups(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        first, *others = net.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": rate}], lr=0.1)

    return make


# what each process gives, and what is said of process 1, whose value stands first
HOOK: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "seed": (lambda rank: {"seed": rank}, "seed = 1, process 0 has seed = 0: "),
    "compressor": (
        lambda rank: {"compressor": ("powersgd", "acp-sgd")[rank]},
        "compressor.name = 'acp-sgd', ",
    ),
    "compressor option": (
        lambda rank: {"compressor": {"name": "topk", "error_feedback": bool(rank)}},
        "compressor.error_feedback = True, process 0 has compressor.error_fee",
    ),
    "level": (lambda rank: {"levels": {"low": 4 - rank, "high": 1}}, "levels.low = 3, "),
    "policy": (
        lambda rank: {"policy": {"name": "accordion", "eta": 0.5 + rank}},
        "policy.eta = 1.5, process 0 has policy.eta = 0.5: ",
    ),
    "own policy": (lambda rank: {"policy": Weekly(7 - rank)}, "policy.days = 6, "),
    "loose policy": (lambda rank: {"policy": Loose(4 - rank, 0)}, "policy.weeks = 3, "),
    "signal": (lambda rank: {"signal": ("update", "global")[rank]}, "signal = 'global', "),
    "start": (lambda rank: {"start_compressing_after": rank}, "start_compressing_after = 1, "),
    "unit": (lambda rank: {"every": 2 + rank}, "every = 3, process 0 has every = 2: "),
    "unit by hand": (lambda rank: {"every": (2, "epoch")[rank]}, "every = 'epoch', "),
    "optimizer": (
        lambda rank: {"make": (cases.sgd, adamw(0.1))[rank]},
        "optimizer.name = 'AdamW', ",
    ),
    "decay": (lambda rank: {"make": adamw(0.1 * rank)}, "optimizer.options.weight_decay = 0.1, "),
    "rate": (lambda rank: {"make": two_groups(0.1 + rank)}, "lr.1 = 1.1, process 0 has lr.1 = 0.1"),
    "rate of a static graph": (  # whose first pass ends in the hook's thread
        lambda rank: {"make": two_groups(0.1 + rank), "ddp": {"static_graph": True}},
        "lr.1 = 1.1, ",
    ),
    "scaler": (lambda rank: {"scaler": (None, Scaler())[rank]}, "scaler = True, "),
    "buckets": (lambda rank: {"ddp": {"bucket_cap_mb": 25 - rank}}, "ddp.bucket_bytes_cap = "),
    "alike": (lambda rank: {"policy": Loose(4, rank), "record": None}, ""),
    "timeouts": (lambda rank: {"timeout": 60.0 + rank}, ""),
}
LOCAL: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "seed": (lambda rank: {"seed": rank}, "seed = 1, process 0 has seed = 0: "),
    "policy": (lambda rank: {"policy": 2 + rank}, "policy.level = '3', "),
    "periods": (
        lambda rank: {"policy": "post-local", "periods": {"low": 1, "high": 8 + rank}},
        "periods.high = 9, process 0 has periods.high = 8: ",
    ),
    "outer": (lambda rank: {"outer": {"lr": 1.0 - 0.5 * rank}}, "outer.lr = 0.5, "),
    "compressor": (
        lambda rank: {"compressor": ("powersgd", "topk")[rank], "level": 1},
        "compressor.name = 'topk', ",
    ),
    "level": (lambda rank: {"compressor": "powersgd", "level": 1 + rank}, "level = 2, "),
    "unit": (lambda rank: {"every": 5 + rank}, "every = 6, process 0 has every = 5: "),
    "momentum": (lambda rank: {"momentum": 0.9 - 0.4 * rank}, "optimizer.options.momentum = 0.5, "),
    "dtype": (lambda rank: {"dtype": (torch.float32, torch.float64)[rank]}, "dtype = 'torch.flo"),
    "alike": (lambda rank: {"policy": Loose(4, rank), "periods": {"low": 2}}, ""),
}
TRAINER = {
    "seed=3": "seed = 3, process 0 has seed = 0: ",
    "optimizer.momentum=0.5": "optimizer.momentum = 0.5, process 0 has optimizer.momentum = ",
    "levels={low=3,high=1}": "levels.low = 3, process 0 has levels.low = 4: ",
    "policy.interval=2": "policy.interval = 2, process 0 has policy.interval = ",
    "unit_steps=3": "unit_steps = 3, process 0 has no unit_steps: ",
}
REST = "start all processes with the same configuration, code and data"


def heard(action: Callable[[], Any]) -> str:
    try:
        action()
    except RegimesError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attached(
    ddp: Any = None, make: Any = cases.sgd, **options: Any
) -> tuple[Callable[[int], None], Any, Any]:
    """A hook of seed 0 with the given options: a step of training, its hook and its optimiser."""
    net = DistributedDataParallel(cases.build(CASE), **(ddp or {}))
    optimizer = make(net)
    hook = regimes.attach(net, optimizer, **{"every": 2, "policy": "accordion", **options})
    rank = torch.distributed.get_rank()
    return lambda step: cases.step_of(net, optimizer, CASE, step, rank), hook, optimizer


def local_steps(
    momentum: float = 0.9, dtype: Any = torch.float64, **options: Any
) -> tuple[Callable[[int], None], Any, Any]:
    network = own_loop.model().to(dtype)
    own = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum)
    steps = regimes.local_steps(network, own, **options)
    data = [*own_loop.batches(torch.distributed.get_rank(), 4)]

    def take(step: int) -> None:
        own_loop.take(network, own, *data[step])
        steps.step()

    return take, steps, own


def at_the_start(rank: int) -> list[list[str]]:
    """What is said where each field differs: of the hook in its first step, of local steps."""
    hooks = [heard(lambda way=way: attached(**way(rank))[0](0)) for way, _ in HOOK.values()]
    return [hooks, [heard(lambda way=way: local_steps(**way(rank))) for way, _ in LOCAL.values()]]


def later(rank: int) -> dict[str, str]:
    """What differs after the first unit: a rate, by a scheduler of its own loss; or a level that
    the scripts set before the first step, after it, on one process alone."""
    found = {}
    press = {"compressor": regimes.PowerSGD(rank=2)}
    for name, make, at, level in (
        ("rate", attached, 2, ""),
        ("rate of local steps", lambda: local_steps(policy=2, every=2), 2, ""),
        ("first", attached, 0, "low"),
        ("second", attached, 2, "low"),
        ("alone", attached, 0, None),
        ("local", lambda: local_steps(policy=2, **press), 0, None),
    ):
        take, job, optimizer = make()

        def train(
            take: Any = take, job: Any = job, own: Any = optimizer, at: int = at, level: Any = level
        ) -> None:
            for step in range(4):
                if step == at and level == "":
                    own.param_groups[0]["lr"] /= 1 + rank
                elif step == at:
                    other = "dense" if isinstance(job, regimes.LocalSteps) else "high"
                    job.set_level(other if rank else level)
                take(step)

        found[name] = heard(train)
    return found


def trainer(rank: int, config: RunConfig, setting: str) -> str:
    """A run whose process 1 has other settings; it is refused before it trains."""
    own = override(config, [setting]) if rank else config
    return heard(lambda: prepare_run(own).close())


def check(said: str, words: str) -> None:
    if not words:
        assert said == ""
        return
    assert said.startswith("ConfigError: process 1 has "), said
    assert f" has {words}" in said
    assert said.endswith(REST)


@cache
def heard_of() -> list[list[Any]]:
    return group.run_in_turn(2, (at_the_start,), (later,))


def test_jobs_that_differ_are_refused_when_they_start() -> None:
    for found in heard_of()[0]:
        for ways, sentences in zip((HOOK, LOCAL), found, strict=True):
            for (_, words), said in zip(ways.values(), sentences, strict=True):
                check(said, words)


def test_what_differs_later_is_refused_at_the_first_step_that_has_it() -> None:
    rates = {"rate": ("0.025", "0.05"), "rate of local steps": ("0.05", "0.1")}
    for found in heard_of()[1]:
        for name, said in found.items():
            if name in rates:
                own, other = rates[name]
                assert f"process 1 has lr.0 = {own}, process 0 has lr.0 = {other}: " in said
                continue
            assert said.startswith("ConfigError: process 1 has "), (name, said)
            assert f"= '{'dense' if name == 'local' else 'high'}', " in said, (name, said)
            assert "\n" not in said, name


def test_trainers_that_differ_are_refused_before_they_train() -> None:
    works = ((trainer, config(), setting) for setting in TRAINER)
    answers = group.run_in_turn(2, *works, timeout=None)
    for words, found in zip(TRAINER.values(), answers, strict=True):
        for said in found:
            check(said, words)


def test_a_difference_in_words() -> None:
    assert describe_difference([{"a": {"b": 1}}, {"a": {"b": 1}}]) is None
    assert describe_difference([{"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, {"a": [1]}]) == (
        "process 2 has no a.1.b, process 0 has a.1.b = 2"
    )
    assert describe_difference([dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1)]) == (
        "process 1 has a = 1, b = 1, c = 1, process 0 has a = 0, b = 0, c = 0; and 2 others differ"
    )
    assert describe_difference([{"a": float("nan")}, {"a": float("nan")}]) is None
    assert len(str(describe_difference([{"a": "x" * 1000}, {"a": "y" * 1000}]))) < 200
