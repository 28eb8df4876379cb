"""One small training, twice: through DDP and the hook, and in one process as its own oracle.

The oracle computes every worker's gradient by a backward pass of its own and reduces the stack with
the compressors' generators in a simulated world, one layer at a time: no DDP, buckets or threads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from leveled import leveled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from regimes import attach
from regimes.base.config import DENSE
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.hook.ddp import Hook
from regimes.policies import make_policy
from regimes.policies.history import read_history
from regimes.training.gradients import layer_table

EPOCHS, STEPS, RATE = 3, 3, 0.05


@dataclass(frozen=True)
class Case:
    """How to train; the defaults are the plainest way."""

    workers: int = 2
    compressor: Any = "powersgd"
    levels: tuple[tuple[str, Any], ...] = (("low", 2), ("high", 1))
    ddp: dict[str, Any] = field(default_factory=dict)  # arguments of DistributedDataParallel
    branch: str = "always"  # when the side branch is used: "always", "sometimes", "never"
    accumulate: int = 1  # micro-batches per step, all but the last under no_sync
    set_to_none: bool = True
    channels_last: bool = False
    device: str = "cpu"

    @property
    def policy(self) -> dict[str, Any]:
        return {"name": "accordion", "interval": 1, "eta": 0.2}


class Net(nn.Module):
    """A convolution, two linear layers with one weight, a frozen one, a side branch, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.inner = nn.Linear(4 * 16, 24)
        self.left, self.right = nn.Linear(24, 24), nn.Linear(24, 24)
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.side = nn.Linear(24, 24)
        self.head = nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = F.relu(self.inner(F.relu(self.conv(x)).flatten(1)))
        x = self.right(F.relu(self.left(x))) + self.frozen(x)
        if branch:
            x = x + self.side(F.relu(x))
        return self.head(x) * self.scale


def build(case: Case) -> Net:
    torch.manual_seed(1)
    net = Net().double().to(case.device)
    return net.to(memory_format=torch.channels_last) if case.channels_last else net


def branch(case: Case, step: int, worker: int) -> bool:
    """ "sometimes": by nobody, by worker 0 alone, by all, in turn."""
    used = [False, worker == 0, True][step % 3]
    return {"always": True, "never": False, "sometimes": used}[case.branch]


def batch(step: int, part: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + part)
    x = torch.randn(6, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (6,), generator=generator)


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)


def loss_of(net: nn.Module, case: Case, step: int, part: int, worker: int) -> Tensor:
    x, y = (t.to(case.device) for t in batch(step, part, worker))
    return F.cross_entropy(net(x, branch(case, step, worker)), y) / case.accumulate


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


# -- through the hook ------------------------------------------------------------------------


def wrap(case: Case) -> tuple[DistributedDataParallel, Hook, torch.optim.SGD]:
    model = DistributedDataParallel(build(case), **case.ddp)
    hook = attach(
        model, policy=case.policy, compressor=leveled(case.compressor, dict(case.levels)), seed=7
    )
    return model, hook, sgd(model)


def step_of(
    model: DistributedDataParallel, optimizer: torch.optim.SGD, case: Case, step: int, rank: int
) -> None:
    optimizer.zero_grad(set_to_none=case.set_to_none)
    for part in range(case.accumulate):
        last = part == case.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss_of(model, case, step, part, rank).backward()
    optimizer.step()


def trained(rank: int, case: Case) -> dict[str, Any]:
    """What one process has in the end, and the sizes of what it reduced."""
    model, hook, optimizer = wrap(case)
    buckets: list[int] = []
    reduce = hook.reducer.reduce

    def counted(bucket: list[int], *given: Any) -> Any:
        buckets.append(sum(layer >= 0 for layer in bucket))
        return reduce(bucket, *given)

    hook.reducer.reduce = counted
    levels = [hook.levels]
    for epoch in range(EPOCHS):
        for step in range(epoch * STEPS, (epoch + 1) * STEPS):
            step_of(model, optimizer, case, step, rank)
        hook.epoch_end(lr=RATE)
        levels.append(hook.levels)
    residuals = {
        layer.name: state.residual
        for layer, state in zip(hook.layers, hook.reducer.states, strict=True)
    }
    return {
        "weights": weights(model.module),
        "levels": levels,
        "rows": hook.rows,
        "residuals": residuals,
        "buckets": buckets,
    }


# -- the oracle ------------------------------------------------------------------------------


def simulated(case: Case) -> dict[str, Any]:
    """The same in one process; what "installed" means is DDP's documented behaviour."""
    net, world = build(case), World(case.workers)
    parameters = [p for p in net.parameters() if p.requires_grad]
    layers = layer_table(net)
    world.meter.dtype = torch.float64
    named = case.compressor if isinstance(case.compressor, dict) else {"name": case.compressor}
    reducer = Reducer(make_compressor(named), layers, world, seed=7)
    compressed = [i for i, layer in enumerate(layers) if layer.compressed]
    rule, values, optimizer = make_policy(case.policy), dict(case.levels), sgd(net)
    rows: list[dict[str, Any]] = []
    all_levels = []
    touched: set[int] = set()  # parameters whose .grad exists
    for epoch in range(EPOCHS + 1):
        decisions = rule.decide(read_history(rows, compressed, "update"), [""] * len(compressed))
        levels = [DENSE] * len(layers)
        for i, decision in zip(compressed, decisions, strict=True):
            levels[i] = decision.level
        all_levels.append({x.name: level for x, level in zip(layers, levels, strict=True)})
        if epoch == EPOCHS:
            break
        sums = [torch.zeros_like(p) for p in parameters]
        for step in range(epoch * STEPS, (epoch + 1) * STEPS):
            stacks, used = _gradients(net, parameters, case, step)
            for i, (p, stack) in enumerate(zip(parameters, stacks, strict=True)):
                in_bucket = case.ddp.get("gradient_as_bucket_view") and not case.set_to_none
                if not used[i] and not (in_bucket and i in touched):
                    p.grad = torch.zeros_like(p) if i in touched and not case.set_to_none else None
                    continue
                value = values.get(levels[i], DENSE)
                p.grad = reducer.reduce([i], {i: stack}, {i: value})[i]
                sums[i] += p.grad
                touched.add(i)
            optimizer.step()
        norms = [s.norm().item() for s in sums]
        rows.append(
            {
                "lr": RATE,
                "next_lr": RATE,
                "layers": {"level": levels},
                "model": {},
                "statistics": {"norm:update": norms},
            }
        )
    residuals = dict(zip((x.name for x in layers), reducer.residuals(), strict=True))
    return {"weights": weights(net), "levels": all_levels, "rows": rows, "residuals": residuals}


def _gradients(
    net: Net, parameters: list[nn.Parameter], case: Case, step: int
) -> tuple[list[Tensor], list[bool]]:
    """Every worker's gradient of each layer, stacked, and whether any worker used the layer."""
    found: list[list[Tensor | None]] = []
    for worker in range(case.workers):
        net.zero_grad()
        for part in range(case.accumulate):
            loss_of(net, case, step, part, worker).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in parameters])
    columns = list(zip(*found, strict=True))
    used = [any(g is not None for g in column) for column in columns]
    stacks = [
        torch.stack([torch.zeros_like(p) if g is None else g for g in column])
        for p, column in zip(parameters, columns, strict=True)
    ]
    return stacks, used
