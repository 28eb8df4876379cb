"""Cases of ``regimes.local_steps``: whole models, and FSDP2 within replicas of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import regimes
from benchmarks.same_bits import mesh
from benchmarks.same_bits.case import Case
from benchmarks.same_bits.hook import PAIRS
from benchmarks.same_bits.loop import Loop

DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMS = {**DILOCO, "fragments": 2, "delay": 1, "mixing": 0.5}


@dataclass(frozen=True, kw_only=True)
class Stepped(Loop):
    """Processes that step by themselves."""

    ends: tuple[int, ...] = (14,)
    counted: tuple[int, int] = (3, 4)

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        return regimes.local_steps(model, optimizers[0], **{"every": 5, "seed": 7, **options})

    def after(self, job: Any, step: int, loss: Tensor) -> None:
        job.step()
        job.log(train_loss=loss)


@dataclass(frozen=True, kw_only=True)
class ShardedSteps(Stepped):
    """Two replicas of two processes that step by themselves."""

    counts: tuple[int, ...] = (4,)
    norm: bool = False

    def wrap(self, net: nn.Module) -> Any:
        return mesh.shard(net)

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        replicas = mesh.two_by_two()["replicate"]
        return super().start(model, optimizers, {"replicas": replicas, **options})

    def worker(self, rank: int) -> tuple[int, slice]:
        return mesh.part(rank)


WAYS: dict[str, dict[str, Any]] = {
    "mean": {"policy": 4, "outer": {"states": "average"}},
    "reset": {"policy": 4, "outer": {"states": "reset"}},
    "diloco": {"policy": 4, "outer": DILOCO},
    "streaming": {"policy": 4, "outer": STREAMS},
    "each-step": {"policy": 1},
    "periods": {"policy": {"name": "accordion", "interval": 1}, "periods": {"low": 1, "high": 4}},
    "post": {"policy": "post-local", "periods": {"low": 1, "high": 4}},
    "qsr": {"policy": {"name": "qsr", "alpha": 0.05, "base": 2}},
    "adacomm": {"policy": {"name": "adacomm", "base": 4}},
}
PRESSED = {f"diloco-{n}": {"compressor": n, "level": PAIRS[n]["high"]} for n in PAIRS}
QUICK = ("diloco", "streaming")

CASES: list[Case] = [
    *(
        Stepped(name=f"own-local-{n}", options=o, quick=n in QUICK, optimizer="adamw")
        for n, o in WAYS.items()
    ),
]
