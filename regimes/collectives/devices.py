"""The device of this process, and a group's devices, compared through its store."""

from __future__ import annotations

import contextlib
import socket
import warnings
from datetime import timedelta
from typing import Any

import torch

from regimes.base.errors import ConfigError
from regimes.collectives.launcher import read_launch

# how long process 0, which has the store, waits for the others to read it before it raises
_LEAVE = timedelta(seconds=10)


def pick_device(wanted: str) -> torch.device:
    """Return the device of this process; "auto" takes a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    local_rank = read_launch().local_rank
    if wanted in ("auto", "cuda"):
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank % torch.cuda.device_count())
        if wanted == "cuda":
            raise ConfigError('device = "cuda", but torch finds no GPU here: use "cpu" or "auto"')
        return torch.device("cpu")
    try:
        torch.zeros(1, device=wanted).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {wanted!r} cannot be used: {reason}") from None
    return torch.device(wanted)


def post_kind(store: Any, rank: int, device: torch.device) -> None:
    """Write this process's type of device, for ``check_kinds`` of every process."""
    store.set(f"kind/{rank}", device.type)


def check_kinds(store: Any, rank: int, count: int) -> None:
    """Wait until every process has posted its type of device, and compare.

    A CPU and a GPU round differently and check for non-finite gradients after different numbers of
    steps: such a group would end with different weights, or deadlock.

    Raises:
        ConfigError: the types differ; on every process.
    """
    kinds = [store.get(f"kind/{other}").decode() for other in range(count)]
    odd = next((other for other, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is None:
        return
    # once all have read the store and do the same; it may end with the first process
    with contextlib.suppress(RuntimeError):
        store.set(f"refused/{rank}", "")
        store.wait([f"refused/{other}" for other in range(count)], _LEAVE)
    why = f"process 0 computes on {kinds[0]!r}, process {odd} on {kinds[odd]!r}"
    raise ConfigError(f'{why}: give every process a GPU, or set the device "cpu" for all')


def one_gpu_each(store: Any, rank: int, count: int, device: torch.device) -> bool:
    """Return whether every process has a GPU for itself, as NCCL requires. All get the same answer;
    process 0 warns if some have and some have not."""
    mine = device.type == "cuda" and torch.cuda.get_device_properties(device)
    store.set(f"gpu/{rank}", f"{socket.gethostname()} {mine.uuid}" if mine else "")
    gpus = [store.get(f"gpu/{other}").decode() for other in range(count)]
    lacking = [other for other, gpu in enumerate(gpus) if not gpu or gpus.count(gpu) > 1]
    if rank == 0 and lacking and any(gpus):
        ranks = ", ".join(map(str, lacking))
        warnings.warn(
            f"no GPU of its own for process {ranks}: tensors travel over gloo, slower than NCCL",
            stacklevel=4,
        )
    return not lacking
