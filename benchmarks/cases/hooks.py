"""What a hook adds to a step of DDP on the host, next to torch's own hooks

One process and one thread, gloo, ResNet-18's and GPT-2's layers (as many, in as many buckets) at
widths so small that a step is the host's work alone. CPU time above that of DDP without a hook, all
threads together; of whole steps where a row says so. *Device path* is the code that runs on a GPU:
kernels that take many layers at once, and flags that the host does not read. Launches are ATen
operations that are no views, also above DDP's. Peers: torch's ``powerSGD_hook`` by default and with
matrices batched by shape, and its ``fp16_compress_hook``.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import regimes
from benchmarks.harness import Limits, Row, Seconds, compare
from regimes.compression import kernels
from regimes.compression.background import Background
from regimes.data.models import build_model
from regimes.data.models.transformer import GPT

WARM, STEPS, ROUNDS = 8, 5, 15
NETWORKS = {"ResNet-18": 2, "GPT-2": 4}  # and the rank of PowerSGD
TORCHS, BATCHED, FP16 = "torch powerSGD_hook", "torch powerSGD_hook, batched", "torch fp16 hook"
TARGETS = {"ResNet-18": 0.5, "GPT-2": 0.9}
LAUNCHES = {"ResNet-18": 120, "GPT-2": 450}  # of PowerSGD on the device path
OVER_HALF = 2.0  # 8 and 4 bits next to torch's fp16 hook
VIEWS = {
    *(
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "transpose",
        "t",
        "mT",
        "permute",
        "expand",
        "unbind",
    ),
    *("unsqueeze", "squeeze", "detach", "detach_", "alias", "split", "split_with_sizes", "narrow"),
    *("as_strided", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("reshape", "_reshape_alias", "unfold", "chunk", "resize_", "flatten", "unflatten"),
    *("unbind", "view_as", "expand_as", "contiguous", "to", "item", "lift_fresh", "result_type"),
}
Attach = Callable[[DistributedDataParallel], Any]


class Tokens(nn.Module):
    """GPT-2's twelve blocks, eight numbers wide."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(classes=32, sequence=4, width=8, depth=12, heads=2, positions="learned")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)[0]
        return logits


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "GPT-2":
        return Tokens()
    return build_model("resnet18-cifar10", classes=10, channels=3, image_size=8, width=2)


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Samples and targets for the network of this name."""
    if name == "GPT-2":
        return torch.randint(0, 32, (1, 4)), torch.randint(0, 32, (4,))
    return torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2,))


def wrap(name: str, device: str = "cpu") -> DistributedDataParallel:
    """The narrow network of this name, with about as many buckets as the real one has."""
    net = _network(name).to(device)
    size = sum(parameter.numel() for parameter in net.parameters())
    cap = 25 * size / (124.4e6 / 1.9 if name == "GPT-2" else 11.17e6)
    return DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=cap)


class Case:
    """A model with a hook, and what its steps took."""

    def __init__(self, network: str, attach: Attach | None, device_path: bool = False) -> None:
        self.model, self.device_path = wrap(network), device_path
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.hook = None if attach is None else attach(self.model)
        self.x, self.y = batch(network)
        self.seconds: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.x)
        nn.functional.cross_entropy(logits.flatten(0, -2), self.y).backward()
        self.optimizer.step()

    def run(self, steps: int, kept: bool = True) -> None:
        with _device_path() if self.device_path else contextlib.nullcontext():
            for _ in range(steps):
                began = time.process_time()
                self.step()
                if kept:
                    self.seconds.append(time.process_time() - began)

    def launches(self) -> int:
        """Of one step. What a thread would exchange runs in the caller's, which is profiled."""
        run = Background.submit
        Background.submit = lambda self, task: task()  # type: ignore[method-assign]
        try:
            with (
                _device_path() if self.device_path else contextlib.nullcontext(),
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen,
            ):
                self.step()
        finally:
            Background.submit = run  # type: ignore[method-assign]
        names = Counter(
            event.name.removeprefix("aten::")
            for event in seen.events()
            if event.name.startswith("aten::")
            and (event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::"))
        )
        return sum(count for name, count in names.items() if name not in VIEWS)


@contextlib.contextmanager
def _device_path() -> Iterator[None]:
    """Inside, tensors of the CPU are treated as a GPU's."""
    holders = [
        module
        for name, module in [*sys.modules.items()]
        if name.startswith("regimes.") and vars(module).get("on_gpu") is _ON_GPU
    ]
    for module in holders:
        module.on_gpu = lambda tensor: True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in holders:
            module.on_gpu = _ON_GPU  # type: ignore[attr-defined]


_ON_GPU = kernels.on_gpu


class _Ended:
    """A collective that has ended. torch's hook waits for one within a callback of gloo's threads,
    which with many buckets may never end; with one process this takes as long."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([self.tensor])
        return future


class _Waiting:
    """``torch.distributed`` for torch's hook."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, group: Any = None, async_op: bool = False) -> _Ended:
        dist.all_reduce(tensor, group=group)
        return _Ended(tensor)


def _torchs(rank: int, **more: Any) -> Attach:
    def attach(model: DistributedDataParallel) -> Any:
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, **more)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state

    return attach


def _half(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _ours(compressor: str, level: Any) -> Attach:
    chosen = {"name": compressor, "level": level}
    quiet = regimes.RecordOptions(summary=False)
    return lambda model: regimes.attach(model, compressor=chosen, record=quiet)


def measure(limits: Limits, *, quick: bool = False) -> list[Row]:
    """A row for each of our hooks and a peer, in milliseconds and in launches."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Of matrices this narrow torch's hook would send most as they are; of the real ones it
    # compresses all but vectors.
    powerSGD_hook._should_compress = lambda n, m, rank, least: (m > 1, n * m, (n + m) * rank)
    powerSGD_hook.dist = _Waiting()
    try:
        return [
            row
            for network, rank in NETWORKS.items()
            for row in _rows(network, rank, 2 if quick else ROUNDS)
        ]
    finally:
        powerSGD_hook.dist = dist
        dist.destroy_process_group()


def _rows(network: str, rank: int, rounds: int) -> list[Row]:
    bits = "quantised-all-reduce"
    cases = {
        "DDP": Case(network, None),
        TORCHS: Case(network, _torchs(rank)),
        BATCHED: Case(network, _torchs(rank, batch_tensors_with_same_shape=True)),
        FP16: Case(network, _half),
        "PowerSGD": Case(network, _ours("powersgd", rank), device_path=True),
        "PowerSGD on a CPU": Case(network, _ours("powersgd", rank)),
        "8 bits": Case(network, _ours(bits, 8), device_path=True),
        "4 bits": Case(network, _ours(bits, 4), device_path=True),
        "fp16": Case(network, _ours("cast", "fp16"), device_path=True),
    }
    for case in cases.values():
        case.run(WARM, kept=False)
    for _ in range(rounds):
        for case in cases.values():
            case.run(STEPS)
    seconds = {name: case.seconds for name, case in cases.items()}
    launches = {name: case.launches() for name, case in cases.items()}
    rows = [
        _above(f"{network}, PowerSGD", seconds, "PowerSGD", TORCHS, TARGETS[network]),
        _above(f"{network}, PowerSGD", seconds, "PowerSGD", BATCHED, None),
        _above(f"{network}, PowerSGD on a CPU", seconds, "PowerSGD on a CPU", TORCHS, None),
        # whole steps: what torch's hook adds is within the spread of a step
        compare(f"{network}, 8 bits, step", seconds, "8 bits", FP16, OVER_HALF),
        compare(f"{network}, 4 bits, step", seconds, "4 bits", FP16, OVER_HALF),
        compare(f"{network}, fp16, step", seconds, "fp16", FP16, None),
    ]
    ours, theirs = (launches[name] - launches["DDP"] for name in ("PowerSGD", TORCHS))
    most = LAUNCHES[network]
    rows.append(Row(f"{network}, PowerSGD", "most launches", ours, most, 1.0, unit="launches"))
    rows.append(Row(f"{network}, PowerSGD", TORCHS, ours, theirs, None, unit="launches"))
    return rows


def _above(setting: str, seconds: Seconds, us: str, them: str, target: float | None) -> Row:
    """Both above the DDP of the same step."""
    above = {
        name: [taken - plain for taken, plain in zip(seconds[name], seconds["DDP"], strict=True)]
        for name in (us, them)
    }
    ours, theirs = (1e3 * statistics.median(above[name]) for name in (us, them))
    spread, rounds = _spread(above[us], above[them]), len(above[us])
    return Row(setting, them, ours, theirs, target, spread=spread, rounds=rounds)


def _spread(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The middle half of the steps' own ratios."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True) if b)
    low, _, high = statistics.quantiles(ratios, n=4)
    return low, high
