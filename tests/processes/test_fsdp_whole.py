"""Compressors of whole gradients behind FSDP2's reduce-scatter: the same job under DDP, and W
simulated workers of known gradients."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from ddp_scripts import fsdp, group
from ddp_scripts.fsdp import EVERY, STEPS, Case
from leveled import leveled
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer


def beside_ddp(
    rank: int, ranks: int, cases: Sequence[Case]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What one process has in the end, case by case: of FSDP2, and of DDP."""
    mesh, found = fsdp.flat_mesh(ranks), []
    for case in cases:
        measured: dict[str, Any] = {"instruments": {"residual", "cosine"}} if case.measured else {}
        net = fsdp.shard(fsdp.build(case), case, mesh)
        optimizer = fsdp.optimiser(net, case)
        hook = fsdp.attach(net, case, mesh, optimizer, **measured)
        fsdp.train(net, optimizer, case, rank)
        ours = outcome(hook, net)
        plain = fsdp.build(case)
        wrapped = DistributedDataParallel(plain, find_unused_parameters=True)
        optimizer = fsdp.optimiser(plain, case)
        words = {"optimizer": optimizer, "every": EVERY, "seed": 7, "policy": case.policy}
        hook = regimes.attach(wrapped, **words, **case.exchange, **measured)
        train_ddp(wrapped, optimizer, case, rank, ranks)
        found.append((ours, outcome(hook, plain)))
    return found


def train_ddp(wrapped: Any, optimizer: Any, case: Case, rank: int, ranks: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.accumulate):
            last = part == case.accumulate - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                fsdp.loss_of(wrapped, case, step, part, rank).backward()
        for p in wrapped.parameters():
            if case.factor is not None and p.grad is not None:
                p.grad.mul_(ranks / case.factor)  # a sum over the factor, not a mean
        if case.clip is not None:
            nn.utils.clip_grad_norm_(wrapped.parameters(), case.clip)
        optimizer.step()


def outcome(hook: Any, net: nn.Module) -> dict[str, Any]:
    owed = fsdp.residuals(hook)
    hook.close()
    names = [layer.name for layer in hook.layers]
    return {
        "weights": fsdp.weights(net),
        "owed": owed,
        "levels": hook.levels,
        "rows": [
            {
                "floats": dict(zip(names, row["layers"]["floats"], strict=True)),
                "levels": dict(zip(names, row["layers"]["level"], strict=True)),
                "statistics": {
                    kind: dict(zip(names, values, strict=True))
                    for kind, values in row["statistics"].items()
                },
                "calls": row["collectives"]["calls"],
                "bytes": row["collectives"]["bytes"],
                "steps": row["steps"],
            }
            for row in hook.rows
        ],
        "per_step": hook.header["per_step"],
    }


# -- gradients that are known ----------------------------------------------------------------------


class Products(nn.Module):
    """The gradient of each parameter is its input; the last ones may have none."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, inputs, strict=False)
        return torch.stack([(weight * x).sum() for weight, x in pairs]).sum()


def given(step: int, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def known(
    rank: int, ranks: int, shapes: Sequence[tuple[int, ...]], steps: int, half: bool, words: Any
) -> list[dict[str, Any]]:
    """By step: what the processes have reduced, and what this one owes afterwards."""
    mesh, found = fsdp.flat_mesh(ranks), list[dict[str, Any]]()
    kind = torch.bfloat16
    policy = MixedPrecisionPolicy(kind, reduce_dtype=kind) if half else MixedPrecisionPolicy()
    net: Any = fully_shard(
        Products(shapes),
        mesh=mesh,
        mp_policy=policy,
        shard_placement_fn=lambda p: Shard(int(p.shape == (8, 8))),  # its columns
    )
    hook = regimes.attach_shards(
        net, mesh, seed=7, record=regimes.RecordOptions(summary=False), **words
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        net(given(step, rank, shapes)).backward()
        optimizer.step()
        reduced = [fsdp.whole(p.grad).clone() for p in net.parameters()]
        found.append({"reduced": reduced, "owed": fsdp.residuals(hook)})
    hook.close()
    return found


def partly_used(
    rank: int, ranks: int, shapes: Sequence[tuple[int, ...]], ways: Sequence[dict[str, Any]]
) -> list[list[torch.Tensor]]:
    """What the processes have reduced where the first alone uses the last parameter: by torch
    alone, and then in each of some ways."""
    mesh, found = fsdp.flat_mesh(ranks), list[list[torch.Tensor]]()
    for words in [None, *ways]:
        net: Any = fully_shard(Products(shapes), mesh=mesh)
        net.set_reduce_scatter_unused_params(True)
        hook = None
        if words is not None:
            options = regimes.RecordOptions(summary=False)
            hook = regimes.attach_shards(net, mesh, seed=7, record=options, **words)
        inputs = given(0, rank, shapes)
        net(inputs if rank == 0 else inputs[:-1]).backward()
        found.append([fsdp.whole(p.grad).clone() for p in net.parameters()])
        if hook is not None:
            hook.close()
    return found


def said(rank: int, ranks: int, words: dict[str, Any]) -> str:
    """What a process says as the hook is attached."""
    net: Any = fully_shard(Products([(8, 8), (9,)]), mesh=fsdp.flat_mesh(ranks))
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        hook = regimes.attach_shards(net, fsdp.flat_mesh(ranks), **words)
    hook.close()
    return heard.getvalue()


RANKS = {"compressor": regimes.PowerSGD(rank={"low": 4, "high": 1})}
OF_RANKS = regimes.Accordion(
    interval=1, eta=0.2, low=regimes.PowerSGD(rank=4), high=regimes.PowerSGD(rank=1)
)
CASES = {
    2: [
        Case(exchange={"compressor": regimes.PowerSGD(rank=2)}),
        Case(exchange=RANKS, policy=fsdp.RULE, side=True, measured=True),
        Case(
            exchange=RANKS | {"start_compressing_after": 3},
            policy=fsdp.RULE,
            root_only=True,
            accumulate=2,
            adamw=True,
            reshard=False,
        ),
        Case(exchange=RANKS, policy=fsdp.RULE, factor=3.0, freeze=("inner.weight",)),
        Case(
            exchange={
                "compressor": regimes.PowerSGD(rank=1, residual="update", error_feedback=0.9)
            },
            side=True,
            clip=0.5,
            recompute=True,
        ),
        Case(exchange={"compressor": regimes.TopK(percent=0.1)}, gather={"level": "dense"}),
        Case(exchange={"compressor": leveled("acp-sgd", 1)}, replaced=True),
    ],
    3: [
        Case(exchange={}, policy=OF_RANKS, side=True),
        Case(exchange={"compressor": leveled("sign", 1)}, root_only=True),
    ],
}
OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)


@cache
def trained(ranks: int) -> list[list[Any]]:
    """By case, the pair that each process has."""
    return list(zip(*group.run(beside_ddp, ranks, ranks, CASES[ranks]), strict=True))


@pytest.mark.parametrize(
    ("ranks", "place"), [(ranks, i) for ranks, cases in CASES.items() for i in range(len(cases))]
)
def test_it_is_the_job_of_ddp(ranks: int, place: int) -> None:
    case = CASES[ranks][place]
    limit = 1e-7 if OLD and case.clip is not None else 1e-12
    for ours, ddp in trained(ranks)[place]:
        for name, tensor in ddp["weights"].items():
            assert (ours["weights"][name] - tensor).abs().max() < limit, name
        assert ours["levels"] == ddp["levels"]
        assert ours["owed"].keys() == ddp["owed"].keys() != set()
        scale = ranks / (case.factor or ranks)  # what is owed is in units of the shared gradient
        for name, tensor in ddp["owed"].items():
            assert torch.allclose(ours["owed"][name], tensor * scale, rtol=0, atol=1e-10), name
        if case.policy is not None:
            assert {"low", "high"} <= {x for row in ddp["rows"] for x in row["levels"].values()}
        alike = not (case.freeze or "start_compressing_after" in case.exchange)
        for mine, theirs in zip(ours["rows"], ddp["rows"], strict=True):
            assert mine["levels"] == theirs["levels"]
            if alike:  # where all of a module are dense, FSDP2's own reduce-scatter runs
                names = ("inner.weight", "left.weight", "right.bias")
                assert [mine["floats"][x] for x in names] == [theirs["floats"][x] for x in names]
            assert mine["statistics"].keys() == theirs["statistics"].keys()
            for kind, values in theirs["statistics"].items():
                expected = {name: x if x is None else x * scale for name, x in values.items()}
                assert mine["statistics"][kind] == pytest.approx(expected, rel=1e-9), kind


# -- gradients that are known ----------------------------------------------------------------------

SHAPES = ((5, 7), (9,), (3, 4, 2), (1, 6), (8, 8))


def simulated(ranks: int, steps: int, half: bool, words: dict[str, Any]) -> list[Any]:
    """By step: the updates and residuals of simulated workers."""
    table, found = words["compressor"], []
    made = make_compressor({"name": table} if isinstance(table, str) else table)
    layers = [Layer(f"weights.{i}", shape) for i, shape in enumerate(SHAPES)]
    reducer = Reducer(made, layers, World(ranks), 7)
    for step in range(steps):
        every = [given(step, rank, SHAPES) for rank in range(ranks)]
        if half:
            every = [[x.bfloat16().float() for x in own] for own in every]
        rows = [torch.stack(x) for x in zip(*every, strict=True)]
        ids = [*range(len(SHAPES))]
        updates = reducer.reduce(ids, rows, [words["level"]] * len(ids))
        states = zip(layers, reducer.states, strict=True)
        owed = {x.name: s.residual.clone() for x, s in states if s.residual is not None}
        found.append((rows, [updates[i].clone() for i in ids], owed))
    return found


KNOWN: list[tuple[dict[str, Any], float]] = [
    ({"compressor": "powersgd", "level": 1}, 1.0),
    ({"compressor": {"name": "topk", "error_feedback": 0.5}, "level": 0.2}, 0.5),
    ({"compressor": {"name": "powersgd", "wire": "bf16"}, "level": 2}, 1.0),
]


def test_it_is_that_of_simulated_workers() -> None:
    """Rows that no number of processes divides, and fewer than processes."""
    ranks, steps = 2, 3
    ways = [(words, decay, half) for words, decay in KNOWN for half in (False, True)]
    jobs = [(known, ranks, SHAPES, steps, half, words) for words, _, half in ways]
    for (words, decay, half), found in zip(ways, group.run_in_turn(ranks, *jobs), strict=True):
        check_known(found, simulated(ranks, steps, half, words), decay, half)


def check_known(found: list[Any], oracle: list[Any], decay: float, half: bool) -> None:
    """In the mean over processes, what is sent and still owed is the gradient and what was owed
    before."""
    before: dict[str, Tensor] = {}
    for step, (rows, _, _) in enumerate(oracle):
        owes = {
            name: torch.stack([mine[step]["owed"][name][0] for mine in found]).mean(0)
            for name in found[0][step]["owed"]
        }
        for i, (own, reduced) in enumerate(zip(rows, found[0][step]["reduced"], strict=True)):
            name = f"weights.{i}"
            past = decay * before[name] if name in before else 0.0
            left = owes.get(name, torch.zeros(())).view(own[0].shape if name in owes else ())
            error = (reduced + left - own.mean(0) - past).abs().max()
            assert error < (2.0**-8 * float(reduced.abs().max()) if half else 2e-6), name
        before = {name: x.view(SHAPES[int(name.split(".")[1])]) for name, x in owes.items()}
    for rank, mine in enumerate(found):
        for step, (_, updates, owed) in zip(mine, oracle, strict=True):
            for update, reduced in zip(updates, step["reduced"], strict=True):
                expected = update.bfloat16().float() if half else update
                limit = 2.0**-7 * float(update.abs().max()) if half else 2e-6
                assert (reduced.float() - expected).abs().max() <= limit
            assert step["owed"].keys() == owed.keys()
            for name, own in owed.items():
                assert torch.allclose(step["owed"][name][0], own[rank], rtol=0, atol=1e-5)


def test_process_0_says_once_what_feedback_keeps_in_memory() -> None:
    """Two residuals of 64 numbers in float32, beside a half of them; nothing without feedback."""
    heard, nothing = group.run(said, 2, 2, {"compressor": regimes.PowerSGD(rank=1)})
    assert heard.count("\n") == 1
    assert "keeps 512 B on each process" in heard
    assert "a shard of the matrices has 128 B" in heard
    without = {"compressor": regimes.PowerSGD(rank=1, error_feedback=False)}
    assert [nothing, *group.run(said, 2, 2, without)] == ["", "", ""]


def test_a_parameter_that_one_process_uses_is_reduced_as_by_torch() -> None:
    """With ``set_reduce_scatter_unused_params(True)``: exactly where all is sent, in 8 bits within
    two steps of the largest magnitude."""
    ways = [{"compressor": "topk", "level": 100}, {"scatter": {"level": 8}}]
    for torchs, whole, rounded in group.run(partly_used, 2, 2, [(8, 8), (4, 6)], ways):
        for exact, all_sent, near in zip(torchs, whole, rounded, strict=True):
            torch.testing.assert_close(all_sent, exact, rtol=1e-6, atol=1e-7)
            assert (near - exact).abs().max() < 2 * exact.abs().max() / 127 * 2
            assert exact.any()
