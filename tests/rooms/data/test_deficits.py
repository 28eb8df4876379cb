"""Deficits: pixels and labels worked out by hand; when they act, seen from a run."""

from __future__ import annotations

import pytest
import torch

import regimes
from regimes.base.config import override
from regimes.base.errors import ConfigError
from regimes.data.deficits import Blur, Deficit, Labels
from regimes.training import build


def test_windows_hold_their_first_epoch_and_not_their_last() -> None:
    chosen = Deficit(windows=((1, 3), (5, 6)))
    assert [chosen.active(epoch) for epoch in range(7)] == [
        False,
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def test_a_blurred_edge_by_hand() -> None:
    """Pairs of columns are averaged to 0 and 4; between their centres the line is straight."""
    image = torch.tensor([0.0, 0.0, 3.0, 5.0]).expand(1, 1, 4, 4)
    found = Blur(factor=2).inputs(image, torch.tensor([0]), 0, 0)
    assert found[0, 0].tolist() == [[0.0, 1.0, 3.0, 4.0]] * 4


def test_images_too_small_to_be_blurred_are_refused() -> None:
    x, index = torch.zeros(1, 1, 8, 6), torch.zeros(1, dtype=torch.long)
    assert Blur(factor=6).inputs(x, index, 0, 0).shape == x.shape
    with pytest.raises(ConfigError, match=r"factor = 7: expected at most the size of the 8x6 im"):
        Blur(factor=7).inputs(x, index, 0, 0)


def test_so_many_labels_are_drawn_anew_from_all_classes() -> None:
    right = torch.full((20_000,), 3)
    wrong = Labels(share=0.5).labels(right, 4, 0)
    counts = torch.bincount(wrong, minlength=4) / len(right)
    assert counts.tolist() == pytest.approx([0.125, 0.125, 0.125, 0.625], abs=0.01)
    assert torch.equal(wrong, Labels(share=0.5).labels(right, 4, 0))
    every = torch.bincount(Labels().labels(right, 4, 1), minlength=4) / len(right)
    assert every.tolist() == pytest.approx([0.25] * 4, abs=0.01)


def test_no_deficit_changes_nothing() -> None:
    images, index = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])
    assert Deficit().inputs(images, index, 0, 0) is images
    assert Deficit().labels(index, 3, 0) is index


@pytest.mark.parametrize("name", ["blur", "labels"])
def test_a_run_sees_changed_images_and_labels_in_the_windows_only(name: str) -> None:
    """Against the batches of the same run without a deficit, worker by worker."""
    base = override(regimes.get_preset("smoke"), ["data.train_size=120", "data.test_size=100"])
    plain = build.prepare_run(base).batches
    worse = build.prepare_run(
        override(base, [f'deficit={{name="{name}",windows=[[1,2]]}}'])
    ).batches
    for epoch in range(3):
        for (x, y), (worse_x, worse_y) in zip(
            plain.epoch(epoch, [0, 1, 2, 3]), worse.epoch(epoch, [3, 1]), strict=True
        ):
            x, y = x[[3, 1]], y[[3, 1]]
            assert torch.equal(worse_x, x) == (epoch != 1 or name == "labels")
            assert torch.equal(worse_y, y) == (epoch != 1 or name == "blur")
