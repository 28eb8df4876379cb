"""Deficits: pixels, labels and noise worked out by hand; when they act, seen from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regimes
from regimes.base.config import override
from regimes.base.errors import ConfigError
from regimes.data.deficits import Blur, Deficit, Flip, GradientNoise, ImageNoise, Labels, OtherTask
from regimes.training import build


def test_windows_hold_their_first_epoch_and_not_their_last() -> None:
    chosen = Deficit(windows=((1, 3), (5, 6)))
    assert [epoch for epoch in range(7) if chosen.active(epoch)] == [1, 2, 5]


def test_flipped_images_are_upside_down_and_not_mirrored() -> None:
    image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    found = Flip().inputs(image, torch.tensor([0]), 0, 0)
    assert found.tolist() == [[[[3.0, 4.0], [1.0, 2.0]]]]


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


def test_gradient_noise_is_so_many_times_the_root_mean_square() -> None:
    """Of each layer, whatever its size: 3 times 2 for the first, 3 times 5 for the second."""
    updates = [torch.full((100, 400), 2.0), torch.full((20_000,), -5.0)]
    noisy = GradientNoise(scale=3.0).updates(updates, seed=1, epoch=0, step=0)
    for new, old, wanted in zip(noisy, updates, (6.0, 15.0), strict=True):
        assert float((new - old).std()) == pytest.approx(wanted, rel=0.02)
        assert abs(float((new - old).mean())) < 0.04 * wanted


def test_each_step_and_epoch_has_its_own_gradient_noise_and_each_process_the_same() -> None:
    def noise(seed: int, epoch: int, step: int) -> torch.Tensor:
        torch.manual_seed(step)  # what the process drew before does not matter
        (noisy,) = GradientNoise().updates([torch.ones(4000)], seed, epoch, step)
        return noisy - 1

    when = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)]
    correlation = torch.corrcoef(torch.stack([noise(*key) for key in when]))
    assert float((correlation - torch.eye(len(when))).abs().max()) < 0.1
    assert torch.equal(noise(*when[3]), noise(*when[3]))


def test_noise_images_are_a_function_of_seed_epoch_and_sample() -> None:
    def images(samples: list[int], seed: int = 0, epoch: int = 0) -> torch.Tensor:
        like = torch.full((len(samples), 3, 8, 8), 7.0)
        return ImageNoise().inputs(like, torch.tensor(samples), seed, epoch)

    many = images([*range(1000)])
    assert float(many.mean()) == pytest.approx(0.0, abs=0.02)  # nothing is left of the sevens
    assert float(many.std()) == pytest.approx(1.0, abs=0.02)
    assert len(torch.unique(many.flatten(1), dim=0)) == 1000
    assert torch.equal(images([30, 4]), torch.stack([many[30], many[4]]))  # whoever asks for them
    for other in (images([5], epoch=1), images([5], epoch=2), images([5], seed=1)):
        assert not torch.equal(other[0], many[5])


def test_so_many_labels_are_drawn_anew_from_all_classes() -> None:
    right = torch.full((20_000,), 3)
    wrong = Labels(share=0.5).labels(right, 4, 0)
    counts = torch.bincount(wrong, minlength=4) / len(right)
    assert counts.tolist() == pytest.approx([0.125, 0.125, 0.125, 0.625], abs=0.01)
    assert torch.equal(wrong, Labels(share=0.5).labels(right, 4, 0))
    every = torch.bincount(Labels().labels(right, 4, 1), minlength=4) / len(right)
    assert every.tolist() == pytest.approx([0.25] * 4, abs=0.01)


def test_no_deficit_changes_nothing() -> None:
    images, index, updates = torch.rand(2, 1, 4, 4), torch.tensor([0, 1]), [torch.ones(3)]
    assert Deficit().inputs(images, index, 0, 0) is images
    assert Deficit().labels(index, 3, 0) is index
    assert Deficit().updates(updates, 0, 0, 0) is updates


def test_another_task_turns_images_and_moves_labels_on() -> None:
    image, right = torch.arange(6.0).reshape(1, 1, 3, 2), torch.tensor([0, 1, 4])
    task = OtherTask(by=3)
    assert task.inputs(image, torch.tensor([0]), 0, 0).tolist() == [[[[4, 5], [2, 3], [0, 1]]]]
    assert task.labels(right, 5, 0).tolist() == [3, 4, 2]
    with pytest.raises(ConfigError, match=r"deficit\.by = 0"):
        OtherTask(by=0)


@pytest.mark.parametrize("name", ["flip", "labels", "other-task"])
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
            if epoch == 1 and name != "labels":
                x = torch.stack([row.flipud() for row in x.flatten(0, 2)]).view_as(x)
            assert torch.equal(worse_x, x)
            assert torch.equal(worse_y, y) == (epoch != 1 or name == "flip")


def test_a_run_has_noisy_updates_in_the_windows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of epoch 1, and what the noise leaves is what is recorded and applied: nothing."""
    asked = []

    def nothing(self: Any, updates: list[Any], seed: int, epoch: int, step: int) -> list[Any]:
        asked.append((seed, epoch, step))
        return [torch.zeros_like(update) for update in updates]

    monkeypatch.setattr(GradientNoise, "updates", nothing)
    settings = [
        "epochs=3",
        "data.train_size=60",
        "data.test_size=20",
        "optimizer.momentum=0",
        "optimizer.weight_decay=0",
        'deficit={name="gradient-noise",windows=[[1,2]]}',
        "batch_size=5",
        "seed=7",
        "optimizer.nesterov=false",
    ]
    record = regimes.run(override(regimes.get_preset("smoke"), settings), tmp_path)
    assert asked == [(7, 1, 0), (7, 1, 1), (7, 1, 2)]
    loss = record.epochs["test_loss"].tolist()
    assert loss[1] == pytest.approx(loss[0], rel=1e-2)  # batch norm's statistics have moved
    norms = [sum(row["statistics"]["norm:update"]) for row in record.rows]
    assert norms[1] == 0 < min(norms[0], norms[2])
