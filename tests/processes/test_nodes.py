"""DDP on nodes of several processes: a worker is a node, and the training is that of a simulation
with a worker for each node; without compression it is that of DDP."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, hsdp
from ddp_scripts.hsdp import Case
from leveled import leveled
from tensors import same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.capabilities import WHOLE_LAYERS
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.sharded_models import load_parts, save_parts
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.job.summary import job_summary
from regimes.plotting.text import describe_run
from regimes.records import read_lines


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


TOPK = (("low", 40), ("high", 5))
CASES = [
    Case(side=True, clip=0.5),  # joins the rows of a node
    Case("topk", TOPK, side=True, measured=True),  # sees each device's by themselves
    Case({"name": "quantised-all-reduce", "block": 16}, (("low", 8), ("high", 4))),
    Case("dense", (("low", "dense"), ("high", "dense"))),
]
EXACT = 1e-12


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("count", "each"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_nodes_train_as_a_simulation_with_a_worker_for_each(count: int, each: int) -> None:
    found = group.run(trained, count * each, count, each, CASES)
    for i, case in enumerate(CASES):
        oracle = hsdp.simulated(count, each, case)
        for rank, results in enumerate(found):
            mine, (node, device) = results[i], divmod(rank, each)
            for name, tensor in oracle["weights"].items():
                assert close(mine["weights"][name], tensor), (case, name)
            for row, theirs in zip(mine["rows"], oracle["rows"], strict=True):
                assert row["layers"]["level"] == theirs["layers"]["level"]
                assert row["statistics"]["norm:update"] == pytest.approx(
                    theirs["statistics"]["norm:update"], rel=1e-9
                )
            for owed, residual in zip(mine["residuals"], oracle["residuals"], strict=True):
                if residual is not None and owed is not None:
                    rows = Layer("", (residual.shape[1],)).on(device, each).shard
                    assert rows is not None
                    assert close(owed[0], residual[node, rows.here])


def test_at_dense_the_weights_are_those_of_ddp() -> None:
    for ours, theirs in group.run(plain, 4, 2, 2):
        for name, tensor in theirs.items():
            assert close(ours[name], tensor), name


def test_layers_of_any_shape_and_type_are_divided_and_joined() -> None:
    kinds = {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-2}
    pressed = (("dense", "dense"), ("powersgd", 64))
    ways = [(odd, 2, dtype, *named) for dtype in kinds for named in pressed]
    for way, answers in zip(ways, group.run_in_turn(4, *ways), strict=True):
        limit = kinds[way[2]]
        for ours, theirs in itertools.chain(*answers):
            close_to = {"rtol": limit, "atol": min(limit, 1e-2)}
            assert torch.allclose(ours.double(), theirs.double(), **close_to), way


def test_a_job_that_was_killed_ends_in_the_same_bits(tmp_path: Path) -> None:
    """From the states of its processes, and from one of all."""
    run, topk, by_turns = tmp_path / "run", Case("topk", TOPK), Case("acp-sgd")
    ways = [(Case(), False), (topk, True), (by_turns, False)]
    jobs = [(resumed, 2, 2, case, str(run / str(i)), whole) for i, (case, whole) in enumerate(ways)]
    *killed, straight = group.run_in_turn(4, *jobs, (trained, 2, 2, [Case(), topk, by_turns]))
    for (case, _), parts in zip(ways, killed, strict=True):
        for part, results in zip(parts, straight, strict=True):
            alone = results[[Case(), topk, by_turns].index(case)]
            same(part["weights"], alone["weights"], case)
            for key in ("bytes", "floats", "layers"):
                assert [row[key] for row in part["rows"]] == [row[key] for row in alone["rows"]]
            assert part["sent"] == alone["sent"]
    for folder in run.iterdir():
        record, rows = regimes.load(folder), read_lines(folder / "epochs.jsonl")
        assert (record.header["world"]["workers"], record.header["world"]["shards"]) == (2, 2)
        assert record.header["config"]["nodes"] == 2
        assert "2 workers on 4 processes in nodes of 2" in describe_run(record.header)
        assert "by each node" in job_summary(record.header, rows, {}, None)
        assert len(record.epochs) == hsdp.UNITS


def test_another_number_of_nodes_and_devices_goes_on_with_what_was_owed(tmp_path: Path) -> None:
    """By a state of all processes, and by checkpoints of torch."""
    file, case = str(tmp_path / "full.pt"), Case(levels=(("low", 1), ("high", 1)))
    before: list[torch.Tensor] = []
    for i, (nodes_now, processes) in enumerate(((2, 6), (3, 6))):
        folders = str(tmp_path / f"{i}"), str(tmp_path / f"{i + 1}")
        ways = [(moved, nodes_now, case, file, i > 0, *by_torch) for by_torch in ((), (folders,))]
        found = [results[0] for results in group.run_in_turn(processes, *ways)]
        for (begin, _), owed in zip(found, before, strict=False):
            assert torch.allclose(begin, owed, rtol=1e-12)
        before = [end for _, end in found]


def test_a_state_of_workers_of_another_kind_is_refused_with_the_argument_that_keeps_it(
    tmp_path: Path,
) -> None:
    file, case = str(tmp_path / "full.pt"), Case(levels=(("low", 1), ("high", 1)))
    ways = [
        (moved, here, case, file, load) for here, load in ((False, 0), (2, 1), (2, 0), (False, 1))
    ]
    _, first, _, second = group.run_in_turn(4, *ways)
    for found, says in ((first, "nodes=False"), (second, "nodes=2")):
        for said in found:
            assert isinstance(said, str)
            assert says in said


def test_every_process_sees_a_gradient_that_is_not_finite() -> None:
    for found in group.run(not_finite, 4, 2):
        assert found == {"seen": [True, False, True], "rows": [1, 0]}


EIGHT = {"compressor": "quantised-all-reduce", "level": 8}
CALLS: list[tuple[dict[str, Any], Any]] = [
    (EIGHT, 2),
    ({"compressor": "topk", "level": 10}, 2),
    ({"compressor": "powersgd", "level": 1}, None),  # a mean, which is added up on the way
    ({"compressor": "dense", "level": "dense"}, None),
    ({**EIGHT, "nodes": False}, None),
    ({**EIGHT, "nodes": 4}, None),  # each process is one
    ({"compressor": "powersgd", "level": 1, "nodes": 2}, 2),
    ({**EIGHT, "mesh": (2, 2)}, 2),
    ({**EIGHT, "nodes": 3}, "nodes"),
    ({**EIGHT, "nodes": 1}, "nodes"),
    ({**EIGHT, "nodes": True}, "nodes"),
    ({**EIGHT, "nodes": "all"}, "nodes"),
    ({"compressor": "whole", "level": 10}, None),  # needs whole layers
    ({"compressor": "whole", "level": 10, "nodes": 2}, "nodes=False"),
]


def test_a_worker_is_a_node_where_that_sends_less_and_the_record_says_so() -> None:
    for rank, found in enumerate(group.run(chosen, 4, 2, [call for call, _ in CALLS])):
        for (call, expected), got in zip(CALLS, found, strict=True):
            if isinstance(expected, str):
                assert isinstance(got, str), (call, got)
                assert expected in got
                continue
            assert not isinstance(got, str), (call, got)
            assert got["nodes"] == expected, call
            assert got["world"].get("shards", 1) == (1 if expected is None else 2)
            assert got["world"]["workers"] == (expected or 4)
            by_default = not call.keys() & {"nodes", "mesh"} and expected is not None
            assert ("nodes=False" in got["said"]) == (by_default and rank == 0)


def test_experts_are_divided_among_devices_and_each_has_factors_of_its_own() -> None:
    steps, layers = 3, [Layer("experts", (5, 12, 18)), Layer("other", (7, 8))]
    results = group.run(mixed, 4, "powersgd", steps)
    reducer = Reducer(make_compressor({"name": "powersgd"}), layers, World(2), seed=3)
    reducer.world.meter.dtype = torch.float64
    for step in range(steps):
        own = []  # the gradient of each process, by layer
        for rank in range(4):
            net = Mixture()
            net(rank, step).backward()
            own.append([p.grad for p in net.parameters()])
        stacks = [torch.stack([(a + b) / 2, (c + d) / 2]) for a, b, c, d in zip(*own, strict=True)]
        updates = reducer.reduce([0, 1], stacks, [1, 1])
        for found in results:
            for ours, theirs in zip(found[step], updates.values(), strict=True):
                assert close(ours, theirs)
    assert reducer.world.meter.layers[0].floats == steps * 5 * (12 + 18)
