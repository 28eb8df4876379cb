"""The plug-ins of 0.3's page on the smallest ones, unchanged, in the present code.

The page is ``docs/how-to/parts.md`` of commit c9ffd08. Oracles: a plain loop of what the compressor
says that it does; the levels that policy and detector give by their own lines.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blocks import blocks, run
from ddp_scripts import group, plug_ins
from ddp_scripts.released import RATE, batch

import regimes

PAGE = Path(__file__).parents[1] / "data" / "plug_ins" / "0.3" / "parts.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the page's files, which can be imported."""
    for block in blocks(PAGE):
        if block.file:
            (tmp_path / block.file).write_text(block.code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("parts", None)


def by_norms(rows: list[dict], layer: int) -> list[str]:
    """The levels that ``Falls`` asks for: low compression while the norm falls."""
    norms = [row["statistics"]["norm:update"][layer] for row in rows]
    falls = [e < 2 or norms[e - 1] < norms[e - 2] for e in range(len(rows))]
    return ["low" if x else "high" for x in falls]


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAGE, blocks(PAGE))
    record = regimes.load("runs/parts")
    assert record.finished
    assert [row["layers"]["level"] for row in record.rows] == [["low", "dense"], ["high", "dense"]]
    assert [row["layers"]["why"][0] for row in record.rows] == [{"rule": "alternate"}] * 2
    for row in record.rows:
        assert row["layers"]["floats"] == [10 * row["steps"]] * 2  # rows of the matrix; the bias
        assert row["model"]["largest"] > 0
    assert Path("figures/parts/losses.csv").is_file()


def test_the_detector_decides_in_the_trainer(folder: Path) -> None:
    settings = [
        "epochs=5",
        "data.train_size=80",
        "data.test_size=20",
        "model.name=parts:linear",
        "compressor.name=parts:RowMean",
        "policy={name='detected',detector={name='parts:Falls'}}",
        "optimizer.lr=2.0",
    ]
    rows = regimes.run(regimes.override(regimes.get_preset("smoke"), settings), "run").rows
    levels = [row["layers"]["level"][0] for row in rows]
    assert levels == by_norms(rows, 0)
    assert {*levels} == {"low", "high"}


def test_simulate_computes_what_the_compressor_says(folder: Path) -> None:
    parts = importlib.import_module("parts")
    inputs, targets = batch(0, 0)
    record = regimes.simulate(
        plug_ins.build,
        (inputs, targets),
        (inputs, targets),
        out=folder / "run",
        workers=1,
        batch_size=len(targets),
        epochs=4,
        compressor=parts.RowMean(),
        levels={"low": 1, "high": 2},
        policy=parts.Alternate(),
        optimizer={"lr": RATE, "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant"},
        set={"dtype": "float64", "instruments.parts:Largest.every": 1},
    )
    assert [row["layers"]["level"][0] for row in record.rows] == ["low", "high", "low", "high"]
    steps = [[(inputs, targets)]] * 4
    net = plug_ins.build()
    before = plug_ins.weights(net)
    for done, row in enumerate(record.rows):
        net.load_state_dict(plug_ins.naive(steps[: done + 1]))
        loss = torch.nn.functional.cross_entropy(net(inputs), targets).item()
        assert math.isclose(row["test_loss"], loss, rel_tol=1e-12)
        moved = [before[name] - p.detach() for name, p in net.named_parameters()]
        before = plug_ins.weights(net)
        largest = max(float(x.abs().max()) / RATE for x in moved)
        assert math.isclose(row["model"]["largest"], largest, rel_tol=1e-9)


@pytest.mark.parametrize("rule", ["Alternate", "Falls"])
def test_the_hook_computes_what_the_compressor_says(rule: str, folder: Path) -> None:
    found = group.run(plug_ins.trained, 2, str(folder), rule)
    steps = range(plug_ins.UNITS * plug_ins.UNIT)
    expected = plug_ins.naive([[batch(step, worker) for worker in range(2)] for step in steps])
    for process in found:
        for name, tensor in expected.items():
            assert torch.allclose(process["weights"][name], tensor, rtol=0, atol=1e-12), name
        levels = [row["layers"]["level"][0] for row in process["rows"]]
        ours = ["low", "high", "low"] if rule == "Alternate" else by_norms(process["rows"], 0)
        assert levels == ours
