"""Figure 4a: pooled over seeds, against numpy and the lines of the instrument."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import smoke

import regimes
from analysis.paper import figure4a
from regimes.base.config import RunConfig
from regimes.base.errors import RecordError
from regimes.records import load_all, read_lines

torch.set_num_threads(1)


def config(*settings: str) -> RunConfig:
    """The smoke preset, cut short, in float64."""
    return smoke("optimizer.decay_epochs=[2]", *settings, epochs=3)


@pytest.mark.slow
def test_figure_pools_over_seeds_and_says_where_90_percent_is(tmp_path: Path) -> None:
    c = replace(config("epochs=2", "instruments={overlap={batches=[32, 60]}}"), name="dense")
    for seed in (1, 2, 3):
        regimes.run(replace(c, seed=seed), tmp_path / f"{seed}")
    fig, numbers = figure4a.figure4a(load_all(tmp_path))
    lines = [read_lines(tmp_path / f"{seed}" / "instruments.jsonl") for seed in (1, 2, 3)]
    assert numbers["batch"].tolist() == [32, 60] * 2
    for row in numbers.itertuples():
        values = [seed[row.epoch]["sizes"][str(row.batch)]["mean"] for seed in lines]
        half = 4.302652729911275 * np.std(values, ddof=1) / 3**0.5  # t of 2 degrees, 97.5 %
        assert row.overlap == pytest.approx(np.mean(values))
        assert (row.ci_low, row.ci_high) == pytest.approx(
            (np.mean(values) - half, np.mean(values) + half)
        )
        assert row.chance == lines[0][0]["chance"]
        assert row.n == 3
    words = fig.get_supxlabel().replace("\n", " ")
    assert "90 % is not reached at any batch size up to 60 images (half of the training" in words
    raised = numbers.assign(overlap=numbers["overlap"] + (numbers["batch"] == 60))
    assert "90 % is reached first at batch 60 (after epoch 0" in figure4a.verdict(raised, 120)


def test_figure_refuses_runs_without_readings(tmp_path: Path) -> None:
    regimes.run(replace(config("epochs=1"), name="dense"), tmp_path)
    with pytest.raises(RecordError, match="recorded no support overlap"):
        figure4a.figure4a(load_all(tmp_path))
