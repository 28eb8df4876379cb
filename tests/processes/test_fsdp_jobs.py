"""What jobs do beside plain training where FSDP2's gradients are compressed, by its own collectives
or by compressors of whole gradients: a step that does not count leaves no trace, a job in two parts
is the one in one, other numbers of processes keep the mean of what is owed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import fsdp, group
from ddp_scripts.fsdp import STEPS, Case
from tensors import same
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import regimes
from regimes.base.errors import RegimesError

# -- steps that do not count -----------------------------------------------------------------------


def uncounted(rank: int, ranks: int, cases: list[Case], kinds: list[str]) -> list[dict[str, Any]]:
    """A job by case and kind of what comes before each step: "nothing", "a pass whose gradients are
    cleared", or "an overflow", a pass that one process makes infinite, without a step."""
    mesh, found = fsdp.flat_mesh(ranks), []
    for case in cases:
        for kind in kinds:
            net = fsdp.shard(fsdp.build(case), case, mesh)
            optimizer = fsdp.optimiser(net, case)
            hook = fsdp.attach(net, case, mesh, optimizer)
            for step in range(STEPS):
                if kind != "nothing" and step in (1, 3):
                    factor = -100.0
                    if kind == "an overflow":
                        factor = float("inf") if rank == ranks - 1 else 1.0
                    (factor * fsdp.loss_of(net, case, step + 50, 0, rank)).backward()
                fsdp.train(net, optimizer, case, rank, [step])
            hook.steps.undo_cleared()
            found.append(
                {
                    "weights": fsdp.weights(net),
                    "residuals": fsdp.residuals(hook),
                    "memories": {k: v["step"] for k, v in hook.reducer.state_dict()[0].items()},
                    "counts": [hook.steps.in_unit, hook.steps.finite_in_unit, hook.steps.total],
                }
            )
            hook.close()
            found[-1]["rows"] = hook.rows
    return found


# -- jobs in several parts -------------------------------------------------------------------------


def span(
    rank: int,
    case: Case,
    folder: str,
    steps: tuple[int, int],
    before: str = "",
    after: str = "",
    files: bool = False,
    regroups: bool = False,
) -> dict[str, Any]:
    """Some steps of the training.

    Args:
        before, after: names of the checkpoints from which it goes on and that it leaves; "": none.
        files: the hook's state is a file of each process, not a part of the checkpoint.
        regroups: the checkpoint is of another number of processes.
    """
    mesh = fsdp.flat_mesh(dist.get_world_size())
    net = fsdp.shard(fsdp.build(case), case, mesh)
    optimizer = fsdp.optimiser(net, case)
    hook = fsdp.attach(net, case, mesh, optimizer)

    def parts(saved: str | None = None) -> dict[str, Any]:
        model, state = get_state_dict(net, optimizer)
        own = {} if files else {"hook": hook.sharded_state(saved=saved)}
        return {"model": model, "optimizer": state, **own}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if before:
            place = f"{folder}/{before}"
            dcp.load(loaded := parts(place if regroups else None), checkpoint_id=place)
            model, state = loaded["model"], loaded["optimizer"]
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
            if files:
                hook.load_state_dict(torch.load(f"{folder}/hook{rank}", weights_only=True))
        begin = _memories(hook)
        fsdp.train(net, optimizer, case, rank, range(*steps))
        if after:
            dcp.save(parts(), checkpoint_id=f"{folder}/{after}")
            if files:
                torch.save(hook.state_dict(), f"{folder}/hook{rank}")
    found = {"begin": begin, "end": _memories(hook), "weights": fsdp.weights(net)}
    hook.close()
    return found | {"rows": hook.rows}


def in_two_parts(rank: int, case: Case, folder: str, files: bool) -> list[Any]:
    """All steps, and the same in two parts."""
    span(rank, case, folder, (0, 3), "", "3", files)
    return [span(rank, case, "", (0, STEPS)), span(rank, case, folder, (3, STEPS), "3", "", files)]


def _memories(hook: Any) -> dict[str, Any]:
    return {"residuals": owed(hook), "sums": sums(hook), "total": hook.steps.total}


def owed(hook: Any) -> dict[str, Tensor]:
    """By layer, what this process owes: of quantised modules ``[shards, part]``."""
    compressor, found = hook.chosen.compressor, fsdp.residuals(hook)
    layers = {layer.name: layer for layer in hook.layers}
    return {name: compressor.numbers(x, layers[name])[0] for name, x in found.items()}


def sums(hook: Any) -> dict[str, Tensor]:
    """What this process has of the norms' sums."""
    kept = hook._norm_sums().get("update", [])
    return {layer.name: x.clone() for layer, x in zip(hook.layers, kept, strict=False)}


# -- a process that is lost ------------------------------------------------------------------------


def lost(rank: int, ranks: int, case: Case) -> str:
    """What the others hear when the last process ends after a step."""
    mesh = fsdp.flat_mesh(ranks)
    net = fsdp.shard(fsdp.build(case), case, mesh)
    hook = fsdp.attach(net, case, mesh, fsdp.optimiser(net, case), timeout=20.0)
    fsdp.loss_of(net, case, 0, 0, rank).backward()
    if rank == ranks - 1:
        os._exit(3)
    try:
        fsdp.loss_of(net, case, 1, 0, rank).backward()
    except RegimesError as error:
        return str(error)
    return f"nothing after {hook.steps.total} steps"


FEEDBACK = {"level": 4, "stochastic": False, "error_feedback": 0.9, "block": 16}
LEVELS = {"levels": {"low": 8, "high": 4}}
RANKS = {"compressor": regimes.PowerSGD(rank={"low": 4, "high": 1})}
OWING = [
    Case(FEEDBACK | {"residual_bits": 8}),
    Case(exchange={"compressor": regimes.PowerSGD(rank=1)}, side=True),
]
AT_RANDOM = [Case({"level": 8}, side=True)]
KINDS = ["nothing", "a pass whose gradients are cleared", "an overflow"]


@pytest.mark.parametrize(
    "cases", [OWING, pytest.param(AT_RANDOM, marks=pytest.mark.slow)], ids=["owing", "at random"]
)
def test_a_pass_that_is_not_applied_leaves_no_trace(cases: list[Case]) -> None:
    """One that is not finite counts, as skipped: the steps of a unit include it."""
    for mine in group.run(uncounted, 2, 2, cases, KINDS):
        for i in range(len(cases)):
            plain, *others = mine[i * len(KINDS) : (i + 1) * len(KINDS)]
            assert bool(plain["residuals"]) == (cases is OWING)
            for other, kind in zip(others, KINDS[1:], strict=True):
                for key in ("weights", "residuals"):
                    assert plain[key].keys() == other[key].keys()
                    for name, tensor in plain[key].items():
                        assert torch.equal(tensor, other[key][name]), (kind, key, name)
                assert plain["memories"] == other["memories"]
                skipped = 2 if kind == "an overflow" else 0
                assert other["counts"][2] == plain["counts"][2] + skipped
                assert sum(row["skipped"] for row in other["rows"]) == skipped
                assert sum(row["steps"] for row in other["rows"]) == fsdp.STEPS + skipped
                if not skipped:
                    levels = [row["layers"]["level"] for row in plain["rows"]]
                    assert [row["layers"]["level"] for row in other["rows"]] == levels


def test_a_job_in_two_parts_has_the_same_bits(tmp_path: Path) -> None:
    """It is cut off within a unit, and goes on from a checkpoint of torch or from files."""
    drawn = LEVELS | {"block": 16}
    fed = drawn | {"stochastic": False, "error_feedback": True}
    options: dict[str, Any] = {"policy": fsdp.RULE, "side": True}
    jobs = [
        (Case(drawn, {"level": 8}, adamw=True, **options), False),
        (Case(fed, {"level": 8}, **options), True),
        (Case(None, {"level": 8}, adamw=True, exchange=RANKS, **options), False),
        (Case(None, {"level": 8}, exchange=RANKS, **options), True),
    ]
    works = [
        (in_two_parts, case, str(tmp_path / str(i)), files) for i, (case, files) in enumerate(jobs)
    ]
    for job, answers in zip(jobs, group.run_in_turn(2, *works), strict=True):
        for through, resumed in answers:
            same(resumed["weights"], through["weights"], job)
            for row, other in zip(through["rows"], resumed["rows"], strict=True):
                for key in ("layers", "statistics", "unit", "lr"):
                    assert row[key] == other[key], job


# -- other numbers of processes --------------------------------------------------------------------

WITH_LEVELS = {key: value for key, value in FEEDBACK.items() if key != "level"} | LEVELS
MOVED = [
    Case(WITH_LEVELS, policy=fsdp.RULE, divide=True, side=True),
    Case(FEEDBACK | {"residual_bits": 16}, divide=True, side=True),
    Case(exchange=RANKS, policy=fsdp.RULE, divide=True, side=True),
]
# the sum over samples, divided by one number on any number of processes
SUMMED = Case(FEEDBACK, divide=True, side=True, factor=3.0)


def shapes_of(case: Case) -> dict[str, list[torch.Size]]:
    """The shapes of the parameters of each layer that is quantised."""
    net = fsdp.build(case)
    named = dict(net.named_parameters())
    return {k: [named[x].shape for x in v] for k, v in fsdp.modules_of(net, case).items()}


def whole(case: Case, parts: list[Tensor], name: str) -> Tensor:
    """Whole numbers of a layer, from each owner's."""
    if case.exchange is not None:
        return torch.cat(parts)
    rows = [part.flatten().double().tolist() for part in parts]
    tensors = fsdp.joined(rows, shapes_of(case)[name], len(parts))
    return torch.cat([tensor.flatten() for tensor in tensors])


def mean_owed(case: Case, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean over processes of what they owe, by layer."""
    found = {}
    for name in results[0]["residuals"]:
        own = [mine["residuals"][name] for mine in results]
        if case.exchange is None:
            own = [whole(case, list(x), name) for x in own]
        found[name] = torch.stack([x.flatten().double() for x in own]).mean(0)
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("one", "other", "cases"),
    [
        (2, 3, [*MOVED, SUMMED]),
        pytest.param(4, 2, MOVED, marks=SLOW),
        pytest.param(4, 8, MOVED, marks=SLOW),
    ],
    ids=["2-3-2", "4-2-4", "4-8-4"],
)
def test_another_number_of_processes_keeps_the_mean_of_what_is_owed(
    one: int, other: int, cases: list[Case], tmp_path: Path
) -> None:
    """They are cut off within a unit."""
    begun, moved, again = (
        group.run_in_turn(
            ranks,
            *(
                (span, case, f"{tmp_path}/{i}", steps, before, after, False, True)
                for i, case in enumerate(cases)
            ),
        )
        for ranks, steps, before, after in (
            (one, (0, 3), "", "3"),
            (other, (3, 5), "3", "5"),
            (one, (5, STEPS), "5", ""),
        )
    )
    for i, case in enumerate(cases):
        for before, after in ((begun, moved), (moved, again)):
            ends, begins = [m["end"] for m in before[i]], [m["begin"] for m in after[i]]
            owed, owes = mean_owed(case, ends), mean_owed(case, begins)
            assert owed.keys() == owes.keys() != set()
            for name, tensor in owed.items():
                held = max(float(m["residuals"][name].abs().max()) for m in begins)
                share = 2.0**-8 if (case.scatter or {}).get("residual_bits") == 16 else 1e-14
                assert torch.allclose(owes[name], tensor, rtol=0, atol=share * held)
                assert held > 1e-5
            for name in ends[0]["sums"]:
                sums = [whole(case, [m["sums"][name] for m in x], name) for x in (ends, begins)]
                shared = min(map(len, sums))
                assert torch.equal(sums[0][:shared], sums[1][:shared])
            assert {m["total"] for m in begins} == {ends[0]["total"]}


def test_a_process_that_is_lost_in_torchs_own_collective_is_named() -> None:
    heard, nothing = group.run(lost, 2, 2, Case())
    assert heard.startswith("process 0 of 2 lost contact with the others in FSDP2's ")
    assert "\n" not in heard
    assert nothing is None
