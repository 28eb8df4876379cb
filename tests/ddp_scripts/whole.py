"""Whole scripts of ``ddp_scripts/stock`` in a group, with the hook's lines or without."""

from __future__ import annotations

import functools
import gc
import io
import os
import runpy
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist

import regimes
from benchmarks import stock


def run(rank: int, name: str, words: list[str], folder: Path, hooked: bool, changed: Any) -> str:
    """One script in this group and in ``folder``; what it prints.

    Args:
        changed: what its ``attach`` is told besides.
    """
    dist.init_process_group = lambda *_: None  # the group is there already
    regimes.attach = functools.partial(regimes.attach, **changed)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    script = folder / f"script-{rank}.py"
    script.write_text(stock.source(name, hooked))
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script))["main"](words)
    # gloo's thread lets go of its last collective under Python's lock, and torch waits for that
    # thread under the same lock when the model's group goes: let the thread be first
    time.sleep(0.2)
    gc.collect()  # nobody has the hook any more: it ends its record
    return out.getvalue()
