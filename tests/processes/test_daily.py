"""What is turned on beside a job: against sums by hand, and the job without it."""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import fsdp, group
from ddp_scripts.fsdp import Product, flat_mesh, given, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import ConfigError, RegimesError
from regimes.collectives.sharded_models import load_parts, save_parts

SHAPE, STEPS = (10, 33), 4
TOPK = {"compressor": "topk", "level": 10}
FOUR = {"level": 4, "stochastic": False, "error_feedback": True, "block": 33}


def attached(kind: str, ranks: int, **more: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model of one layer, its optimiser and its hook."""
    net: Any = Product(*SHAPE)
    if kind == "DDP":
        net, options = DistributedDataParallel(net), TOPK
    else:
        mesh = flat_mesh(ranks)
        net, options = fully_shard(net, mesh=mesh), {"shards": mesh, "scatter": FOUR}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hook = regimes.attach(net, optimizer, every=STEPS, seed=7, **options, **more)
    return net, optimizer, hook


def numbers(rank: int, step: int) -> Tensor:
    return given(100 * step + rank, SHAPE)


def train(net: Any, optimizer: Any, rank: int, steps: range) -> list[Tensor]:
    """The shared gradient of each step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        net(numbers(rank, step)).backward()
        optimizer.step()
        found.append(whole(next(net.parameters()).grad).clone())
    return found


def ended(net: Any, hook: Any) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        hook.close()
    return {
        "weight": whole(next(net.parameters()).detach()).clone(),
        "rows": hook.rows,
        "said": said.getvalue(),
    }


def measure(rank: int, ranks: int, kind: str) -> list[dict[str, Any]]:
    """A unit with everything on, and the same without."""
    found = []
    guard = {"check_every": 2, "check_cosine": 1.0, "instruments": {"error", "residual"}}
    for options in (guard, {"summary": False}):
        net, optimizer, hook = attached(kind, ranks, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            updates = train(net, optimizer, rank, range(STEPS))
        (residual,) = hook.reducer.residuals()
        found.append(
            {
                "updates": torch.stack(updates),
                "residual": residual,
                "warned": [str(w.message) for w in caught if "cosine" in str(w.message)],
                **ended(net, hook),
            }
        )
    return found


def level_by_hand(rank: int, ranks: int, kind: str) -> dict[str, Any]:
    """Dense from the second unit on, set within the first; saved within the second, resumed, and
    given back to the policy for the third. Then on one process alone."""
    net, optimizer, hook = attached(kind, ranks, summary=False)
    first = train(net, optimizer, rank, range(2))
    hook.set_level("dense", why="it looks odd")
    first += train(net, optimizer, rank, range(2, 4))
    second = train(net, optimizer, rank, range(4, 6))
    saved, weight = hook.state_dict(), net.state_dict()
    hook.close()
    net, optimizer, hook = attached(kind, ranks, summary=False)
    net.load_state_dict(weight)
    hook.load_state_dict(saved)
    second += train(net, optimizer, rank, range(6, 8))
    hook.set_level(None)
    third = train(net, optimizer, rank, range(8, 12))
    if rank:
        hook.set_level("dense")
    alone = ""
    try:
        train(net, optimizer, rank, range(12, 14))
    except RegimesError as error:
        alone = str(error)
    try:
        hook.set_level("dens")
    except ConfigError as error:
        unknown = str(error)
    return {
        "updates": torch.stack([*first, *second, *third]),
        "layers": [row["layers"] for row in hook.rows],
        "sentences": [alone, unknown],
    }


def all_kinds(rank: int, ranks: int, kinds: list[str]) -> dict[str, Any]:
    """All of it in one group of processes."""
    return {
        "measured": {kind: measure(rank, ranks, kind) for kind in kinds},
        "by hand": {kind: level_by_hand(rank, ranks, kind) for kind in kinds},
    }


# -- local steps -----------------------------------------------------------------------------------


def continue_locally(rank: int) -> list[dict[str, Any]]:
    """Eight local steps; the second half of them again, from the full state; and three."""
    through = local(rank, range(8), None, 4)
    return [through, local(rank, range(4, 8), through["kept"]), local(rank, range(4), None, 3)]


def on_one(rank: int, saved: Any, between: Any) -> list[Any]:
    """A full state on one process; one that was saved between two synchronisations; and local steps
    whose level the script sets."""
    said = ""
    try:
        local(rank, range(0), between)
    except ConfigError as error:
        said = str(error)
    return [local(rank, range(0), saved), said, local(rank, range(4), level="dense")]


def by_torch(rank: int, steps: range, full: Any, folder: Path) -> dict[str, Any]:
    """Eight local steps, of which four are in a checkpoint of torch; or some that continue it."""
    return local(rank, steps, full, 0 if full else 4, folder=folder)


def local(
    rank: int,
    steps: range,
    full: Any = None,
    count: int = 0,
    level: str | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Local steps of period 2 with TopK, from a full state; its own full state after ``count``. A
    ``folder`` has the state instead."""
    net: nn.Module = Product(*SHAPE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job = regimes.local_steps(
        net,
        optimizer,
        policy=2,
        compressor=regimes.TopK(percent=10),
        every=4,
        record=regimes.RecordOptions(
            instruments={"error", "residual"}, check_every=2, check_cosine=-1.0, summary=False
        ),
    )
    if full is not None:
        with torch.no_grad():
            net.load_state_dict(full["model"])
        if folder is None:
            job.load_full_state_dict(full["job"] if rank == 0 else None)
        else:
            load_parts({"local": job.sharded_state(saved=folder)}, folder)
    kept = None
    if level is not None:
        job.set_level(level)
    for step in steps:
        optimizer.zero_grad()
        net(numbers(rank, step)).backward()
        optimizer.step()
        job.step()
        if step + 1 == count:
            model = {name: t.clone() for name, t in net.state_dict().items()}
            kept = {"model": model, "job": job.full_state_dict()}
            if folder is not None:
                save_parts({"local": job.sharded_state()}, folder)
    (layer,) = job.state_dict()["parts"][0]["outer"]["layers"].values()
    job.close()
    return {
        "weight": net.state_dict()["weight"].clone(),
        "residual": layer["residual"],
        "rows": job.rows,
        "kept": kept,
    }


KINDS = ["DDP", "shards"]


@cache
def everything() -> list[dict[str, Any]]:
    return group.run(all_kinds, 2, 2, KINDS)


def measured(kind: str) -> list[list[dict[str, Any]]]:
    """With everything on, and without; what each process has."""
    return list(zip(*(found["measured"][kind] for found in everything()), strict=True))


@cache
def continued() -> list[list[dict[str, Any]]]:
    """Local steps: at once, resumed, and three of them; what each process has."""
    return list(zip(*group.run(continue_locally, 2), strict=True))


def mean(step: int) -> Tensor:
    return torch.stack([numbers(rank, step) for rank in range(2)]).double().mean(0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_leaves_no_trace_in_the_bits(kind: str) -> None:
    for mine, plain in zip(*measured(kind), strict=True):
        for name in ("updates", "weight", "residual"):
            assert torch.equal(mine[name], plain[name]), name
        (row,), (other,) = mine["rows"], plain["rows"]
        assert row["layers"]["bytes"] == other["layers"]["bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_cosine_is_that_of_the_last_measured_step(kind: str) -> None:
    ours, _ = measured(kind)
    u, g = ours[0]["updates"][3].double().flatten(), mean(3).flatten()
    expected = float(u @ g / (u.norm() * g.norm()))
    for one in ours:
        (row,) = one["rows"]
        assert row["statistics"]["cosine"] == pytest.approx([expected], rel=1e-6)
        assert row["model"]["cosine"] == pytest.approx(expected, rel=1e-6)
    warned = ours[0]["warned"]  # below 1.0 at both measured steps, on process 0
    assert [text.partition(":")[0] for text in warned] == ["step 2", "step 4"]
    assert f"a cosine of {expected:.2f} with" in warned[1]
    assert ours[1]["warned"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_guard_sends_is_counted(kind: str) -> None:
    """Two dense exchanges of the guard, and one of the error, at step 0 of its stride of 8."""
    (ours, _), (plain, _) = measured(kind)
    (row,), (other,) = ours["rows"], plain["rows"]
    size = 330 * 4 if kind == "DDP" else 165 * 4  # of a reduce-scatter half stays here
    of_readings = 8  # the residual's mean square, in float64
    assert row["bytes"] - other["bytes"] == 3 * size + of_readings
    if kind == "shards":
        dense = {"scatter": 4 * 165 * 4, "weights": 4 * 165 * 4}  # a root stays gathered
        assert row["collectives"]["dense"] == other["collectives"]["dense"] == dense


def test_the_error_of_shards_is_that_of_the_mean_in_blocks() -> None:
    """Of step 0, as float32 rounds: the mean of each owner's rows, a block for each row."""
    ours, _ = measured("shards")
    g = mean(0)
    rounded = torch.tensor([fsdp.rounded(row.tolist(), 4, 33, [0.5] * 33) for row in g])
    expected = float((rounded - g).square().sum() / g.square().sum())
    for one in ours:
        assert one["rows"][0]["statistics"]["error:constant"] == pytest.approx([expected], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_is_the_root_mean_square_over_workers(kind: str) -> None:
    ours, _ = measured(kind)
    squares = [float(one["residual"].double().square().sum()) for one in ours]
    expected = (sum(squares) / 2) ** 0.5
    for one in ours:
        assert one["rows"][0]["statistics"]["residual"] == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_at_the_end(kind: str) -> None:
    (first, second), (plain, _) = measured(kind)
    (row,) = first["rows"]
    dense = sum(row["collectives"].get("dense", {"mean": 4 * 330 * 4}).values())
    assert f"{row['bytes'] / dense:.2f} of what no compression would send" in first["said"]
    assert first["said"].startswith("regimes: 4 steps in 1 unit, 2 processes\n")
    assert len(first["said"].splitlines()) <= 5
    assert second["said"] == plain["said"] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_level_that_the_script_sets(kind: str) -> None:
    for found in (one["by hand"][kind] for one in everything()):
        first, second, third = found["layers"]
        assert [x["level"] for x in (first, second, third)] == [
            ["constant"],
            ["dense"],
            ["constant"],
        ]
        assert first["why"] == [{"rule": "static"}]
        assert third["why"] == [None]  # to the policy it never was another
        assert second["why"] == [{"rule": "set by the script", "why": "it looks odd"}]
        owed = sum((mean(step) - found["updates"][step] for step in range(4)), torch.zeros(()))
        # the first dense step sends what was owed, those after it the mean
        assert (found["updates"][4] - mean(4) - owed).abs().max() < 1e-5
        for step in range(5, 8):
            assert (found["updates"][step] - mean(step)).abs().max() < 1e-6
        assert (found["updates"][8] - mean(8)).abs().max() > 1e-3
        alone, unknown = found["sentences"]
        assert "levels" in alone
        assert "\n" not in alone
        assert "'dense'" in unknown


def test_local_steps_go_on_with_another_number_of_processes() -> None:
    whole, resumed, short = continued()
    saved = whole[0]["kept"]
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one["weight"], other["weight"])
        assert one["rows"][1]["statistics"] == other["rows"][1]["statistics"]
    owed = [part["outer"]["layers"]["weight"]["residual"] for part in saved["job"]["parts"]]
    ((alone, said, dense),) = group.run(on_one, 1, saved, short[0]["kept"])
    assert torch.equal(alone["residual"], (owed[0] + owed[1]) / 2)
    assert torch.equal(alone["weight"], saved["model"]["weight"])
    assert "saved between two synchronisations" in said
    assert dense["rows"][0]["layers"]["level"] == ["dense"]
    plain = -0.1 * sum(numbers(0, step) for step in range(4))
    assert (dense["weight"] - plain).abs().max() < 1e-6  # all of it is sent


def test_local_steps_go_on_from_a_checkpoint_of_torch(tmp_path: Path) -> None:
    """On as many processes with the same bits; on another number each owes its part."""
    whole = group.run(by_torch, 2, range(8), None, tmp_path)
    kept = whole[0]["kept"]
    resumed = group.run(by_torch, 2, range(4, 8), kept, tmp_path)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one["weight"], other["weight"])
        assert torch.equal(one["residual"], other["residual"])
    owed = [part["outer"]["layers"]["weight"]["residual"] for part in kept["job"]["parts"]]
    found = [group.run(by_torch, n, range(0), kept, tmp_path) for n in (1, 4)]
    assert torch.equal(found[0][0]["residual"], (owed[0] + owed[1]) / 2)
    for process, one in enumerate(found[1]):
        assert torch.equal(one["residual"], owed[process // 2])


def test_instruments_of_local_steps_are_of_movements() -> None:
    """A round of two steps moves a process by -0.1 times the sum of its gradients; of the unit's
    two rounds the error is of the first, the cosine of the last."""
    rows = [one["rows"][0] for one in continued()[0]]
    moved = mean(0) + mean(1)
    count = 33  # 10 per cent of 330
    lost = moved.flatten().abs().sort().values[:-count].square().sum()
    expected = float(lost / moved.square().sum())
    for row in rows:
        assert row["statistics"]["error:sent"] == pytest.approx([expected], rel=1e-5)
        assert 0 < row["model"]["cosine"] < 1
        assert row["model"]["residual"] > 0
