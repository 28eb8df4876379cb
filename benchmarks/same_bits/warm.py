"""What the server of processes does once, so that each process has it: imports, and a training in
which every library sets itself up. Objects made here are no part of what a case holds."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path

import pandas  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp

import regimes
from benchmarks.same_bits import attached, cases

assert cases.CASES
for name in (*attached.STARTERS, "branch", "simulate"):  # imported at first use
    getattr(regimes, name)
torch.set_num_threads(1)
with tempfile.TemporaryDirectory(prefix="regimes-") as scratch, contextlib.suppress(Exception):
    # a tree that cannot do this fails in its cases, where it is seen
    short = ["epochs=1", "data.train_size=64", "data.test_size=32", "device=cpu"]
    regimes.run(regimes.override(regimes.get_preset("smoke"), short), Path(scratch, "run"))
gc.collect()
gc.freeze()
