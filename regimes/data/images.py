"""Data sets in memory, and batches from them.

A whole data set is 8-bit tensors on the model's device; a batch is gathered by index, augmented
and normalised in a few tensor operations. What a sample looks like and when it comes are functions
of (seed, epoch, index), never of the number of workers, of processes or of the batch size:

- the order of epoch e is one permutation, ``stream(seed, "order", e)``; step k takes the next
  W x b entries, and worker w those at positions w, w + W, w + 2 W, ... of them;
- crop and flip are drawn for all samples of an epoch at once, ``stream(seed, "augment", e)``.

Stands on `data.sources` (which data sets there are) and `seeding`; used by the loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from regimes.data.deficits import Deficit
from regimes.data.sources import CIFAR_FOLDERS, balanced, read
from regimes.data.task import Rebatched
from regimes.errors import DataError
from regimes.seeding import stream

if TYPE_CHECKING:
    from regimes.config import DataConfig

PADDING = 4  # pixels on each side, black, before the random crop (paper, section 5)
CIFAR_MEAN, CIFAR_STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)  # the paper's, of 0..1 pixels


@dataclass(frozen=True)
class Images:
    """One data set in memory. Any prefix of either split holds the classes in equal shares."""

    train_x: UInt8[Tensor, "train c h w"]
    train_y: Int64[Tensor, " train"]
    test_x: UInt8[Tensor, "test c h w"]
    test_y: Int64[Tensor, " test"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels in 0..1
    std: tuple[float, ...]
    digest: str  # SHA-256 of all the above: equal on all processes, or they hold different data


def load(config: DataConfig) -> Images:
    """The data set that a configuration names, subset and pooled as it says, or DataError."""
    raw = read(config)
    train = _select(raw.train_x, raw.train_y, raw.classes, config.train_size, "train")
    test = _select(raw.test_x, raw.test_y, raw.classes, config.test_size, "test")
    train_x, test_x = _pooled(train[0], config.image_size), _pooled(test[0], config.image_size)
    cifar = config.name in CIFAR_FOLDERS
    mean, std = (CIFAR_MEAN, CIFAR_STD) if cifar else _statistics(train_x)
    tensors = (train_x, train[1], test_x, test[1])
    digest = hashlib.sha256(repr((raw.classes, mean, std)).encode())
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().data)
    return Images(*tensors, raw.classes, mean, std, digest.hexdigest())


def _select(
    x: np.ndarray, y: np.ndarray, classes: tuple[str, ...], size: int | None, what: str
) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(balanced(y, len(classes), size, what)[:size])
    return torch.from_numpy(x).index_select(0, index), torch.from_numpy(y).index_select(0, index)


def _pooled(x: UInt8[Tensor, "n c h w"], size: int | None) -> UInt8[Tensor, "n c s s"]:
    """Average over blocks, rounded half up in integers: the same bytes on every machine."""
    _, c, h, w = x.shape
    if size is None or (h, w) == (size, size):
        return x
    if size < 1 or h % size or w % size:
        raise DataError(f"data.image_size = {size} must divide the original size, {h}x{w}.")
    area = (h // size) * (w // size)
    sums = (
        part.view(-1, c, size, h // size, size, w // size).sum((3, 5), dtype=torch.int32)
        for part in x.split(4096)
    )
    return torch.cat([((s + area // 2) // area).to(torch.uint8) for s in sums])


def _statistics(x: UInt8[Tensor, "n c h w"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, exact from counts, rounded to 4 digits."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        centre = float(share @ values)
        mean.append(round(centre, 4))
        std.append(round(float(share @ (values - centre) ** 2) ** 0.5, 4) or 1.0)  # constant: 1
    return tuple(mean), tuple(std)


class Normaliser:
    """8-bit images to ``(x / 255 - mean) / std`` in the model's dtype and memory format.

    Types narrower than float32 are rounded once, at the end.
    """

    def __init__(
        self, images: Images, device: torch.device | str, dtype: torch.dtype,
        channels_last: bool = False,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self.wide = dtype if dtype.itemsize >= 4 else torch.float32
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        mean, std = torch.tensor([images.mean, images.std], dtype=torch.float64)[..., None, None]
        self.scale = (1 / (255 * std)).to(device, self.wide)  # [c, 1, 1]
        self.shift = (mean / std).to(device, self.wide)

    def __call__(self, x: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        wide = x.to(self.wide, memory_format=self.layout).mul_(self.scale).sub_(self.shift)
        return wide.to(self.dtype)


class ImageBatches(Rebatched):
    """The training batches of a run: which samples each worker sees at each step of each epoch."""

    def __init__(
        self, images: Images, config: DataConfig, *, seed: int, workers: int, batch_size: int,
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
        channels_last: bool = False, deficit: Deficit | None = None,
    ) -> None:  # fmt: skip
        self.config, self.seed, self.workers = config, seed, workers
        self.device, self.dtype = torch.device(device), dtype
        self.normalise = Normaliser(images, device, dtype, channels_last)
        self.y = images.train_y.to(device)
        self.deficit = deficit or Deficit()
        self.wrong_y = self.deficit.labels(self.y, len(images.classes), seed)
        x = images.train_x.to(device)
        if config.augment:  # every crop of every image is a view: [n, 9, 9, c, h, w]
            h, w = x.shape[2:]
            padded = functional.pad(x, (PADDING,) * 4).permute(0, 2, 3, 1).contiguous()
            x = padded.unfold(1, h, 1).unfold(2, w, 1)
        self.x = x
        self._set(batch_size)

    def _set(self, batch_size: int) -> None:
        union, n = self.workers * batch_size, len(self.y)
        self.batch_size = batch_size
        self.steps = n // union if self.config.drop_last else -(-n // union)
        if self.steps == 0:
            raise DataError(
                f"A global batch of {self.workers} x {batch_size} = {union} images with drop_last "
                f"leaves no step: the training set has {n}."
            )

    def order(self, epoch: int) -> Int64[Tensor, " n"]:
        """The permutation of one epoch, on the CPU."""
        key = epoch if self.config.reshuffle else 0
        return torch.randperm(len(self.y), generator=stream(self.seed, "order", key))

    def crops(self, epoch: int) -> Int64[Tensor, "3 n"]:
        """Row offset, column offset (0..8) and flip (0 or 1) of each sample, on the CPU."""
        generator, n = stream(self.seed, "augment", epoch), len(self.y)
        offsets = torch.randint(0, 2 * PADDING + 1, (2, n), generator=generator)
        return torch.cat([offsets, torch.randint(0, 2, (1, n), generator=generator)])

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Float[Tensor, "L b c h w"], Int64[Tensor, "L b"]]]:
        """The batches of the hosted `workers`, from step `start` on.

        A short last batch is filled up to a multiple of W from the start of the permutation, so all
        workers always have equally many. Memory is in union order: for ``workers=range(W)``,
        ``x.transpose(0, 1).flatten(0, 1)`` is the global batch in the order of the permutation, and
        a view.
        """
        order = self.order(epoch).to(self.device)
        crops = self.crops(epoch).to(self.device) if self.config.augment else None
        hosted = torch.tensor(list(workers), device=self.device)
        worse = self.deficit.active(epoch)
        labels = self.wrong_y if worse else self.y
        for step in range(start, self.steps):
            index = self._union(order, step)[:, hosted]  # [b, L]
            x = self.normalise(self._gather(index.flatten(), crops))
            if worse:
                x = self.deficit.inputs(x, index.flatten(), self.seed, epoch)
            yield x.unflatten(0, index.shape).transpose(0, 1), labels[index].transpose(0, 1)

    def _union(self, order: Int64[Tensor, " n"], step: int) -> Int64[Tensor, "b W"]:
        first = step * self.workers * self.batch_size
        rows = min(self.batch_size, -(-(len(order) - first) // self.workers))
        positions = torch.arange(first, first + rows * self.workers, device=order.device)
        return order[positions % len(order)].view(rows, self.workers)

    def _gather(self, index: Tensor, crops: Tensor | None) -> UInt8[Tensor, "n c h w"]:
        if crops is None:
            return self.x.index_select(0, index)
        row, column, flip = crops[:, index]
        x = self.x[index, row, column]
        return torch.where(flip.bool()[:, None, None, None], x.flip(-1), x)


def evaluation_batches(
    images: Images, batch_size: int, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Float[Tensor, "b c h w"], Int64[Tensor, " b"]]]:  # fmt: skip
    """Each test image once, in stored order, never augmented."""
    normalise = Normaliser(images, device, dtype)
    parts = zip(images.test_x.split(batch_size), images.test_y.split(batch_size), strict=True)
    for x, y in parts:
        yield normalise(x.to(device)), y.to(device)
