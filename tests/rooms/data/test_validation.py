"""Samples held out for validation: disjoint, balanced, the same for every seed, and without a trace
on a run that has none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import write
from hypothesis import given
from hypothesis import strategies as st

import regimes
from regimes.base.config import DataConfig, RunConfig, from_dict, override
from regimes.base.errors import DataError
from regimes.data import images, load_task
from regimes.data.sources import balanced_order, hold_out
from regimes.records import read_lines

torch.set_num_threads(1)
CPU = torch.device("cpu")


def digits(**settings: Any) -> images.Images:
    return images.load_images(DataConfig(**settings))


def keys(x: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in x}


# -- images --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=8, max_size=80), st.integers(1, 12), st.data())
def test_parts_are_disjoint_balanced_and_do_not_depend_on_the_training_size(
    labels: list[int], size: int, draw: st.DataObject
) -> None:
    y = np.array([*labels, 0, 1, 2, 3])
    counts = np.bincount(y)
    shares = size // 4 + (np.arange(4) < size % 4)
    if (shares > counts).any() or size == len(y):
        with pytest.raises(DataError):
            hold_out(y, 4, size)
        return
    rest, held = hold_out(y, 4, size)
    assert sorted([*rest, *held]) == list(range(len(y)))
    assert np.bincount(y[held], minlength=4).tolist() == shares.tolist()
    train = draw.draw(st.integers(0, len(rest)))
    of_rest = train // 4 + (np.arange(4) < train % 4)
    if (of_rest <= counts - shares).all():  # there is room for both: the split changes nothing
        alone = balanced_order(y, 4, train or None, "train")
        assert rest[:train].tolist() == alone[:train].tolist()


def test_images_are_held_out_of_the_training_set() -> None:
    plain, split = digits(), digits(validation_size=203)
    assert split.validation is not None
    held_x, held_y = split.validation
    assert len(split.train_y) == 797
    assert len(held_y) == 203
    assert keys(split.train_x) | keys(held_x) == keys(plain.train_x)
    assert not keys(split.train_x) & keys(held_x)
    assert torch.equal(split.test_x, plain.test_x)
    assert held_y.bincount().tolist() == [21, 21, 21, *[20] * 7]
    assert plain.digest != split.digest
    assert plain.validation is None


def test_both_are_as_large_as_asked_or_it_is_an_error() -> None:
    both = digits(train_size=400, validation_size=100)
    assert both.validation is not None
    parts = [both.train_x, both.validation[0], both.test_x]
    assert [len(part) for part in parts] == [400, 100, 1297]
    assert sum(len(keys(part)) for part in parts) == len(set.union(*map(keys, parts)))
    for sizes, sentence in (
        ({"validation_size": 1000}, "takes all images of the training set"),
        ({"validation_size": 1200}, "validation: 1200 images of 10 classes need 120 of class"),
        ({"train_size": 1700, "validation_size": 100}, "digits: 1800 images of 10 classes need"),
    ):
        with pytest.raises(DataError, match=sentence) as caught:
            digits(**sizes)
        assert "\n" not in str(caught.value)


def test_a_folder_that_has_no_room_for_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from PIL import Image

    for split in ("train", "test"):
        for place in range(24):
            folder = tmp_path / "tree" / split / "ab"[place % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), place * 10).save(folder / f"{place}.png")
    table = {"name": "folder", "path": str(tmp_path / "tree"), "validation_size": 6}
    found = digits(**table, train_size=18)
    assert found.validation is not None
    assert found.train_y.bincount().tolist() == [9, 9]
    assert not keys(found.train_x) & keys(found.validation[0])
    assert keys(digits(**table).validation[0]) == keys(found.validation[0])  # type: ignore[index]
    assert len(digits(**table, train_size=20).train_x) == 18
    assert "data.train_size = 20" in caplog.text


# -- texts ---------------------------------------------------------------------------------------


def test_wikitext_has_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, ["the cat saw the dog"] * 9, ["the dog"] * 4)
    (tmp_path / "wiki.valid.tokens").write_text("the cat\n" * 3)
    table = {"name": "wikitext-2", "path": str(tmp_path), "sequence": 2}
    plain, split = (
        load_task(from_dict(RunConfig, {"data": table | held}))
        for held in ({}, {"validation_size": 8})
    )
    words = split.corpus.words  # type: ignore[attr-defined]
    held = split.corpus.validation.tolist()  # type: ignore[attr-defined]
    assert " ".join(words[i] for i in held) == "the cat <eos> the cat <eos> the cat"
    assert split.header() == {**plain.header(), "validation": 8, "digest": split.digest}
    assert split.digest != plain.digest
    (tmp_path / "wiki.valid.tokens").unlink()
    load_task(from_dict(RunConfig, {"data": table}))  # which needs no such file
    with pytest.raises(DataError, match=r"lacks wiki\.valid\.tokens"):
        load_task(from_dict(RunConfig, {"data": table | {"validation_size": 8}}))


# -- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits", "stdlib"])
def test_a_run_measures_what_is_held_out(data: str, tmp_path: Path) -> None:
    model = {"name": "vgg7", "width": 4} if data == "digits" else {"name": "gpt", "depth": 1}
    c = from_dict(
        RunConfig,
        {
            "epochs": 1,
            "workers": 2,
            "batch_size": 10,
            "model": model,
            "data": {
                "name": data,
                "train_size": 400,
                "test_size": 100,
                "validation_size": 60,
                "sequence": 16,
            },
            "optimizer": {"lr": 0.1},
        },
    )
    record = regimes.run(c, tmp_path / "run")
    row = read_lines(tmp_path / "run/epochs.jsonl")[0]
    assert record.header["data"]["validation"] == 60
    assert record.header["data"]["train"] == 400
    assert record.epochs["validation_loss"][0] == row["validation"]["loss"]
    assert record.epochs["validation_metric"][0] == row["validation"]["metric"]
    assert math.isfinite(row["validation"]["loss"])
    assert row["validation"]["loss"] != row["test_loss"]
    assert ("perplexity" in row) == (data != "digits")
    other = load_task(override(c, ["seed=7"]))
    assert other.digest == record.header["data"]["digest"]


def test_a_task_without_a_split_says_so() -> None:
    for data, what in (("digits", "no images"), ("stdlib", "no text")):
        task = load_task(from_dict(RunConfig, {"data": {"name": data}}))
        with pytest.raises(DataError, match=f"there (are|is) {what} for validation"):
            task.validate(torch.nn.Identity(), CPU, torch.float32)


def test_validation_is_evaluation_of_other_samples() -> None:
    """On the test set's own images, `validate` gives what `evaluate` gives."""
    c = from_dict(RunConfig, {"data": {"validation_size": 50}, "model": {"name": "vgg7"}})
    task: Any = load_task(c)
    model = task.build(c)
    before = task.validate(model, CPU, torch.float32)
    x, y = task.images.validation
    task.images = replace(task.images, test_x=x, test_y=y)
    assert task.evaluate(model, CPU, torch.float32) == before
