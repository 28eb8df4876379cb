"""Steps on a pretended GPU and their bounds: launches, waits of the host, copies, memory taken.

One list for every compressor, optimiser, instrument, network, deficit and precision. The numbers
are bounds: who makes a step shorter lowers them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pretended
import torch
from torch import nn

import regimes
from regimes.base.config import RunConfig, from_dict, override


class Counts(NamedTuple):
    """Of the last step; ``run``: waits of the whole run, which instruments add to between steps."""

    launches: int
    waits: int
    copies: int
    memory: int
    run: int


class Steps:
    """A reporter that reads the diary after each step."""

    def __init__(self, diary: pretended.Diary) -> None:
        self.diary, self.seen = diary, []

    def start(self, *_: Any) -> None: ...
    def epoch(self, *_: Any) -> None: ...
    def stop(self, *_: Any) -> None: ...

    def step(self, *_: Any) -> None:
        d = self.diary
        self.seen.append([part.total() for part in (d.ops, d.waits, d.copies, d.memory)])

    @property
    def counts(self) -> Counts:
        before, after = self.seen[-2:]
        last = [b - a for a, b in zip(before, after, strict=True)]
        return Counts(*last, self.diary.waits.total())


def config(*settings: str) -> RunConfig:
    """Five steps of ResNet-18, narrow, on images of 8 x 8."""
    base = from_dict(
        RunConfig,
        {
            "epochs": 1,
            "workers": 4,
            "batch_size": 2,
            "device": "cuda",
            "data": {"name": "digits", "train_size": 40, "test_size": 10},
            "model": {"name": "resnet18-cifar10", "width": 4},
            "levels": {"low": 4, "high": 2},
            "policy": {"name": "static", "level": "high"},
        },
    )
    return override(base, list(settings))


def counted(settings: list[str], folder: Path, prepare: Callable[[], Any] = lambda: None) -> Counts:
    """A run's counts; ``prepare`` is called where the GPU is pretended."""
    with pretended.gpu() as diary:
        prepare()
        steps = Steps(diary)
        regimes.run(config(*settings), folder, reporters=[steps])
        return steps.counts


def waiting() -> None:
    """What a bound must see: the host waits."""
    torch.cuda.current_stream().synchronize()


def copying() -> None:
    """A copy to the GPU, for which the host waits."""
    torch.ones(1).to("cuda")


def taking() -> None:
    """Memory, by an operation."""
    torch.zeros(1, device="cuda").clone()


def tiny(classes: int, channels: int, image_size: int) -> nn.Module:
    """The least network with convolutions, BatchNorm and two matrices of another shape."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(image_size // 2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


class Forked(nn.Module):
    """`tiny` with a layer that a smaller batch, or one that is evaluated, does not use."""

    def __init__(self, classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.body = tiny(classes, channels, image_size)
        self.side = nn.Linear(classes, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return x + self.side(x) if len(x) == 4 else x


SMALL = "model={name='vgg7', width=4}"
STATIC = "policy={name='static', level='dense'}"
DENSE = [SMALL, STATIC]
TEXT = [
    "data={name='stdlib', sequence=8, train_size=150, test_size=60}",
    "batch_size=2",
    "union_pass=false",
]
LEVELS: dict[str, Any] = {
    "acp-sgd": 2,
    "cast": "'bf16'",
    "chunked-topk": 10,
    "dct-topk": 10,
    "low-pass": 0.5,
    "powersgd": 2,
    "quantise": 2,
    "quantised-all-reduce": 8,
    "randomk": 10,
    "sign": 1,
    "threshold": 0.001,
    "topk": 10,
}
TABLES = {
    "norms": "{readings=['global', 'worker0', 'local-mean', 'update']}",
    "noise": "{}",
    "msdr": "{}",
    "overlap": "{batches=[16], count=2}",
    "error": "{}",
    "moments": "{}",
    "moments-frozen": "{batch=8, count=2}",
    "fisher": "{images=8, batch=4}",
    "curvature": "{images=8, batch=4, max_products=4}",
}
NETWORKS = {
    "gpt": "{name='gpt', width=16, depth=1, heads=2}",
    "transformer": "{name='transformer', width=16, depth=1}",
    "lstm": "{name='lstm', width=8, depth=1}",
}
# A narrower ResNet copies the input of its shortcuts, because of a CPU (`data/models/resnet.py`).
IMAGES = {"resnet18-cifar10": 8, "googlenet-cifar10": 4, "densenet-cifar10": 4}
DEFICITS = ("blur", "flip", "noise", "labels", "gradient-noise")
PRECISIONS = ("bfloat16", "tf32")


def compressed(name: str) -> list[str]:
    return [SMALL, f"compressor={{name='{name}'}}", f"levels={{high={LEVELS[name]}}}"]


GRAPHED = {  # more steps, of which the last is replayed
    "dense": DENSE,
    "powersgd": compressed("powersgd"),
    "quantise": compressed("quantise"),
    "adamw": [*DENSE, "optimizer={name='adamw', lr=0.01}"],
    "gpt": [*TEXT, f"model={NETWORKS['gpt']}", "data.train_size=400", "data.drop_last=true"],
    "resnet18, powersgd": [],
}

STEPS: dict[str, list[str]] = {
    "dense": DENSE,
    "dense, worker by worker": [*DENSE, "union_pass=false"],
    **{name: compressed(name) for name in LEVELS},
    # any has 19 or 76 launches more than in float32, as it reduces a union or each worker
    **{f"{x}, bfloat16": [*compressed(x), "precision='bfloat16'"] for x in ("powersgd", "topk")},
    **{name: [*DENSE, f"optimizer={{name='{name}', lr=0.01}}"] for name in ("adamw", "muon")},
    "clipped": [*DENSE, "optimizer.clip=1.0"],
    **{f"dense, {name}": [*DENSE, f"precision='{name}'"] for name in PRECISIONS},
    "parameters in bfloat16": [*DENSE, "dtype='bfloat16'"],
    **{
        f"instrument {name}": [*compressed("topk"), f"instruments.{name}={table}"]
        for name, table in TABLES.items()
    },
    **{name: [*TEXT, f"model={table}"] for name, table in NETWORKS.items()},
    **{
        f"{name}, bfloat16": [*TEXT, f"model={table}", "precision='bfloat16'"]
        for name, table in NETWORKS.items()
    },
    **{name: [f"model={{name='{name}', width={width}}}", STATIC] for name, width in IMAGES.items()},
    **{
        f"deficit {name}": [*DENSE, f"deficit={{name='{name}', windows=[[0, 1]]}}"]
        for name in DEFICITS
    },
    "local steps": [*DENSE, "sync_policy={name='static', level='2'}", "sync_levels={'2'=2}"],
    **{
        f"{name}, graphs": ["data.train_size=56", *table, "graphs=4"]
        for name, table in GRAPHED.items()
    },
    "resnet18, powersgd": [],
    "resnet18, worker by worker": [STATIC, "union_pass=false"],
    "resnet18, quantised-all-reduce": [
        "compressor={name='quantised-all-reduce'}",
        "levels={high=4}",
    ],
    "resnet18, topk worker by worker": [
        "compressor={name='topk'}",
        "levels={high=10}",
        "union_pass=false",
    ],
}

BOUNDS = {  # waits of a run include those of first uses, which later runs of a process save
    "dense": Counts(109, 0, 0, 129, 77),
    "dense, worker by worker": Counts(317, 0, 0, 378, 57),
    "acp-sgd": Counts(148, 0, 0, 165, 91),
    "cast": Counts(323, 0, 0, 382, 57),
    "chunked-topk": Counts(803, 0, 0, 787, 71),
    "dct-topk": Counts(554, 0, 0, 614, 64),
    "low-pass": Counts(132, 0, 0, 150, 77),
    "powersgd": Counts(148, 0, 0, 165, 91),
    "quantise": Counts(372, 0, 0, 435, 58),
    "quantised-all-reduce": Counts(373, 0, 0, 541, 57),
    "randomk": Counts(280, 0, 0, 309, 77),
    "sign": Counts(354, 0, 0, 454, 57),
    "threshold": Counts(425, 1, 0, 466, 62),
    "topk": Counts(473, 0, 0, 535, 57),
    "powersgd, bfloat16": Counts(167, 0, 0, 184, 91),
    "topk, bfloat16": Counts(549, 0, 0, 611, 57),
    "adamw": Counts(119, 0, 0, 129, 77),
    "muon": Counts(119, 0, 0, 129, 77),
    "clipped": Counts(323, 0, 0, 383, 57),
    "dense, bfloat16": Counts(128, 0, 0, 148, 77),
    "dense, tf32": Counts(109, 0, 0, 129, 77),
    "parameters in bfloat16": Counts(366, 0, 0, 407, 57),
    "instrument norms": Counts(476, 0, 0, 536, 60),
    "instrument noise": Counts(523, 0, 0, 585, 59),
    "instrument msdr": Counts(479, 0, 0, 559, 59),
    "instrument overlap": Counts(473, 0, 0, 535, 133),
    "instrument error": Counts(473, 0, 0, 535, 59),
    "instrument moments": Counts(485, 0, 0, 545, 928),
    "instrument moments-frozen": Counts(473, 0, 0, 535, 720),
    "instrument fisher": Counts(473, 0, 0, 535, 129),
    "instrument curvature": Counts(473, 0, 0, 535, 245),
    "gpt": Counts(300, 0, 0, 317, 28),
    "transformer": Counts(492, 0, 0, 468, 35),
    "lstm": Counts(195, 0, 0, 198, 22),
    "gpt, bfloat16": Counts(396, 0, 0, 413, 28),
    "transformer, bfloat16": Counts(640, 0, 0, 616, 35),
    "lstm, bfloat16": Counts(287, 0, 0, 290, 22),
    "resnet18-cifar10": Counts(261, 0, 0, 348, 203),
    "googlenet-cifar10": Counts(793, 0, 0, 1175, 663),
    "densenet-cifar10": Counts(1489, 0, 0, 2076, 1103),
    "deficit blur": Counts(111, 0, 0, 131, 77),
    "deficit flip": Counts(110, 0, 0, 130, 77),
    "deficit noise": Counts(113, 0, 0, 133, 78),
    "deficit labels": Counts(109, 0, 0, 129, 79),
    "deficit gradient-noise": Counts(229, 0, 1, 249, 77),
    "local steps": Counts(414, 0, 0, 440, 57),
    "dense, graphs": Counts(21, 0, 0, 28, 101),  # with two replays; a run waits for two comparisons
    "powersgd, graphs": Counts(21, 0, 0, 28, 118),
    "quantise, graphs": Counts(22, 0, 1, 28, 88),
    "adamw, graphs": Counts(31, 0, 0, 28, 101),
    "gpt, graphs": Counts(22, 0, 0, 19, 41),
    "resnet18, powersgd, graphs": Counts(21, 0, 0, 70, 314),
    "resnet18, powersgd": Counts(301, 0, 0, 385, 245),
    "resnet18, worker by worker": Counts(853, 0, 0, 1056, 141),
    "resnet18, quantised-all-reduce": Counts(911, 0, 0, 1501, 141),
    "resnet18, topk worker by worker": Counts(1303, 0, 0, 1521, 141),
}
