"""A hook on each data-parallel group of a mesh, whose other dimension shares the matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddp_scripts import group, mesh

import regimes
from regimes.records import find_edit


def test_a_job_of_two_groups_has_one_record(tmp_path: Path) -> None:
    plain, found = group.run_in_turn(
        4, (mesh.trained, tmp_path, False), (mesh.trained, tmp_path, True)
    )
    for ours, theirs in zip(found, plain, strict=True):
        for a, b in zip(ours["weights"], theirs["weights"], strict=True):
            assert torch.equal(a, b)
        assert ours["rows"][-1]["floats"] == theirs["rows"][-1]["floats"] > 0
    record = regimes.load(tmp_path / "run")
    assert record.finished
    assert [row["train_loss"] for row in record.rows] == [1.0] * 3
    assert record.header["world"]["groups"] == 2
    assert not find_edit(record.folder)
    said = [process["said"] for process in found]
    assert [len(words) for words in said] == [0, 1, 0, 0]
    assert "run has the record of the group of process 0, without the traffic of the" in said[1][0]


def test_groups_of_a_tensor_parallel_mesh_have_the_norms_and_levels_of_whole_layers() -> None:
    whole = group.run(mesh.norms, 2, False)
    for rows in group.run(mesh.norms, 4, True):
        assert len(rows) == 3
        for (norms, levels), (expected, theirs) in zip(rows, whole[0], strict=True):
            assert norms == pytest.approx(expected, rel=1e-9)
            assert levels == theirs


@pytest.mark.parametrize("late", [False, True])
def test_stages_of_a_pipeline_have_one_record_with_the_loss(late: bool, tmp_path: Path) -> None:
    """The group that was there first writes it, and the other one warns."""
    first, last = group.run(mesh.stages, 2, tmp_path / "run", late)
    record = regimes.load(tmp_path / "run")
    assert record.finished
    assert [row["train_loss"] for row in record.rows] == [0.5, 2.5, 4.5]
    said = (first if late else last)["said"]
    assert [f"has the record of the group of process {int(late)}, without" in x for x in said] == [
        True
    ]
    assert (last if late else first)["said"] == []
