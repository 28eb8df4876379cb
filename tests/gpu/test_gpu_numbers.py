"""Runs on a pretended GPU. Oracle: the same run on the CPU, whose kernels a pretended GPU has.

Where a path of their own is taken on a GPU (layers side by side, sums in blocks, another memory
layout), the last digits may differ.
"""

from __future__ import annotations

from pathlib import Path

import pretended
import pytest
import torch
from ddp_scripts import gpus as jobs
from ddp_scripts import group
from ddp_scripts.cases import Case
from runs import break_off, same_bits, weights

import regimes
from regimes.base.config import RunConfig, from_dict, override
from regimes.records import read_lines

TEXT = ["data={name='stdlib', sequence=8, train_size=150, test_size=60}", "batch_size=2"]
TABLES = [
    "norms={readings=['global', 'worker0', 'local-mean']}",
    "noise={}",
    "msdr={}",
    "overlap={batches=[16], count=2}",
    "error={}",
    "moments={}",
    "moments-frozen={batch=8, count=2}",
]
EVERYTHING = [f"instruments.{table}" for table in TABLES]


def deficit(name: str) -> str:
    return f"deficit={{name='{name}', windows=[[0, 1]]}}"


CASES: dict[str, list[str]] = {
    "dense": ["compressor={name='dense'}", "levels={}", "policy={name='static', level='dense'}"],
    "topk, every instrument": EVERYTHING,
    "topk in buckets, with noise": ["bucket_mb=0.01", deficit("noise")],
    "random-k, flipped": ["compressor={name='randomk'}", deficit("flip")],
    "sign": ["compressor={name='sign'}", "levels={low='dense', high=1}", "optimizer.lr=0.01"],
    "quantise": ["compressor={name='quantise'}", "levels={low=8, high=2}", "signal='local-mean'"],
    "low-pass": ["compressor={name='low-pass'}", "levels={low=0.5, high=0.1}"],
    "cast": ["compressor={name='cast'}", "levels={low='bf16', high='fp16'}", "signal='worker0'"],
    "clipped, the movement, adamw": [
        "optimizer={name='adamw', lr=0.01, clip=1.0}",
        "signal='movement'",
    ],
    "muon, rate by step": ["optimizer={name='muon', lr=0.02, schedule='cosine', per='step'}"],
    "float64, other labels": ["dtype='float64'", "signal='movement/lr'", deficit("labels")],
    "bfloat16, blurred": [
        "precision='bfloat16'",
        "model={name='resnet8', width=4}",
        deficit("blur"),
    ],
    "batch growth": [
        "policy={name='static', level='low'}",
        "batch_levels={low=8, high=16}",
        "batch_policy={name='windows', windows=[[0, 1]], inside='low', outside='high'}",
    ],
    "adaqs, gradient noise": [
        "policy={name='adaqs', levels=['low', 'high']}",
        deficit("gradient-noise"),
    ],
    "gpt": [
        *TEXT,
        "model={name='gpt', width=16, depth=1, heads=2}",
        "union_pass=false",
        "instruments.noise={}",
    ],
    "lstm": [*TEXT, "model={name='lstm', width=8, depth=2, dropout=0.4}"],
}


POWERSGD = ["compressor={name='powersgd'}", "levels={low=2, high=1}"]
APART: dict[str, tuple[float, list[str]]] = {  # how close, settings
    "powersgd, a union": (1e-5, POWERSGD),
    "acp-sgd, a union": (1e-5, ["compressor={name='acp-sgd'}", "levels={low=2, high=1}"]),
    "acp-sgd twice, by worker, fading": (
        1e-5,
        [
            "compressor={name='acp-sgd', iterations=2, error_feedback=0.9}",
            "levels={low=2, high=1}",
            "union_pass=false",
        ],
    ),
    "dct-topk": (1e-5, ["compressor={name='dct-topk', chunk=16}"]),
    "powersgd by worker, every instrument": (1e-4, [*POWERSGD, "union_pass=false", *EVERYTHING]),
    "curvature": (
        1e-6,
        [
            "instruments.fisher={images=16, batch=8}",
            "epochs=1",
            "instruments.curvature={images=16, batch=8, probes=2, max_products=12}",
        ],
    ),
    "lstm, curvature": (
        1e-6,
        [
            *TEXT,
            "model={name='lstm', width=8, depth=1}",
            "epochs=1",
            "instruments.curvature={images=8, batch=4, max_products=6}",
        ],
    ),
    "transformer, whose inference is the CPU's own": (
        1e-6,
        [*TEXT, "model={name='transformer', width=64, depth=1, dropout=0.1}"],
    ),
}


def config(*settings: str) -> RunConfig:
    """Two epochs of two steps."""
    base = from_dict(
        RunConfig,
        {
            "epochs": 2,
            "workers": 4,
            "batch_size": 8,
            "data": {"name": "digits", "train_size": 64, "test_size": 40},
            "model": {"name": "vgg7", "width": 4},
            "optimizer": {"lr": 0.1, "clip": None},
            "compressor": {"name": "topk"},
            "levels": {"low": 20, "high": 2},
            "policy": {"name": "accordion", "interval": 1},
        },
    )
    return override(base, list(settings))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, marks=pytest.mark.slow) if settings is EVERYTHING else settings
        for settings in CASES.values()
    ],
    ids=CASES,
)
def test_a_run_has_the_numbers_of_the_cpu(settings: list[str], tmp_path: Path) -> None:
    regimes.run(config(*settings, "device=cpu"), tmp_path / "cpu")
    with pretended.gpu() as diary:
        regimes.run(config(*settings, "device=cuda"), tmp_path / "gpu")
        assert diary.ops.total() > 400
    same_bits(tmp_path / "cpu", tmp_path / "gpu")


@pytest.mark.parametrize(
    ("close", "settings"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * name.startswith(("transformer", "powersgd by"))
        )
        for name, case in APART.items()
    ],
    ids=APART,
)
def test_a_run_with_another_path_comes_close(
    close: float, settings: list[str], tmp_path: Path
) -> None:
    cpu = regimes.run(config(*settings, "device=cpu"), tmp_path / "cpu")
    with pretended.gpu():
        gpu = regimes.run(config(*settings, "device=cuda"), tmp_path / "gpu")
    for mine, theirs in zip(gpu.rows, cpu.rows, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=close)
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=close)
        known = {name: value for name, value in theirs["model"].items() if value is not None}
        found = {name: value for name, value in mine["model"].items() if value is not None}
        assert found == pytest.approx(known, rel=close)
        assert mine["floats"] == theirs["floats"]
    for name, tensor in weights(tmp_path / "gpu").items():
        torch.testing.assert_close(tensor, weights(tmp_path / "cpu")[name], rtol=close, atol=close)


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(tmp_path: Path) -> None:
    c = config(
        *TEXT,
        "model={name='lstm', width=8, depth=2, dropout=0.4}",
        "epochs=3",
        "optimizer={name='adamw', lr=0.01}",
        "device=cuda",
    )
    with pretended.gpu():
        regimes.run(c, tmp_path / "whole")
        break_off(c, tmp_path / "broken", 1)
        regimes.run(c, tmp_path / "broken", resume=True)
    same_bits(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(
    "buckets", [pytest.param(25, marks=pytest.mark.slow), 0.01], ids=["one bucket", "buckets"]
)
def test_two_processes_have_the_numbers_of_two_on_the_cpu(buckets: float, tmp_path: Path) -> None:
    c = config("union_pass=false", f"bucket_mb={buckets}", "device=cuda")
    answers = group.run(jobs.on_both, 2, c, tmp_path)
    assert [answer["calls"][-1] for answer in answers] == ["destroy"] * 2
    same_bits(tmp_path / "cpu", tmp_path / "gpu")
    assert len(read_lines(tmp_path / "gpu" / "epochs.jsonl")) == 2


@pytest.mark.parametrize("view", [False, True], ids=["gradients of their own", "in the buckets"])
def test_the_hook_has_the_numbers_of_the_cpu_and_nobody_overtakes_it(view: bool) -> None:
    """What follows the hook on the main stream may change the buckets, so it waits for the hook's
    gauges, which read them."""
    case = Case(
        compressor="topk",
        levels=(("low", 20), ("high", 2)),
        ddp={"bucket_cap_mb": 0.004, "gradient_as_bucket_view": view},
    )
    for rank, answer in enumerate(group.run(jobs.hook, 2, case)):
        assert answer["same"]
        assert answer["rows"]
        assert answer["places"] == [f"cuda:{rank}"]
        streams = answer["streams"]
        assert streams.count("side waits for main") > 9  # once a step, and at the end of an epoch
        for i, call in enumerate(streams):
            if call == "side waits for main":
                assert streams[i + 1] == "main waits for side"
