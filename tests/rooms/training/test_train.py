"""The trainer against itself: processes == simulation, resumed == uninterrupted, union == worker by
worker, instruments leave no trace; and what it says when it cannot go on."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from configs import gpt, lstm
from configs import smoke as config
from copied_models import ADAMW, every, text
from corpora import random_walk
from runs import Reporter, break_off, resumed_alike, rows, same_bits, same_run, weights
from torch import nn

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError, DataError, RecordError, TrainingError
from regimes.collectives.world import World
from regimes.compression.background import Background
from regimes.data import images
from regimes.records import load, read_lines
from regimes.records.writer import RecordWriter
from regimes.search import sweep
from regimes.training import build, checkpoint, gradients

torch.set_num_threads(1)
POWERSGD: tuple[str, ...] = ()
TOPK = ("compressor=topk", "levels.low=50", "levels.high=2")
INTEGERS = ("compressor=quantised-all-reduce", "levels.low=8", "levels.high=4")
GROWS = (
    "batch_levels={low=2, high=4}",
    "batch_policy={name='windows', windows=[[0, 1]], inside='low', outside='high'}",
)


def test_a_run_ends_the_threads_of_its_exchanges() -> None:
    words = ("sync_policy=static", "sync_policy.level=high", "sync_levels={low=1, high=3}")
    run = build.prepare_run(config(*words, "outer.delay=1"))
    assert run.local is not None
    exchanges = [run.exchange, run.local.exchange]
    for exchange in exchanges:  # as among several processes
        exchange.background = Background(run.device)
    run.close()
    for exchange in exchanges:
        assert exchange.background is not None
        assert not exchange.background.thread.is_alive()


# -- evaluation ------------------------------------------------------------------------------


def test_every_so_many_units_and_the_last_are_evaluated(tmp_path: Path) -> None:
    """All else is as in a run that evaluates each unit."""
    words = ("epochs=4", "data.validation_size=100")
    regimes.run(config(*words), tmp_path / "each")
    for count, known in ((2, [1, 3]), (3, [2, 3]), (9, [3])):
        some = tmp_path / str(count)
        record = regimes.run(config(*words, f"evaluate_every={count}"), some)
        for unit, (a, b) in enumerate(zip(rows(tmp_path / "each"), rows(some), strict=True)):
            if unit not in known:
                a |= {"test_loss": None, "metric": None}
                del a["validation"]
            assert a == b
        assert record.epochs["metric"].notna().to_numpy().nonzero()[0].tolist() == known


@pytest.mark.parametrize("precision", ["strict", "bfloat16"])
def test_evaluation_in_the_precision_of_training(precision: str, tmp_path: Path) -> None:
    """By hand: the test set's loss under autocast, with the weights that the run ends with."""
    words = ("epochs=1", "dtype=float32", f"precision={precision}")
    c = config(*words, "evaluate_precision=training")
    record = regimes.run(c, tmp_path)
    parts = build.prepare_run(c)
    parts.model.load_state_dict(weights(tmp_path))
    parts.model.eval()
    x, y = parts.task.images.test_x, parts.task.images.test_y
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision != "strict"):
        logits = parts.model(images.Normaliser(parts.task.images, "cpu", torch.float32)(x)).float()
    parts.close()
    expected = nn.functional.cross_entropy(logits, y).item()
    assert record.epochs["test_loss"].iloc[-1] == pytest.approx(expected, rel=1e-6)
    strict = regimes.run(override(c, ["evaluate_precision=strict"]), tmp_path / "strict")
    same = strict.epochs["test_loss"].iloc[-1] == record.epochs["test_loss"].iloc[-1]
    assert same == (precision == "strict")


# -- equivalence -----------------------------------------------------------------------------


def test_processes_equal_simulation(tmp_path: Path) -> None:
    c = config()
    regimes.run(c, tmp_path / "1x4")
    levels = {x for r in read_lines(tmp_path / "1x4/epochs.jsonl") for x in r["layers"]["level"]}
    assert levels == {"low", "high", "dense"}  # ACCORDION has switched, or the test shows nothing
    for count, bucket_mb in ((2, 0.02), (4, 25.0)):  # during backward, and after it
        out = tmp_path / f"{count}x{4 // count}"
        forked.train(replace(c, bucket_mb=bucket_mb), out, count)
        same_run(tmp_path / "1x4", out)
        record = load(out)
        assert [each["epoch"] for each in record.processes] == [*range(len(record.rows))]
        for name in ("compute", "compress", "communicate"):
            spent = [each[name] for each in record.processes]
            assert {len(seconds) for seconds in spent} == {count}
            assert [s[0] for s in spent] == record.epochs[f"seconds_{name}"].tolist()
    assert not load(tmp_path / "1x4").processes


WINDOWS = ("data.windows=sampled", "data.validation_size=50", "model.dropout=0.2")
OTHERS: dict[str, Callable[[Path], RunConfig]] = {  # trainings that share no part with the first
    "text": lambda folder: lstm(
        random_walk(folder),
        *TOPK,
        *ADAMW,
        "unit_steps=3",
        "model.dropout=0.2",
        "policy.eta=0.9",
        epochs=4,
    ),
    "windows": lambda folder: gpt(*INTEGERS, *WINDOWS, *GROWS, "dtype=float64"),
}


@pytest.mark.parametrize("name", ["text", pytest.param("windows", marks=pytest.mark.slow)])
def test_processes_equal_the_simulation_of_other_trainings(name: str, tmp_path: Path) -> None:
    """Texts that carry a state, by units within epochs; windows, whose batch grows."""
    c = OTHERS[name](tmp_path)
    regimes.run(c, tmp_path / "one")
    if name == "text":
        levels = {x for row in rows(tmp_path / "one") for x in row["layers"]["level"]}
        assert levels == {"low", "high", "dense"}  # ACCORDION has switched
    forked.train(c, tmp_path / "two", 2)
    same_run(tmp_path / "one", tmp_path / "two", tolerance=1e-9)


def test_channels_last_is_the_same_training(tmp_path: Path) -> None:
    c = config("model.name=resnet8", epochs=1)
    regimes.run(c, tmp_path / "planes")
    regimes.run(replace(c, channels_last=True), tmp_path / "last")
    same_run(tmp_path / "planes", tmp_path / "last", tolerance=1e-9)


def test_bfloat16_autocast_trains(tmp_path: Path) -> None:
    c = config("precision=bfloat16", "dtype=float32", "policy=static", epochs=2)
    record = regimes.run(c, tmp_path / "run")
    exact = regimes.run(replace(c, precision="strict"), tmp_path / "exact")
    ours, theirs = (r.epochs["train_loss"].to_numpy() for r in (record, exact))
    assert (ours != theirs).all()
    assert abs(ours / theirs - 1).max() < 0.2


# -- resume ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    [TOPK, ("compressor=quantise", "levels.low=8", "levels.high=2")],
    ids=["topk", "quantise"],
)
def test_resumed_equals_uninterrupted(compressor: tuple[str, ...], tmp_path: Path) -> None:
    resumed_alike(config("dtype=float32", *compressor), tmp_path, 2)


def test_checkpoints_every_so_many_epochs_and_resume_between_them(tmp_path: Path) -> None:
    """After epochs 2, 4 and the last, the newest two kept; the record may be ahead of them."""
    c = config("dtype=float32", "checkpoint_every=2", epochs=5)
    seen = []

    class Looks(Reporter):
        def epoch(self, row: Any, seconds: Any) -> None:
            folders = (tmp_path / "whole" / "checkpoints").glob("*")
            seen.append(sorted(folder.name for folder in folders))

    regimes.run(c, tmp_path / "whole", reporters=[Looks()])
    first, second, last = "epoch-0002", "epoch-0004", "epoch-0005"
    assert seen == [[], [first], [first], [first, second], [second, last]]
    break_off(c, tmp_path / "broken", 3)
    assert len(read_lines(tmp_path / "broken" / "epochs.jsonl")) == 3
    regimes.run(c, tmp_path / "broken", resume=True)
    same_bits(tmp_path / "whole", tmp_path / "broken")


def test_a_whole_file_of_another_checkpoint_is_damage(tmp_path: Path) -> None:
    """Only its checksum tells."""
    for epochs in (1, 2):
        model = {"w": torch.full((2,), float(epochs))}
        saved = {"format": 4, "model": model, "parts": [{"workers": [0]}]}
        checkpoint.save_checkpoint(tmp_path, epochs, saved, World(1))
    assert weights(tmp_path)["w"].tolist() == [2.0, 2.0]
    older, newer = sorted((tmp_path / "checkpoints").iterdir())
    shutil.copy(older / "process-0.pt", newer / "process-0.pt")
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 1


SLOW = pytest.mark.slow
UNITS = ("dtype=float32", "unit_steps=2")
ROUNDS = (every(5), *UNITS, "epochs=8", *ADAMW)


@pytest.mark.parametrize(
    ("c", "kill_at"),
    [
        pytest.param(config("dtype=float32", epochs=12), 1, id="1"),
        pytest.param(config("dtype=float32", epochs=16), 2, id="2", marks=SLOW),
        pytest.param(config("dtype=float32", epochs=28), 5, id="5", marks=SLOW),
        pytest.param(config(*UNITS, epochs=12), 4, id="within an epoch", marks=SLOW),
        pytest.param(text(*ROUNDS), 3, id="within a round", marks=SLOW),
        pytest.param(text(*ROUNDS), 5, id="after a synchronisation", marks=SLOW),
    ],
)
def test_kill_9_and_resume(c: RunConfig, kill_at: int, tmp_path: Path) -> None:
    regimes.run(c, tmp_path / "whole")
    run = forked.Training([c], tmp_path / "broken")
    run.reached(kill_at)
    time.sleep(0.03 * kill_at)  # anywhere within an epoch, a line or a checkpoint
    assert run.send(signal.SIGKILL)
    assert [end.code for end in run.ends()] == [-signal.SIGKILL]
    regimes.run(c, tmp_path / "broken", resume=True)
    same_bits(tmp_path / "whole", tmp_path / "broken")


def test_resume_on_another_number_of_processes(tmp_path: Path) -> None:
    c = config(*TOPK)
    resumed_alike(c, tmp_path, 2, processes=2)


def test_what_a_resumed_run_shows_has_the_processes_of_now(tmp_path: Path) -> None:
    """The header of a record keeps those of its start."""
    shown: list[Any] = []

    class Looks(Reporter):
        def start(self, header: Any, rows: Any) -> None:
            shown.append(header["world"]["processes"])

    c = config(epochs=2)
    with pytest.MonkeyPatch.context() as patch:
        begun = RecordWriter.create
        patch.setattr(RecordWriter, "create", lambda folder, header: begun(folder, on_two(header)))
        break_off(c, tmp_path, 1)
    run = regimes.run(c, tmp_path, resume=True, reporters=[Looks()])
    assert (run.header["world"]["processes"], shown) == (2, [1])


def on_two(header: Any) -> Any:
    return {**header, "world": {**header["world"], "processes": 2}}


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    c = config()
    regimes.run(c, tmp_path / "whole")
    break_off(c, tmp_path / "run", 2)
    newest, older = sorted((tmp_path / "run/checkpoints").iterdir())[::-1]
    file = newest / "process-0.pt"
    file.write_bytes(file.read_bytes()[:-7])
    shutil.copytree(tmp_path / "run", tmp_path / "lost")
    regimes.run(c, tmp_path / "run", resume=True)  # trains the second epoch again
    same_run(tmp_path / "whole", tmp_path / "run")
    for folder in (newest, older):
        (tmp_path / "lost/checkpoints" / folder.name / "process-0.pt").write_bytes(b"nothing")
    with pytest.raises(RecordError, match=r"no checkpoint of .* is complete"):
        regimes.run(c, tmp_path / "lost", resume=True)


# -- no trace --------------------------------------------------------------------------------


def test_signals_against_gradients_recomputed_by_hand(tmp_path: Path) -> None:
    """One step per epoch, dense: the four readings from plain autograd."""
    c = config(
        "union_pass=false",
        "policy=static",
        "policy.level=dense",
        "data.train_size=40",
        "batch_size=10",
        "instruments={norms={}}",
        epochs=1,
    )
    record = regimes.run(c, tmp_path / "run")
    parts = build.prepare_run(c)
    model = parts.task.build(c).double()
    x, y = next(iter(parts.batches.epoch(0, range(4))))
    own = []
    for worker in range(4):
        loss = torch.nn.functional.cross_entropy(model(x[worker]), y[worker])
        own.append(torch.autograd.grad(loss, list(model.parameters())))
    mean = [torch.stack(g).mean(0).norm().item() for g in zip(*own, strict=True)]
    squares = [
        torch.stack(g).flatten(1).square().sum(1).mean().sqrt().item()
        for g in zip(*own, strict=True)
    ]
    expected = {
        "norm:update": mean,
        "norm:global": mean,
        "norm:local-mean": squares,
        "norm:worker0": [g.norm().item() for g in own[0]],
    }
    for column, values in expected.items():
        assert record.layers[column].tolist() == pytest.approx(values, rel=1e-9), column


# -- traffic over real steps -----------------------------------------------------------------


@pytest.mark.parametrize("compressor", [POWERSGD, TOPK], ids=["powersgd", "topk"])
def test_metered_traffic_is_the_formula_times_steps(
    compressor: tuple[str, ...], tmp_path: Path
) -> None:
    c = config(*compressor, "policy=windows", "policy.windows=[[0, 2]]", "dtype=float32", epochs=3)
    record = regimes.run(c, tmp_path / "run")
    steps = record.header["steps_per_epoch"]
    buffers = build.prepare_run(c).model.buffers()  # float32 and, BatchNorm's counts, int64
    beside = 4 * steps + sum(b.numel() * b.element_size() for b in buffers)  # and the mean losses
    for level, row in zip(["low", "low", "high"], record.epochs.itertuples(), strict=True):
        assert row.floats == record.header["per_step"][level]["floats"] * steps
        words = 0
        for layer in record.header["layers"]:
            n, m = layer["shape"][0], math.prod(layer["shape"][1:])
            if not layer["compressed"]:
                words += n * m
            elif compressor == POWERSGD:
                words += (n + m) * min({"low": 4, "high": 1}[level], n, m)
            else:  # a value and its place
                words += 2 * max(1, round({"low": 50, "high": 2}[level] / 100 * n * m))
        assert row.bytes == 4 * words * steps + beside


# -- bad input, before any training ----------------------------------------------------------


def nothing(classes: int, **shape: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.AvgPool1d(6))


def empty(classes: int, **shape: int) -> nn.Module:
    model = narrow(classes, wide=classes)
    model.register_parameter("spare", nn.Parameter(torch.zeros(0, 10)))
    return model


def narrow(classes: int, wide: int = 3, **shape: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, wide))


def misfit(classes: int, **shape: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(63, classes))


class pair(nn.Module):
    def __init__(self, classes: int, **shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ([*TOPK, "levels.low=101"], ConfigError, "percentage in (0, 100]"),
        (["levels.low=1", "levels.high=4"], ConfigError, "sends less than levels.high"),
        (["compressor={name='quantise'}", "levels={low=4, high=8}"], ConfigError, "levels.low = 4"),
        (["compressor=sign"], ConfigError, "level of sign = 4: expected 1 (bit)"),
        (["policy=windows", "policy.windows=[[9, 12]]"], ConfigError, "a window starts in epoch 9"),
        (
            ["policy={name='by-layer', groups={'*'={name='windows', windows=[[9, 12]]}}}"],
            ConfigError,
            "a window starts in epoch 9",
        ),
        (["evaluate_every=2", "budget={}"], ConfigError, "evaluate_every = 2: expected 1"),
        *[([f"device={x}"], ConfigError, f"device = '{x}' cannot be") for x in ("meta", "tpu7")],
        (["batch_size=500"], DataError, "too few for one step of 4 workers x 500"),
        (["deficit=regimes:Static"], ConfigError, "is no deficit: it has no windows"),
        (["instruments.regimes:Static.level=low"], ConfigError, "no instrument: it has no every"),
        (["batch_policy=regimes:PowerSGD"], ConfigError, "batch_policy.name = 'regimes:PowerSGD'"),
        (["model.name=test_train:nothing"], ConfigError, "Sequential has no parameter to train"),
        (["model.name=test_train:empty"], ConfigError, "parameter 'spare' of shape [0, 10] is emp"),
        (["model.name=test_train:narrow"], ConfigError, "gives [1, 3] for one image: expected"),
        (["model.name=test_train:misfit"], ConfigError, "does not take images of 1x8x8: "),
        (["model.name=test_train:pair"], ConfigError, "gives tuple for one image"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(
    settings: list[str], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        regimes.run(config(*settings), tmp_path / "run")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "epochs.jsonl").exists()


def test_the_command_line_prints_one_sentence_and_a_code(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = command("run", "smok")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: unknown preset 'smok': did you mean 'smoke'? Known: ")
    done = command("run", "smoke", "--processes", "3")
    assert done.returncode == 2
    assert "workers = 4: expected a multiple of the number of processes, 3" in done.stderr


def test_an_ablation_refuses_results_of_another_configuration(tmp_path: Path) -> None:
    c = config(epochs=1)
    regimes.run(c, tmp_path / "cell")
    assert sweep.is_finished(tmp_path / "cell", c)
    assert not sweep.is_finished(tmp_path / "other", c)
    with pytest.raises(RecordError, match="differs in optimizer"):
        sweep.is_finished(tmp_path / "cell", override(c, ["optimizer.lr=0.01"]))


# -- during training -------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_before_the_weights_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of worker 2 in its seventh step; the loss itself is finite."""
    original, calls = gradients.Gradients.compute_gradients, iter(range(100))

    def poisoned(self: Any, *batch: Any) -> torch.Tensor:
        losses = original(self, *batch)
        if next(calls) == 7:
            self.stack[2, -1] = math.inf
        return losses

    monkeypatch.setattr(gradients.Gradients, "compute_gradients", poisoned)
    with pytest.raises(TrainingError, match="of worker 2 is not finite in epoch 2, step 1"):
        regimes.run(config("union_pass=false"), tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_dies_stops_the_others_within_seconds(victim: int, tmp_path: Path) -> None:
    run = forked.Training([config(epochs=500)] * 2, tmp_path)
    run.reached(2)
    start = time.monotonic()
    assert run.send(signal.SIGKILL, victim)
    ends = run.ends()
    assert time.monotonic() - start < 30
    assert (ends[victim].code, ends[1 - victim].code) == (-signal.SIGKILL, 3)
    assert "lost contact" in ends[1 - victim].said
    assert len(regimes.load(tmp_path).epochs) >= 2
