"""`set_gradient_divide_factor` of a model whose replicas the hook exchanges. Torch's own HSDP is
the oracle. Compressors commute with a factor, so that each is compared with itself without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddp_scripts import group
from leveled import leveled
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import regimes
from regimes.compression import REGISTRY

STEPS = 2
WIDTH = 8


@dataclass(frozen=True)
class Case:
    """``way``: "replicas", "both" (with FSDP2's collectives), or "torch"; ``late``: the factor is
    set once the hook is attached; ``passes``: backward passes of a step, each exchanged."""

    way: str
    factor: float | None
    compressor: Any = "dense"
    level: Any = "dense"
    late: bool = False
    passes: int = 1
    kind: torch.dtype = torch.float64
    before: bool = False  # the user has an all-reduce hook of FSDP2 of his own


def make_net(kind: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(kind)


def set_factor(net: nn.Module, factor: float | None) -> None:
    for module in net.modules():
        if factor is not None and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def attach(net: nn.Module, case: Case, mesh: DeviceMesh) -> None:
    inside: dict[str, Any] = {}
    if case.way == "both":
        inside = {"scatter": {"level": 8, "block": 1}}
    if case.way != "torch":
        regimes.attach_replicas(
            net,
            mesh["replicate"],
            compressor=leveled(case.compressor, case.level),
            record=regimes.RecordOptions(summary=False),
            **inside,
        )


def gradients(case: Case, mesh: DeviceMesh, rank: int) -> list[Tensor]:
    """The whole gradient of each step, all layers end to end."""
    net = make_net(case.kind)
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh if case.way == "torch" else mesh["shard"])
    if case.before:
        for module in (net[0], net[2]):
            module.set_all_reduce_hook(lambda output: output.mul_(3))
    for setting in (attach, set_factor) if case.late else (set_factor, attach):
        setting(net, *((case.factor,) if setting is set_factor else (case, mesh)))
    found, generator = [], torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(case.passes):
            x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(case.kind)
            net(x).square().sum().backward()
        parts: list[Any] = [p.grad for p in net.parameters()]
        found.append(torch.cat([part.full_tensor().flatten() for part in parts]).double())
    return found


def reduced(rank: int, shape: tuple[int, int], cases: list[Case]) -> list[Tensor]:
    """The gradients of each case, ``[steps, numbers]``."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return [torch.stack(gradients(case, mesh, rank)) for case in cases]


FACTORS = (1.0, 3.0)  # torchtitan's, and no power of two
LEVELS = {
    "dense": "dense",
    "powersgd": 2,
    "acp-sgd": 2,
    "topk": 40,
    "randomk": 40,
    "chunked-topk": 40,
    "sign": 1,
    "quantise": 8,
    "quantised-all-reduce": 8,
    "cast": "bf16",
}
MESH = (2, 2)
WORLD = MESH[0] * MESH[1]


def test_replicas_get_the_sum_that_torch_gives() -> None:
    torchs = [Case("torch", factor) for factor in (None, *FACTORS)]
    dense = [Case("replicas", factor) for factor in (None, *FACTORS)]
    more = [
        Case(way, factor, name, LEVELS[name])
        for way, name in (("replicas", "powersgd"), ("both", "dense"), ("both", "topk"))
        for factor in (None, 1.0)
    ]
    for answers in group.run(reduced, WORLD, MESH, [*torchs, *dense, *more]):
        found = dict(zip([*torchs, *dense, *more], answers, strict=True))
        for case, ours in zip(torchs, dense, strict=True):
            total = found[torchs[0]] * (1 if case.factor is None else WORLD / case.factor)
            assert torch.allclose(found[case], total, rtol=1e-12, atol=1e-14)
            assert torch.allclose(found[ours], total, rtol=1e-12, atol=1e-14), ours
        for plain, case in zip(more[::2], more[1::2], strict=True):
            check_times(case, found[case], found[plain], WORLD)


def test_every_compressor_gives_the_same_numbers_times_the_factor() -> None:
    assert LEVELS.keys() == set(REGISTRY)
    cases = [
        Case("replicas", factor, name, level)
        for name, level in LEVELS.items()
        for factor in (None, 1.0)
    ]
    for answers in group.run(reduced, 2, (2, 1), cases):
        for case, plain, gradient in zip(cases[1::2], answers[::2], answers[1::2], strict=True):
            check_times(case, gradient, plain, 2)


def check_times(case: Case, gradient: torch.Tensor, plain: torch.Tensor, world: int) -> None:
    assert case.factor is not None
    error = (gradient - plain * world / case.factor).norm() / gradient.norm()
    assert error < 1e-9, (case, error)


@pytest.mark.parametrize("shape", [MESH, (2, 1)], ids=str)
def test_a_factor_counts_once_whenever_it_is_set(shape: tuple[int, int]) -> None:
    """After `attach`, in passes that are each exchanged and added up, and on a replica of one
    process."""
    limits = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
    more = [{}, {"late": True}, {"passes": 3}, {"before": True}]
    ways = [(kind, x) for kind in limits for x in more]
    cases = [Case(way, 1.0, kind=kind, **x) for way in ("torch", "replicas") for kind, x in ways]
    for answers in group.run(reduced, shape[0] * shape[1], shape, cases):
        for (kind, case), right, ours in zip(ways, answers[:8], answers[8:], strict=True):
            error = (ours - right).norm() / right.norm()
            assert error < limits[kind], (shape, kind, case, error)


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_a_level_that_would_send_more_than_a_layer_has_sends_it_whole(
    shape: tuple[int, int],
) -> None:
    """Matrices of 8 x 8 and 4 x 8, whose rows are on one or two processes."""
    pairs = [({"name": "powersgd"}, 4), ({"name": "chunked-topk", "bits": 32}, 100)]
    cases = [Case("replicas", None, table, level) for table, level in pairs]
    count = shape[0] * shape[1]
    for torchs, *ours in group.run(reduced, count, shape, [Case("torch", None), *cases]):
        for case, gradients in zip(cases, ours, strict=True):
            assert torch.allclose(gradients, torchs, rtol=1e-12, atol=1e-14), case
