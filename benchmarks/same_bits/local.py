"""Cases of ``regimes.local_steps``: whole models, and FSDP2 within replicas of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.same_bits import attached, mesh
from benchmarks.same_bits.loop import Loop


@dataclass(frozen=True, kw_only=True)
class Stepped(Loop):
    """Processes that step by themselves."""

    ends: tuple[int, ...] = (18,)
    counted: tuple[int, int] = (3, 4)  # with a synchronisation of each fragment, within a unit

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        return attached.local_steps(model, optimizers[0], {"every": 8, "seed": 7, **options})

    def after(self, job: Any, step: int, loss: Tensor) -> None:
        job.step()
        job.log(train_loss=loss)


@dataclass(frozen=True, kw_only=True)
class ShardedSteps(Stepped):
    """Two replicas of two processes that step by themselves."""

    counts: tuple[int, ...] = (4,)
    norm: bool = False

    def wrap(self, net: nn.Module) -> Any:
        return mesh.shard(net, mesh.two_by_two()["shard"])

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        replicas = mesh.two_by_two()["replicate"]
        return super().start(model, optimizers, {"replicas": replicas, **options})

    def worker(self, rank: int) -> tuple[int, slice]:
        return mesh.part(rank)
