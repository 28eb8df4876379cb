"""The hook in scripts of the usual kinds: three lines, a record of what they print, and, when it
compresses nothing, the weights of plain DDP."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, whole

from regimes.records import read_header, read_lines

SHORT = {
    "mnist": ["--epochs", "4", "--batch-size", "120"],
    "words": ["--epochs", "2", "--bytes", "9200", "--size", "16", "--unit", "4"],
    "vit": [
        "--epochs",
        "4",
        "--batch-size",
        "60",
        "--size",
        "16",
        "--layers",
        "1",
        "--warm-up",
        "4",
    ],
}
SOON = {"policy": {"name": "accordion", "interval": 1, "eta": 0.9}}
DENSE = {"policy": {"name": "static", "level": "dense"}}


def train(name: str, folder: Path, hooked: bool = True, **changed: Any) -> str:
    """A short run in two processes; what process 0 prints."""
    words = [*SHORT[name], "--save-model", "model.pt"]
    return group.run(whole.run, 2, name, words, folder, hooked, changed)[0]


def record(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def per_epoch(folder: Path, epochs: int) -> list[float]:
    """The recorded training loss of each epoch, over units of any length."""
    rows = read_lines(record(folder) / "epochs.jsonl")
    size, rest = divmod(sum(row["steps"] for row in rows), epochs)
    assert rest == 0
    steps = [row["train_loss"] for row in rows for _ in range(row["steps"])]
    return [sum(steps[i * size : (i + 1) * size]) / size for i in range(epochs)]


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = (torch.load(x / "model.pt", weights_only=True) for x in (a, b))
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", whole.NAMES)
def test_the_hook_is_three_lines(name: str) -> None:
    """Import, attach, log; each a whole line of its own, and no other line knows of it."""
    hooked, plain = (whole.source(name, h).splitlines() for h in (True, False))
    changed = [x for x in difflib.ndiff(plain, hooked) if x[0] in "+-"]
    assert [x[0] for x in changed] == ["+"] * 3
    begins = ["import regimes", "hook = regimes.attach(", "hook.log("]
    for line, begin in zip(changed, begins, strict=True):
        assert line[2:].strip().startswith(begin)
        assert line.endswith(whole.MARK)
    body = ast.parse("\n".join(plain)).body[1:]  # without the docstring
    assert not re.search("regimes|hook", ast.unparse(ast.Module(body, [])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "words")) for n in whole.NAMES]
)
def test_its_record_is_what_the_script_prints(name: str, tmp_path: Path) -> None:
    """And without compression it trains as plain DDP does: with two processes to the last bit,
    because half of a sum is rounded like the sum of halves."""
    train(name, plain := tmp_path / "plain", hooked=False)
    train(name, dense := tmp_path / "dense", **DENSE)
    assert same_weights(plain, dense)
    said = train(name, tmp_path / "hook", **SOON)
    assert not same_weights(plain, tmp_path / "hook")
    losses = whole.printed(said, "train loss")
    assert per_epoch(tmp_path / "hook", len(losses)) == pytest.approx(losses, abs=6e-5)
    folder = record(tmp_path / "hook")
    rows, events = (read_lines(folder / f"{x}.jsonl") for x in ("epochs", "events"))
    assert [e["event"] for e in events] == ["start", "end"]
    assert read_header(folder)["units"] == len(rows)
    assert {"low", "high"} <= {x for row in rows for x in row["layers"]["level"]}
    assert len({row["bytes"] / row["steps"] for row in rows}) > 1
