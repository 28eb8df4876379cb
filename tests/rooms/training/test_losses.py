"""Steps that do not wait: losses looked at every so many steps are those looked at in each, and
what has broken is named as if it had been seen at once; a clock that a GPU's events drive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke as config
from runs import same_bits

import regimes
from regimes.base.errors import TrainingError
from regimes.compression.exchange import finite_flag, loss_with_flag
from regimes.data import classification
from regimes.job import clock
from regimes.records import read_lines
from regimes.training import checkpoint, losses
from regimes.training.build import prepare_run

LOOKS = (1, 2, 16)  # an epoch has 3 steps
HIGH = ("policy=static", "policy.level=high")


def test_a_gpu_is_looked_at_rarely_and_the_cpu_always() -> None:
    assert losses.check_interval(torch.device("cpu")) == 1
    assert losses.check_interval(torch.device("cuda", 1)) == 16


def test_the_record_does_not_depend_on_how_often_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config(*HIGH, "dtype=float32", epochs=2)
    for every in LOOKS:
        monkeypatch.setattr(losses, "check_interval", lambda device, every=every: every)
        regimes.run(c, tmp_path / str(every))
    same_bits(tmp_path / "1", tmp_path / "2")
    same_bits(tmp_path / "1", tmp_path / "16")


@pytest.mark.parametrize("union", [True, False])
def test_the_same_step_and_worker_are_named(
    union: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps, broken as well, do not cover the first; nothing of them is saved."""
    c = config(*HIGH, f"union_pass={str(union).lower()}")
    passes = 1 if union else 4  # per step
    at = 3 * passes + passes + passes // 2  # second epoch; second step, worker 2
    heard = [_broken(every, at, c, tmp_path / str(every), monkeypatch) for every in LOOKS]
    worker = "the union of workers 0, 1, 2, 3" if union else "worker 2"
    said = f"the loss or a gradient of {worker} is not finite in epoch 1, step 1: "
    assert all(why.startswith(said) for why, _ in heard), heard
    taken = [(calls - 3 * passes) // passes for _, calls in heard]  # of the second epoch
    assert taken == [2, 2, 3]


def _broken(
    every: int, at: int, c: regimes.RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, int]:
    """(what is said, passes) of a run whose loss is not finite in pass ``at``."""
    original, calls = torch.nn.functional.cross_entropy, [0]

    def poisoned(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return original(model(x), y) * (float("nan") if calls[0] == at + 1 else 1.0)

    monkeypatch.setattr(losses, "check_interval", lambda device: every)
    monkeypatch.setattr(classification, "classification_loss", poisoned)
    with pytest.raises(TrainingError) as error:
        regimes.run(c, out)
    assert len(read_lines(out / "epochs.jsonl")) == 1
    found = checkpoint.load(out)
    assert found is not None
    assert found[0] == 1
    assert read_lines(out / "events.jsonl")[-1]["why"] == str(error.value)
    return str(error.value), calls[0]


def test_a_clock_of_a_gpu_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On pretended events: the stream is at second ``now`` when it comes to one."""
    now, waited = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "the stream of cuda:1"
            self.at = now[0]

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, other: Event) -> float:
            assert waited
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    time = clock.Clock(torch.device("cuda", 1))
    for name, seconds in {"compute": 3.0, "compress": 2.0}.items():
        for _ in range(2):
            with time(name):
                now[0] += seconds
            now[0] += 10.0
    time.move_seconds(0.5, "compress", "communicate")
    assert waited == []
    time.read_events()
    assert waited == [40.0]  # the last mark
    assert time.seconds == {"compute": 6.0, "compress": 3.5, "communicate": 0.5}
    time.read_events()
    assert time.seconds["compute"] == 6.0
    assert len(waited) == 1


def test_a_wait_that_began_before_what_it_is_moved_out_of_leaves_no_time_below_zero() -> None:
    time = clock.Clock(torch.device("cpu"))
    time.seconds.update(compute=3.0, compress=0.2)
    time.move_seconds(0.5, "compress", "communicate")
    time.read_events()
    assert time.seconds == pytest.approx({"compute": 3.0, "compress": 0.0, "communicate": 0.2})
    time.move_seconds(0.1, "compute", "communicate")
    time.read_events()
    assert time.seconds == pytest.approx({"compute": 2.9, "compress": 0.0, "communicate": 0.3})


def test_who_looks_at_losses_has_the_clock_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = []
    time = clock.Clock(torch.device("cpu"))
    monkeypatch.setattr(time, "read_events", lambda: settled.append(1))
    seen = losses.Losses(prepare_run(config()).gradients, time)
    seen.every = 2
    for number, looks in ((0, 0), (1, 1)):
        seen.add_step(torch.tensor(1.0), torch.ones(4), 0, number)
        assert len(settled) == looks


def test_a_mean_that_overflows_is_not_said_to_be_a_workers() -> None:
    run = prepare_run(config("dtype=float32", "policy=static", "policy.level=dense"))
    gradients = [torch.full((4, *layer.shape), 1e38) for layer in run.layers]
    stack = torch.cat([rows.flatten(1) for rows in gradients], 1)
    transfer = run.exchange.begin_transfer(["dense"] * len(gradients))
    run.exchange.add_rows(dict(enumerate(gradients)))
    run.exchange.finish_transfer(torch.ones(4), stack)
    assert transfer.means is not None
    assert transfer.extra is not None
    with pytest.raises(TrainingError, match=r"^the loss or a gradient of all workers together is"):
        losses.Losses(run.gradients, clock.Clock(run.device)).add_step(
            transfer.means, transfer.extra, 1, 0
        )


# -- the flag of a gradient that is not finite ------------------------------------------------


def test_a_float64_run_has_its_losses_in_float64(tmp_path: Path) -> None:
    """One step, so that the unit's mean is the step's."""
    words = (
        "data.train_size=40",
        "policy=static",
        "optimizer.decay_epochs=[]",
        "workers=2",
        "batch_size=20",
    )
    wide, narrow = (
        regimes.run(config(*words, f"dtype={dtype}", epochs=1), tmp_path / dtype).rows[0]
        for dtype in ("float64", "float32")
    )
    assert wide["steps"] == 1
    rounded = torch.tensor(wide["train_loss"], dtype=torch.float64).float().item()
    assert 0 < abs(wide["train_loss"] - rounded) < 1e-6
    assert narrow["train_loss"] == torch.tensor(narrow["train_loss"]).item()
    assert abs(wide["train_loss"] - narrow["train_loss"]) < 1e-5


def test_only_a_gradient_that_is_not_finite_is_flagged() -> None:
    losses, largest = torch.tensor([1.5, 2.5, 0.0]), torch.finfo(torch.float32).max
    stack = torch.full((3, 8), largest)
    assert not stack.sum(1).isfinite().any()
    assert loss_with_flag(losses, stack).equal(losses)
    assert finite_flag(list(stack)) == 0
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = stack.clone()
        broken[1, 3] = bad
        assert loss_with_flag(losses, broken).isnan().tolist() == [False, True, False]
        assert finite_flag(list(broken)).isnan()
    stack[0, 0], stack[0, 1] = torch.inf, -torch.inf  # whose sum is NaN
    assert loss_with_flag(losses, stack).isnan().tolist() == [True, False, False]
    wide = torch.tensor([1 + 1e-12], dtype=torch.float64)
    assert loss_with_flag(wide, torch.zeros(1, 4, dtype=torch.float64)).equal(wide)
