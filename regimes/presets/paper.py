"""The paper's scale (Table 7): 300 epochs on whole data sets; a GPU, or several.

The presets ``paper-...`` are as the authors' loop runs them. Their loop sets the rate at the end of
an epoch, by that epoch's number: counted from 0 the warm-up lags by one epoch, and 152 and 252 are
the first epochs at the lower rates. Those called ``paper-text-...`` are by the paper's text:
"divided by 10 at epochs 150 and 250" ends epochs 150 and 250, counted from 0, the warm-up has no
lag, and ACCORDION looks every 10 epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from regimes.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets import families
from regimes.presets.registry import GRIDS, PRESETS, Grid, add

DECAYS = {(152, 252): (151, 251), (62, 81): (61, 81)}  # of the authors' loop -> of the text
BATCHES = ("small-batch", "large-batch", "accordion-batch")
TABLES: dict[int, tuple[str, str, dict[str, tuple[int, int]]]] = {
    1: ("cifar10", "powersgd", {"resnet18": (2, 1), "vgg19bn": (4, 1), "senet": (4, 1)}),
    2: ("cifar100", "powersgd", {"resnet18": (2, 1), "densenet": (2, 1), "senet": (2, 1)}),
    3: ("cifar10", "topk", {"resnet18": (99, 10), "googlenet": (99, 10), "senet": (99, 10)}),
    4: ("cifar100", "topk", {"resnet18": (99, 25), "googlenet": (99, 25), "senet": (99, 25)}),
}
SENET = {"cifar10": "se-resnet18-cifar10", "cifar100": "senet18-cifar100"}  # of the printed rows


def paper(data: str, model: str, low: Any, high: Any, compressor: str = "powersgd") -> RunConfig:
    """The paper's setting (Table 7) as the authors' loop runs it: 4 workers x 128, 300 epochs,
    lr 0.1 -> 0.4 in 5 epochs, divided by 10 after epochs 150 and 250."""
    return RunConfig(
        name="accordion",
        epochs=300,
        workers=4,
        batch_size=128,
        data=DataConfig(name=data, augment=True),
        model=ModelConfig(name=model),
        optimizer=OptimizerConfig(lr=0.4, warmup_from=0.1, warmup_hold=1, decay_epochs=(152, 252)),
        compressor={"name": compressor},
        levels={"low": low, "high": high},
        policy={"name": "accordion", "eta": 0.5, "interval": 10},
    )


def lstm() -> RunConfig:
    """A 2-layer LSTM on WikiText-2. Table 7 has the rates (2.5 x W, warmed up in 5 epochs, divided
    by 10 after epochs 60 and 80); the authors' code has the batch, the window, dropout, clipping,
    no weight decay, an interval of 5, and 62 and 81 as the first epochs at the lower rates."""
    return replace(
        paper("wikitext-2", "lstm", 99, 2, "topk"),
        epochs=90,
        data=DataConfig(name="wikitext-2", sequence=30),
        model=ModelConfig(name="lstm", width=650, depth=2, dropout=0.4),
        optimizer=OptimizerConfig(
            lr=10.0,
            warmup_from=2.5,
            warmup_hold=1,
            decay_epochs=(62, 81),
            weight_decay=0.0,
            clip=0.4,
        ),
        policy={"name": "accordion", "eta": 0.5, "interval": 5},
    )


resnet18 = partial(paper, "cifar10", "resnet18-cifar10", 2, 1)
resnet18_cifar100 = partial(paper, "cifar100", "resnet18-cifar100", 2, 1)
vgg19bn = partial(paper, "cifar10", "vgg19bn-cifar10", 4, 1)


def by_text(config: RunConfig) -> RunConfig:
    """A preset of the authors' loop with the rates and the interval of the text."""
    decays = DECAYS[config.optimizer.decay_epochs]  # type: ignore[index]
    return replace(
        config,
        optimizer=replace(config.optimizer, warmup_hold=0, decay_epochs=decays),
        policy={**config.policy, "interval": 10},
    )


def critical(base: RunConfig) -> list[tuple[int, int]]:
    """The hand-made windows of Figure 2: the first 20 epochs, and 10 after the first decay."""
    decay = base.optimizer.decay_epochs[0]
    return [(0, 20), (decay, decay + 10)]


def schedules(base: RunConfig) -> Grid:
    """Figure 2 at this scale; the late window is as long as the early one."""
    decay = base.optimizer.decay_epochs[0]
    return families.schedules(
        base, critical(base), late=(decay, decay + 20), interval=base.policy["interval"]
    )


def _three(base: RunConfig) -> Grid:
    return families.three(base, base.policy["interval"])


def _row(table: int, network: str) -> Grid:
    """A network's rows of Tables 1 to 4."""
    data, compressor, networks = TABLES[table]
    model = SENET[data] if network == "senet" else f"{network}-{data}"
    return _three(paper(data, model, *networks[network], compressor))


def _batches(data: str, high: int, network: str = "resnet18") -> Grid:
    """4 x 128 images and ``high`` times as many."""
    base, smith = paper(data, f"{network}-{data}", 2, 1), (160, 800, 4000)
    return families.batches(base, 128, 128 * high, critical(base), smith=smith, interval=10)


def _three_batches(data: str, high: int, network: str = "resnet18") -> Grid:
    cells = _batches(data, high, network)
    return {name: cells[name] for name in BATCHES}


def _figure3() -> Grid:
    low = schedules(resnet18())["low"]
    curvature = {"every": 5, "images": 512, "batch": 128, "modes": ["eval", "batch-statistics"]}
    return {"low": replace(low, instruments={"curvature": curvature})}


_LOOP: dict[str, tuple[str, Callable[[], RunConfig]]] = {
    "resnet18-cifar100": ("Figures 1 and 2, Table 2; needs a GPU", resnet18_cifar100),
    "resnet18-cifar10": ("Table 1, rank 2 / 1; needs a GPU", resnet18),
    "vgg19bn-cifar10": ("Table 1 and Figure 6, rank 4 / 1; needs a GPU", vgg19bn),
    "lstm": ("Figure 11, a 2-layer LSTM on WikiText-2, TopK 99 % / 2 %; a GPU", partial(lstm)),
}
for _name, (_shows, _loop) in _LOOP.items():
    _same = f"paper-{_name}, rates by the text; a GPU"
    add(PRESETS, {f"paper-{_name}": (_shows, _loop)})
    add(PRESETS, {f"paper-text-{_name}": (_same, lambda loop=_loop: by_text(loop()))})

for _table, (_, _, _networks) in TABLES.items():
    for _network in _networks:
        _rows = f"--seeds 3: the rows of Table {_table}; a GPU"
        add(GRIDS, {f"paper-table{_table}-{_network}": (_rows, partial(_row, _table, _network))})
for _network in ("googlenet", "densenet"):
    for _table, _data in ((5, "cifar10"), (6, "cifar100")):
        _rows = f"--seeds 3: the rows of Table {_table}; a GPU"
        _make = partial(_three_batches, _data, 8, _network)
        add(GRIDS, {f"paper-table{_table}-{_network}": (_rows, _make)})

_GRIDS: dict[str, tuple[str, Callable[[], Grid]]] = {
    "paper-figure2": (
        "--seeds 3: Figure 2; four GPUs with `torchrun --nproc-per-node 4 -m` in front",
        lambda: schedules(resnet18_cifar100()),
    ),
    "paper-batch-cifar10": (
        "Figures 4b, 5, 16 and Table 5, batch 512 and 4,096; a GPU",
        lambda: _batches("cifar10", 8),
    ),
    "paper-batch-cifar100": (
        "Figures 5, 17 and Table 6; a GPU",
        lambda: _batches("cifar100", 8),
    ),
    "paper-batch-16384": (
        "Figure 10, batch 512 and 16,384; a GPU",
        lambda: _three_batches("cifar10", 32),
    ),
    "paper-adaqs": (
        "Figure 7, VGG-19bn on CIFAR-10, ranks 1, 2, 4; a GPU",
        lambda: families.adaqs(vgg19bn(), interval=10),
    ),
    "paper-budget": (
        "Figure 8, ResNet-18 on CIFAR-100, rank 1 until it has sent what rank 2 sends in 300 "
        "epochs; a GPU",
        lambda: families.budget(resnet18_cifar100(), 600, interval=10),
    ),
    "paper-ladder": (
        "Figure 9, VGG-19bn on CIFAR-100, ranks 4, 2, 1; a GPU",
        lambda: families.ladder(paper("cifar100", "vgg19bn-cifar100", 4, 1), interval=10),
    ),
    "paper-lstm": ("--seeds 3: the three curves of Figure 11; a GPU", lambda: _three(lstm())),
    "paper-figure3": (
        "Figure 3, ResNet-18 on CIFAR-10, eigenvalues of 512 images every 5 epochs; a GPU",
        _figure3,
    ),
    "paper-text-figure2": (
        "paper-figure2, rates and windows by the text; a GPU",
        lambda: schedules(by_text(resnet18_cifar100())),
    ),
    "paper-text-table1-resnet18": (
        "paper-table1-resnet18, rates by the text; a GPU",
        lambda: _three(by_text(resnet18())),
    ),
    "paper-text-lstm": (
        "paper-lstm, rates and interval by the text; a GPU",
        lambda: _three(by_text(lstm())),
    ),
}
add(GRIDS, _GRIDS)
