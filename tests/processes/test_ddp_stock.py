"""The hook in a script of the usual kind: three lines, a record of what it prints, and, when it
compresses nothing, the weights of plain DDP."""

from __future__ import annotations

import io
import os
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.records import read_header, read_lines

SCRIPT = Path(__file__).parents[1] / "shared/ddp_scripts/stock/words.py"
MARK = "# regimes"

# To the end of the process: when a group goes with its last model, torch waits for gloo's thread
# under Python's lock, which that thread may want to let go of its last collective.
KEPT: list[Any] = []


def source(hooked: bool) -> str:
    """The script as it is, or without the hook's lines."""
    lines = SCRIPT.read_text().splitlines(True)
    return "".join(x for x in lines if hooked or not x.rstrip().endswith(MARK))


def run(rank: int, folder: Path, hooked: bool, changed: dict[str, Any]) -> str:
    """The script in this group and in ``folder``; what it prints.

    Args:
        changed: what its ``attach`` is told besides.
    """
    dist.init_process_group = lambda *_: None  # the group is there already
    attach, wrap = regimes.attach, DistributedDataParallel.__init__

    def attached(*args: Any, **options: Any) -> Any:
        KEPT.append(attach(*args, **options, **changed))
        return KEPT[-1]

    def wrapped(model: Any, *args: Any, **options: Any) -> None:
        KEPT.append(model)
        wrap(model, *args, **options)

    regimes.attach, DistributedDataParallel.__init__ = attached, wrapped  # type: ignore[method-assign]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    script = folder / f"script-{rank}.py"
    script.write_text(source(hooked))
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script))["main"](["--save-model", "model.pt"])
    for kept in KEPT:
        if isinstance(kept, regimes.Hook):
            kept._end_job(together=False)  # as the end of Python does
    return out.getvalue()


SOON = {"policy": {"name": "accordion", "interval": 1, "eta": 0.9}}
DENSE = {"policy": {"name": "static", "level": "dense"}}


def train(folder: Path, hooked: bool = True, **changed: Any) -> str:
    """A short run in two processes; what process 0 prints."""
    return group.run(run, 2, folder, hooked, changed)[0]


def per_epoch(rows: list[dict[str, Any]], epochs: int) -> list[float]:
    """The recorded training loss of each epoch, over units of any length."""
    steps = [row["train_loss"] for row in rows for _ in range(row["steps"])]
    size = len(steps) // epochs
    assert size * epochs == len(steps)
    return [sum(steps[i * size : (i + 1) * size]) / size for i in range(epochs)]


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = (torch.load(x / "model.pt", weights_only=True) for x in (a, b))
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
def test_its_record_is_what_the_script_prints(tmp_path: Path) -> None:
    """And without compression it trains as plain DDP does: with two processes to the last bit,
    because half of a sum is rounded like the sum of halves."""
    assert source(True).count("\n") - source(False).count("\n") == 3
    train(plain := tmp_path / "plain", hooked=False)
    train(dense := tmp_path / "dense", **DENSE)
    assert same_weights(plain, dense)
    said = train(tmp_path / "hook", **SOON)
    assert not same_weights(plain, tmp_path / "hook")
    losses = [float(x) for x in re.findall(r"^epoch .* train loss ([\d.]+)", said, re.MULTILINE)]
    folder = tmp_path / "hook/runs/lm"
    rows, events = (read_lines(folder / f"{x}.jsonl") for x in ("epochs", "events"))
    assert per_epoch(rows, len(losses)) == pytest.approx(losses, abs=6e-5)
    assert len(losses) == 3
    assert [e["event"] for e in events] == ["start", "end"]
    assert read_header(folder)["units"] == len(rows)
    assert {"low", "high"} <= {x for row in rows for x in row["layers"]["level"]}
    assert len({row["bytes"] / row["steps"] for row in rows}) > 1
