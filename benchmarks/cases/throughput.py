"""Training throughput, CIFAR-10's shapes, random crop and flip

Milliseconds per image of dense training, one worker: our batches (8-bit in memory, augmented as
whole batches) and our loop, against ``DataLoader`` with torchvision's transforms around PIL images
and a plain loop; both with the batch and optimiser below. Images are noise: time does not
depend on them. `small`: its VGG-7 at 16 x 16, batch 64; ResNet-18 and ResNet-20 at 32 x 32, batch
32. Floor: the plain loop's forward and backward pass and SGD step alone, in the faster memory
layout. ResNet-20 also as the grid `cifar10-resnet20` trains it, four workers and rank 4, against
the floor's loop with four batches to a step: what our data, workers and compression cost beside a
bare loop, without any data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import NETS, Limits, Net, Row, compare, interleaved, sgd
from regimes.base.config import DENSE, DataConfig
from regimes.collectives.world import World
from regimes.compression.elementwise import Dense
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer
from regimes.data.classification import classification_loss
from regimes.data.images import CIFAR_MEAN, CIFAR_STD, PADDING, ImageBatches, Images
from regimes.training.gradients import Gradients, layer_table, set_gradients

WHY = (
    "ResNet-18: its forward and backward pass are nearly all of the peer's step on one core (see "
    "the floor), so that no way of feeding images could reach 1.3 times its throughput."
)
RESNET20 = "ResNet-20"
TARGETS = {"small": 1 / 1.7, "ResNet-18": 1 / 1.3, RESNET20: None}
BATCH = {"small": 64, "ResNet-18": 32, RESNET20: 32}
CASES = NETS | {RESNET20: Net("resnet20", None, 3, 32, 32, 390)}
WORKERS, OF_BARE = 4, 1.15  # of the grid, and its goal


class Pictures(Dataset):
    """As torchvision's CIFAR10: an array; each item becomes a PIL image."""

    def __init__(self, x: np.ndarray, y: list[int], transform: Callable[[Any], Any]) -> None:
        self.x, self.y, self.transform = x, y, transform

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.x[i])), self.y[i]


def images(net: Net, n: int) -> Images:
    generator = torch.Generator().manual_seed(2)
    shape = (n, net.channels, net.size, net.size)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)
    return Images(x, y, x[:10], y[:10], tuple("abcdefghij"), CIFAR_MEAN, CIFAR_STD, "")


def ours(
    net: Net, data: Images, channels_last: bool, rank: int | None = None, workers: int = 1
) -> Callable[[], None]:
    """One step of our loop, data included; ``rank``: of PowerSGD, None is dense."""
    model, world = net.build(), World(workers)
    layers = layer_table(model)
    gradients = Gradients(
        model, classification_loss, world, union=True, seed=0, micro_batch=net.batch
    )
    compressor = Dense() if rank is None else PowerSGD()
    exchange, optimizer = Exchange(Reducer(compressor, layers, world, 0)), sgd(gradients.parameters)
    levels = [rank if rank and layer.compressed else DENSE for layer in layers]
    batches = ImageBatches(
        data,
        DataConfig(augment=True, drop_last=True),
        seed=0,
        workers=workers,
        batch_size=net.batch,
        channels_last=channels_last,
    )

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            yield from batches.epoch(epoch, [*range(workers)])
            epoch += 1

    feed = stream()

    def step() -> None:
        own = gradients.compute_gradients(*next(feed), 0, 0)
        updates, loss = exchange.exchange_step(gradients.layers, levels, own, gradients.stack)
        loss.item()
        set_gradients(gradients.parameters, updates)
        optimizer.step()

    return step


def loader(net: Net, data: Images) -> DataLoader:
    from benchmarks.curvature import declare_torchvision_operators

    declare_torchvision_operators()
    from torchvision import transforms as T

    transform = T.Compose(
        [
            T.RandomCrop(net.size, padding=PADDING),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize(CIFAR_MEAN, CIFAR_STD),
        ]
    )
    pictures = Pictures(data.train_x.permute(0, 2, 3, 1).numpy(), data.train_y.tolist(), transform)
    return DataLoader(pictures, net.batch, shuffle=True, drop_last=True)


def plain(net: Net, feed: Iterator[list[Tensor]], batches: int = 1) -> Callable[[], None]:
    """One step of a bare loop, over so many batches."""
    model = net.build().train()
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(batches):
            x, y = next(feed)
            loss = classification_loss(model, x, y) / batches
            loss.backward()
        optimizer.step()
        loss.item()

    return step


def forever(source: DataLoader) -> Iterator[list[Tensor]]:
    while True:
        yield from source


def fixed(net: Net, layout: torch.memory_format) -> Iterator[list[Tensor]]:
    x, y = net.images(1)
    while True:
        yield [x[0].contiguous(memory_format=layout), y[0].contiguous()]


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    rows = []
    for name, target in TARGETS.items():
        net = replace(CASES[name], batch=BATCH[name])
        data = images(net, 16 * net.batch)
        tasks = {
            "regimes": ours(net, data, False),
            "regimes, channels-last": ours(net, data, True),
            "DataLoader + torchvision": plain(net, forever(loader(net, data))),
            "no data": plain(net, fixed(net, torch.contiguous_format)),
            "no data, channels-last": plain(net, fixed(net, torch.channels_last)),
        }
        rounds = 40 if name == "small" else 9
        seconds = interleaved(tasks, rounds // 4 if quick else rounds)
        seconds = {k: [t / net.batch for t in taken] for k, taken in seconds.items()}
        floor = 1e3 * min(statistics.median(v) for k, v in seconds.items() if "no data" in k)
        both = [
            compare(f"{name}{way[7:]}", seconds, way, "DataLoader + torchvision", floor=floor)
            for way in ("regimes", "regimes, channels-last")
        ]
        best = min(both, key=lambda row: row.ours)
        rows += [replace(row, target=target if row is best else None) for row in both]
    rows.append(_whole_step(quick=quick))
    return [replace(row, note=_images_per_second(rows)) for row in rows]


def _whole_step(*, quick: bool) -> Row:
    """A step of the grid `cifar10-resnet20` against a bare loop over as many images."""
    net = CASES[RESNET20]
    feed = fixed(net, torch.channels_last)
    tasks = {
        "regimes": ours(net, images(net, 16 * WORKERS * net.batch), True, 4, WORKERS),
        "bare loop": plain(net, feed, WORKERS),
    }
    seconds = interleaved(tasks, 5 if quick else 20)
    seconds = {name: [t / (WORKERS * net.batch) for t in taken] for name, taken in seconds.items()}
    floor = 1e3 * statistics.median(seconds["bare loop"])
    name = f"{RESNET20}, {WORKERS} workers, rank 4"
    return compare(name, seconds, "regimes", "bare loop", OF_BARE, floor=floor)


def _images_per_second(rows: list[Row]) -> str:
    said = [f"{row.setting} {1e3 / row.ours:.0f} against {1e3 / row.theirs:.0f}" for row in rows]
    return f"Images per second: {'; '.join(said)}. {WHY}"
