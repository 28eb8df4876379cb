"""Cases of ``regimes.attach``: DDP on a few processes, FSDP2 within replicas of two, and FSDP2 with
its own collectives compressed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.same_bits import attached, mesh
from benchmarks.same_bits.case import BATCH, Place
from benchmarks.same_bits.loop import Loop, batch

SMALL = {"bucket_cap_mb": 0.004}  # several buckets, rebuilt after the first step
HIGH_LOW_HIGH = {"name": "windows", "windows": [[1, 2]]}


@dataclass(frozen=True, kw_only=True)
class Hooked(Loop):
    """A DDP model with a hook.

    Attributes:
        ddp: arguments of DistributedDataParallel.
        full: the state of all processes goes through one file, so that their number may change.
        told: the hook has the optimiser, and reads its rate.
        probed: the curvature is measured on a probe of this many batches.
    """

    counted: tuple[int, int] = (1, 1)  # after the buckets are rebuilt, before the unit ends
    ddp: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    full: bool = False
    told: bool = False
    probed: int = 0

    def wrap(self, net: nn.Module) -> Any:
        options: dict[str, Any] = {"find_unused_parameters": self.side, **self.ddp}
        return DistributedDataParallel(net, **options)

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        given: dict[str, Any] = {"policy": HIGH_LOW_HIGH, "seed": 7, **options}
        if self.told or "every" in given:
            given["optimizer"] = optimizers if len(optimizers) > 1 else optimizers[0]
        if self.probed:
            given["probe"] = probe_loss, [batch(0, i, 0) for i in range(self.probed)]
        return attached.attach(model, given)

    def after(self, job: Any, step: int, loss: Tensor) -> None:
        if "record" in self.options:
            job.log(train_loss=loss)
        if "every" not in self.options and step % 3 == 2:
            job.epoch_end(lr=self.rate(step + 1))

    def last_backward(self, model: Any, last: bool) -> Any:
        return contextlib.nullcontext() if last else model.no_sync()

    def save(self, at: Place, model: Any, optimizers: list[Any], job: Any) -> None:
        if not self.full:
            super().save(at, model, optimizers, job)
            return
        state = {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "job": job.full_state_dict(),
        }
        if at.rank == 0:
            torch.save(state, at.folder / "state.pt")

    def load(self, at: Place, model: Any, optimizers: list[Any], job: Any) -> None:
        branch = {"branch": True} if self.changes else {}
        path = at.folder / ("state.pt" if self.full else f"state-{at.rank}.pt")
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        load = job.load_full_state_dict if self.full else job.load_state_dict
        load(state["job"], **branch)


@dataclass(frozen=True, kw_only=True)
class Sharded(Hooked):
    """Two replicas of two processes, among which FSDP2 divides the model."""

    counts: tuple[int, ...] = (4,)
    norm: bool = False

    def wrap(self, net: nn.Module) -> Any:
        return mesh.shard(net, mesh.two_by_two()["shard"])

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        replicas = mesh.two_by_two()["replicate"]
        return super().start(model, optimizers, {"replicas": replicas, **options})

    def worker(self, rank: int) -> tuple[int, slice]:
        return mesh.part(rank)

    def last_backward(self, model: Any, last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def save(self, at: Place, model: Any, optimizers: list[Any], job: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about itself
            dcp.save(_parts(model, optimizers, job), checkpoint_id=at.folder / "checkpoint")

    def load(self, at: Place, model: Any, optimizers: list[Any], job: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                found := _parts(model, optimizers, job), checkpoint_id=at.folder / "checkpoint"
            )
            model_state, state = found["model"], found["optimizer"]
            set_state_dict(model, optimizers, model_state_dict=model_state, optim_state_dict=state)


@dataclass(frozen=True, kw_only=True)
class Collective(Sharded):
    """All processes divide the model by FSDP2, whose own collectives are compressed."""

    counts: tuple[int, ...] = (2,)

    def wrap(self, net: nn.Module) -> Any:
        return mesh.shard(net, mesh.line())

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        return Hooked.start(
            self, model, optimizers, {"shards": mesh.line(), "policy": None, **options}
        )

    def worker(self, rank: int) -> tuple[int, slice]:
        return rank, slice(0, BATCH)


@dataclass(frozen=True, kw_only=True)
class CollectiveWithin(Sharded):
    """As ``Sharded``, and the collectives within a replica are compressed."""

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        shards = mesh.two_by_two()["shard"]
        return super().start(model, optimizers, {"shards": shards, **options})


def _parts(model: Any, optimizers: list[Any], job: Any) -> dict[str, Any]:
    model_state, state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": state, "hook": job.sharded_state()}


def probe_loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of a batch of the probe."""
    return F.cross_entropy(model(samples[0], 0), samples[1])
