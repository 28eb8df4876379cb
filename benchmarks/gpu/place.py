"""Where the campaign runs, and the configurations and child processes that its parts share."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import regimes
from regimes.base.config import RunConfig, override, to_dict
from regimes.data.classification import ImageTask
from regimes.data.images import Images
from regimes.records import read_lines
from regimes.search.processes import die_with_parent
from regimes.training.torch_flags import Numerics

ROOT = Path(__file__).parents[2]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Place:
    """Attributes:
    device: "cuda", or "cpu" for a rehearsal.
    out: everything is left in here.
    images: an archive of CIFAR-10 as an image folder; None: noise of the same shape.
    rehearsal: toy sizes, as on a CPU.
    """

    device: str
    out: Path
    images: Path | None = None
    rehearsal: bool = False

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def large(self) -> bool:
        """Networks and data of the real size?"""
        return self.gpu and not self.rehearsal

    @property
    def devices(self) -> int:
        """Visible GPUs."""
        return torch.cuda.device_count() if self.gpu else 0


@contextmanager
def numerics(device: str, precision: str) -> Iterator[None]:
    """Inside, the device computes as in the training steps of a run of that precision."""
    flags = Numerics(torch.device(device), precision=precision, deterministic=False)
    with closing(flags), flags.training():
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


def task(place: Place, count: int, side: int) -> ImageTask:
    """All of CIFAR-10; without an archive, noise: ``count`` images of side x side."""
    return archived(place.images) if place.images else noise(count, side)


@functools.cache  # one process trains on it again and again
def archived(images: Path) -> ImageTask:
    return ImageTask(override(RunConfig(), ["data.name=folder", f"data.path={images}"]))


@functools.lru_cache(maxsize=1)
def noise(count: int, side: int) -> ImageTask:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count + 100, 3, side, side), generator=generator).to(torch.uint8)
    y = torch.arange(len(x)) % 10
    train, test = (x[:count], y[:count]), (x[count:], y[count:])
    half = (0.5,) * 3
    noise = Images(*train, *test, tuple("0123456789"), half, half, f"noise {count} x {side}")
    return ImageTask(RunConfig(), noise)


# -- children --------------------------------------------------------------------------------


class Children:
    """Processes of ``benchmarks.gpu.child``, and what each has said."""

    def __init__(self, words: list[str], count: int, grouped: bool, env: dict[str, str]) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="children-")
        rendezvous = Path(self.scratch.name, "rendezvous").as_uri()
        shared = {**env, **LOOPBACK, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        self.processes = []
        end_with_us = functools.partial(die_with_parent, os.getpid())
        for rank in range(count):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            named = {name: str(value) for name, value in own.items()} if grouped else {}
            many = {"REGIMES_RENDEZVOUS": rendezvous} if count > 1 else {}
            with self._log(rank).open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.gpu.child", *words],
                        env={**shared, **named, **many},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=end_with_us,
                    )
                )

    def _log(self, rank: int) -> Path:
        return Path(self.scratch.name, f"said-{rank}")

    def over(self) -> bool:
        """Have all ended, or one of them badly?"""
        codes = [process.poll() for process in self.processes]
        return None not in codes or any(codes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, seconds: float) -> str:
        """What the first one has printed, once all have ended well.

        Raises:
            RuntimeError: they have not, with the first error among their lines.
        """
        end = time.monotonic() + seconds
        while not (over := self.over()) and time.monotonic() < end:
            time.sleep(0.02)
        if over and any(process.returncode for process in self.processes):
            time.sleep(0.5)  # for what the others say of it
        codes = [process.poll() for process in self.processes]
        self.kill()
        if not over:
            raise RuntimeError(f"a child was still at work after {seconds:g} s")
        texts = [self._log(rank).read_text() for rank in range(len(codes))]
        if any(codes):
            lines = [line for text in texts for line in text.splitlines()]
            said = [x for x in lines if "Error: " in x and "lost contact" not in x]
            said = said or lines[-1:] or ["silent"]
            raise RuntimeError(f"a child ended with code {codes}: {said[0].strip()}")
        return texts[0]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def start(what: str, *words: str, processes: int = 1, config: RunConfig | None = None) -> Children:
    """``benchmarks.gpu.child`` in a process of its own, or in a group of so many; a group needs no
    launcher, no network and no name of this machine."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    if config is not None:
        env["REGIMES_CONFIG"] = json.dumps(to_dict(config))
    grouped = processes > 1 or what in ("hook", "island")
    return Children([what, *words], processes, grouped, env)


def ended(children: Children, seconds: float = 110) -> str:
    """What a child has printed, once all have ended well; RuntimeError if not."""
    return children.said(seconds)


def end_group(leader: int) -> None:
    """Kill a process that leads a session, with all that it has started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
