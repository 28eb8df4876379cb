"""The ``doctor`` command: tries what Regimes needs on this machine.

A failure of what Regimes needs makes the exit code 1. What only a user's own script needs (``import
torchvision`` as a whole) is reported and does not change the exit code.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable

from regimes.console.stdout import console
from regimes.console.tables import Table
from regimes.records import provenance

NEEDED = (
    *("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pandas", "seaborn", "matplotlib"),
    *("jinja2", "rich", "tyro", "tomli-w", "jaxtyping"),
)
EXTRAS = ("pyhessian", "tensorboard", "wandb", "jupyterlab", "ipywidgets")
MINUTE = 60.0  # seconds that importing torchvision may take
TWO_INDEXES = (
    "Regimes reads its data sets all the same; a script of your own that imports it fails. "
    "Install torch and torchvision from one index, e.g. pip install --force-reinstall torch "
    "torchvision --index-url https://download.pytorch.org/whl/cpu"
)


def report() -> bool:
    """Print a table; False if something that is needed does not work."""
    from regimes.data import sources

    version = importlib.metadata.version
    needed: dict[str, Callable[[], str]] = {
        **{name: functools.partial(version, name) for name in NEEDED},
        "torchvision's data": _data_sets,
        "digits": _digits,
        "gloo": lambda: _backend("gloo"),
    }
    useful: dict[str, Callable[[], str]] = {
        **{f"{name} (optional)": functools.partial(version, name) for name in EXTRAS},
        "import torchvision": _torchvision,
        "CUDA": _cuda,
        "NCCL": lambda: _backend("nccl"),
    }
    rows = [(name, *_tried(attempt)) for name, attempt in {**needed, **useful}.items()]
    rows += [
        (f"data: {found.name}", "found" if found.available else "not found", found.where)
        for found in sources.find()
    ]
    heads = ("what", "state", "detail")
    console().print(Table(heads, rows, title="regimes doctor", texts=3).drawn())
    return all(state == "ok" for name, state, _ in rows if name in needed)


def _tried(attempt: Callable[[], str]) -> tuple[str, str]:
    """(ok or no, detail)."""
    try:
        return "ok", attempt()
    except Exception as error:  # any failure is a row of the table
        return "no", (str(error).splitlines() or [type(error).__name__])[0]


def _torchvision() -> str:
    """Import torchvision alone in another Python, as a user's script does; RuntimeError if it
    fails."""
    words = [sys.executable, "-c", "import torchvision"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MINUTE, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not imported within {MINUTE:.0f} s") from None
    if done.returncode:
        # the first line of the error itself, which follows the indented calls
        calls = done.stderr.rpartition("Traceback (most recent call last):")[2].splitlines()
        lines = (line for line in calls if line.strip() and not line.startswith(" "))
        error = next(lines, "no message")
        missing = error.startswith("ModuleNotFoundError")
        raise RuntimeError(error if missing else f"{error}. {TWO_INDEXES}")
    return "as a script of your own would"


def _data_sets() -> str:
    """The part of torchvision that Regimes needs."""
    from regimes.data.sources import torchvision_datasets

    return f"{len(torchvision_datasets().__all__)} data sets"


def _digits() -> str:
    from regimes.config import DataConfig
    from regimes.data import images

    digits = images.load(DataConfig())
    return f"{len(digits.train_y)} training, {len(digits.test_y)} test images"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    direct, pairs = sum(map(len, provenance.peers())), count * (count - 1)
    return f"{names}; direct access in {direct} of {pairs} ordered pairs" if pairs else names


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
