"""Image data sets in memory, and their batches.

A data set is 8-bit tensors on the model's device; a batch is gathered by index, augmented and
normalised in a few tensor operations. Order and augmentation of the samples are functions of (seed,
epoch, index), never of the number of workers, of processes or of the batch size:

- the order of epoch e is one permutation, from the random stream ``(seed, "order", e)`` (see
  `task.Shuffled` and `seeding`);
- crop and flip are drawn for all samples of an epoch at once, from ``(seed, "augment", e)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from regimes.base.config import DataConfig
from regimes.base.errors import DataError
from regimes.base.seeding import make_generator
from regimes.data.deficits import Deficit
from regimes.data.sources import CIFAR_FOLDERS, balanced_order, hold_out, limit_sizes, read_images
from regimes.data.task import Shuffled

Split = Literal["test", "validation"]
PADDING = 4  # pixels on each side, black, before the random crop (the authors' code)
CIFAR_MEAN, CIFAR_STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)  # the paper's, of 0..1 pixels


@dataclass(frozen=True)
class Images:
    """Holds one data set. Any prefix of a split holds the classes in equal shares."""

    train_x: UInt8[Tensor, "train c h w"]
    train_y: Int64[Tensor, " train"]
    test_x: UInt8[Tensor, "test c h w"]
    test_y: Int64[Tensor, " test"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels in 0..1
    std: tuple[float, ...]
    digest: str  # SHA-256 of all other fields, compared between processes
    # Held out of the training set.
    validation: tuple[UInt8[Tensor, "held c h w"], Int64[Tensor, " held"]] | None = None

    def with_test_on(self, device: torch.device) -> Images:
        """Copy it, with the test and validation tensors on a device."""
        held = self.validation and (self.validation[0].to(device), self.validation[1].to(device))
        test_x, test_y = self.test_x.to(device), self.test_y.to(device)
        return replace(self, test_x=test_x, test_y=test_y, validation=held)


def load_images(config: DataConfig) -> Images:
    """Load the data set of a configuration, cut to its sizes and pooled, or raise DataError."""
    raw = read_images(config)
    config, classes = limit_sizes(config, raw), len(raw.classes)

    def select(x: np.ndarray, y: np.ndarray, index: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = _average_blocks(torch.from_numpy(x[index]), config.image_size)
        return pixels, torch.from_numpy(y[index])

    order, held = _training_order(raw.train_y, classes, config)
    tests = balanced_order(raw.test_y, classes, config.test_size, "test")[: config.test_size]
    train = select(raw.train_x, raw.train_y, order[: config.train_size])
    test = select(raw.test_x, raw.test_y, tests)
    validation = None if held is None else select(raw.train_x, raw.train_y, held)
    is_cifar = config.name in CIFAR_FOLDERS
    mean, std = (CIFAR_MEAN, CIFAR_STD) if is_cifar else _channel_statistics(train[0])
    digest = hashlib.sha256(repr((raw.classes, mean, std)).encode())
    for tensor in (*train, *test, *(validation or ())):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().data)
    return Images(*train, *test, raw.classes, mean, std, digest.hexdigest(), validation)


def _training_order(
    y: np.ndarray, classes: int, config: DataConfig
) -> tuple[np.ndarray, np.ndarray | None]:
    """Indices of the training images and, disjoint from them, of the validation images, if any."""
    if config.validation_size is None:
        return balanced_order(y, classes, config.train_size, "train"), None
    order, held = hold_out(y, classes, config.validation_size)
    if config.train_size is not None:
        what = f"train, without the {len(held)} for validation"
        balanced_order(y[order], classes, config.train_size, what)  # raises if too few are left
    return order, held


def _average_blocks(x: UInt8[Tensor, "n c h w"], size: int | None) -> UInt8[Tensor, "n c s s"]:
    """Average over blocks, rounded half up in integers: the same bytes on every machine."""
    _, c, h, w = x.shape
    if size is None or (h, w) == (size, size):
        return x
    if size < 1 or h % size or w % size:
        raise DataError(
            f"data.image_size = {size} must divide the original size, {h}x{w}; data.resize "
            "resizes the images of a folder to any size; data.image_size = none keeps their size."
        )
    area = (h // size) * (w // size)
    sums = (
        part.view(-1, c, size, h // size, size, w // size).sum((3, 5), dtype=torch.int32)
        for part in x.split(4096)
    )
    return torch.cat([((s + area // 2) // area).to(torch.uint8) for s in sums])


def _channel_statistics(x: UInt8[Tensor, "n c h w"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, exact from counts, rounded to 4 digits."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        centre = float(share @ values)
        mean.append(round(centre, 4))
        std.append(round(float(share @ (values - centre) ** 2) ** 0.5, 4) or 1.0)  # 0: a constant
    return tuple(mean), tuple(std)


class Normaliser:
    """Turns 8-bit images into ``(x / 255 - mean) / std`` in the model's dtype and memory format.

    Types narrower than float32 are rounded once, at the end.
    """

    def __init__(
        self,
        images: Images,
        device: torch.device | str,
        dtype: torch.dtype,
        channels_last: bool = False,
    ) -> None:
        self.dtype = dtype
        self.wide = dtype if dtype.itemsize >= 4 else torch.float32
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        mean, std = torch.tensor([images.mean, images.std], dtype=torch.float64)[..., None, None]
        self.scale = (1 / (255 * std)).to(device, self.wide)  # [c, 1, 1]
        self.shift = (mean / std).to(device, self.wide)

    def __call__(self, x: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        wide = x.to(self.wide, memory_format=self.layout).mul_(self.scale).sub_(self.shift)
        return wide.to(self.dtype)


class ImageBatches(Shuffled):
    """Gives the training batches of a run: which samples each worker sees at each step of each
    epoch."""

    unit = "images"

    def __init__(
        self,
        images: Images,
        config: DataConfig,
        *,
        seed: int,
        workers: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        deficit: Deficit | None = None,
    ) -> None:
        self.seed, self.workers = seed, workers
        self.device, self.dtype = torch.device(device), dtype
        self.normalise = Normaliser(images, device, dtype, channels_last)
        self.y = images.train_y.to(device)
        self.count, self.drop_last = len(self.y), config.drop_last
        self.augment, self.reshuffle = config.augment, config.reshuffle
        self.deficit = deficit or Deficit()
        self.deficit_y = self.deficit.labels(self.y, len(images.classes), seed)
        x = images.train_x.to(device)
        if self.augment:  # every crop of every image is a view: [n, 9, 9, c, h, w]
            h, w = x.shape[2:]
            padded = functional.pad(x, (PADDING,) * 4).permute(0, 2, 3, 1).contiguous()
            x = padded.unfold(1, h, 1).unfold(2, w, 1)
        self.x = x
        self._set(batch_size)

    def crops(self, epoch: int) -> Int64[Tensor, "3 n"]:
        """Draw row offset, column offset (0..8) and flip (0 or 1) of each sample, on the CPU."""
        generator, n = make_generator(self.seed, "augment", epoch), len(self.y)
        offsets = torch.randint(0, 2 * PADDING + 1, (2, n), generator=generator)
        return torch.cat([offsets, torch.randint(0, 2, (1, n), generator=generator)])

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Float[Tensor, "L b c h w"], Int64[Tensor, "L b"]]]:
        """Yield the batches of the hosted `workers`, from step `start` on.

        For ``workers=range(W)``, ``x.transpose(0, 1).flatten(0, 1)`` is the global batch in the
        order of the permutation, and a view.
        """
        order = self.order(epoch).to(self.device)
        crops = self.crops(epoch).to(self.device) if self.augment else None
        hosted = torch.tensor(list(workers), device=self.device)
        has_deficit = self.deficit.active(epoch)
        labels = self.deficit_y if has_deficit else self.y
        for step in range(start, self.steps):
            index = self._union(order, step)[:, hosted]  # [b, L]
            x = self.normalise(self._gather(index.flatten(), crops))
            if has_deficit:
                x = self.deficit.inputs(x, index.flatten(), self.seed, epoch)
            yield x.unflatten(0, index.shape).transpose(0, 1), labels[index].transpose(0, 1)

    def _gather(self, index: Tensor, crops: Tensor | None) -> UInt8[Tensor, "n c h w"]:
        """The pixels of samples; a function, so that they are freed before the batch is used."""
        if crops is None:
            return self.x.index_select(0, index)
        row, column, flip = crops[:, index]
        x = self.x[index, row, column]
        return torch.where(flip.bool()[:, None, None, None], x.flip(-1), x)


def evaluation_batches(
    images: Images,
    batch_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    split: Split = "test",
    share: slice = slice(None),
    channels_last: bool = False,
) -> Iterator[tuple[Float[Tensor, "b c h w"], Int64[Tensor, " b"]]]:
    """Yield batches of a split in stored order, never augmented.

    Raises:
        DataError: nothing was held out for validation.
    """
    normalise = Normaliser(images, device, dtype, channels_last)
    held = (images.test_x, images.test_y) if split == "test" else images.validation
    if held is None:
        raise DataError("there are no images for validation: set data.validation_size")
    for x, y in zip(*(part.split(batch_size)[share] for part in held), strict=True):
        yield normalise(x.to(device)), y.to(device)
