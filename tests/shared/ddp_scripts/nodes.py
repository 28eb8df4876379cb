"""A DDP training on nodes of several processes; its oracle is that of replicas of shards
(``hsdp.simulated``): a worker's batch is that of its node."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Sequence
from typing import Any

import torch
from ddp_scripts import hsdp
from leveled import leveled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.capabilities import WHOLE_LAYERS
from regimes.base.errors import ConfigError
from regimes.collectives.sharded_models import load_parts, save_parts
from regimes.compression.sparse import TopK


def attached(
    net: nn.Module, optimizer: Any, case: hsdp.Case, nodes: Any, folder: str | None = None
) -> tuple[Any, Any]:
    """The DDP model and its hook."""
    model = DistributedDataParallel(net, find_unused_parameters=True)
    measured = {"instruments": {"error", "residual"}, "check_every": 2} if case.measured else {}
    hook = regimes.attach(
        model,
        optimizer,
        every=hsdp.STEPS,
        policy=case.rule or hsdp.RULE,
        compressor=leveled(case.compressor, dict(case.levels)),
        seed=7,
        nodes=nodes,
        record=regimes.RecordOptions(folder, **measured),
    )
    return model, hook


def trained(rank: int, nodes: int, each: int, cases: Sequence[hsdp.Case]) -> list[dict[str, Any]]:
    """What one process has in the end, case by case."""
    node, rows = hsdp.place(rank, each)
    results = []
    for case in cases:
        net = hsdp.build(case)
        optimizer = hsdp.optimiser(net, case)
        model, hook = attached(net, optimizer, case, nodes)
        hsdp.train(model, optimizer, case, node, rows)
        hook.close()
        results.append(
            {
                "weights": hsdp.weights(net),
                "rows": hook.rows,
                "residuals": [state.residual for state in hook.reducer.states],
                "sent": hook.traffic.bytes,
            }
        )
    return results


def plain(rank: int, nodes: int, each: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights at "dense" with nodes, and those of DDP."""
    case = hsdp.Case("dense", (("low", "dense"), ("high", "dense")), side=True, clip=0.5)
    (ours,) = trained(rank, nodes, each, [case])
    node, rows = hsdp.place(rank, each)
    net = hsdp.build(case)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    hsdp.train(model, hsdp.optimiser(net, case), case, node, rows)
    return ours["weights"], hsdp.weights(net)


def resumed(
    rank: int, nodes: int, each: int, case: hsdp.Case, folder: str, whole: bool
) -> dict[str, Any]:
    """A job that is saved at the end of a unit and within one, and goes on in a new hook."""
    node, rows = hsdp.place(rank, each)
    net = hsdp.build(case)
    optimizer = hsdp.optimiser(net, case)
    model, hook = attached(net, optimizer, case, nodes, folder)
    for step in range(hsdp.UNITS * hsdp.STEPS):
        if step in (2, 5):
            saved = hook.full_state_dict() if whole else hook.state_dict()
            del model, hook  # killed: the record is not ended
            gc.collect()
            model, hook = attached(net, optimizer, case, nodes, folder)
            (hook.load_full_state_dict if whole else hook.load_state_dict)(saved)
        optimizer.zero_grad()
        hsdp.loss_of(model, case, step, 0, node, rows).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    hook.close()
    return {"weights": hsdp.weights(net), "rows": hook.rows, "sent": hook.traffic.bytes}


def moved(
    rank: int,
    nodes: int | bool,
    case: hsdp.Case,
    file: str,
    load: bool,
    folders: tuple[str, str] | None = None,
) -> Any:
    """One unit; the sum over layers of what is owed, before it and behind it, or what refuses to
    go on.

    Args:
        folders: checkpoints of torch from which it goes on and that it leaves, not the file.
    """
    net = hsdp.build(case)
    optimizer = hsdp.optimiser(net, case)
    model, hook = attached(net, optimizer, case, nodes)

    def owed() -> Tensor:
        states = hook.reducer.states
        known = [s.residual.double().sum() for s in states if s.residual is not None]
        total = sum(known, torch.zeros((), dtype=torch.float64)) / hook.world.workers
        torch.distributed.all_reduce(total)
        return total

    before = owed()
    if load:
        saved = torch.load(file, weights_only=True) if rank == 0 else None
        try:
            if folders is None:
                hook.load_full_state_dict(saved)
            else:
                load_parts({"hook": hook.sharded_state(saved=folders[0])}, folders[0])
        except ConfigError as error:
            return str(error)
        before = owed()
    for step in range(hsdp.STEPS):
        optimizer.zero_grad()
        hsdp.loss_of(model, case, step, 0, rank, slice(None)).backward()
        optimizer.step()
    if folders is not None:
        save_parts({"hook": hook.sharded_state()}, folders[1])
    hook.close()
    if (full := hook.full_state_dict()) is not None:
        torch.save(full, file)
    return [before, owed()]


class Odd(nn.Module):
    """A scalar, vectors and matrices of one, three and five rows, a convolution in another order of
    memory, one without numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        shapes = [(), (1,), (3,), (1, 4), (3, 4), (5, 2, 3), (0, 3), (6, 2, 3, 3)]
        self.all = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)
        self.all[-1].data = self.all[-1].data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return sum((p * x[: max(p.numel(), 1)][: p.numel()].view(p.shape)).sum() for p in self.all)


def odd(rank: int, nodes: int, dtype: torch.dtype, compressor: str, level: Any) -> list[Tensor]:
    """The gradients of such a model, beside those of DDP itself."""
    torch.manual_seed(rank)
    x = torch.randn(128).to(dtype)
    with_hook, alone = (DistributedDataParallel(Odd(dtype)) for _ in range(2))
    hook = regimes.attach(
        with_hook,
        torch.optim.SGD(with_hook.parameters(), 0.1),
        compressor=leveled(compressor, level),
        every=1,
        nodes=nodes,
    )
    for model in (with_hook, alone):
        model(x).backward()
    hook.close()
    pairs = zip(with_hook.parameters(), alone.parameters(), strict=True)
    return [torch.stack([p.grad, q.grad]) for p, q in pairs]


def not_finite(rank: int, nodes: int) -> dict[str, Any]:
    """Does every process see that one of them had a gradient that is not finite?"""
    net = hsdp.build(hsdp.Case())
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    model, hook = attached(net, optimizer, hsdp.Case(), nodes)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss = hsdp.loss_of(model, hsdp.Case(), step, 0, rank, slice(None))
        (loss * (torch.nan if step == 1 and rank == 3 else 1)).backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        seen.append(all(bool(g.isfinite().all()) for g in grads))
        if seen[-1]:
            optimizer.step()
    hook.close()
    return {"seen": seen, "rows": [row["skipped"] for row in hook.rows]}


class Whole(TopK):
    """A compressor of somebody else's that reads whole layers."""

    requires = frozenset({WHOLE_LAYERS})


def chosen(rank: int, each: int, calls: Sequence[dict[str, Any]]) -> list[Any]:
    """What ``attach`` makes of processes that a launcher has started on nodes of so many."""
    os.environ.update(GROUP_RANK=str(rank // each), LOCAL_WORLD_SIZE=str(each))
    found = []
    for call in calls:
        options, said = dict(call), io.StringIO()
        if "mesh" in options:
            mesh = init_device_mesh("cpu", options.pop("mesh"), mesh_dim_names=("node", "device"))
            options["nodes"] = mesh["node"]
        name, level = options.pop("compressor"), options.pop("level")
        chosen = leveled(Whole() if name == "whole" else name, level)
        model = DistributedDataParallel(nn.Linear(8, 8).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with contextlib.redirect_stderr(said):
            try:
                hook = regimes.attach(model, optimizer, compressor=chosen, every=1, **options)
            except ConfigError as error:
                found.append(str(error))
                continue
        model(torch.randn(2, 8).double()).sum().backward()
        hook.close()
        header = hook.header
        found.append(
            {
                "world": header["world"],
                "nodes": header["config"].get("nodes"),
                "said": said.getvalue(),
            }
        )
    return found


class Mixture(nn.Module):
    """Five experts, which no two devices share evenly, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.experts = nn.Parameter(torch.randn(5, 12, 18, dtype=torch.float64))
        self.other = nn.Parameter(torch.randn(7, 8, dtype=torch.float64))

    def forward(self, rank: int, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(10 * step + rank)
        parts = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in self.parameters()]
        return sum((p * x).sum() for p, x in zip(self.parameters(), parts, strict=True))


def mixed(rank: int, compressor: str, steps: int) -> list[list[Tensor]]:
    """The gradients of each step, on two nodes of two."""
    model = DistributedDataParallel(Mixture())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    chosen = leveled(compressor, 1)
    hook = regimes.attach(model, optimizer, compressor=chosen, every=steps, nodes=2, seed=3)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(rank, step).backward()
        found.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    hook.close()
    return found
