"""What all cases share: interleaved timing, one row per comparison, and the machine's limits.

A *row* compares one of our times with one other number (a peer's time, or a limit) from the same
run. Ratios are of medians over interleaved rounds, so that a busy machine hits both sides alike;
the spread is the middle half of the rounds' own ratios.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimes.base.config import DENSE, Level
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.base import Compressor
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.data.classification import classification_loss
from regimes.data.models import build_model
from regimes.records.provenance import processor_name
from regimes.training.gradients import Gradients, layer_table, set_gradients

Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        setting: what was varied.
        ours, theirs: medians, in ``unit``; ``theirs`` is a peer's, or the limit that we keep to.
        target: the ratio ours / theirs to stay within, or None where the row only informs.
        spread: quartiles of the rounds' ratios; None where a round has no pair.
        rounds: how often each was measured.
        floor: the least that the machine allows, in ``unit``, or None where none is known.
        curve: what was measured at each size, where the row is an exponent.
        error: why there is no number.
    """

    setting: str
    against: str
    ours: float = float("nan")
    theirs: float = float("nan")
    target: float | None = None
    unit: str = "ms"
    spread: tuple[float, float] | None = None
    rounds: int = 0
    floor: float | None = None
    note: str = ""
    curve: tuple[tuple[int, float], ...] = ()
    error: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        """In words: reached, or missed and by how much."""
        if self.error:
            return f"not measured: {self.error}"
        if self.target is None:
            return ""
        over = self.ratio / self.target - 1
        return "reached" if over <= 0 else f"missed by {100 * over:.2g} %"


def interleaved(
    tasks: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    before: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.process_time,
) -> Seconds:
    """Seconds of each task, round by round, after one round that does not count.

    Args:
        before: called before each task, not timed.
        clock: the default, CPU seconds of this process, sees nothing of other processes.
    """
    seconds: Seconds = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            before()
            began = clock()
            task()
            if turn:
                seconds[name].append(clock() - began)
    return seconds


def compare(
    setting: str,
    seconds: Seconds,
    us: str,
    them: str,
    target: float | None = None,
    *,
    against: str | None = None,
    **rest: Any,
) -> Row:
    """The row of two entries of the same rounds, in milliseconds."""
    pairs = list(zip(seconds[us], seconds[them], strict=True))
    ratios = sorted(a / b for a, b in pairs)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        setting,
        against or them,
        1e3 * statistics.median(seconds[us]),
        1e3 * statistics.median(seconds[them]),
        target,
        spread=(low, high),
        rounds=len(pairs),
        **rest,
    )


# -- what is measured ------------------------------------------------------------------------


def resnet18() -> list[Layer]:
    """The 62 tensors of CIFAR-10's ResNet-18, 11,173,962 parameters."""
    return layer_table(build_model("resnet18-cifar10", classes=10, channels=3, image_size=32))


@dataclass
class Step:
    """Our public path from stacked gradients to updates: ``Exchange.exchange_step``."""

    reducer: Reducer
    level: Level
    stack: Tensor

    def __post_init__(self) -> None:
        layers = self.reducer.layers
        parts = self.stack.split([layer.size for layer in layers], dim=1)
        rows = len(self.stack)
        self.gradients = [p.view(rows, *x.shape) for p, x in zip(parts, layers, strict=True)]
        self.levels = [self.level if layer.compressed else DENSE for layer in layers]
        self.losses = torch.zeros(rows)
        self.exchange = Exchange(self.reducer)

    def __call__(self) -> list[Tensor]:
        return self.exchange.exchange_step(self.gradients, self.levels, self.losses, self.stack)[0]


@dataclass(frozen=True)
class Net:
    """A network, what it is fed, and for how many steps an epoch lasts."""

    model: str
    width: int | None
    channels: int
    size: int  # of an image
    batch: int  # per worker
    steps: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return build_model(
            self.model, classes=10, channels=self.channels, image_size=self.size, width=self.width
        )

    def images(self, workers: int) -> tuple[Tensor, Tensor]:
        """Noise ``[W, b, ...]`` in union order, as batches come, and labels."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(
            self.batch, workers, self.channels, self.size, self.size, generator=generator
        )
        y = torch.randint(0, 10, (self.batch, workers), generator=generator)
        return x.transpose(0, 1), y.transpose(0, 1)


NETS = {  # the CPU presets' and the paper's
    "smoke": Net("vgg7", 8, 1, 8, 8, 12),
    "small": Net("vgg7", 16, 3, 16, 16, 46),
    "ResNet-18": Net("resnet18-cifar10", None, 3, 32, 8, 97),
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The optimiser of all runs here, ours and peers'."""
    return torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, foreach=True
    )


class Loop:
    """One step of our loop but the data: gradients, reduction, instruments, optimiser."""

    def __init__(
        self,
        net: Net,
        compressor: Compressor,
        level: Level,
        *,
        workers: int = 4,
        union: bool,
    ) -> None:
        self.x, self.y = net.images(workers)
        self.model = net.build()
        self.layers = layer_table(self.model)
        self.world = World(workers)
        self.gradients = Gradients(
            self.model,
            classification_loss,
            self.world,
            union=union,
            seed=0,
            micro_batch=net.batch,
        )
        self.exchange = Exchange(Reducer(compressor, self.layers, self.world, 0))
        self.levels = [level if layer.compressed else DENSE for layer in self.layers]
        self.optimizer = sgd(self.gradients.parameters)
        self.updates: list[Tensor] = []

    def __call__(self) -> float:
        own = self.gradients.compute_gradients(self.x, self.y, 0, 0)
        self.updates, loss = self.exchange.exchange_step(
            self.gradients.layers, self.levels, own, self.gradients.stack
        )
        set_gradients(self.gradients.parameters, self.updates)
        self.optimizer.step()
        return loss.item()


# -- the machine -----------------------------------------------------------------------------


def peak_memory() -> float:
    """The most memory that this process has had, MiB. Not ``ru_maxrss``, which begins with its
    parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:"))


@dataclass(frozen=True)
class Limits:
    """What one core reaches here.

    Attributes:
        bandwidth: bytes per second of ``a + b -> c`` over 45 MB each, all three counted.
        flops: of a 1024 x 1024 float32 product.
    """

    bandwidth: float
    flops: float


def limits() -> Limits:
    """Measured, best of ten."""
    a, b, c = torch.rand(3, 11_173_962).unbind()
    x, y = torch.rand(2, 1024, 1024).unbind()
    z = torch.empty_like(x)
    tasks = {"add": lambda: torch.add(a, b, out=c), "product": lambda: torch.mm(x, y, out=z)}
    best = {name: min(taken) for name, taken in interleaved(tasks, 10).items()}
    return Limits(3 * 4 * a.numel() / best["add"], 2 * 1024**3 / best["product"])


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    packages = ("torch", "torchvision", "numpy", "scipy", "powersgd")
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "cores used": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        try:
            __import__(name)
        except ImportError:
            return "not installed"
        return "from source"


def child(module: str, *words: str) -> str:
    """Standard output of a fresh interpreter that runs ``python -m module words``.

    Raises:
        RuntimeError: it failed; the last line that it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout
