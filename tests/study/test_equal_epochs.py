"""What is lost by epoch, beside the authors' logs (oracles: the logs' own file, clocks that are
given)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.paper import equal_epochs
from analysis.paper.equal_epochs import clock, clocks, differences, of_authors, of_runs
from regimes.base.errors import LackingError
from regimes.records import load_all

ROOT = Path(__file__).parents[2]


def test_the_authors_networks_at_equal_epochs() -> None:
    """Epochs 20 to 29, formed from the file alone."""
    logs = pd.read_csv(ROOT / "analysis/data/curves.csv.xz", dtype={"level": str})
    logs = logs[(logs["compressor"] == "powersgd") & logs["epoch"].between(20, 29)]
    by = logs.groupby(["data", "model", "level"])["value"].mean().mul(100)
    found = differences(of_authors())
    found = found[(found["bin"] == 20) & (found["schedule"] == "accordion")]
    found = found.set_index("network")["points"]
    for network, data, model, low in (
        ("ResNet-18, CIFAR-10 (2, 1)", "cifar10", "resnet18", "rank 2"),
        ("VGG-19bn, CIFAR-10 (4, 1)", "cifar10", "vgg19bn", "rank 4"),
        ("SENet, CIFAR-100 (2, 1)", "cifar100", "senet", "rank 2"),
    ):
        expected = by[data, model, "accordion"] - by[data, model, low]
        assert found[network] == pytest.approx(expected)
    assert len(found) == 6


def test_a_clock_that_is_given_is_found() -> None:
    """A curve that is another's at k times the epochs, with tests at each third epoch of both."""

    def curve(epochs: np.ndarray) -> np.ndarray:
        return 90 * (1 - np.exp(-epochs / 20))

    epochs = np.arange(1, 41)
    for k in (0.4, 0.75, 1.0):
        assert clock(list(curve(epochs)), list(curve(k * epochs))) == pytest.approx(k, abs=0.03)
    sparse = epochs[::3]
    rows = [
        {"epoch": e - 1, "schedule": name, "accuracy": curve(k * e), "seed": 1}
        for name, k in (("low", 1.0), ("high", 0.5), ("accordion", 0.8))
        for e in sparse
    ]
    about = {"decay": 40, "whose": "ours", "network": "mine"}
    (row,) = clocks(pd.DataFrame(rows).assign(**about)).to_dict("records")
    assert row["k of high"] == pytest.approx(0.5, abs=0.03)
    assert row["k of accordion"] == pytest.approx(0.8, abs=0.03)
    assert row["n of high"] == 1


def test_runs_of_ours_up_to_their_decay(tmp_path: Path) -> None:
    archive = ROOT / "data/reference/paper-cifar10-short.tar.xz"
    curves = of_runs("short", load_all(archive))
    assert {*curves["schedule"]} == {"low", "high", "accordion"}
    gaps = differences(curves)
    assert gaps["last"].max() == 9  # the rate falls in epoch 10
    wide = curves[curves["epoch"] == 9].pivot(index="seed", columns="schedule", values="accuracy")
    last = gaps[(gaps["last"] == 9) & (gaps["schedule"] == "accordion")]
    assert last["n"].tolist() == [3]
    assert (wide["accordion"] - wide["low"]).mean() < 0
    with pytest.raises(LackingError, match="no run is 'accordion'"):
        of_runs("some", [run for run in load_all(archive) if not run.name.startswith("acc")])
    paths = equal_epochs.main((archive,), tmp_path)
    assert {path.name for path in paths} >= {"equal-epochs.png", "equal-epochs-clocks.csv"}
