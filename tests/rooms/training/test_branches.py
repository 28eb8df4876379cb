"""Branches of a run (oracle: with nothing changed, the trunk's bits; else a resumed run)."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import gpt, lstm, smoke
from corpora import random_walk
from runs import same_weights

import regimes
from regimes.config import RunConfig, override


def lines(folder: Path) -> list[bytes]:
    return (folder / "epochs.jsonl").read_bytes().splitlines()


def ends_as_its_trunk(branch: Path, trunk: Path, at: int) -> None:
    """The same bits from unit ``at`` on, and the same rows when read."""
    assert lines(branch) == lines(trunk)[at:]
    same_weights(branch, trunk)
    assert regimes.load(branch).rows == regimes.load(trunk).rows


NULL: dict[str, RunConfig] = {
    "powersgd": smoke(),
    "two of three passes": smoke("union_pass=false"),
    "acp-sgd": smoke("compressor=acp-sgd"),
    "topk": smoke("compressor=topk", "levels={low=20, high=5}"),
    "randomk": smoke("compressor=randomk", "levels={low=20, high=5}"),
    "dct-topk": smoke("compressor=dct-topk", "levels={low=20, high=5}"),
    "sign": smoke("compressor=sign", "levels={low=1, high=1}"),
    "quantise": smoke("compressor=quantise", "levels={low=8, high=4}"),
    "cast": smoke("compressor=cast", "levels={low='bf16', high='bf16'}"),
    "dense": smoke("compressor=dense", "levels={}", "policy={name='static', level='dense'}"),
    "low-pass": smoke("compressor=low-pass", "levels={low=0.5, high=0.1}"),
    "adamw": smoke("optimizer.name=adamw", "optimizer.lr=0.01"),
    "muon": smoke("optimizer.name=muon", "optimizer.lr=0.01", "dtype=float32"),
    "no momentum": smoke("optimizer.momentum=0"),
    "local steps": smoke("sync_policy={name='static', level='7'}", "policy=static"),
    "local, DiLoCo": smoke(
        "sync_policy={name='post-local', before='1', after='4'}",
        "policy=static",
        "outer={lr=0.7, momentum=0.9, nesterov=true}",
    ),
    "batches": smoke(
        "batch_levels={low=8, high=16}", "batch_policy={name='accordion-batch', interval=1}"
    ),
    "units of steps": smoke("unit_steps=5", "steps=18", "epochs=6"),
    "deficit": smoke("deficit={name='blur', windows=[[1, 3]]}"),
    "pruned": smoke("pruning={epoch=1, share=0.5}"),
    "gpt": gpt("unit_steps=6"),
}


@pytest.mark.parametrize("name", NULL)
def test_with_nothing_changed_a_branch_ends_in_the_trunks_bits(name: str, tmp_path: Path) -> None:
    config = override(NULL[name], ["checkpoint_keep=all"])
    trunk = regimes.run(config, tmp_path / "trunk")
    for at in (0, 2):
        out = tmp_path / f"from {at}"
        regimes.branch(trunk, at=at, out=out)
        ends_as_its_trunk(out, tmp_path / "trunk", at)
    out = tmp_path / "pulse"
    regimes.branch(tmp_path / "trunk", at=1, length=1, out=out)
    ends_as_its_trunk(out, tmp_path / "trunk", 1)


def test_a_text_with_states_carried_on(tmp_path: Path) -> None:
    config = lstm(random_walk(tmp_path), "checkpoint_keep=[1]")
    regimes.run(config, tmp_path / "trunk")
    regimes.branch(tmp_path / "trunk", at=1, out=tmp_path / "branch")
    ends_as_its_trunk(tmp_path / "branch", tmp_path / "trunk", 1)
