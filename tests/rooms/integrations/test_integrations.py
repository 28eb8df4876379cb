"""The trainers in use under the hook: the examples on two processes, to the end, broken off and
resumed; and without those packages, what is asked of them.

Oracles: the job that is not broken off, whose record and weights the resumed one repeats; without
compression the trainer without a hook.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import ConfigError
from regimes.integrations.shared import HookSettings, load_hook, save_hook, wrapped_model
from regimes.job.process_states import unpack_state
from regimes.records import read_lines

ROOT = Path(__file__).parents[3]

# -- the examples ----------------------------------------------------------------------------

EXAMPLES = {  # what it needs; what is deleted before it is resumed: the last is in a unit's middle
    "trainer_hf": ("transformers", ("checkpoint-48",)),
    "loop_accelerate": ("accelerate", ("epoch-006", "epoch-007")),
    "module_lightning": ("lightning", ("epoch=006.ckpt", "epoch=007.ckpt")),
}
NEWS = {"loop_accelerate": "accuracy", "module_lightning": "accuracy", "trainer_hf": "loss"}


def launched(count: int, script: Path, *words: str | Path, cwd: Path) -> list[str]:
    """What so many processes have printed, by line."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    command = [*torchrun, str(count), script, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def start(example: str, out: Path, *options: str) -> None:
    launched(2, ROOT / f"examples/{example}.py", "--out", out, *options, cwd=out.parent)


@pytest.mark.integrations
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_to_the_end_and_resumes(example: str, tmp_path: Path) -> None:
    package, lost = EXAMPLES[example]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make integrations")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start(example, whole)
    record = regimes.load(whole / "record")
    assert record.header["metric"] == NEWS[example]
    assert record.header["written_by"] == "hook"
    assert len(record.rows) == 6 if example == "trainer_hf" else 8
    assert len({str(row["layers"]["level"]) for row in record.rows}) > 1
    assert all(row["train_loss"] is not None for row in record.rows)
    assert record.rows[-1]["metric"] is not None
    assert record.rows[-1]["train_loss"] < record.rows[0]["train_loss"]
    if example == "trainer_hf":  # linear to zero, the default
        assert [row["lr"] for row in record.rows] == pytest.approx(
            [3e-3 * (1 - unit / 6) for unit in range(6)]
        )
        assert record.rows[-1]["next_lr"] == 0

    shutil.copytree(whole, cut)
    for name in lost:
        gone = cut / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    start(example, cut)
    assert read_lines(cut / "record/epochs.jsonl") == read_lines(whole / "record/epochs.jsonl")
    events = [e["event"] for e in read_lines(cut / "record/events.jsonl")]
    assert events == ["start", "end", "resume", "end"]
    for name in lost:
        for file, other in zip(weights(whole / name), weights(cut / name), strict=True):
            assert (
                file.read_bytes() == other.read_bytes()
                if file.suffix == ".safetensors"
                else (same_weights(file, other))
            )


@pytest.mark.integrations
@pytest.mark.parametrize("compressor", ["dense", "powersgd"])
def test_accelerates_parallelism_config_leaves_the_replicas_to_the_hook(
    compressor: str, tmp_path: Path
) -> None:
    """Without compression the weights are those of one process with the batches of all four."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: make integrations")
    script, out = ROOT / "tests/shared/ddp_scripts/hsdp_accelerate.py", tmp_path / "record"
    lines = launched(4, script, out, compressor, cwd=tmp_path)
    differences = json.loads(next(x for x in lines if x.startswith("{")))
    assert len(differences) == 4
    limit = 1e-6 if compressor == "dense" else 0.2  # AdamW at 0.01 moves a weight 0.12 at most
    assert all(value < limit for value in differences.values()), differences
    record = regimes.load(out)
    assert record.finished
    assert record.header["world"]["shards"] == 2
    assert [row["steps"] for row in record.rows] == [4, 4, 4]


# What it needs; the last checkpoint, which is deleted before the job is resumed.
DIVIDED = {
    "transformers": ("transformers", "checkpoint-24"),
    "loading": ("transformers.distributed", None),
    "accelerate": ("accelerate", "epoch-3"),
    "lightning": ("lightning", "epoch=003.ckpt"),
}


def divided(trainer: str, out: Path) -> dict[str, Any]:
    script = ROOT / "tests/shared/ddp_scripts/fsdp_trainers.py"
    lines = launched(2, script, trainer, out, cwd=out.parent)  # a trainer's own ones among them
    found: dict[str, Any] = json.loads(next(x for x in lines if x.startswith('{"')))
    return found


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is a part of
        return False


@pytest.mark.integrations
@pytest.mark.parametrize("trainer", DIVIDED)
def test_a_trainer_that_shards_with_fsdp2(trainer: str, tmp_path: Path) -> None:
    """Nothing compressed: the bits of the trainer without a hook. 4 bits: broken off and resumed,
    the rows and the sum of each weight are those of the job left alone."""
    package, last = DIVIDED[trainer]
    if not installed(package):
        pytest.skip(f"{package} is not installed: make integrations")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = divided(trainer, whole)
    assert first["same"]
    record, dense = regimes.load(whole / "record"), regimes.load(whole / "dense/record")
    assert record.finished
    assert record.header["world"]["processes"] == 2
    assert record.rows[-1]["train_loss"] < record.rows[0]["train_loss"]
    for row, other in zip(record.rows, dense.rows, strict=True):
        sent, plain = row["collectives"]["bytes"], other["collectives"]["bytes"]
        # 4 bits and a scale for each 64 numbers or less of each parameter; vectors as they are
        assert 0.14 * plain["scatter"] <= sent["scatter"] <= 0.18 * plain["scatter"]
        assert sent["weights"] == plain["weights"]
    if last is None:
        return
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / last)
    assert divided(trainer, cut)["sums"] == first["sums"]
    assert read_lines(cut / "record/epochs.jsonl") == read_lines(whole / "record/epochs.jsonl")
    events = [e["event"] for e in read_lines(cut / "record/events.jsonl")]
    assert events == ["start", "end", "resume", "end"]


@pytest.mark.integrations
def test_a_loop_like_torchtitans_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Broken off between two units: the rows of the job left alone, losses included."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = ("--steps", "24", "--every", "6", "--save", "8", "--gather", "8")
    start("gpt_fsdp", whole, *steps)
    record = regimes.load(whole)
    assert record.finished
    assert [row["steps"] for row in record.rows] == [6] * 4
    assert record.rows[-1]["train_loss"] < record.rows[0]["train_loss"]
    shutil.copytree(whole, cut)
    for name in ("16", "24"):
        shutil.rmtree(cut / "checkpoints" / name)
    start("gpt_fsdp", cut, *steps)
    assert read_lines(cut / "epochs.jsonl") == read_lines(whole / "epochs.jsonl")


def weights(saved: Path) -> list[Path]:
    return sorted(saved.rglob("*.safetensors")) if saved.is_dir() else [saved]


def same_weights(file: Path, other: Path) -> bool:
    found, expected = (torch.load(f, weights_only=True)["state_dict"] for f in (other, file))
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.integrations
def test_a_trainer_of_one_process_says_how_to_start_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: make integrations")
    words = [sys.executable, ROOT / "examples/trainer_hf.py", "--out", tmp_path / "out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert "start the script with torchrun" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out/record").exists()


# -- what is asked, without the packages -----------------------------------------------------


def test_mistakes_are_known_before_there_is_a_model() -> None:
    with pytest.raises(ConfigError, match="every = 0: expected"):
        HookSettings(0, None, {})
    with pytest.raises(ConfigError, match="unknown option 'polity': did you mean 'policy'"):
        HookSettings("epoch", None, {"polity": "accordion"})
    with pytest.raises(ConfigError, match="record = 3"):
        HookSettings("epoch", 3, {})
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        wrapped_model(nn.Linear(2, 2))


@pytest.mark.parametrize("epoch", [None, float("inf")])
def test_an_epoch_without_a_length_is_refused(epoch: float | None) -> None:
    """No reason that a loop of one's own makes false: Accelerate's has a loader of some length."""
    words = (
        r"the steps of an epoch are not known \(.* or a loop of your own with Accelerate\): give"
    )
    with pytest.raises(ConfigError, match=words):
        HookSettings("epoch", None, {}).attach(
            nn.Linear(2, 2), None, epoch_steps=epoch, total=None, batch_size=None
        )


def test_what_a_trainer_logs_is_what_the_record_calls_it() -> None:
    about = regimes.RecordOptions("somewhere", metric="accuracy")
    logged: dict[str, Any] = {
        "train_loss": 1.0,
        "eval_loss": 2.0,
        "val/accuracy": torch.tensor(0.5),
        "eval_f1": 0.1,
        "words": "no",
        "right": True,
        "many": torch.zeros(2),
    }
    assert HookSettings("epoch", about, {}).numbers(logged) == {
        "train_loss": 1.0,
        "test_loss": 2.0,
        "accuracy": 0.5,
        "eval_f1": 0.1,
    }
    for record in (None, "somewhere"):  # the metric is then the test loss
        assert HookSettings("epoch", record, {}).numbers({"val_loss": 3.0}) == {"test_loss": 3.0}


# -- a group of one process ------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    yield
    dist.destroy_process_group()


class Clock:
    epoch = 0


def hooked(every: Any = 2, record: Any = None, **known: Any) -> tuple[Any, Any]:
    """A wrapped model, and the hook that a trainer's settings attach to it."""
    model = DistributedDataParallel(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = HookSettings(every, record, {"policy": "accordion", "summary": False})
    given = {"epoch_steps": None, "total": None, "batch_size": None, **known}
    return model, settings.attach(model, optimizer, **given)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("total", "units"), [(None, None), (float("inf"), None), (-1, None), (0, None), (7, 4)]
)
def test_a_job_without_an_end_has_no_number_of_units(
    total: float | None, units: int | None, tmp_path: Path
) -> None:
    """Lightning says -1 where only steps or time end the training."""
    assert hooked(2, tmp_path / "steps", total=total)[1].header["units"] == units
    epochs = hooked("epoch", tmp_path / "epochs", total=total, clock=Clock())[1]
    assert epochs.header["units"] == (None if units is None else total)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, None])
def test_a_damaged_checkpoint_is_one_sentence(share: float | None, tmp_path: Path) -> None:
    """Empty, cut off, or with other bytes."""
    model, hook = hooked()
    model(torch.ones(4, 5)).sum().backward()
    save_hook(hook, tmp_path)
    file = tmp_path / "regimes.pt"
    whole = file.read_bytes()
    file.write_bytes(b"no archive" if share is None else whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"regimes\.pt: cannot load .* it is damaged \("):
        load_hook(hook, tmp_path)
    file.write_bytes(whole)
    load_hook(hook, tmp_path)


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\3\4"])
def test_damaged_bytes_of_a_process_are_one_sentence(data: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot load the hook's state: it is damaged"):
        unpack_state(data)
