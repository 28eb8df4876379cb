"""Part 2: milliseconds per step of CIFAR-10's ResNet-18, 4 workers x 128 images, against the peers.

Ours is the trainer as users run it, data, augmentation, instruments and record included: the median
over units of 25 steps after the first two. The peers' loops have one batch on the device, no data:
the least that a step can take. TopK's workers have a pass each, all else one pass over the union.
GPT-2 124M in bfloat16 likewise: 4 workers x 4 texts of 1,024 random tokens, AdamW. Rows "as graphs"
are the trainer with ``graphs``; a CPU has none, which their rehearsal there says.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import regimes
from benchmarks.gpu.curvature import largest
from benchmarks.gpu.place import Place, numerics
from regimes.config import RunConfig, override
from regimes.errors import ConfigError
from regimes.models import build
from regimes.models.transformer import GPT

WAYS = {  # compressor, level
    "dense": ("powersgd", "dense"),
    "powersgd 1": ("powersgd", 1),
    "powersgd 2": ("powersgd", 2),
    "powersgd 4": ("powersgd", 4),
    "topk 10 %": ("topk", 10),
    "topk 99 %": ("topk", 99),
}
PRECISIONS = ("strict", "tf32", "bfloat16")
GRAPHS = ("dense", "powersgd 2", "topk 10 %")  # also measured as CUDA graphs
UNITS = 6


@dataclass(frozen=True)
class Size:
    """Of the network and its batches; ``steps`` in a unit."""

    model: str = "resnet18-cifar10"
    width: int | None = None
    batch: int = 128
    steps: int = 25

    @property
    def shape(self) -> tuple[int, ...]:
        return 4 * self.batch, 3, 32, 32


def size(place: Place) -> Size:
    """The paper's, or small enough to rehearse."""
    return Size() if place.large else Size("vgg7", 4, 4, 2)


class Logits(nn.Module):
    """A language model's logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)[0]
        return logits


@dataclass(frozen=True)
class TextSize:
    """Of GPT-2 124M and its batches; ``steps`` in a unit."""

    vocabulary: int = 50257
    sequence: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    batch: int = 4
    steps: int = 10

    def network(self) -> nn.Module:
        return Logits(
            GPT(
                classes=self.vocabulary,
                sequence=self.sequence,
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                positions="learned",
            )
        )

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Texts and their next tokens."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(self.vocabulary, (count, self.sequence + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def text_size(place: Place) -> TextSize:
    return TextSize() if place.large else TextSize(300, 8, 16, 1, 2, 2, 2)


def noise(place: Place, count: int) -> Path:
    """An image folder of noise in CIFAR-10's shape; time does not depend on the pixels."""
    folder = place.out / "noise"
    if not (folder / "test").exists():
        random = np.random.default_rng(0)
        for part, n in (("train", count), ("test", 100)):
            for i in range(n):
                file = folder / part / str(i % 10) / f"{i:05}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(file)
    return folder


def config(place: Place, way: str, precision: str, graphs: str = "none") -> RunConfig:
    compressor, level = WAYS[way]
    s = size(place)
    words = [
        f"device={place.device}",
        f"precision={precision}",
        f"batch_size={s.batch}",
        f"steps={UNITS * s.steps}",
        f"unit_steps={s.steps}",
        "data.name=folder",
        f"data.path={noise(place, 4 * s.batch * s.steps)}",
        "data.augment=true",
        f"model.name={s.model}",
        f"model.width={s.width or 'none'}",
        "optimizer.lr=0.01",
        "optimizer.schedule=constant",
        "optimizer.warmup_from=none",
        "channels_last=true",
        "policy=static",
        f"compressor={compressor}",
        "checkpoint_every=1000",
        f"graphs={graphs}",
    ]
    levels = (
        ["policy.level=dense"]
        if level == "dense"
        else [f"levels={{high={level}}}", "policy.level=high"]
    )
    return override(regimes.get_preset("paper-resnet18-cifar10"), [*words, *levels])


@dataclass
class Stamps:
    """A reporter that looks at the clock after each unit; the last one is profiled."""

    place: Place
    profile: bool
    at: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None: ...

    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None:
        synchronise(self.place)
        self.at.append(time.perf_counter())
        if self.profile and len(self.at) == UNITS - 1:
            self.profiler = profiler(self.place)
            self.profiler.start()
        elif self.profile and len(self.at) == UNITS:
            self.profiler.stop()
            self.counts = counted(self.profiler, row["steps"])

    def stop(self, message: str) -> None: ...

    @property
    def seconds(self) -> list[float]:
        """Of each unit but the first two and the profiled one."""
        gaps = [b - a for a, b in zip(self.at, self.at[1:], strict=False)]
        return gaps[1 : -1 if self.profile else None]


def synchronise(place: Place) -> None:
    if place.gpu:
        torch.cuda.synchronize()


def profiler(place: Place) -> torch.profiler.profile:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if place.gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=kinds, acc_events=True)


def counted(profile: torch.profiler.profile, steps: int) -> dict[str, int]:
    """Kernels, and waits of the host, per step (on the CPU: operations)."""
    seen: Counter[str] = Counter()
    for event in profile.events():
        if "CUDA" in str(event.device_type):
            seen["kernels"] += not event.name.startswith(("Memcpy", "Memset"))
        elif event.name.startswith("aten::"):
            seen["operations"] += 1
        elif event.name in (
            "cudaStreamSynchronize",
            "cudaDeviceSynchronize",
            "cudaEventSynchronize",
        ):
            seen["waits"] += 1
    return {name: round(n / steps) for name, n in seen.items()}


def ours(
    place: Place, name: str, steps: int, train: Callable[[Path, Stamps], object], *, profile: bool
) -> dict[str, Any]:
    """The trainer in units of so many steps: milliseconds, counts, memory."""
    stamps = Stamps(place, profile=profile)
    folder = place.out / "speed" / name.replace(" ", "-").replace("%", "")
    shutil.rmtree(folder, ignore_errors=True)
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    train(folder, stamps)
    return {**measured(place, stamps.seconds, steps), **stamps.counts}


def on_images(place: Place, way: str, precision: str, graphs: str = "none") -> dict[str, Any]:
    def train(folder: Path, stamps: Stamps) -> None:
        regimes.run(config(place, way, precision, graphs), folder, reporters=[stamps])

    name, profile = f"{way}-{precision}-{graphs}", precision == PRECISIONS[0]
    return ours(place, name, size(place).steps, train, profile=profile)


def on_text(place: Place, way: str, precision: str, graphs: int | None = None) -> dict[str, Any]:
    (compressor, level), s = WAYS[way], text_size(place)

    def train(folder: Path, stamps: Stamps) -> None:
        regimes.simulate(
            s.network,
            s.tokens(4 * s.batch * s.steps),
            s.tokens(4),
            out=folder,
            workers=4,
            batch_size=s.batch,
            compressor=compressor,
            levels={} if level == "dense" else {"high": level},
            policy={"name": "static", "level": level if level == "dense" else "high"},
            optimizer={"name": "adamw", "lr": 1e-4},
            set={
                "device": place.device,
                "precision": precision,
                "steps": UNITS * s.steps,
                "unit_steps": s.steps,
                "checkpoint_every": 1000,
                "graphs": graphs,
            },
            reporters=[stamps],
        )

    return ours(place, f"gpt2-{way}-{precision}-{graphs}", s.steps, train, profile=True)


def as_graphs(place: Place, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, or that a CPU has none; a wrong setting of it is seen in any case."""
    try:
        return measure()
    except ConfigError as error:
        if place.gpu or "none on a CPU" not in str(error):
            raise
        return {"detail": f"not measured: {error}"}


def measured(place: Place, seconds: list[float], steps: int) -> dict[str, Any]:
    """A row's numbers."""
    per_step = [1e3 * s / steps for s in seconds]
    found = {
        "ms": round(statistics.median(per_step), 3),
        "n": len(per_step),
        "least": round(min(per_step), 3),
        "most": round(max(per_step), 3),
    }
    if place.gpu:
        found["MiB"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return found


# -- peers -----------------------------------------------------------------------------------


class Task(NamedTuple):
    """What a plain loop trains: one batch that stays on the device, ``steps`` in a unit."""

    network: nn.Module
    x: Tensor
    y: Tensor
    optimizer: Callable[..., torch.optim.Optimizer]
    steps: int


def images(place: Place) -> Task:
    """ResNet-18, channels-last."""
    s = size(place)
    net = build(s.model, classes=10, channels=3, image_size=32, width=s.width)
    net = net.to(place.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(s.shape).to(place.device, memory_format=torch.channels_last)
    y = torch.randint(0, 10, (len(x),)).to(place.device)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return Task(net, x, y, sgd, s.steps)


def texts(place: Place) -> Task:
    """GPT-2."""
    s = text_size(place)
    x, y = (t.to(place.device) for t in s.tokens(4 * s.batch))
    adamw = partial(torch.optim.AdamW, lr=1e-4)
    return Task(s.network().to(place.device), x, y, adamw, s.steps)


def loop(
    place: Place,
    precision: str,
    wrap: Callable[[nn.Module], nn.Module],
    make: Callable[[Place], Task] = images,
) -> dict[str, Any]:
    """A plain training loop."""
    torch.manual_seed(0)
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    task = make(place)
    model = wrap(task.network.train())
    optimizer = task.optimizer(model.parameters(), fused=place.gpu)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(place.device, torch.bfloat16, enabled=precision == "bfloat16"):
            out: Tensor = model(task.x)
        F.cross_entropy(out.float().flatten(0, -2), task.y.flatten()).backward()
        optimizer.step()

    seconds = []
    for turn in range(UNITS):
        synchronise(place)
        began = time.perf_counter()
        for _ in range(task.steps):
            step()
        synchronise(place)
        if turn > 1:
            seconds.append(time.perf_counter() - began)
    return measured(place, seconds, task.steps)


def ddp(hooked: bool) -> Callable[[nn.Module], nn.Module]:
    """torch's DDP in a group of one process, without or with its PowerSGD hook of rank 2."""

    def wrap(net: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        if hooked:
            state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=2)
            model.register_comm_hook(state, hooks.powerSGD_hook)
        return model

    return wrap


PEERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain loop": lambda net: net,
    "plain loop, compiled": torch.compile,
    "DDP": ddp(False),
    "DDP, torch's PowerSGD 2": ddp(True),
}


_used: list[Any] = []  # process groups, so that each lives as long as the process


def peer(
    place: Place, name: str, precision: str, make: Callable[[Place], Task] = images
) -> dict[str, Any]:
    """One of them; DDP needs a process group, of one."""
    import torch.distributed as dist

    with numerics(place.device, precision):
        if not name.startswith("DDP"):
            return loop(place, precision, PEERS[name], make)
        store = dist.HashStore()
        dist.init_process_group("nccl" if place.gpu else "gloo", store=store, rank=0, world_size=1)
        # The futures of torch's PowerSGD hold the group, and gloo's thread drops them late. If that
        # were the last reference, the thread would join itself, and the process abort.
        _used.append(dist.group.WORLD)
        try:
            return loop(place, precision, PEERS[name], make)
        finally:
            dist.destroy_process_group()


def eigenvalue(place: Place, backend: str) -> dict[str, Any]:
    """Seconds for the largest Hessian eigenvalue on 512 images, by us or by PyHessian."""
    s, (images, side) = size(place), (512, 32) if place.gpu else (16, 8)
    runs = [
        largest(place.device, backend, s.model, s.width, images, side)
        for _ in range(3 if place.gpu else 1)
    ]
    seconds = [run["s"] for run in runs]
    return {
        "value": runs[0]["value"],
        "products": runs[0]["products"],
        "n": len(runs),
        "s": round(statistics.median(seconds), 3),
    }


def rows(place: Place) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, in order."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for precision in PRECISIONS:
        for name in PEERS:
            found[f"{name}, {precision}"] = lambda n=name, p=precision: peer(place, n, p)
        for way in WAYS:
            found[f"{way}, {precision}"] = lambda w=way, p=precision: on_images(place, w, p)
        for way in GRAPHS:
            found[f"{way} as graphs, {precision}"] = lambda w=way, p=precision: as_graphs(
                place, lambda: on_images(place, w, p, "4")
            )
    half = "bfloat16"
    for name in PEERS:
        found[f"GPT-2, {name}, {half}"] = lambda n=name: peer(place, n, half, texts)
    for way in ("dense", "powersgd 4"):
        found[f"GPT-2, {way}, {half}"] = lambda w=way: on_text(place, w, half)
        found[f"GPT-2, {way} as graphs, {half}"] = lambda w=way: as_graphs(
            place, lambda: on_text(place, w, half, 4)
        )
    for backend in ("lanczos", "pyhessian"):
        found[f"eigenvalue, {backend}"] = lambda b=backend: eigenvalue(place, b)
    return found
