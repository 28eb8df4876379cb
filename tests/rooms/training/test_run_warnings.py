"""What a policy has not done is said: at the end of the run, in ``watch``, in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configs import smoke as config

import regimes
from regimes.cli.html_report import render_page
from regimes.cli.monitor import watch_runs
from regimes.cli.train import train
from regimes.job.run_warnings import run_warnings

torch.set_num_threads(1)
ALWAYS = "policy: accordion chose 'low' for everything in all of 4 epochs"
LONG = "policy: accordion compares every 10 units, and the run has 4: it has compared nothing."


def test_an_interval_longer_than_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = config("policy.interval=10", "optimizer.decay_epochs=[]")
    train(late, tmp_path / "run", processes=1, resume=False, quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    assert ALWAYS in said
    assert LONG in said
    watch_runs(tmp_path / "run", once=True)
    said = " ".join(capsys.readouterr().out.split())
    assert ALWAYS in said
    assert LONG in said
    assert "compared nothing" in render_page(tmp_path / "run", "10 Gbit/s")


def test_an_interval_that_is_nearly_the_run() -> None:
    """12 units and an interval of 10: one comparison, before the last unit. Of 11 units, none that
    decides anything."""
    why, said = (
        [None],
        {
            12: "It compares every 10 units, here 1 time: set policy.interval lower",
            11: "compares every 10 units, and the run has 11: it has compared nothing",
        },
    )
    for units, words in said.items():
        header = {
            "config": {"policy": {"name": "accordion"}},
            "layers": [{"compressed": True}],
            "units": units,
        }
        rows = [{"layers": {"level": ["low"], "why": why}}] * units
        assert any(words in sentence for sentence in run_warnings(header, rows))


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ((0, 2, 1, 2), "no step of 2 of 4 units has finite gradients"),
        ((0, 2, 0, 0), "no step of 1 of 4 units has finite gradients"),
        ((0, 1, 1, 0), None),
    ],
)
def test_units_without_a_finite_gradient_are_counted_and_the_first_is_named(
    skipped: tuple[int, ...], said: str | None
) -> None:
    """``skipped``: of two steps of each unit, how many were left out."""
    rows = [{"epoch": unit, "steps": 2, "skipped": n} for unit, n in enumerate(skipped)]
    sentences = run_warnings({"config": {}, "layers": []}, rows)
    assert [s.partition(" (")[0] for s in sentences] == ([] if said is None else [said])
    assert all("the first is unit 1:" in sentence for sentence in sentences)


def test_a_decay_in_every_epoch(tmp_path: Path) -> None:
    """Halved in every epoch: ACCORDION is low because of the decays, not of its detector."""
    record = regimes.run(
        config(
            "optimizer.warmup_from=none",
            "optimizer.decay_epochs=[1,2,3]",
            "optimizer.decay_factor=2",
        ),
        tmp_path / "run",
    )
    (first, _) = run_warnings(record.header, record.rows)
    assert first.startswith("policy: the learning rate decayed before 3 of 4 units")


def test_a_batch_policy_that_never_grew(tmp_path: Path) -> None:
    batch = ("batch_levels={low=8,high=16}", 'batch_policy={name="windows",windows=[[0,4]]}')
    record = regimes.run(config(*batch, "policy=static"), tmp_path / "run")
    (said,) = run_warnings(record.header, record.rows)
    assert said.startswith("batch_policy: windows chose 'low' for everything")


@pytest.mark.parametrize(("start", "compressed"), [(3, True), (4, False), (99, False)])
def test_a_run_in_which_no_step_was_compressed(start: int, compressed: bool) -> None:
    rows = [{"epoch": unit, "steps": 2} for unit in range(2)]
    sentences = run_warnings({"config": {"start_compressing_after": start}, "layers": []}, rows)
    assert [s.partition(":")[0] for s in sentences] == [
        f"start_compressing_after = {start}" for _ in range(not compressed)
    ]


def test_a_policy_that_decides_is_not_mentioned(tmp_path: Path) -> None:
    for name, settings in {
        "windows": ["policy=windows", "policy.windows=[[0,2]]"],
        "static": ["policy=static"],
    }.items():
        record = regimes.run(config(*settings), tmp_path / name)
        assert run_warnings(record.header, record.rows) == []
