"""The paper's scale (Table 7): 300 epochs on whole data sets; a GPU, or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from regimes.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets import families
from regimes.presets.registry import Grid, grid, preset


def paper(data: str, model: str, low: Any, high: Any, compressor: str = "powersgd") -> RunConfig:
    """The paper's setting (Table 7) as the authors' loop runs it: 4 workers x 128, 300 epochs,
    lr 0.1 -> 0.4 in 5 epochs, divided by 10 after epochs 150 and 250. Their loop sets the rate at
    the end of an epoch, by that epoch's number: counted from 0 the warm-up lags by one epoch, and
    152 and 252 are the first epochs at the lower rates. `paper_text` has it by the text."""
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


@preset("paper-resnet18-cifar100")
def paper_resnet18_cifar100() -> RunConfig:
    """`regimes run paper-resnet18-cifar100`: Figures 1 and 2, Table 2; needs a GPU."""
    return paper("cifar100", "resnet18-cifar100", 2, 1)


@grid("paper-figure2")
def paper_figure2() -> Grid:
    """`torchrun --nproc-per-node 4 -m regimes ablate paper-figure2 --seeds 3`; four GPUs."""
    return schedules(paper_resnet18_cifar100())


@preset("paper-resnet18-cifar10")
def paper_resnet18_cifar10() -> RunConfig:
    """`regimes run paper-resnet18-cifar10`: Table 1, rank 2 / 1; needs a GPU."""
    return paper("cifar10", "resnet18-cifar10", 2, 1)


@preset("paper-vgg19bn-cifar10")
def paper_vgg19bn_cifar10() -> RunConfig:
    """`regimes run paper-vgg19bn-cifar10`: Table 1 and Figure 6, rank 4 / 1; needs a GPU."""
    return paper("cifar10", "vgg19bn-cifar10", 4, 1)


THREE, BATCHES = ("low", "high", "accordion"), ("small-batch", "large-batch", "accordion-batch")
TABLES: dict[int, tuple[str, str, dict[str, tuple[int, int]]]] = {
    1: ("cifar10", "powersgd", {"resnet18": (2, 1), "vgg19bn": (4, 1), "senet": (4, 1)}),
    2: ("cifar100", "powersgd", {"resnet18": (2, 1), "densenet": (2, 1), "senet": (2, 1)}),
    3: ("cifar10", "topk", {"resnet18": (99, 10), "googlenet": (99, 10), "senet": (99, 10)}),
    4: ("cifar100", "topk", {"resnet18": (99, 25), "googlenet": (99, 25), "senet": (99, 25)}),
}
SENET = {"cifar10": "se-resnet18-cifar10", "cifar100": "senet18-cifar100"}  # of the printed rows


def _rows(table: int, network: str) -> Callable[[], Grid]:
    def cells() -> Grid:
        data, compressor, networks = TABLES[table]
        model = SENET[data] if network == "senet" else f"{network}-{data}"
        return some(schedules(paper(data, model, *networks[network], compressor)), THREE)

    return _row(table, network, cells)


def _row(table: int, network: str, cells: Callable[[], Grid]) -> Callable[[], Grid]:
    name = f"paper-table{table}-{network}"
    cells.__doc__ = f"`regimes ablate {name} --seeds 3`: the rows of Table {table}; a GPU."
    return grid(name)(cells)


def some(cells: Grid, names: Iterable[str]) -> Grid:
    """These schedules of a grid."""
    return {name: cells[name] for name in names}


for _table, (_, _, _networks) in TABLES.items():
    for _network in _networks:
        _rows(_table, _network)


def _paper_batches(
    data: str, high: int, network: str = "resnet18", names: Sequence[str] = ()
) -> Grid:
    """4 x 128 images and ``high`` times as many."""
    base, smith = paper(data, f"{network}-{data}", 2, 1), (160, 800, 4000)
    cells = families.batches(base, 128, 128 * high, critical(base), smith=smith, interval=10)
    return some(cells, names or cells)


for _network in ("googlenet", "densenet"):
    for _table, _data in ((5, "cifar10"), (6, "cifar100")):
        _row(_table, _network, partial(_paper_batches, _data, 8, _network, BATCHES))


@grid("paper-batch-cifar10")
def paper_batch_cifar10() -> Grid:
    """`regimes ablate paper-batch-cifar10`: Figures 4b, 5, 16 and Table 5, batch 512 and 4,096; a
    GPU."""
    return _paper_batches("cifar10", 8)


@grid("paper-batch-cifar100")
def paper_batch_cifar100() -> Grid:
    """`regimes ablate paper-batch-cifar100`: Figures 5, 17 and Table 6; a GPU."""
    return _paper_batches("cifar100", 8)


@grid("paper-batch-16384")
def paper_batch_16384() -> Grid:
    """`regimes ablate paper-batch-16384`: Figure 10, batch 512 and 16,384; a GPU."""
    return _paper_batches("cifar10", 32, names=BATCHES)


@grid("paper-adaqs")
def paper_adaqs() -> Grid:
    """`regimes ablate paper-adaqs`: Figure 7, VGG-19bn on CIFAR-10, ranks 1, 2, 4; a GPU."""
    return families.adaqs(paper_vgg19bn_cifar10(), interval=10)


@grid("paper-budget")
def paper_budget() -> Grid:
    """`regimes ablate paper-budget`: Figure 8, ResNet-18 on CIFAR-100, rank 1 until it has sent
    what rank 2 sends in 300 epochs; a GPU."""
    return families.budget(paper_resnet18_cifar100(), 600, interval=10)


@grid("paper-ladder")
def paper_ladder() -> Grid:
    """`regimes ablate paper-ladder`: Figure 9, VGG-19bn on CIFAR-100, ranks 4, 2, 1; a GPU."""
    return families.ladder(paper("cifar100", "vgg19bn-cifar100", 4, 1), interval=10)


@preset("paper-lstm")
def paper_lstm() -> RunConfig:
    """`regimes run paper-lstm`: Figure 11, a 2-layer LSTM on WikiText-2, TopK 99 % / 2 %; a GPU.

    Table 7 has the rates (2.5 x W, warmed up in 5 epochs, divided by 10 after epochs 60 and 80);
    the authors' code has the batch, the window, dropout, clipping, no weight decay, an interval of
    5, and 62 and 81 as the first epochs at the lower rates."""
    return RunConfig(
        name="accordion",
        epochs=90,
        workers=4,
        batch_size=128,
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
        compressor={"name": "topk"},
        levels={"low": 99, "high": 2},
        policy={"name": "accordion", "eta": 0.5, "interval": 5},
    )


@grid("paper-lstm")
def paper_lstm_grid() -> Grid:
    """`regimes ablate paper-lstm --seeds 3`: the three curves of Figure 11; a GPU."""
    return some(schedules(paper_lstm()), THREE)


@grid("paper-figure3")
def paper_figure3() -> Grid:
    """`regimes ablate paper-figure3`: Figure 3, ResNet-18 on CIFAR-10, eigenvalues of 512 images
    every 5 epochs; a GPU."""
    found = schedules(paper_resnet18_cifar10())
    curvature = {"every": 5, "images": 512, "batch": 128, "modes": ["eval", "batch-statistics"]}
    return {"low": replace(found["low"], instruments={"curvature": curvature})}
