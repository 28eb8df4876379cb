"""Cases of ``regimes.attach``: DDP on a few processes, and FSDP2 within replicas of two."""

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
from torch.nn.parallel import DistributedDataParallel

import regimes
from benchmarks.same_bits import mesh
from benchmarks.same_bits.case import Case, Place
from benchmarks.same_bits.loop import Loop

SMALL = {"bucket_cap_mb": 0.004}  # several buckets, rebuilt after the first step
SWITCHES = {"name": "windows", "windows": [[1, 2]]}  # high, low, high


@dataclass(frozen=True, kw_only=True)
class Hooked(Loop):
    """A DDP model with a hook.

    Attributes:
        ddp: arguments of DistributedDataParallel.
        full: the state of all processes goes through one file, so that their number may change.
        told: the hook has the optimiser, and reads its rate.
    """

    ddp: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    full: bool = False
    told: bool = False

    def wrap(self, net: nn.Module) -> Any:
        options: dict[str, Any] = {"find_unused_parameters": self.side, **self.ddp}
        return DistributedDataParallel(net, **options)

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        given: dict[str, Any] = {"policy": SWITCHES, "seed": 7, **options}
        if self.told or "every" in given:
            given["optimizer"] = optimizers if len(optimizers) > 1 else optimizers[0]
        return regimes.attach(model, **given)

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
        return mesh.shard(net)

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


def _parts(model: Any, optimizers: list[Any], job: Any) -> dict[str, Any]:
    model_state, state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": state, "hook": job.sharded_state()}


PAIRS: dict[str, dict[str, Any]] = {  # levels of each compressor
    "powersgd": {"low": 2, "high": 1},
    "topk": {"low": 40, "high": 5},
    "quantise": {"low": 8, "high": 4},
    "threshold": {"low": 1e-4, "high": 1e-3},
    "dense": {"low": "dense", "high": "dense"},
    "acp-sgd": {"low": 2, "high": 1},
    "randomk": {"low": 40, "high": 5},
    "sign": {"low": "dense", "high": 1},
    "dct-topk": {"low": 40, "high": 5},
    "low-pass": {"low": 0.5, "high": 0.1},
    "cast": {"low": "fp16", "high": "bf16"},
    "chunked-topk": {"low": 40, "high": 5},
    "quantised-all-reduce": {"low": 8, "high": 4},
}
FIELDS = {"chunked-topk": {"chunk": 16}, "quantised-all-reduce": {"block": 16}}
TOPK: dict[str, Any] = {"compressor": "topk", "levels": PAIRS["topk"]}
QUICK = ("powersgd", "topk")


def _options(name: str) -> dict[str, Any]:
    return {"compressor": {"name": name, **FIELDS.get(name, {})}, "levels": PAIRS[name]}


CASES: list[Case] = [
    *(
        Hooked(name=f"hook-{n}", options=_options(n), told=n == "threshold", quick=n in QUICK)
        for n in PAIRS
    ),
    *(
        Sharded(
            name=f"fsdp2-{n}", options=_options(n), told=n == "threshold", quick=n == "powersgd"
        )
        for n in PAIRS
    ),
]
