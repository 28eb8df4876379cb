"""The visible GPUs, and one for each of several runs, by their names in CUDA_VISIBLE_DEVICES.

No torch at import, because the launching process computes nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterable

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Name the GPUs that this process may use: indices, or UUIDs where the variable has them.

    torch is imported only if the variable is not set and there is a driver.
    """
    listed = os.environ.get(VARIABLE)
    if listed is not None:  # as CUDA reads it: up to the first invalid entry
        names = (name.strip() for name in listed.split(","))
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is no driver
        return []
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def share_gpus(jobs: int, devices: Iterable[str]) -> list[str | None]:
    """Choose a GPU for each job, round-robin; None where the job sees all GPUs.

    Args:
        devices: of the runs' configurations. A device such as "cuda:1" is an index into the GPUs
            visible now, so none is hidden.
    """
    gpus = visible_gpus() if {"auto", "cuda"}.issuperset(devices) else []
    return [gpus[job % len(gpus)] if gpus else None for job in range(jobs)]


def hide_other_gpus(gpu: str | None) -> None:
    """Hide all other GPUs from this process. CUDA reads the variable once, at its first use."""
    if gpu is not None:
        os.environ[VARIABLE] = gpu
