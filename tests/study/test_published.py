"""The authors' curves: what is in the file against the paper's words and tables (oracle: print),
their overlay on our runs, and what is lost by epoch (oracle: clocks that are given)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import make

from analysis.paper import curves, published
from analysis.paper.equal_epochs import clock, clocks, differences, of_authors, of_runs
from regimes.base.errors import LackingError, RecordError
from regimes.plotting import looks
from regimes.records import load_all


def test_all_logs_are_present_and_complete() -> None:
    frame = published.runs()
    lengths = frame.groupby([*published.KEYS, "level"])["epoch"].agg(["size", "nunique", "max"])
    assert len(lengths) == 57
    assert (lengths["size"] == lengths["nunique"]).all()
    assert (lengths["max"] + 1 == lengths["size"]).all()
    short = lengths[lengths["size"] != 300]["size"]
    assert sorted(short) == [90, 90, 90, 234]
    assert short[("cifar10", "senet", "powersgd", "accordion")] == 234


def test_ends_of_the_logs_are_near_the_printed_accuracies() -> None:
    """One seed against the mean of three: within 1.7 points, and within half a point on average."""
    frame = published.runs()
    keys = [*published.KEYS, "level"]
    last = 100 * frame.groupby(keys)["value"].last().rename("log")
    both = published.tables().merge(last.reset_index(), on=keys, validate="1:1")
    assert len(both) == 54
    off = (both["log"] - both["accuracy"]).abs()
    assert off.max() < 1.7
    assert off.mean() < 0.5


def test_low_is_the_level_that_sends_more() -> None:
    for data, model, compressor, *levels in (
        ("cifar100", "resnet18-cifar100", "powersgd", "rank 2", "rank 1"),
        ("cifar10", "se-resnet18-cifar10", "topk", "99%", "10%"),
        ("cifar10", "senet18-cifar10", "powersgd", "rank 4", "rank 1"),
        ("wikitext-2", "lstm", "topk", "99%", "2%"),
        ("cifar10", "densenet-cifar10", "batch", "512", "4096"),
    ):
        logs = published.curves(data=data, model=model, compressor=compressor)
        words = ("small-batch", "large-batch") if compressor == "batch" else ("low", "high")
        for word, level in zip(words, levels, strict=True):
            assert {*logs[logs["schedule"] == word]["level"]} == {level}
        assert logs.columns[-1] == ("perplexity" if model == "lstm" else "accuracy")
        assert logs["schedule"].nunique() == 3


def test_what_the_authors_did_not_publish() -> None:
    with pytest.raises(RecordError, match=r"no curves for cifar10, vgg7, powersgd; there are: cif"):
        published.curves(data="cifar10", model="vgg7", compressor="powersgd")


# -- over our runs ---------------------------------------------------------------------------

RESNET: dict[str, Any] = {
    "data": {"name": "cifar100"},
    "model": {"name": "resnet18-cifar100"},
    "levels": {"low": 2, "high": 1},
}


def test_overlay_of_the_same_setting(tmp_path: Path) -> None:
    for name in ("low", "accordion"):
        make(tmp_path, name, 0, **RESNET)
    fig, numbers = curves.figure(load_all(tmp_path), overlay=True)
    authors = numbers[numbers["part"] == "authors"]
    oracle = published.curves(data="cifar100", model="resnet18", compressor="powersgd")
    pd.testing.assert_frame_equal(
        authors[oracle.columns].reset_index(drop=True), oracle, check_dtype=False
    )
    drawn, beside = ({str(line.get_label()): line for line in ax.lines} for ax in fig.axes[:2])
    low = oracle[oracle["schedule"] == "low"]
    logs = [label for label in drawn if label.endswith("authors' log")]
    assert drawn[logs[0]].get_ydata().tolist() == low["accuracy"].tolist()
    assert len(logs) == 2
    assert not {*beside} & {*logs}  # no floats are known of the logs


def test_overlay_of_another_metric_or_of_batch_sizes(tmp_path: Path) -> None:
    """Sizes are those of all workers; of levels that the authors did not run there is none."""
    make(tmp_path / "a", "low", 0, **RESNET)
    (one,) = runs = load_all(tmp_path / "a")
    _, numbers = curves.figure(runs, column="test_loss", overlay=True)
    assert numbers[numbers["part"] == "authors"]["test_loss"].notna().all()
    with pytest.raises(RecordError, match="no 'train_loss': choose test_loss or accuracy"):
        published.of(one, looks.find_metric("train_loss"))
    make(tmp_path / "b", "low", 0, **{**RESNET, "levels": {"low": 4, "high": 1}})
    with pytest.raises(RecordError, match=r"levels rank 4, rank 1, the authors' .* rank 1, rank 2"):
        curves.figure(load_all(tmp_path / "b"), overlay=True)
    batches = {"batch_levels": {"low": 128, "high": 1024}, "batch_policy": {"name": "static"}}
    dense = {"levels": {}, "policy": {"name": "static", "level": "dense"}, "batch_size": 128}
    make(tmp_path / "c", "small-batch", 0, **{**RESNET, **batches, **dense})
    (one,) = load_all(tmp_path / "c")
    found = published.of(one, looks.find_metric("accuracy"))
    assert {*found["level"]} == {"512", "4096", "accordion"}


# -- what is lost by epoch, beside the authors' logs ---------------------------------------

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


def test_runs_of_ours_up_to_their_decay() -> None:
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
