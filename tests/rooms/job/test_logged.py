"""What a script logs. Oracle: the mean by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import plain
import pytest
import torch

from regimes.job.recorder import JobRecorder, RecordOptions
from regimes.job.summary import job_summary
from regimes.records import Header, Row


def recorder(folder: Path) -> JobRecorder:
    return JobRecorder(RecordOptions(folder), cast("Header", {}))


def row() -> Row:
    names = "epoch", "train_loss", "test_loss", "metric"
    columns: dict[str, Any] = {**dict.fromkeys(names), "logged": {}}
    return cast("Row", columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_a_mean_is_that_of_all_values_of_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """7 of 5000 steps: float16 cannot hold their sum exactly, bfloat16 stands still at 2048."""
    job = recorder(tmp_path)
    for _ in range(5000):
        job.log_values({"loss": torch.tensor(7, dtype=dtype)})
    assert job.take_logged() == {"loss": 7.0}


@pytest.mark.parametrize("metric", ["loss", "test_loss", "train_loss", "accuracy", "metric"])
def test_the_metric_may_have_the_name_of_any_column(metric: str, tmp_path: Path) -> None:
    job, ended = JobRecorder(RecordOptions(tmp_path, metric=metric), cast("Header", {})), row()
    logged = {"test_loss": 1.5, "train_loss": 2.0, "accuracy": 0.5, "metric": 4.0}
    job.add_row(ended, {}, {})
    job.log_values(logged)
    job.merge_logged()
    assert ended["metric"] == logged.get(metric, 1.5)
    assert (ended["test_loss"], ended["train_loss"]) == (1.5, 2.0)


def test_a_state_that_is_saved_meanwhile_changes_no_mean(tmp_path: Path) -> None:
    """Before and after it values of the unit that has ended; the saved ones are in its row."""
    job, ended, following = recorder(tmp_path), row(), row()
    job.add_row(ended, {}, {})
    for value in (1.0, 2.0, 6.0):
        job.log_values({"test_loss": value, "f1": value})
        job.merge_logged()
        assert job.state_dict()["sums"] == job.state_dict()["counts"] == {}
    assert (ended["test_loss"], ended["metric"], ended["logged"]) == (3.0, 3.0, {"f1": 3.0})
    job.write_pending()
    job.log_values({"f1": 5.0})
    assert job.state_dict()["sums"] == {"f1": 5.0}
    job.add_row(following, {}, {})
    job.write_pending()
    assert (following["test_loss"], following["logged"]) == (None, {"f1": 5.0})
    assert ended["logged"] == {"f1": 3.0}


def test_files_that_are_closed_leave_no_value_of_the_row_to_the_next(tmp_path: Path) -> None:
    job, ended = recorder(tmp_path), row()
    job.add_row(ended, {}, {})
    job.log_values({"test_loss": 1.0})
    job.close_files()
    assert ended["test_loss"] == 1.0
    assert job.take_logged() == {}


def test_each_line_of_a_jobs_summary_says_something() -> None:
    said = job_summary(cast("Header", plain.header()), [plain.row(0)], {}, None)
    head, *lines = said.splitlines()
    assert head == "regimes: 2 steps in 1 unit, 1 processes"
    assert [line.split()[0] for line in lines if line.split()[1:]] == ["sent", "levels"]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("metric", "values", "said"),
    [
        ("loss", {"metric": None, "logged": {"loss": 0.5}}, "none: loss was logged, and test_loss"),
        ("accuracy", {"metric": None, "logged": {"acc": 0.5}}, "none: acc was logged, and acc"),
        ("accuracy", {"metric": 93.0, "logged": {}}, "accuracy 93: log a share of one"),
        ("accuracy", {"metric": 0.93, "logged": {"acc": 0.5}}, None),
        ("loss", {"metric": None, "logged": {}}, None),
    ],
)
def test_a_summary_says_what_is_strange_about_the_results(
    metric: str, values: dict[str, Any], said: str | None
) -> None:
    """A result under another name than the metric's, and an accuracy in per cent."""
    header, rows = plain.header(metric=metric), [{**plain.row(0), **values}]
    text = job_summary(cast("Header", header), cast(Any, rows), {}, Path("runs/mine"))
    lines = [line for line in text.splitlines() if line.startswith("  result")]
    assert [said in line for line in lines if said] == [True] * len(lines)
    assert len(lines) == (said is not None)
