"""Whole scripts of ``ddp_scripts/stock`` in a group, with the hook's lines or without."""

from __future__ import annotations

import io
import os
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regimes

SCRIPTS = Path(__file__).with_name("stock")
MARK = "# regimes"
NAMES = ("mnist", "words", "vit")

# To the end of the process: when a group goes with its last model, torch waits for gloo's thread
# under Python's lock, which that thread may want to let go of its last collective.
KEPT: list[Any] = []


def source(name: str, hooked: bool) -> str:
    """A script as it is, or without the hook's lines."""
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines(True)
    return "".join(x for x in lines if hooked or not x.rstrip().endswith(MARK))


def printed(words: str, name: str) -> list[float]:
    """A number of each epoch, out of what a script has printed."""
    number = rf"^epoch .*\b{name} ([\d.]+|nan|inf)"
    return [float(x) for x in re.findall(number, words, re.MULTILINE)]


def run(rank: int, name: str, words: list[str], folder: Path, hooked: bool, changed: Any) -> str:
    """One script in this group and in ``folder``; what it prints.

    Args:
        changed: what its ``attach`` is told besides.
    """
    dist.init_process_group = lambda *_: None  # the group is there already
    attach, wrap = regimes.attach, DistributedDataParallel.__init__

    def attached(*args: Any, **options: Any) -> Any:
        KEPT.append(attach(*args, **options, **changed))
        return KEPT[-1]

    def wrapped(model: Any, *args: Any, **options: Any) -> None:
        KEPT.append(model)
        wrap(model, *args, **options)

    regimes.attach, DistributedDataParallel.__init__ = attached, wrapped  # type: ignore[method-assign]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    script = folder / f"script-{rank}.py"
    script.write_text(source(name, hooked))
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script))["main"](words)
    for kept in KEPT:
        if isinstance(kept, regimes.Hook):
            kept.close()  # as the end of Python does
    return out.getvalue()
