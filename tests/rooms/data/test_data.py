"""Image data: order and augmentation as functions of (seed, epoch, index); subsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_trees import rows
from PIL import Image

from regimes.base.config import DataConfig, RunConfig
from regimes.base.errors import ConfigError, DataError
from regimes.data.classification import ImageTask
from regimes.data.images import ImageBatches, Images, evaluation_batches, load_images
from regimes.data.sources import read_images

pytestmark = pytest.mark.usefixtures("cache")

SMALL = settings(max_examples=40)


def numbered(n: int, c: int = 1, h: int = 1, w: int = 2) -> Images:
    """Images whose first two pixels spell their index; the rest is noise. Normalising: x -> x."""
    x = torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator())
    index = torch.arange(n)
    x.view(n, -1)[:, 0], x.view(n, -1)[:, 1] = index % 256, index // 256
    unit = (0.0,) * c, (1 / 255,) * c
    return Images(x, index, x[:3], index[:3], ("a", "b"), *unit, digest="")


def batches(pictures, config=None, *, workers=2, batch_size=3, seed=5, **options) -> ImageBatches:
    config = config or DataConfig()
    return ImageBatches(
        pictures, config, seed=seed, workers=workers, batch_size=batch_size, **options
    )


def union(b: ImageBatches, epoch: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels of an epoch in global order."""
    parts = list(b.epoch(epoch, range(b.workers), start))
    return tuple(torch.cat([p[i].transpose(0, 1).flatten(0, 1) for p in parts]) for i in (0, 1))


# -- order -----------------------------------------------------------------------------------


@SMALL
@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_order_is_one_permutation_whatever_the_workers_and_the_batch(n, workers, size, epoch):
    b = batches(numbered(n), workers=workers, batch_size=size)
    x, y = union(b, epoch)
    order = batches(numbered(n), workers=1, batch_size=1).order(epoch)
    assert torch.equal(order.sort().values, torch.arange(n))
    assert torch.equal(y[:n], order)  # every sample once, in the permutation's order ...
    assert torch.equal(y[n:], order.repeat(workers)[: len(y) - n])  # ... then from its start
    assert len(y) == -(-n // workers) * workers
    assert torch.equal(x[:, 0, 0, 0] + 256 * x[:, 0, 0, 1], y.float())  # image and label agree
    assert b.steps == len(b) == -(-n // (workers * size))


@SMALL
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_process_gets_its_workers_part(n, workers, size, draw):
    hosted = draw.draw(st.lists(st.integers(0, workers - 1), min_size=1, unique=True))
    start = draw.draw(st.integers(0, 3))
    b = batches(numbered(n), workers=workers, batch_size=size)
    whole, part = list(b.epoch(1, range(workers))), list(b.epoch(1, hosted, start))
    assert len(part) == max(0, len(whole) - start)
    for (x, y), (px, py) in zip(whole[start:], part, strict=True):
        assert torch.equal(px, x[hosted])
        assert torch.equal(py, y[hosted])


def test_drop_last():
    b = batches(numbered(20), DataConfig(drop_last=True))
    assert b.steps == 3
    assert torch.equal(union(b, 0)[1], b.order(0)[:18])
    with pytest.raises(DataError, match="2 x 11 = 22 images with drop_last leaves no step"):
        b.rebatched(11)


def test_reshuffle_off_repeats_the_order_but_not_the_augmentation():
    fixed = batches(numbered(50), DataConfig(reshuffle=False))
    fresh = batches(numbered(50))
    assert torch.equal(fixed.order(0), fixed.order(7))
    assert torch.equal(fixed.order(0), fresh.order(0))
    assert not torch.equal(fresh.order(0), fresh.order(7))
    assert not torch.equal(fixed.crops(0), fixed.crops(7))
    assert not torch.equal(fresh.order(0), batches(numbered(50), seed=6).order(0))


def test_rebatched_copies_no_image():
    b = batches(numbered(50))
    c = b.rebatched(10)
    assert (b.steps, c.steps, c.batch_size) == (9, 3, 10)
    assert c.x.data_ptr() == b.x.data_ptr()
    assert torch.equal(union(b, 2)[1][:50], union(c, 2)[1][:50])


# -- pixels ----------------------------------------------------------------------------------


def cropped(image: np.ndarray, row: int, column: int, flip: int) -> np.ndarray:
    """One image, the slow and obvious way."""
    c, h, w = image.shape
    out = np.zeros_like(image)
    for k, i, j in np.ndindex(c, h, w):
        y, x = i + row - 4, (w - 1 - j if flip else j) + column - 4
        if 0 <= y < h and 0 <= x < w:
            out[k, i, j] = image[k, y, x]
    return out


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([(1, 4, 6), (3, 8, 8), (2, 5, 3)]))
def test_augmentation_is_that_of_a_loop_over_images(workers, size, shape):
    pictures = numbered(17, *shape)
    b = batches(
        pictures, DataConfig(augment=True), workers=workers, batch_size=size, dtype=torch.float64
    )
    crops = b.crops(3).T.tolist()
    x, y = union(b, 3)
    wanted = [cropped(pictures.train_x[i].numpy(), *crops[i]) for i in y.tolist()]
    torch.testing.assert_close(x, torch.tensor(np.stack(wanted)).double(), rtol=1e-14, atol=1e-13)


def test_augmentation_draws_are_uniform():
    """81 x 2 outcomes; chi-squared with 161 degrees of freedom stays below its 0.1 % tail, 224."""
    row, column, flip = batches(numbered(60_000)).crops(0)
    counts = torch.bincount(row * 18 + column * 2 + flip, minlength=162).double()
    expected = 60_000 / 162
    assert len(counts) == 162
    assert ((counts - expected).square() / expected).sum() < 224


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_union_order_is_a_view(augment, channels_last):
    b = batches(numbered(30, 3, 8, 8), DataConfig(augment=augment), channels_last=channels_last)
    for x, _ in b.epoch(0, range(2)):
        whole = x.transpose(0, 1).flatten(0, 1)
        assert whole.data_ptr() == x.data_ptr()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert whole.is_contiguous(memory_format=layout)


def test_normalisation():
    pictures = load_images(DataConfig())
    exact = (pictures.test_x.double() / 255 - pictures.mean[0]) / pictures.std[0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.cat([x for x, _ in evaluation_batches(pictures, 100, dtype=dtype)])
        assert x.dtype == dtype
        by = {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {}
        torch.testing.assert_close(x, exact.to(dtype), **by)
    assert torch.equal(  # rounded once, at the end
        next(evaluation_batches(pictures, 9, dtype=torch.bfloat16))[0],
        next(evaluation_batches(pictures, 9))[0].bfloat16(),
    )


@pytest.mark.parametrize("last", [False, True])
def test_evaluation_has_the_layout_of_training(last):
    seen = []

    class Layout(torch.nn.Module):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return x.mean((1, 2, 3))[:, None].expand(-1, 10)

    task = ImageTask(RunConfig(channels_last=last), numbered(40, 3, 8, 8))
    task.evaluate(Layout(), torch.device("cpu"), torch.float32)
    assert seen == [last]


def test_evaluation_takes_each_image_once_and_in_order():
    parts = list(evaluation_batches(numbered(10), 2))
    assert torch.cat([y for _, y in parts]).tolist() == list(range(3))
    assert torch.cat([x for x, _ in parts])[:, 0, 0, 0].tolist() == list(range(3))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_pooling_is_the_rounded_mean(size):
    x, k = load_images(DataConfig()).test_x, 8 // size
    pooled = load_images(DataConfig(image_size=size)).test_x
    mean = x.double().numpy().reshape(-1, 1, size, k, size, k).mean((3, 5))
    assert np.array_equal(pooled, np.floor(mean + 0.5))


@pytest.mark.parametrize("size", [3, 16, 0])
def test_pooling_to_a_size_that_does_not_divide(size):
    with pytest.raises(DataError, match=f"image_size = {size} must divide the original size, 8x8"):
        load_images(DataConfig(image_size=size))


# -- digits and subsets ----------------------------------------------------------------------


def test_digits():
    pictures = load_images(DataConfig())
    assert pictures.train_x.shape == (1000, 1, 8, 8)
    assert pictures.test_x.shape == (797, 1, 8, 8)
    assert pictures.train_x.max() == 255
    assert pictures.classes == tuple("0123456789")
    assert len(rows(pictures.train_x) | rows(pictures.test_x)) == 1797  # disjoint; none is double
    x = pictures.train_x.double() / 255
    assert pictures.mean == (round(x.mean().item(), 4),)
    assert pictures.std == (round(x.std(correction=0).item(), 4),)


@settings(max_examples=20)
@given(st.integers(1, 1740), st.integers(1, 40))
def test_subsets_hold_the_classes_in_equal_shares(train, test):
    pictures = load_images(DataConfig(train_size=train, test_size=None))
    assert len(pictures.train_y) + len(pictures.test_y) == 1797
    counts = torch.bincount(pictures.train_y, minlength=10)
    assert counts.tolist() == [train // 10 + (c < train % 10) for c in range(10)]
    for prefix in (7, 50, 333):  # and so does each prefix
        counts = torch.bincount(pictures.train_y[:prefix], minlength=10)
        assert counts.max() - counts.min() <= 1


def test_subsets_are_nested_and_the_same_each_time():
    small, again, large = (load_images(DataConfig(train_size=n)) for n in (400, 400, 1000))
    assert small.digest == again.digest != large.digest
    assert rows(small.train_x) < rows(large.train_x)
    assert len(small.test_y) == 1397
    some = load_images(DataConfig(train_size=400, test_size=50))
    assert torch.equal(some.test_x, small.test_x[:50])


@pytest.mark.parametrize("config", [{"train_size": 1750}, {"test_size": 790}])
def test_more_images_than_a_class_has(config):
    with pytest.raises(DataError, match=r"images of 10 classes need \d+ of class \d, which has"):
        load_images(DataConfig(**config))


def test_the_digest_sees_each_pixel_and_label(tree):
    digests = [load_images(DataConfig("folder", str(tree))).digest]
    for image in sorted(tree.rglob("[0-9].png")):
        pixels = np.array(Image.open(image))
        pixels[-1, -1, -1] ^= 1
        Image.fromarray(pixels).save(image)
        digests.append(load_images(DataConfig("folder", str(tree))).digest)
    for split in ("train", "test"):  # the last label alone
        moved = max((tree / split / "cat").glob("*.png"))
        moved.rename(tree / split / "dog" / "9.png")
        digests.append(load_images(DataConfig("folder", str(tree))).digest)
    assert len(set(digests)) == len(digests) == 1 + 8 + 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("path", "my-photos"), ("resize", 8), ("test_share", 0.5), ("split_seed", 0)],
        *[("windows", "sampled"), ("tokenizer", "bpe"), ("vocabulary", 300)],
    ],
)
def test_a_field_that_digits_would_ignore_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{field} = .*: expected none"):
        read_images(replace(DataConfig(name="digits"), **{field: value}))
