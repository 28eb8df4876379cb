"""Local steps between replicas equal those of whole models on as many processes as replicas."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, hsdp
from ddp_scripts.hsdp import Case
from tensors import same
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import regimes

DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMED = {**DILOCO, "fragments": 2, "delay": 1, "mixing": 0.5}
STEPS = 10
WAYS: dict[str, dict[str, Any]] = {
    "mean": {"policy": 3, "outer": {"states": "average"}},
    "DiLoCo": {"policy": 3, "outer": DILOCO},
    "streamed": {"policy": 4, "outer": STREAMED},
    "powersgd": {"policy": 2, "outer": DILOCO, "compressor": "powersgd", "level": 2},
    "periods": {"policy": "accordion", "periods": {"low": 1, "high": 3}},
}


def steps(
    net: nn.Module, own: Any, local: Any, case: Case, place: tuple[int, slice], span: range
) -> None:
    for step in span:
        own.zero_grad()
        loss = hsdp.loss_of(net, case, step, 0, *place)
        loss.backward()
        own.step()
        local.step()
        local.log(train_loss=loss)


def trained(rank: int, count: int, shards: int, sharded: bool) -> dict[str, Any]:
    """Weights and rows after local steps, way by way."""
    case, found = Case(adamw=True), {}
    mesh, place = hsdp.two_dimensions(count, shards), hsdp.place(rank, shards)
    for name, options in WAYS.items():
        net: Any = hsdp.build(case, seed=1 + place[0])  # replicas start apart
        if sharded:
            hsdp.shard(net, case, mesh["shard"])
        own = hsdp.optimiser(net, case)
        more = {"replicas": mesh["replicate"]} if sharded else {}
        local = regimes.local_steps(net, own, every=4, **more, **options)
        steps(net, own, local, case, place, range(STEPS))
        local.close()
        found[name] = {"weights": hsdp.weights(net), "rows": local.rows}
    return found


def resumed(rank: int, folder: str, first: int, last: int, *cuts: int) -> dict[str, Any]:
    """Steps ``first`` to ``last`` on two replicas of two, from a checkpoint and to another one."""
    case, place = Case(side=True), hsdp.place(rank, 2)
    mesh = hsdp.two_dimensions(2, 2)
    net: Any = hsdp.shard(hsdp.build(case), case, mesh["shard"])
    own = hsdp.optimiser(net, case)
    options = {"compressor": "topk", "level": 20, "outer": DILOCO, "record": f"{folder}/run"}
    local = regimes.local_steps(net, own, replicas=mesh["replicate"], policy=4, every=5, **options)
    replica = f"replica {place[0]}"  # between synchronisations each has its own

    def parts() -> dict[str, Any]:
        model, state = get_state_dict(net, own)
        return {replica: {"model": model, "optimizer": state}, "local": local.sharded_state()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if first:
            found = parts()
            states = found.pop("local")
            dcp.load(found, checkpoint_id=f"{folder}/{first}")
            model, state = found[replica]["model"], found[replica]["optimizer"]
            set_state_dict(net, own, model_state_dict=model, optim_state_dict=state)
            dcp.load({"local": states}, checkpoint_id=f"{folder}/{first}")
        steps(net, own, local, case, place, range(first, last))
        dcp.save(parts(), checkpoint_id=f"{folder}/{last}")
    local.close()
    return {"weights": hsdp.weights(net), "rows": local.rows}


def rounded(sync: dict[str, Any]) -> dict[str, Any]:
    """With 12 digits of the norms behind the decision, which are summed over shards."""
    why = sync["why"] and {
        key: float(f"{value:.12g}") if isinstance(value, float) else value
        for key, value in sync["why"].items()
    }
    return sync | {"why": why}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "shards"), [(2, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_they_equal_local_steps_of_whole_models(count: int, shards: int) -> None:
    ours = group.run(trained, count * shards, count, shards, True)
    (oracle, *_) = group.run(trained, count, count, 1, False)
    for mine in ours:
        for way, expected in oracle.items():
            for name, tensor in expected["weights"].items():
                found = mine[way]["weights"][name]
                assert torch.allclose(found, tensor, rtol=0, atol=1e-10), (way, name)
            for row, theirs in zip(mine[way]["rows"], expected["rows"], strict=True):
                assert rounded(row["sync"]) == rounded(theirs["sync"])
                assert row["floats"] == pytest.approx(theirs["floats"], rel=1e-12)


@pytest.mark.slow
def test_continued_within_a_round_they_have_the_same_bits(tmp_path: Path) -> None:
    whole = group.run(resumed, 4, str(tmp_path / "whole"), 0, 11)
    group.run(resumed, 4, str(tmp_path / "cut"), 0, 6)
    cut = group.run(resumed, 4, str(tmp_path / "cut"), 6, 11)
    for mine, theirs in zip(cut, whole, strict=True):
        same(mine["weights"], theirs["weights"])
        for row, expected in zip(mine["rows"], theirs["rows"], strict=True):
            if expected["train_loss"] is None:  # only process 0 has what was logged, and the record
                row = row | {"train_loss": None}
            assert row == expected
    record = regimes.load(tmp_path / "cut" / "run")
    assert record.finished
    assert record.header["world"]["shards"] == 2
