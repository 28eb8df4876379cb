"""Where the campaign runs, and the configurations and child processes that its parts share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import regimes
from regimes.config import RunConfig, override, to_dict
from regimes.records import read_lines
from regimes.training.numerics import Numerics

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Attributes:
    device: "cuda", or "cpu" for a rehearsal.
    out: everything is left in here.
    rehearsal: toy sizes, as on a CPU.
    """

    device: str
    out: Path
    rehearsal: bool = False

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def large(self) -> bool:
        """Networks and data of the real size?"""
        return self.gpu and not self.rehearsal


@contextmanager
def numerics(device: str, precision: str) -> Iterator[None]:
    """Inside, the device computes as in the training steps of a run of that precision."""
    config = override(RunConfig(), [f"precision={precision}", "deterministic=false"])
    with closing(Numerics(config, torch.device(device))) as flags, flags.training():
        yield


def short(device: str, *settings: str, steps: int = 10) -> RunConfig:
    """``smoke`` (a CNN on digits, 4 workers) for one unit of so many steps, where nothing else is
    said; every worker has its own pass."""
    least = [
        f"device={device}",
        "union_pass=false",
        f"steps={steps}",
        f"unit_steps={steps}",
        "data.test_size=100",
    ]
    return override(regimes.get_preset("smoke"), [*least, *settings])


def rows(folder: Path) -> list[dict[str, Any]]:
    """A record's rows."""
    return read_lines(folder / "epochs.jsonl")


def trained(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """A run in this process; its rows."""
    regimes.run(config, folder)
    return rows(folder)


def start(
    what: str, *words: str, processes: int = 1, config: RunConfig | None = None
) -> subprocess.Popen[str]:
    """``benchmarks.gpu.child`` in a process of its own, or as many under torchrun."""
    command = [sys.executable]
    if processes > 1 or what in ("hook", "island"):
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if config is not None:
        env["REGIMES_CONFIG"] = json.dumps(to_dict(config))
    command += ["-m", "benchmarks.gpu.child", what, *words]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(child: subprocess.Popen[str], seconds: float = 120) -> str:
    """What a child has printed, once it has ended well.

    Raises:
        RuntimeError: it has not, with its last line.
    """
    try:
        words, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        raise RuntimeError(f"a child was still at work after {seconds:g} s") from None
    if child.returncode != 0:
        lines = words.splitlines()
        said = [x for x in lines if "Error: " in x] or lines[-1:] or ["silent"]
        raise RuntimeError(f"a child ended with code {child.returncode}: {said[0].strip()}")
    return words
