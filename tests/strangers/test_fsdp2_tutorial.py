"""A script like that of torch's FSDP2 tutorial: it gets the hook's lines, between replicas or for
FSDP2's own collectives, is cut off and continued, and its record is read by the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import read

import regimes

SCRIPT = Path(__file__).parents[1] / "shared/ddp_scripts/stock/fsdp2.py"
HOOKS = {  # what docs/how-to/islands.md and fsdp.md say; how many replicas the script makes
    "islands": ('attach_replicas(model, mesh["replicate"], optim', 2),
    "shards": (
        'attach_shards(model, mesh["shard"], optim, scatter={"levels": {"low": 8, "high": 4}}',
        1,
    ),
}
LINES = {
    'fsdp_kwargs = {"mesh": mesh}  # MESH': 'fsdp_kwargs = {"mesh": mesh["shard"]}',
    "# HOOK": """hook = regimes.HOW, every=4, record="run",
        policy={"name": "accordion", "interval": 2},
    )""",
    '"optim": optim_state}': '"optim": optim_state, "hook": hook.sharded_state()}',
    "# LOG": "hook.log(train_loss=loss.detach())",
    "# CLOSE": "hook.close()",
    "import torch\n": "import regimes\nimport torch\n",
}


def hooked(folder: Path, how: str) -> Path:
    text = SCRIPT.read_text()
    for before, after in LINES.items():
        assert before in text
        text = text.replace(before, after, 1)
    text = text.replace("HOW", HOOKS[how][0])
    (folder / "train.py").write_text(text)
    return folder / "train.py"


def launched(folder: Path, how: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *command, hooked(folder, how), "--replicas", str(HOOKS[how][1]), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", HOOKS)
def test_it_is_cut_off_continued_and_read(how: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    first = launched(whole, how)
    assert first.returncode == 0, first.stderr
    assert launched(cut, how, "--die").returncode != 0
    second = launched(cut, how)
    assert second.returncode == 0, second.stderr
    loss = re.compile(r"loss [\d.]+")
    assert loss.findall(second.stdout) == loss.findall(first.stdout) != []
    ours, theirs = ((x / "run" / "epochs.jsonl").read_bytes() for x in (cut, whole))
    assert ours == theirs
    record = regimes.load(cut / "run")
    assert record.finished
    assert record.header["world"]["processes"] == 4
    assert record.header["world"]["workers"] == (2 if how == "islands" else 4)
    assert "train_loss" in record.epochs
    assert "accordion" in read(cut, "watch", "run", "--once")
    assert read(cut, "report", "run")
    assert "accordion" in read(cut, "detect", "run")
    if how == "islands":  # the command does not predict a record of shards
        assert "dense" in read(cut, "cost", "run", "--network", "1Gbit/s,50us")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOOKS)
def test_in_mixed_precision(how: str, tmp_path: Path) -> None:
    done = launched(tmp_path, how, "--mixed-precision", "--steps", "8")
    assert done.returncode == 0, done.stderr
