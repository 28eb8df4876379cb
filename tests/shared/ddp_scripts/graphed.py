"""A user's training on pretended GPUs, with CUDA graphs in the hook and without: what it has in the
end, and what each step launches."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from ddp_scripts import gpus
from leveled import leveled
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.hook.ddp import Hook

UNIT = 6  # steps
QUIET = regimes.RecordOptions(summary=False)
WINDOWS = {
    "name": "windows",
    "windows": [[0, 1], [2, 3], [4, 5]],
    "inside": "low",
    "outside": "high",
}
EVENTS = ("plain", "not finite", "thrown away", "accumulated", "saved and loaded", "another scale")


class Net(nn.Module):
    """Layers of two shapes, of which one comes twice, and some that are not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.inner, self.twin = nn.Linear(64, 24), nn.Linear(24, 24)
        self.other, self.head = nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.conv(x).relu().flatten(1)).relu()
        return self.head(self.other(self.twin(x).relu()).relu())


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 4, 4, generator=seed).to(dtype), torch.randint(5, (6,), generator=seed)


def walk(steps: int, seed: int, events: tuple[str, ...] = EVENTS) -> list[str]:
    """What happens at each step, half of which are plain."""
    draw = random.Random(seed)
    return [draw.choice(events) if draw.random() < 0.5 else "plain" for _ in range(steps)]


class Job:
    """A model, its hook and its optimiser."""

    def __init__(
        self,
        rank: int,
        compressor: Any,
        levels: dict[str, Any],
        *,
        graphs: int | None,  # 0: no hook
        ddp: dict[str, Any],
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.rank, self.dtype = rank, getattr(torch, dtype)
        net = Net().to(self.dtype).to(f"cuda:{rank}")
        self.model = DistributedDataParallel(net, **{"bucket_cap_mb": 0.006, **ddp})
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        self.scale = 1.0
        self.hook: Hook | None = None
        if graphs == 0:
            return
        given = {"policy": WINDOWS, "every": UNIT, "scaler": self, "record": QUIET, **options}
        self.hook = regimes.attach(
            self.model,
            self.optimizer,
            compressor=leveled(compressor, levels),
            seed=7,
            graphs=graphs,
            **given,
        )

    def get_scale(self) -> float:  # of a GradScaler
        return self.scale

    def step(self, number: int, event: str) -> None:
        if event == "saved and loaded" and self.hook is not None:
            self.hook.load_state_dict(copy.deepcopy(self.hook.state_dict()))
        if event == "another scale":
            self.scale = 1024.0 if self.scale == 1 else 1.0
        if event == "thrown away":
            self.pass_of(number + 500)
            self.optimizer.zero_grad()
        if event == "accumulated":
            with self.model.no_sync():
                self.pass_of(number + 600)
        broken = event == "not finite" and self.rank == 0
        self.pass_of(number, torch.nan if broken else 1.0)
        if event != "not finite":
            for parameter in self.model.parameters():
                parameter.grad.div_(self.scale)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)

    def pass_of(self, number: int, factor: float = 1.0) -> None:
        x, y = (t.to(f"cuda:{self.rank}") for t in batch(number, self.rank, self.dtype))
        (nn.functional.cross_entropy(self.model(x), y) * factor * self.scale).backward()

    def left(self) -> list[Any]:
        """What there is in the end."""
        assert self.hook is not None
        self.hook.close()
        state = self.hook.state_dict()
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in self.hook.rows]
        return [state, rows, [p.detach().clone() for p in self.model.parameters()]]


def compared(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each case with and without graphs: is what they leave the same, how many graphs were
    captured and replayed, and the launches of the last step above those of DDP."""
    answers = {}
    for name, case in cases.items():
        options = dict(case)
        events, most = options.pop("events"), options.pop("graphs", 2)
        found, launches = list[Any](), list[int]()
        for graphs in (None, most, 0):
            with gpus.nccl(rank) as (diary, _):
                job = Job(rank, graphs=graphs, **options)
                for number, event in enumerate(events if graphs != 0 else ["plain"] * 3):
                    diary.ops.clear()
                    job.step(number, event)
                launches.append(diary.ops.total())
                if job.hook is not None:
                    found.append(job.left())
                    counts = dict(diary.graphs)
        above = [n - launches[2] for n in launches[:2]]
        answers[name] = {"same": alike(*found), "graphs": counts, "launches": above}
    return answers


def alike(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor):
        return bool(torch.equal(a.nan_to_num(7), b.nan_to_num(7))) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b or a != a)
