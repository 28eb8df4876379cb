"""A run whose workers FSDP2 divides (`--shards`) is the run without: the same record and weights,
on any number of shards, stopped or not; and what cannot go with it says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from configs import gpt, lstm, smoke
from corpora import random_walk
from runs import rows, same_bits, weights
from torch import nn

import regimes
from benchmarks.trainers import Training
from regimes.cli.train import run as run_command
from regimes.config import RunConfig, to_toml
from regimes.errors import ConfigError
from regimes.training.sharded import _find_blocks

WITHIN = ("sum", "join")


def numbers(row: Any, other: Any, near: float) -> None:
    """Equal but for what processes of a replica send each other, and floats nearly so."""
    if isinstance(row, dict):
        assert row.keys() - {*WITHIN} == other.keys() - {*WITHIN}
        for key in other.keys() - {*WITHIN, "calls"}:
            numbers(row[key], other[key], near)
    elif isinstance(row, list):
        assert len(row) == len(other)
        for mine, theirs in zip(row, other, strict=True):
            numbers(mine, theirs, near)
    elif isinstance(row, float):
        assert row == pytest.approx(other, rel=near, abs=near)
    else:
        assert row == other


def same_record(replicas: Path, plain: Path, near: float = 1e-10) -> None:
    """All columns of all rows, and the weights of the last checkpoint."""
    numbers(rows(replicas), rows(plain), near)
    other = weights(plain)
    assert weights(replicas).keys() == other.keys()
    for name, tensor in weights(replicas).items():
        assert (tensor - other[name]).abs().max() <= near, name


SLOW = pytest.mark.slow
FLOAT64, RESNET = "dtype=float64", ("model.name=resnet8", "model.width=4")
CASES = {
    # two workers on each replica, buckets during backward, BatchNorm of a divided batch
    "smoke": (smoke("bucket_mb=0.02", epochs=2), 4, 2),
    "one worker each": (smoke("workers=2", epochs=3), 4, 2),
    "four shards": (smoke("workers=2", "bucket_mb=0.02", epochs=2), 8, 4),
    "one replica": (smoke("workers=2", epochs=2), 3, 3),
    "blocks, an odd batch": (smoke(*RESNET, "batch_size=5", "bucket_mb=0.02", epochs=2), 4, 2),
    "a short batch": (smoke("data.drop_last=false", "data.train_size=101", epochs=2), 4, 2),
    "AdamW and clipping": (gpt(FLOAT64, "optimizer.name=adamw", "optimizer.lr=0.01"), 4, 2),
    "growing batches": (
        smoke("batch_policy.name=static", "batch_policy.level=large", "batch_levels.large=16"),
        4,
        2,
    ),
    "low-pass": (smoke("compressor=low-pass", "levels.low=0.5", "levels.high=0.1"), 4, 2),
    "update units": (smoke("compressor.residual=update", epochs=3), 4, 2),
    "all norms": (smoke("instruments.norms={}", "union_pass=false", epochs=2), 4, 2),
    "of the exchange": (
        smoke("instruments={error={}, residual={}, cosine={stride=3}}", epochs=2),
        4,
        2,
    ),
    "curvature": (
        smoke(
            "instruments.curvature={probes=2, images=48, batch=12, tolerance=1e-8}",
            "instruments.sharpness={images=48, batch=12}",
            "instruments.fisher={images=48, batch=12}",
            epochs=2,
        ),
        4,
        2,
    ),
    "the authors": (smoke("quirks=authors", epochs=2), 4, 2),
}


@pytest.mark.parametrize(
    "case", [name if name == "smoke" else pytest.param(name, marks=SLOW) for name in CASES]
)
def test_a_run_in_replicas_is_the_simulated_run(case: str, tmp_path: Path) -> None:
    config, count, shards = CASES[case]
    plain, replicas = tmp_path / "plain", tmp_path / "replicas"
    regimes.run(config, plain)
    forked.train(config, replicas, count, shards)
    same_record(replicas, plain)
    assert regimes.load(replicas).header["world"]["shards"] == shards


@SLOW
@pytest.mark.parametrize("settings", [[], ["compressor.wire=bf16"]], ids=["full", "half factors"])
def test_it_is_the_run_of_as_many_processes_as_replicas(
    settings: list[str], tmp_path: Path
) -> None:
    """Half factors are equal to those of as many processes alone: these add in that format."""
    config = smoke("workers=2", *settings, epochs=3)
    forked.train(config, tmp_path / "plain", 2)
    forked.train(config, tmp_path / "replicas", 4, 2)
    same_record(tmp_path / "replicas", tmp_path / "plain")


@SLOW
def test_torchrun_starts_it_with_the_same_bits(tmp_path: Path) -> None:
    config = smoke("workers=2", epochs=2)
    forked.train(config, tmp_path / "own", 4, 2)
    (tmp_path / "run.toml").write_text(to_toml(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = ["-m", "regimes", "run", str(tmp_path / "run.toml"), "--shards", "2", "--quiet"]
    words = [*torchrun, "--nproc-per-node", "4", *job, "--out", str(tmp_path / "torchrun")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    same_bits(tmp_path / "own", tmp_path / "torchrun")


# -- stopped and continued ---------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_process_and_the_run_continued(victim: int, tmp_path: Path) -> None:
    """On the same replicas the same bits; without shards, and back, the same numbers."""
    config = smoke("workers=2", "bucket_mb=0.02", epochs=6)
    whole, out = tmp_path / "whole", tmp_path / "run"
    forked.train(config, whole, 4, 2)
    run = Training([config] * 4, out, shards=2)
    run.reached(2)
    assert run.send(signal.SIGKILL, victim)
    ends = run.ends()
    assert ends[victim].code == -signal.SIGKILL
    for rank, end in enumerate(ends):
        assert rank == victim or (end.code == 3 and "lost contact" in end.said), ends
    assert 2 <= len(rows(out)) < 6
    forked.train(config, out, 4, 2)
    same_bits(whole, out)


@SLOW
def test_another_number_of_shards_continues_a_run(tmp_path: Path) -> None:
    """Ended by SIGTERM on two replicas of two, simulated, on one replica, and simulated again."""
    config, out, places = smoke("bucket_mb=0.02", epochs=20), tmp_path / "run", []
    regimes.run(config, tmp_path / "plain")
    for count, shards in ((4, 2), (1, 1), (2, 2), (1, 1)):
        run = Training([config] * count, out, shards=shards)
        run.reached(done := len(rows(out)) + 1)
        assert run.send(signal.SIGTERM)
        assert {end.code for end in run.ends()} != {0}
        assert done <= len(rows(out)) < 20
        places.append(len(rows(out)))
    assert places == sorted({*places})
    forked.train(config, out, 4, 2)
    same_record(out, tmp_path / "plain", 1e-7)  # the rounding of 60 steps


@SLOW
def test_a_gradient_that_is_not_finite_names_the_worker(tmp_path: Path) -> None:
    from benchmarks.trainers import Poison

    run = Training([smoke("workers=2")] * 4, tmp_path / "run", Poison(3, 2), shards=2)
    for end in run.ends():
        assert end.code == 3
        assert "gradient of worker 1 is not finite in epoch 0, step 2" in end.said, end


# -- held wrong --------------------------------------------------------------------------------

WRONG: dict[str, tuple[RunConfig, str]] = {
    "movement": (smoke("signal=movement"), "signal = 'movement': expected update"),
    "batch": (smoke("batch_size=1"), "batch_size = 1: expected at least --shards, 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_needs_whole_layers_is_refused_before_any_work(case: str, tmp_path: Path) -> None:
    config, sentence = WRONG[case]
    with pytest.raises(ConfigError, match="shards") as error:
        regimes.run(config, tmp_path / "run", shards=2)
    assert sentence in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "shards", "workers", "sentence"),
    [
        (4, 3, 4, "--shards = 3: expected a divisor of the number of processes, 4"),
        (4, 0, 4, "--shards = 0: expected at least 1"),
        (1, 2, 4, "--shards = 2: expected a divisor of the number of processes, 1"),
        (4, 2, 3, "workers = 3: expected a multiple of the number of replicas, 4 processes / 2"),
    ],
)
def test_processes_that_are_no_replicas_start_nothing(
    processes: int, shards: int, workers: int, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        run_command(
            "smoke", out=tmp_path / "run", workers=workers, processes=processes, shards=shards
        )
    assert sentence in str(error.value)
    assert not (tmp_path / "run").exists()


@SLOW
def test_a_model_that_needs_a_whole_batch_is_refused(tmp_path: Path) -> None:
    text = random_walk(tmp_path / "text")
    dropout = gpt("workers=1", "model.dropout=0.1")
    for config, sentence in (
        (dropout, "the model draws random numbers (dropout)"),
        (lstm(text, "workers=1"), "the model carries a state from batch to batch"),
    ):
        for end in Training([config] * 2, tmp_path / "run", shards=2).ends():
            assert end.code == 2
            assert sentence in end.said, end


def test_blocks_are_those_that_stand_alone() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    model = nn.ModuleDict(
        {
            "stem": nn.Linear(3, 3),
            "body": nn.ModuleList([block(), block(), nn.Sequential(block())]),
            "tail": nn.Sequential(nn.Linear(3, 3), block(), nn.Sequential(nn.ReLU())),
        }
    )
    model["body"][1][0].weight = model["stem"].weight  # shared with another module: not alone
    found = _find_blocks(model)
    expected = [model["body"][0], model["body"][2], model["tail"][1]]
    assert [id(x) for x in found] == [id(x) for x in expected]
