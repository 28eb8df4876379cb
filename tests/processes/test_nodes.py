"""DDP on nodes of several processes: a worker is a node, and the training is that of a simulation
with a worker for each node; without compression it is that of DDP."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, hsdp, nodes
from ddp_scripts.hsdp import Case

import regimes
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.job.summary import job_summary
from regimes.plotting.text import describe_run
from regimes.records import read_lines

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
    found = group.run(nodes.trained, count * each, count, each, CASES)
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
    for ours, theirs in group.run(nodes.plain, 4, 2, 2):
        for name, tensor in theirs.items():
            assert close(ours[name], tensor), name


def test_layers_of_any_shape_and_type_are_divided_and_joined() -> None:
    kinds = {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-2}
    pressed = (("dense", "dense"), ("powersgd", 64))
    ways = [(nodes.odd, 2, dtype, *named) for dtype in kinds for named in pressed]
    for way, answers in zip(ways, group.run_in_turn(4, *ways), strict=True):
        limit = kinds[way[2]]
        for ours, theirs in itertools.chain(*answers):
            close_to = {"rtol": limit, "atol": min(limit, 1e-2)}
            assert torch.allclose(ours.double(), theirs.double(), **close_to), way


def test_a_job_that_was_killed_ends_in_the_same_bits(tmp_path: Path) -> None:
    """From the states of its processes, and from one of all."""
    run, topk, by_turns = tmp_path / "run", Case("topk", TOPK), Case("acp-sgd")
    ways = [(Case(), False), (Case(), True), (topk, True), (by_turns, False)]
    jobs = [
        (nodes.resumed, 2, 2, case, str(run / str(i)), whole)
        for i, (case, whole) in enumerate(ways)
    ]
    *killed, straight = group.run_in_turn(4, *jobs, (nodes.trained, 2, 2, [Case(), topk, by_turns]))
    for (case, _), parts in zip(ways, killed, strict=True):
        for part, results in zip(parts, straight, strict=True):
            alone = results[[Case(), topk, by_turns].index(case)]
            for name, tensor in alone["weights"].items():
                assert torch.equal(part["weights"][name], tensor), (case, name)
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
    for i, (nodes_now, processes) in enumerate(((2, 4), (2, 6), (3, 6))):
        folders = str(tmp_path / f"{i}"), str(tmp_path / f"{i + 1}")
        ways = [
            (nodes.moved, nodes_now, case, file, i > 0, *by_torch) for by_torch in ((), (folders,))
        ]
        found = [results[0] for results in group.run_in_turn(processes, *ways)]
        for (begin, _), owed in zip(found, before, strict=False):
            assert torch.allclose(begin, owed, rtol=1e-12)
        before = [end for _, end in found]


def test_a_state_of_workers_of_another_kind_is_refused_with_the_argument_that_keeps_it(
    tmp_path: Path,
) -> None:
    file, case = str(tmp_path / "full.pt"), Case(levels=(("low", 1), ("high", 1)))
    ways = [
        (nodes.moved, here, case, file, load)
        for here, load in ((False, 0), (2, 1), (2, 0), (False, 1))
    ]
    _, first, _, second = group.run_in_turn(4, *ways)
    for found, says in ((first, "nodes=False"), (second, "nodes=2")):
        for said in found:
            assert isinstance(said, str)
            assert says in said


def test_every_process_sees_a_gradient_that_is_not_finite() -> None:
    for found in group.run(nodes.not_finite, 4, 2):
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
    for rank, found in enumerate(group.run(nodes.chosen, 4, 2, [call for call, _ in CALLS])):
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
    results = group.run(nodes.mixed, 4, "powersgd", steps)
    reducer = Reducer(make_compressor({"name": "powersgd"}), layers, World(2), seed=3)
    reducer.world.meter.dtype = torch.float64
    for step in range(steps):
        own = []  # the gradient of each process, by layer
        for rank in range(4):
            net = nodes.Mixture()
            net(rank, step).backward()
            own.append([p.grad for p in net.parameters()])
        stacks = [torch.stack([(a + b) / 2, (c + d) / 2]) for a, b, c, d in zip(*own, strict=True)]
        updates = reducer.reduce([0, 1], stacks, [1, 1])
        for found in results:
            for ours, theirs in zip(found[step], updates.values(), strict=True):
                assert close(ours, theirs)
    assert reducer.world.meter.layers[0].floats == steps * 5 * (12 + 18)
