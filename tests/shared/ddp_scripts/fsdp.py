"""One small training under plain FSDP2, with and without its collectives compressed.

The oracle of ``looped`` runs every rank's backward pass in one process and reduces module by module
by a plain loop over numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regimes
from regimes.base.seeding import derive_seed, draw_uniform

STEPS, EVERY, RATE, BATCH = 6, 2, 0.05, 8
RULE = {"name": "accordion", "interval": 1, "eta": 0.2}


@dataclass(frozen=True)
class Case:
    """How to train; the defaults are the plainest way."""

    scatter: Any = None
    gather: Any = None
    policy: Any = None
    root_only: bool = False  # one call of fully_shard
    reshard: bool | int = True
    side: bool = False  # a branch that every third step uses
    accumulate: int = 1
    synchronise: bool = False  # all of the accumulated passes
    clip: float | None = None
    adamw: bool = False
    half: bool = False  # computes and reduces in bfloat16
    factor: float | None = None  # set_gradient_divide_factor
    force_sum: bool = False
    recompute: bool = False  # activation checkpointing of the block, and prefetching
    replaced: bool = False  # divided on the meta device, then other parameters in their places
    attach: bool = True
    divide: bool = False  # one batch among the processes
    freeze: tuple[str, ...] = ()  # parameters beside others of their modules that are trained
    compiled: bool = False  # block by block
    measured: bool = False  # the instrument "residual"
    exchange: Any = None  # arguments of attach in place of "scatter"


class Net(nn.Module):
    """Two linear layers with one weight, a frozen one, a side branch; a last layer of five rows,
    which no number of shards divides. Smooth, because zero rows of a gradient would leave a factor
    of ACP-SGD to rounding."""

    def __init__(self, convolves: bool = False) -> None:
        super().__init__()
        if convolves:
            self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.inner = nn.Linear(64 if convolves else 8, 12)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.side = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)
        self.recompute = False

    def forward(self, x: Tensor, side: bool) -> Tensor:
        if hasattr(self, "conv"):
            x = torch.tanh(self.conv(x)).flatten(1)
        if self.recompute:
            x = torch.tanh(checkpoint(self.inner, x, use_reentrant=False))
        else:
            x = torch.tanh(self.inner(x))
        x = self.right(torch.tanh(self.left(x))) + self.frozen(x)
        if side:
            x = x + self.side(torch.tanh(x))
        return self.head(x)


def build(case: Case) -> Net:
    torch.manual_seed(1)
    net = Net().to(torch.float32 if case.half else torch.float64)
    for name in case.freeze:
        net.get_parameter(name).requires_grad_(False)
    return net


def batch(
    step: int, part: int, rank: int, size: int = BATCH, shape: tuple[int, ...] = (8,)
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (size,), generator=generator)


def loss_of(net: Any, case: Case, step: int, part: int, rank: int) -> Tensor:
    x, y = batch(step, part, rank)
    if case.divide:
        every = batch(step, part, 0, 3 * BATCH)
        x, y = (tensor.chunk(dist.get_world_size())[rank] for tensor in every)
    answer = net(x.to(next(net.parameters()).dtype), case.side and step % 3 == 1)
    loss = F.cross_entropy(answer.to(torch.float64), y) / case.accumulate
    return loss * len(y) / BATCH if case.divide and case.factor else loss  # a sum over samples


def optimiser(net: nn.Module, case: Any) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    if case.adamw:
        return torch.optim.AdamW(trained, lr=RATE / 10)
    return torch.optim.SGD(trained, lr=RATE, momentum=0.9, weight_decay=1e-3)


def shard(net: Net, case: Case, mesh: DeviceMesh) -> Any:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.compiled:
        net.inner.compile(backend="eager")
        net.side.compile(backend="eager")
    if case.half:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    saved = net.state_dict()
    if case.replaced:
        net = net.to("meta")
        net.right.weight = net.left.weight
    if not case.root_only:
        for module in (net.inner, net.frozen, net.side):
            fully_shard(module, **options)
        fully_shard([net.left, net.right], **options)
    sharded: Any = fully_shard(net, **options)
    if case.replaced:
        for name, tensor in saved.items():
            place, _, last = name.rpartition(".")
            part, rows = sharded.get_submodule(place), distribute_tensor(tensor, mesh, [Shard(0)])
            setattr(part, last, nn.Parameter(rows, getattr(part, last).requires_grad))
        sharded.right.weight = sharded.left.weight
    if case.recompute:
        sharded.recompute = True
        sharded.set_modules_to_forward_prefetch([net.inner, net.frozen])
    for module in sharded.modules():
        if case.factor is not None and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(case.factor)
        if case.force_sum and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {k: whole(v.detach()).clone() for k, v in net.named_parameters()}


def train(
    net: Any,
    optimizer: torch.optim.Optimizer,
    case: Case,
    rank: int,
    steps: Sequence[int] = range(STEPS),
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(case.accumulate):
            last = part == case.accumulate - 1 or case.synchronise
            if case.accumulate > 1:
                net.set_requires_gradient_sync(last)
            loss_of(net, case, step, part, rank).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()


def attach(net: Any, case: Case, mesh: DeviceMesh, optimizer: Any, **more: Any) -> Any:
    return regimes.attach_shards(
        net,
        mesh,
        optimizer,
        scatter=case.scatter,
        gather=case.gather,
        policy=case.policy,
        every=EVERY,
        seed=7,
        **case.exchange or {},
        **more,
    )


def flat_mesh(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def trained(rank: int, ranks: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What one process has in the end, case by case."""
    mesh, results = flat_mesh(ranks), []
    for case in cases:
        net = shard(build(case), case, mesh)
        optimizer = optimiser(net, case)
        measured = {"instruments": {"residual"}} if case.measured else {}
        hook = attach(net, case, mesh, optimizer, **measured) if case.attach else None
        train(net, optimizer, case, rank)
        found: dict[str, Any] = {"weights": weights(net)}
        if hook is not None:
            found["levels"] = hook.levels
            hook.close()
            found |= {"rows": hook.rows, "per_step": hook.header["per_step"]}
            found["layers"] = {x.name: x.size for x in hook.layers}
        results.append(found)
    return results


def residuals(hook: Any) -> dict[str, Tensor]:
    """What this process owes, by layer, in units of its gradient."""
    pairs = zip(hook.reducer.states, hook.reducer.scales, strict=True)
    owed = [None if x.residual is None else x.residual / scale for x, scale in pairs]
    layers = zip(hook.layers, owed, strict=True)
    return {layer.name: x.clone() for layer, x in layers if x is not None}


# -- the oracle: plain loops in one process ------------------------------------------------------


def modules_of(net: Net, case: Case) -> dict[str, list[str]]:
    """The parameters of each call of ``fully_shard``, in the order of their flat tensor."""
    names = [name for name, _ in net.named_parameters()]
    if case.root_only:
        return {"(root)": names}
    parts = {"inner": ("inner",), "left+right": ("left", "right"), "side": ("side",)}
    parts |= {"frozen": ("frozen",), "(root)": ("head",)}
    return {
        module: [name for name in names if name.split(".")[0] in inside]
        for module, inside in parts.items()
    }


def for_owner(numbers: Tensor, owner: int, ranks: int) -> list[float]:
    """The rows of a parameter that a rank owns, padded with zeros."""
    size = -(-numbers.shape[0] // ranks)
    rows = numbers.view(numbers.shape[0], -1)
    mine = rows[owner * size : (owner + 1) * size].flatten().tolist()
    return mine + [0.0] * (size * rows.shape[1] - len(mine))


def rounded(numbers: Sequence[float], bits: int, block: int, noise: Sequence[float]) -> list[float]:
    """Numbers as integers times the scale of their block."""
    steps, found = 2 ** (bits - 1) - 1, []
    for start in range(0, len(numbers), block):
        part = numbers[start : start + block]
        scale = max(max(abs(x) for x in part), 2.2250738585072014e-308)
        for x, more in zip(part, noise[start:], strict=False):
            code = math.floor(x / scale * steps + more)
            found.append(max(-steps, min(steps, code)) * (scale / steps))
    return found


def stored(numbers: list[float], bits: int, block: int) -> list[float]:
    """Numbers as they come back from a memory of 32, 16 or 8 bits each."""
    if bits == 32:
        return numbers
    if bits == 16:
        return torch.tensor(numbers, dtype=torch.float64).bfloat16().double().tolist()
    found: list[float] = []
    for start in range(0, len(numbers), block):
        part = np.array(numbers[start : start + block], dtype=np.float32)
        scale = max(np.abs(part).max(), np.finfo(np.float32).tiny)
        step = scale / np.float32(127)
        for x in part:
            code = np.floor(x / scale * np.float32(127) + np.float32(0.5))
            found.append(float(np.clip(code, -127, 127) * step))
    return found


class Loop:
    """One module's reduce-scatter, number by number."""

    def __init__(self, name: str, ranks: int, table: dict[str, Any], first: int = 0) -> None:
        """``first``: the rank of the first among all that draw numbers."""
        self.name, self.ranks, self.step, self.first = name, ranks, 0, first
        self.block, self.stochastic = table.get("block", 64), table.get("stochastic", True)
        self.feedback = table.get("error_feedback", False)
        self.bits = table.get("residual_bits", 32)
        self.owed: dict[tuple[int, int], list[float]] = {}  # by sender and owner

    def reduce(self, gradients: list[list[Tensor]], level: Any) -> list[Tensor]:
        """The means of parameters whose gradients each rank has."""
        self.step += 1
        shapes, ranks = [g.shape for g in gradients[0]], self.ranks
        means: list[list[float]] = []
        for owner in range(ranks):
            total: list[float] = []
            for rank, own in enumerate(gradients):
                numbers = [x for g in own for x in for_owner(g, owner, ranks)]
                owed = self.owed.pop((rank, owner), [0.0] * len(numbers))
                decay = float(self.feedback or True)
                numbers = [x + decay * y for x, y in zip(numbers, owed, strict=True)]
                sent = numbers
                if level != "dense":
                    sizes = [len(for_owner(g, owner, ranks)) for g in own]
                    matrices = [g.ndim > 1 for g in own]
                    parts = list(zip(split(numbers, sizes), matrices, strict=True))
                    widths = self._widths([n * m for n, m in zip(sizes, matrices, strict=True)])
                    noise = self._noise(rank, owner, sum(widths))
                    starts = accumulate(widths, initial=0)
                    sent = [
                        x
                        for (part, matrix), start in zip(parts, starts, strict=False)
                        for x in (
                            rounded(part, level, self.block, noise[start:]) if matrix else part
                        )
                    ]
                    if self.feedback:
                        left = [x - y for x, y in zip(numbers, sent, strict=True)]
                        self.owed[rank, owner] = [
                            x
                            for part in split(left, sizes)
                            for x in stored(part, self.bits, self.block)
                        ]
                total = [x + y for x, y in zip(total or [0.0] * len(sent), sent, strict=True)]
            means.append([x / ranks for x in total])
        return joined(means, shapes, ranks)

    def square_owed(self) -> float:
        """The square of all that all ranks owe."""
        return sum(x * x for owed in self.owed.values() for x in owed)

    def _widths(self, sizes: list[int]) -> list[int]:
        """The random numbers of matrices' parts: for whole blocks, and whole bytes of codes."""
        block = min(self.block, max(sizes))
        unit = block * (1 + block % 2)
        return [-(-size // unit) * unit for size in sizes]

    def _noise(self, rank: int, owner: int, size: int) -> list[float]:
        if not self.stochastic:
            return [0.5] * size
        seed = derive_seed(7, self.name, "numbers", self.step, self.first + rank)
        (drawn,) = draw_uniform([(seed, size * self.ranks, 0)], torch.device("cpu"))
        return drawn.tolist()[owner * size : (owner + 1) * size]


def split(numbers: list[float], sizes: Sequence[int]) -> list[list[float]]:
    """Parts of so many numbers."""
    ends = list(accumulate(sizes, initial=0))
    return [numbers[a:b] for a, b in pairwise(ends)]


def joined(parts: list[list[float]], shapes: Sequence[torch.Size], ranks: int) -> list[Tensor]:
    """Whole tensors from what each rank owns."""
    found, start = [], 0
    for shape in shapes:
        rows, width = shape[0], math.prod(shape[1:])
        size = -(-rows // ranks) * width
        flat = [x for part in parts for x in part[start : start + size]]
        found.append(torch.tensor(flat[: rows * width], dtype=torch.float64).view(shape))
        start += size
    return found


def looped(ranks: int, case: Case, levels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same training in one process.

    Args:
        levels: by unit and module.
    """
    net, optimizer = build(case), None
    optimizer = optimiser(net, case)
    named, modules = dict(net.named_parameters()), modules_of(net, case)
    loops = {name: Loop(name, ranks, case.scatter or {}) for name in modules}
    norms: list[dict[str, float]] = []
    for step in range(STEPS):
        if step % EVERY == 0:
            sums = {k: torch.zeros_like(p) for k, p in named.items()}
        for p in named.values():
            p.grad = None
        masters = {k: p.detach().clone() for k, p in named.items()}
        if case.gather:
            round_weights(named, modules, ranks, case.gather)
        reduced: dict[str, Tensor] = {}
        passes = [[part] for part in range(case.accumulate)]
        for parts in passes if case.synchronise else [list(range(case.accumulate))]:
            by_rank = []
            for rank in range(ranks):
                net.zero_grad()
                for part in parts:
                    loss_of(net, case, step, part, rank).backward()
                by_rank.append({k: p.grad.clone() for k, p in named.items() if p.grad is not None})
            for module, names in modules.items():
                used = [name for name in names if name in by_rank[0]]
                if used:
                    own = [[g[name] for name in used] for g in by_rank]
                    level = levels[step // EVERY].get(module, "dense")
                    means = zip(used, loops[module].reduce(own, level), strict=True)
                    for name, mean in means:
                        reduced[name] = reduced.get(name, 0) + mean
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
                p.grad = reduced.get(name)
                if name in reduced:
                    sums[name] += reduced[name]
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()
        if step % EVERY == EVERY - 1:
            squares = {k: float(v.square().sum()) for k, v in sums.items()}
            norms.append({m: math.sqrt(sum(squares[k] for k in modules[m])) for m in modules})
    owed = {name: math.sqrt(loop.square_owed() / ranks) for name, loop in loops.items()}
    return {"weights": weights(net), "norms": norms, "residual": owed}


@torch.no_grad()
def round_weights(
    named: dict[str, Any], modules: dict[str, list[str]], ranks: int, table: dict[str, Any]
) -> None:
    for names in modules.values():
        parts = []
        for owner in range(ranks):
            part: list[float] = []
            for name in names:
                numbers = for_owner(named[name], owner, ranks)
                if named[name].ndim > 1:
                    half = [0.5] * len(numbers)
                    numbers = rounded(numbers, table["level"], table.get("block", 64), half)
                part += numbers
            parts.append(part)
        shapes = [named[name].shape for name in names]
        for name, tensor in zip(names, joined(parts, shapes, ranks), strict=True):
            named[name].copy_(tensor)


# -- one gradient that is known --------------------------------------------------------------------


class Product(nn.Module):
    """Its gradient is its input."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient(
    rank: int,
    ranks: int,
    shape: tuple[int, int],
    options: dict[str, Any],
    alike: bool = False,
    poisoned: bool = False,
) -> Tensor:
    """The reduced gradient of a step in which rank r has the gradient ``given(r)``.

    Args:
        alike: all of its rows are the first one.
        poisoned: the answer is that of a step before, whose first number is infinite, and of this
            step.
    """
    mesh, options = flat_mesh(ranks), dict(options)
    half, factor = options.pop("half", False), options.pop("factor", None)
    kind = torch.bfloat16
    policy = MixedPrecisionPolicy(kind, reduce_dtype=kind) if half else MixedPrecisionPolicy()
    net: Any = fully_shard(Product(*shape), mesh=mesh, mp_policy=policy)
    if factor is not None:
        net.set_gradient_divide_factor(factor)
    hook = regimes.attach_shards(net, mesh, seed=7, **options)
    mine = given(rank, shape)
    if poisoned:  # the step before this one
        bad = mine.clone()
        bad[0, 0] = float("inf")
        net(bad).backward()
        before = whole(net.weight.grad).clone()
        net.zero_grad()
    net(mine[:1].expand(shape).contiguous() if alike else mine).backward()
    hook.close()
    now = whole(net.weight.grad).clone()
    return torch.stack([before, now]) if poisoned else now


def given(rank: int, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(shape, generator=generator)


def wide(rank: int, ranks: int) -> list[dict[str, int]]:
    """Bytes by collective of one step in float32: dense, at 8 and at 4 bits."""
    mesh, found = flat_mesh(ranks), []
    for level in ("dense", 8, 4):
        net: Any = fully_shard(Product(64, 100), mesh=mesh)
        table = {"level": level}
        hook = regimes.attach_shards(net, mesh, scatter=table, gather=table)
        net(given(rank, (64, 100))).backward()
        formula = hook.header["per_step"]["constant"]["bytes"]
        found.append({**hook.world.meter.sent, "formula": formula})
        hook.close()
    return found


class Normed(nn.Module):
    """Scales near 1 beside weights of 0.02, as in a GPT; a vector that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.LayerNorm(16), nn.Linear(16, 33)
        self.second, self.b = nn.LayerNorm(33), nn.Linear(33, 16)
        self.extra = nn.Linear(16, 16)
        with torch.no_grad():
            for linear in (self.a, self.b):
                linear.weight.mul_(0.02)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        y = self.b(self.second(torch.relu(self.a(self.first(x)))))
        return x + (self.extra(y) if whole else y)


def vectors(rank: int, ranks: int, level: int, apart: bool, half: bool) -> list[bool]:
    """Are gathered weights and gradients of 1-D parameters those of plain FSDP2, to the bit? In
    steps with and without all parameters."""
    mesh, found = flat_mesh(ranks), []
    kind = torch.bfloat16
    policy = MixedPrecisionPolicy(kind, reduce_dtype=kind) if half else MixedPrecisionPolicy()
    nets: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        net = Normed()
        for module in (net.first, net.second) if apart else ():
            fully_shard(module, mesh=mesh, mp_policy=policy)
        nets.append(fully_shard(net, mesh=mesh, mp_policy=policy))
    ours, plain = nets
    gathered: dict[str, Tensor] = {}

    def keep(module: nn.Module, _: Any) -> None:
        for path in ("first", "second", "a", "b"):
            bias = ours.get_parameter(f"{path}.bias")
            gathered[path] = whole(bias.detach()).clone()

    ours.b.register_forward_pre_hook(keep)
    saved = {name: whole(p.detach()).clone() for name, p in ours.named_parameters()}
    table = {"level": level}
    # weights are rounded in a second job alone, because gradients depend on them
    for tables in ({"scatter": table}, {"scatter": table, "gather": table}):
        hook = regimes.attach_shards(
            ours, mesh, record=regimes.RecordOptions(summary=False), **tables
        )
        for step, used in enumerate((True, False, True)):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(9 * step + rank))
            grads = []
            for net in (ours, plain):
                net.zero_grad()
                net(x, used).square().mean().backward()
                each = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
                grads.append({n: whole(g).clone() for n, g in each.items() if g.ndim == 1})
            if "gather" not in tables:
                found.append(grads[0].keys() == grads[1].keys() and len(grads[0]) >= 6)
                found += [torch.equal(grads[0][n], grads[1][n]) for n in grads[0]]
            else:
                like = torch.bfloat16 if half else torch.float32
                found += [
                    torch.equal(x.to(like), saved[f"{path}.bias"].to(like))
                    for path, x in gathered.items()
                ]
        hook.close()
    return found
