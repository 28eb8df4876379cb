"""On which devices the processes of a group compute, exchanged in the store where they have met."""

from __future__ import annotations

import contextlib
import socket
import warnings
from datetime import timedelta
from typing import Any

import torch

from regimes.errors import ConfigError

LEAVE = timedelta(seconds=10)  # for the others to read the same refusal


def post_kind(store: Any, rank: int, device: torch.device) -> None:
    """Write this process's kind of device, which ``check_kinds`` of every process reads."""
    store.set(f"kind/{rank}", device.type)


def check_kinds(store: Any, rank: int, count: int) -> None:
    """Wait until every process has posted its kind of device, and compare.

    A CPU and a GPU round differently and look for non-finite gradients after different numbers of
    steps: such a group would end with different weights, or wait for ever.

    Raises:
        ConfigError: on every process, where the kinds differ.
    """
    kinds = [store.get(f"kind/{other}").decode() for other in range(count)]
    odd = next((other for other, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is None:
        return
    with contextlib.suppress(RuntimeError):  # the store may end with the process that leaves first
        store.set(f"refused/{rank}", "")
        store.wait([f"refused/{other}" for other in range(count)], LEAVE)
    raise ConfigError(
        f"process 0 computes on {kinds[0]!r}, process {odd} on {kinds[odd]!r}: give every process "
        'a GPU, or set the device "cpu" for all'
    )


def one_gpu_each(store: Any, rank: int, count: int, device: torch.device) -> bool:
    """Has every process a GPU for itself, as NCCL needs it? All get the same answer; process 0
    warns where GPUs are shared."""
    mine = device.type == "cuda" and torch.cuda.get_device_properties(device)
    store.set(f"gpu/{rank}", f"{socket.gethostname()} {mine.uuid}" if mine else "")
    gpus = [store.get(f"gpu/{other}").decode() for other in range(count)]
    lacking = [other for other, gpu in enumerate(gpus) if not gpu or gpus.count(gpu) > 1]
    if rank == 0 and lacking and any(gpus):
        who = ", ".join(map(str, lacking))
        warnings.warn(
            f"no GPU of its own for process {who}: tensors travel over gloo, slower than NCCL",
            stacklevel=4,
        )
    return not lacking
