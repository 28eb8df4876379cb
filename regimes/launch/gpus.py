"""Which GPUs there are, and one for each of several runs. Names are those of CUDA_VISIBLE_DEVICES.

Stands under ``regimes.launch``, whose process starts runs but computes nothing: no torch at import.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Iterable

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The GPUs that this process may use: indices, or UUIDs where the variable has them.

    torch is asked only where the variable does not tell and a driver is there.
    """
    listed = os.environ.get(VARIABLE)
    if listed is not None:  # as CUDA reads it: up to the first entry that names nothing
        names = (name.strip() for name in listed.split(","))
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    if not _driver():
        return []
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def shared(jobs: int, devices: Iterable[str]) -> list[str | None]:
    """A GPU for each of so many jobs, in turn; None: leave the job as it is.

    Args:
        devices: of the runs' configurations. One that names its device means the names that are
            visible now, so all are left as they are.
    """
    if not {"auto", "cuda"}.issuperset(devices):
        return [None] * jobs
    found = visible()
    return [found[job % len(found)] if found else None for job in range(jobs)]


def take(gpu: str | None) -> None:
    """Let this process see that GPU only. CUDA reads the variable once, at its first use."""
    if gpu is not None:
        os.environ[VARIABLE] = gpu
