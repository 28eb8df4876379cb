"""Processes with a pretended GPU each, and gloo in the place of NCCL."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pretended
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regimes
from regimes.collectives import group, processes
from regimes.config import RunConfig

ERRORS = {"nccl": dist.DistBackendError("NCCL timeout"), "memory": torch.OutOfMemoryError("full")}


def trained(
    rank: int, config: RunConfig, count: int, out: Path, fails: str | None = None
) -> dict[str, Any]:
    """A run of the trainer: what was called in which order, what travelled from where, its error.

    Args:
        fails: a key of ERRORS; what the third all-reduce ends in, as NCCL's do: not before it is
            waited for with patience.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
                      REGIMES_RENDEZVOUS=(out.parent / "meet").as_uri())  # fmt: skip
    patch = pytest.MonkeyPatch()
    calls = pretended.install(patch, count)
    _gloo_for_nccl(patch, calls)
    places = {name: _spied(patch, name) for name in ("all_reduce", processes.GATHER, "broadcast")}
    if fails is not None:
        _failing(patch, ERRORS[fails])
    try:
        regimes.run(config, out)
        heard = ""
    except RuntimeError as error:
        heard = f"{type(error).__name__}: {error}"
    except regimes.errors.TrainingError as error:
        heard = str(error)
    return {"calls": calls, "places": places, "heard": heard}


def _gloo_for_nccl(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    begin, end = dist.init_process_group, dist.destroy_process_group
    asked: list[str] = []

    def init(backend: str, device_id: object = None, **options: Any) -> None:
        waits = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        calls.append(f"init {backend} {device_id} {waits}")
        asked.append(backend)
        begin(_gloo(backend), **options)

    def leave(how: str) -> None:
        calls.append(how)
        asked.clear()
        end()

    end()  # the group that these processes were started with
    patch.setattr(dist, "init_process_group", init)
    patch.setattr(dist, "get_backend_config", lambda group=None: asked[-1])
    patch.setattr(dist, "destroy_process_group", lambda: leave("destroy"))
    patch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: leave("abort"))


def _gloo(backend: str) -> str:
    return "cuda:gloo" if backend == "nccl" else backend.replace("nccl", "gloo")


def _spied(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Where the tensors of a collective are, each place once."""
    original, places = getattr(dist, name), []

    def collective(*args: Any, **options: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor) and str(tensor.device) not in places:
                places.append(str(tensor.device))
        work = original(*args, **options)
        return work and Mock(wait=lambda patience: work.wait(patience))

    collective.__name__ = name
    patch.setattr(dist, name, collective)
    return places


def _failing(patch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    original, calls = dist.all_reduce, [0]

    def wait(patience: timedelta) -> None:
        raise error

    def all_reduce(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return Mock(wait=wait) if calls[0] == 3 else original(*args, **options)

    patch.setattr(dist, "all_reduce", all_reduce)


def hooked(rank: int) -> dict[str, Any]:
    """The communicator of the hook next to a user's own NCCL group."""
    made: list[str] = []
    new_group, patch = dist.new_group, pytest.MonkeyPatch()

    def new(ranks: object, timeout: object, backend: str, **options: Any) -> Any:
        made.extend([backend, os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "")])
        return new_group(ranks, timeout, _gloo(backend), **options)

    with patch.context() as p:
        p.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        p.setattr(dist, "new_group", new)
        ours = group.GroupWorld(dist.group.WORLD, pretended.GPU, 20.0)
    patch.setattr(torch.cuda, "current_stream", pretended.stream)
    return {"gathered": ours.gather_object(rank), "made": made,
            "after": "TORCH_NCCL_BLOCKING_WAIT" in os.environ}  # fmt: skip
