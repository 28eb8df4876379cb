"""torchtitan's way to use FSDP2, against torch's own HSDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from leveled import leveled
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import regimes

WIDTH, VOCABULARY, EXPERTS, STEPS, PARTS = 8, 12, 3, 2, 2


@dataclass(frozen=True)
class Case:
    """How to train. ``hook``: exchange by Regimes, with torch's HSDP mesh where ``native``."""

    hook: bool = True
    native: bool = True
    late: bool = True  # one exchange between replicas per accumulated step
    compressor: Any = "dense"
    level: Any = "dense"
    experts: int = 1  # the dimension along which they are divided
    idle: bool = False  # an expert block that one replica does not use in a step


class Experts(nn.Module):
    """[E, n, k], all of which see each token, with weights that the router gives."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("btn,enk->betk", x, self.w1))
        return torch.einsum("betk,ekn,bte->btn", hidden, self.w2, shares).clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.norm = Experts(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x), self.router(x).softmax(-1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.leaves_out = False

    def forward(self, tokens: Tensor, skips: bool = False) -> Tensor:
        x = self.tok_embeddings(tokens)
        for name, layer in self.layers.items():
            if not (skips and name == "1"):
                x = layer(x)
            elif not self.leaves_out:  # with torch's HSDP its gradient must be there, and zero
                x = x + 0 * layer(x)
        return self.output(x)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, case: Case) -> None:
    """As ``torchtitan.models``: experts first, then blocks, then the root."""
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    for block in model.layers.values():  # type: ignore[union-attr,operator]
        place = None if case.experts == 0 else (lambda _: Shard(1))
        fully_shard(block.experts, **options, shard_placement_fn=place)
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():  # disable_fsdp_gradient_division
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def tokens(step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    drawn = torch.randint(VOCABULARY, (2, 6), generator=generator)
    labels = drawn[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100  # uneven numbers that count
    return drawn[:, :-1], labels


def train(rank: int, case: Case) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(1)
    model: Any = Transformer().double()
    model.leaves_out = case.hook
    apply_fsdp(model, mesh if case.native else mesh["dp_shard"], case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = None
    if case.hook:
        hook = regimes.attach_replicas(
            model,
            mesh["dp_replicate"],
            optimizer,
            compressor=leveled(case.compressor, case.level),
            every=STEPS,
        )
    gradients: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [tokens(step, part, rank) for part in range(PARTS)]
        valid = torch.tensor(sum(int((y != -100).sum()) for _, y in parts))
        dist.all_reduce(valid)  # global_valid_tokens
        for part, (x, y) in enumerate(parts):
            if case.late:
                model.set_requires_all_reduce(part == PARTS - 1)
            else:
                model.set_requires_gradient_sync(part == PARTS - 1)
            skips = case.idle and step == 1 and rank >= 2
            scores = model(x, skips).flatten(0, 1)
            loss = F.cross_entropy(scores, y.flatten(), reduction="sum", ignore_index=-100)
            (loss / valid).backward()
        if step == 1:
            gradients = [p.grad.full_tensor() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    rows = []
    if hook is not None:
        (hook.detach if case.native else hook.close)()  # torch's mesh has its replicas again
        rows = [{key: row[key] for key in ("steps", "floats", "bytes")} for row in hook.rows]
    # torch's own exchange again, where there was one
    model.set_requires_all_reduce(True)
    model.set_requires_gradient_sync(True)
    optimizer.zero_grad()
    model(tokens(9, 0, rank)[0]).square().mean().backward()
    after = [p.grad.full_tensor() for p in model.parameters()]
    return {
        "gradients": gradients,
        "weights": [p.detach().full_tensor() for p in model.parameters()],
        "after": after,
        "rows": rows,
    }


def trained(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [train(rank, case) for case in cases]


TORCH = Case(hook=False)
OURS = [
    Case(),
    Case(native=False),
    Case(late=False),
    Case(experts=0),
    Case(compressor="powersgd", level=8),
]
IDLE = [Case(idle=True), Case(idle=True, native=False, compressor="powersgd", level=1)]


@pytest.fixture(scope="module")
def found() -> list[list[dict]]:
    return group.run(trained, 4, [TORCH, *OURS, *IDLE, Case(hook=False, idle=True)])


def largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("i", range(len(OURS)), ids=[str(case) for case in OURS])
def test_gradients_and_weights_are_those_of_torchs_hsdp(found: list, i: int) -> None:
    for torchs, *ours in found:
        dense = OURS[i].compressor == "dense"
        assert largest(ours[i]["gradients"], torchs["gradients"]) < (1e-12 if dense else 0.9)
        if dense:
            assert largest(ours[i]["weights"], torchs["weights"]) < 1e-12
            assert largest(ours[i]["after"], torchs["after"]) < 1e-12
        (row,) = ours[i]["rows"]  # one exchange for each step of the optimiser
        assert row["steps"] == STEPS
        replicas_differ = largest(ours[i]["weights"], found[0][1 + i]["weights"])
        assert replicas_differ == 0


def test_experts_that_are_idle_on_one_replica_count_as_zero(found: list) -> None:
    for results in found:
        *_, exact, low_rank, torchs = results
        for key in ("gradients", "weights"):
            assert largest(exact[key], torchs[key]) < 1e-12
        # floats and bytes are those of any other step, and all replicas have the same weights
        assert exact["rows"] == results[1]["rows"]
        assert largest(low_rank["weights"], found[0][-2]["weights"]) == 0
