"""The ``doctor`` command: what works on this machine, found by trying it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable

from rich.table import Table

from regimes.terminal import console

NEEDED = ("torch", "torchvision", "numpy", "scipy", "pandas", "scikit-learn", "seaborn", "rich")
EXTRAS = ("pyhessian", "tyro", "tensorboard", "jupyterlab", "ipywidgets")


def report() -> bool:
    """Print the findings; False when something that is needed does not work."""
    table = Table("what", "state", "detail", title="regimes doctor")
    good = True
    for name in NEEDED:
        good &= _row(table, name, lambda name=name: importlib.metadata.version(name))
    for name in EXTRAS:
        _row(table, f"{name} (optional)", lambda name=name: importlib.metadata.version(name))
    good &= _row(table, "torchvision import", _torchvision)
    good &= _row(table, "digits", _digits)
    _row(table, "CUDA", _cuda)
    good &= _row(table, "gloo", lambda: _backend("gloo"))
    _row(table, "NCCL", lambda: _backend("nccl"))
    from regimes import data

    for found in data.find():
        state = "found" if found.available else "not found"
        table.add_row(f"data: {found.name}", state, found.where)
    console().print(table)
    return good


def _row(table: Table, name: str, attempt: Callable[[], str]) -> bool:
    try:
        table.add_row(name, "ok", attempt())
    except Exception as error:  # whatever it is, it goes into the table
        lines = str(error).splitlines() or [type(error).__name__]
        table.add_row(name, "no", lines[0])
        return False
    return True


def _torchvision() -> str:
    from regimes.sources import torchvision_datasets

    return f"{len(torchvision_datasets().__all__)} data sets"


def _digits() -> str:
    from regimes import data
    from regimes.config import DataConfig

    images = data.load(DataConfig())
    return f"{len(images.train_y)} training, {len(images.test_y)} test images"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _backend(name: str) -> str:
    """One all-reduce in a group of one."""
    import torch
    import torch.distributed as dist

    device = "cuda" if name == "nccl" else "cpu"
    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise RuntimeError("needs a GPU and a torch built with NCCL")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device=device))
    finally:
        dist.destroy_process_group()
    return "one all-reduce done"
