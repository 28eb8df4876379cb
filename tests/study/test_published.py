"""The authors' curves: what is in the file against the paper's words and tables (oracle: print),
and their overlay on our runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic import make

from analysis.paper import curves, published
from regimes.base.errors import RecordError
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


def test_vgg_at_rank_1_never_gets_off_the_ground() -> None:
    """Figure 6: a gap of 25 points, and under 53 % in every epoch before the first decay."""
    logs = published.curves(data="cifar10", model="vgg19bn-cifar10", compressor="powersgd")
    end = logs.groupby("schedule")["accuracy"].last()
    assert end["low"] - end["high"] > 25
    high = logs[(logs["schedule"] == "high") & (logs["epoch"] < 150)]
    assert set(high["level"]) == {"rank 1"}
    assert high["accuracy"].max() < 53


@pytest.mark.parametrize(
    ("setting", "levels"),
    [
        (("cifar100", "resnet18-cifar100", "powersgd"), ("rank 2", "rank 1")),
        (("cifar10", "se-resnet18-cifar10", "topk"), ("99%", "10%")),
        (("cifar10", "senet18-cifar10", "powersgd"), ("rank 4", "rank 1")),
        (("wikitext-2", "lstm", "topk"), ("99%", "2%")),
        (("cifar10", "densenet-cifar10", "batch"), ("512", "4096")),
    ],
)
def test_low_is_the_level_that_sends_more(
    setting: tuple[str, str, str], levels: tuple[str, str]
) -> None:
    data, model, compressor = setting
    logs = published.curves(data=data, model=model, compressor=compressor)
    words = ("small-batch", "large-batch") if compressor == "batch" else ("low", "high")
    for word, level in zip(words, levels, strict=True):
        assert set(logs[logs["schedule"] == word]["level"]) == {level}
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
    drawn = {str(line.get_label()): line for line in fig.axes[0].lines}
    labels = [label for label in drawn if label and not label.startswith("_")]
    assert labels == [
        "rank 2",
        "ACCORDION (rank 2 or 1)",
        "low compression: authors' log",
        "ACCORDION: authors' log",
    ]
    low = oracle[oracle["schedule"] == "low"]
    assert drawn[labels[2]].get_ydata().tolist() == low["accuracy"].tolist()
    beside = {str(line.get_label()) for line in fig.axes[1].lines}
    assert not beside & {*labels[2:]}  # no floats are known of the logs


def test_overlay_of_another_metric(tmp_path: Path) -> None:
    make(tmp_path, "low", 0, **RESNET)
    _, numbers = curves.figure(load_all(tmp_path), column="test_loss", overlay=True)
    assert numbers[numbers["part"] == "authors"]["test_loss"].notna().all()
    one = load_all(tmp_path)[0]
    with pytest.raises(RecordError, match="no 'train_loss': choose test_loss or accuracy"):
        published.of(one, looks.find_metric("train_loss"))


def test_levels_that_the_authors_did_not_run(tmp_path: Path) -> None:
    make(tmp_path, "low", 0, **{**RESNET, "levels": {"low": 4, "high": 1}})
    with pytest.raises(RecordError, match=r"levels rank 4, rank 1, the authors' .* rank 1, rank 2"):
        curves.figure(load_all(tmp_path), overlay=True)


def test_batch_sizes_are_those_of_all_workers(tmp_path: Path) -> None:
    make(
        tmp_path,
        "small-batch",
        0,
        **{
            **RESNET,
            "levels": {},
            "policy": {"name": "static", "level": "dense"},
            "batch_size": 128,
            "batch_levels": {"low": 128, "high": 1024},
            "batch_policy": {"name": "static"},
        },
    )
    found = published.of(load_all(tmp_path)[0], looks.find_metric("accuracy"))
    assert set(found["level"]) == {"512", "4096", "accordion"}
