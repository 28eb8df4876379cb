"""Local steps between replicas equal those of whole models on as many processes as replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, hsdp_local

import regimes


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
    ours = group.run(hsdp_local.trained, count * shards, count, shards, True)
    (oracle, *_) = group.run(hsdp_local.trained, count, count, 1, False)
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
    whole = group.run(hsdp_local.resumed, 4, str(tmp_path / "whole"), 0, 11)
    group.run(hsdp_local.resumed, 4, str(tmp_path / "cut"), 0, 6)
    cut = group.run(hsdp_local.resumed, 4, str(tmp_path / "cut"), 6, 11)
    for mine, theirs in zip(cut, whole, strict=True):
        for name, tensor in theirs["weights"].items():
            assert torch.equal(mine["weights"][name], tensor), name
        for row, expected in zip(mine["rows"], theirs["rows"], strict=True):
            if expected["train_loss"] is None:  # only process 0 has what was logged, and the record
                row = row | {"train_loss": None}
            assert row == expected
    record = regimes.load(tmp_path / "cut" / "run")
    assert record.finished
    assert record.header["world"]["shards"] == 2


def test_held_wrong_they_say_so() -> None:
    for said in group.run(hsdp_local.refused, 4):
        for sentence, expected in zip(
            said,
            (
                "the model is divided by fully_shard: shard it over one dimension of a mesh",
                "the mesh of replicas: got a mesh of 2 dimensions, expected one dimension",
                "process 2 has policy.level = '3', process 0 has policy.level = '2'",
            ),
            strict=True,
        ):
            assert expected in sentence, said
