"""Named experiments: configurations, and grids of them (ablations).

A preset is a diff from the defaults; its docstring says the command, the machine and the minutes.
A grid is a family of schedules of one preset: ``{schedule: configuration}``; every seed of a grid
is a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regimes.config import Budget, DataConfig, ModelConfig, OptimizerConfig, RunConfig, to_dict
from regimes.errors import ConfigError, nearest

Grid = dict[str, RunConfig]
PRESETS: dict[str, Callable[[], RunConfig]] = {}
GRIDS: dict[str, Callable[[], Grid]] = {}


def preset(name: str) -> Callable[[Callable[[], RunConfig]], Callable[[], RunConfig]]:
    """Register a configuration under a name."""

    def register(make: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
        PRESETS[name] = make
        return make

    return register


def grid(name: str) -> Callable[[Callable[[], Grid]], Callable[[], Grid]]:
    """Register a grid under a name."""

    def register(make: Callable[[], Grid]) -> Callable[[], Grid]:
        GRIDS[name] = make
        return make

    return register


def get_preset(name: str) -> RunConfig:
    """A preset, or ConfigError with the nearest name. ``GRID/SCHEDULE`` names a cell of a grid."""
    if name in PRESETS:
        return PRESETS[name]()
    grid_name, slash, schedule = name.partition("/")
    if slash and grid_name in GRIDS:
        cells = GRIDS[grid_name]()
        if schedule in cells:
            return cells[schedule]
        raise ConfigError(
            f"grid {grid_name!r} has no schedule {schedule!r}: {nearest(schedule, cells)}"
        )
    raise ConfigError(f"unknown preset {name!r}: {nearest(name, PRESETS)}")


def get_grid(name: str) -> Grid:
    """A grid, or ConfigError with the nearest name."""
    if name not in GRIDS:
        raise ConfigError(f"unknown grid {name!r}: {nearest(name, GRIDS)}")
    return GRIDS[name]()


def check_common(grid: Grid, settings: tuple[str, ...]) -> None:
    """Raise ConfigError if a setting would overwrite what tells a grid's schedules apart."""
    for setting in settings:
        path = setting.partition("=")[0].strip().split(".")
        values = {name: _at(to_dict(cell), path) for name, cell in grid.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise ConfigError(
                f"--set {setting}: the schedules {', '.join(values)} differ in {'.'.join(path)}; "
                "choose those it is meant for with --schedules"
            )


def _at(table: Any, path: list[str]) -> Any:
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _windows(
    *windows: tuple[int, int], inside: str = "low", outside: str = "high"
) -> dict[str, Any]:
    return {"name": "windows", "windows": list(windows), "inside": inside, "outside": outside}


def schedules(
    base: RunConfig, critical: list[tuple[int, int]], late: tuple[int, int], **accordion: Any
) -> Grid:
    """The schedules of Figure 2 and their controls.

    Args:
        critical: hand-made critical windows ``[first, stop)``; the first is the early one.
        late: a window as long as the early one, after the decay (control of equal traffic).
        accordion: fields of the ACCORDION policy.
    """
    early = critical[0]
    policies = {
        "dense": {"name": "static", "level": "dense"},
        "low": {"name": "static", "level": "low"},
        "high": {"name": "static", "level": "high"},
        "low-in-critical": _windows(*critical),
        "high-in-critical": _windows(*critical, inside="high", outside="dense"),
        "accordion": {"name": "accordion", **accordion},
        "low-early": _windows(early),
        "low-late": _windows(late),
    }
    cells = {name: replace(base, name=name, policy=table) for name, table in policies.items()}
    return {**cells, "dense-deleted": _without_first(cells["dense"], early[1])}


def _without_first(config: RunConfig, epochs: int) -> RunConfig:
    """The same training with so many epochs deleted before the first decay (the warm-up stays):
    is what happens in the early window damage, or only lost time?"""
    sooner = tuple(first - epochs for first in config.optimizer.decay_epochs)
    return replace(
        config,
        name="dense-deleted",
        epochs=config.epochs - epochs,
        optimizer=replace(config.optimizer, decay_epochs=sooner),
    )


# -- CPU scale -------------------------------------------------------------------------------


@preset("smoke")
def smoke() -> RunConfig:
    """`regimes run smoke`: digits, VGG-7 of 18 k parameters, 4 workers x 8; 4 s on one core."""
    return RunConfig(
        name="accordion",
        epochs=24,
        workers=4,
        batch_size=8,
        data=DataConfig(name="digits", train_size=400, drop_last=True),
        model=ModelConfig(name="vgg7", width=8),
        optimizer=OptimizerConfig(lr=0.4, warmup_from=0.1, warmup_epochs=2, decay_epochs=(12, 20)),
        policy={"name": "accordion", "interval": 3},
    )


@grid("smoke")
def smoke_grid() -> Grid:
    """`regimes ablate smoke --seeds 5 --jobs 2`: Figure 2 and its controls; 2 minutes, 2 cores."""
    return schedules(smoke(), [(0, 6), (12, 14)], late=(12, 18), interval=3)


@preset("small")
def small() -> RunConfig:
    """`regimes run small` (with `--set data.name=folder --set data.path=ARCHIVE` for an image
    archive): 3,000 CIFAR-10 images at 16 x 16, VGG-7 of 75 k parameters, 4 workers x 16; 20 s on
    one core."""
    return replace(
        smoke(),
        batch_size=16,
        data=DataConfig(
            name="cifar10", train_size=3000, test_size=2000, image_size=16, drop_last=True
        ),
        model=ModelConfig(name="vgg7", width=16),
        optimizer=OptimizerConfig(lr=0.3, warmup_from=0.05, warmup_epochs=3, decay_epochs=(12, 20)),
    )


@grid("small")
def small_grid() -> Grid:
    """`regimes ablate small --seeds 5 --jobs 2`: Figure 2 and its controls; 12 minutes, 2 cores."""
    return schedules(small(), [(0, 6), (12, 14)], late=(12, 18), interval=3)


def _overlap(base: RunConfig, batches: list[int], every: int) -> Grid:
    """Support overlap between stochastic gradients, with and without compression in training."""
    tables = {"overlap": {"batches": batches, "every": every}}
    return {
        level: replace(
            base, name=level, policy={"name": "static", "level": level}, instruments=tables
        )
        for level in ("dense", "low")
    }


@grid("smoke-overlap")
def smoke_overlap() -> Grid:
    """`regimes ablate smoke-overlap --seeds 5`: Figure 4a, up to half of the 400 training images;
    3 minutes on one core."""
    return _overlap(smoke(), [8, 16, 32, 64, 128, 200], every=1)


@grid("small-overlap")
def small_overlap() -> Grid:
    """`regimes ablate small-overlap --seeds 3`: Figure 4a, up to half of the 3,000 training
    images; 7 minutes on one core."""
    return _overlap(small(), [16, 32, 128, 512, 1024, 1500], every=3)


def _signals(base: RunConfig, *names: str) -> Grid:
    """Schedules with every signal that a detector may read, from one probe of 200 images."""
    tables: dict[str, dict[str, Any]] = {
        "norms": {"readings": ["update", "global"]},
        "curvature": {"modes": ["eval", "batch-statistics"], "probes": 4},
        "fisher": {},
        "msdr": {},
    }
    cells = schedules(base, [(0, 6), (12, 14)], late=(12, 18), interval=3)
    return {name: replace(cells[name], instruments=tables) for name in names}


@grid("smoke-signals")
def smoke_signals() -> Grid:
    """`regimes ablate smoke-signals --seeds 5`: Figure 3 and the detector bench on digits; 8
    minutes on one core."""
    return _signals(smoke(), "low", "accordion")


@grid("small-signals")
def small_signals() -> Grid:
    """`regimes ablate small-signals --seeds 5`: Figure 3 and the detector bench on CIFAR-10; 20
    minutes on one core."""
    return _signals(small(), "low")


@grid("small-batch")
def small_batch() -> Grid:
    """`regimes ablate small-batch --seeds 5 --jobs 2`: Figures 4b, 5 and 10: batch sizes 64, 256
    and 512 of 3,000 images, uncompressed, at a third of `small`'s learning rate, since four times
    that rate no longer trains; 10 minutes, 2 cores."""
    critical = [(0, 6), (12, 14)]
    cells = _batches(_gentle(), 16, 64, critical, smith=(20, 100, 500), interval=3)
    for name in ("large-batch", "accordion-batch"):
        largest = {"low": 16, "high": 128}
        cells[f"{name}-8x"] = replace(cells[name], name=f"{name}-8x", batch_levels=largest)
    return cells


def _gentle() -> RunConfig:
    """`small` at a learning rate that leaves room to be scaled with the batch."""
    optimizer = replace(small().optimizer, lr=0.1, warmup_from=0.02)
    return replace(small(), optimizer=optimizer)


def _batches(
    base: RunConfig,
    low: int,
    high: int,
    critical: list[tuple[int, int]],
    smith: tuple[int, ...],
    interval: int,
) -> Grid:
    """Batch size as a level: fixed, in windows, by ACCORDION, and Smith et al., who start with a
    batch and a rate 1.25 times larger and grow five-fold where the rate would decay."""
    plain = replace(
        base,
        compressor={"name": "dense"},
        levels={},
        policy={"name": "static", "level": "dense"},
        batch_size=low,
        batch_levels={"low": low, "high": high},
    )
    policies: dict[str, dict[str, Any]] = {
        "small-batch": {"name": "static", "level": "low"},
        "large-batch": {"name": "static", "level": "high"},
        "small-in-critical": _windows(*critical),
        "large-in-critical": _windows(*critical, inside="high", outside="low"),
        "accordion-batch": {"name": "accordion-batch", "interval": interval},
    }
    cells = {name: replace(plain, name=name, batch_policy=p) for name, p in policies.items()}
    words = [f"x{size // smith[0]}" for size in smith]
    optimizer = replace(base.optimizer, lr=base.optimizer.lr * smith[0] / low, decay_factor=5.0)
    cells["smith"] = replace(
        plain,
        name="smith",
        batch_size=smith[0],
        batch_levels=dict(zip(words, smith, strict=True)),
        batch_policy={"name": "smith", "levels": words},
        optimizer=optimizer,
    )
    return cells


@grid("small-adaqs")
def small_adaqs() -> Grid:
    """`regimes ablate small-adaqs --seeds 5 --jobs 2`: Figure 7, AdaQS over ranks 1, 2, 4; 6
    minutes, 2 cores."""
    return _adaqs(small(), interval=3)


def _adaqs(base: RunConfig, interval: int) -> Grid:
    low, high = int(base.levels["low"]), int(base.levels["high"])
    levels: dict[str, Any] = {"low": low, "mid": (low + high) // 2, "high": high}
    ladder = ["high", "mid", "low"] if high < levels["mid"] < low else ["high", "low"]
    policies: dict[str, dict[str, Any]] = {
        "low": {"name": "static", "level": "low"},
        "high": {"name": "static", "level": "high"},
        "accordion": {"name": "accordion", "interval": interval},
        "adaqs": {"name": "adaqs", "levels": ladder},
    }
    return {name: replace(base, name=name, levels=levels, policy=p) for name, p in policies.items()}


@grid("small-budget")
def small_budget() -> Grid:
    """`regimes ablate small-budget --seeds 5 --jobs 2`: Figure 8, rank 1 until it has sent what
    rank 4 sends in 24 epochs; 10 minutes, 2 cores."""
    return _budget(small(), 120, interval=3)


def _budget(base: RunConfig, most: int, interval: int) -> Grid:
    """The high level trained on: with the decays where they were, and with all epochs stretched by
    the ratio of the levels' traffic."""
    cells = {name: schedules(base, [(0, 6)], late=(12, 18), interval=interval)[name]
             for name in ("low", "high", "accordion")}  # fmt: skip
    budget = Budget("low", base.epochs)
    longer = replace(cells["high"], name="high-longer", epochs=most, budget=budget)
    decays = tuple(first * most // base.epochs for first in base.optimizer.decay_epochs)
    stretched = replace(
        longer, name="high-stretched", optimizer=replace(base.optimizer, decay_epochs=decays)
    )
    return {**cells, "high-longer": longer, "high-stretched": stretched}


@grid("small-ladder")
def small_ladder() -> Grid:
    """`regimes ablate small-ladder --seeds 5 --jobs 2`: Figure 9: which two ranks ACCORDION is
    given, and three policies that choose among ranks 1, 2, 4 themselves; 9 minutes, 2 cores."""
    return _ladder(small(), interval=3)


def _ladder(base: RunConfig, interval: int) -> Grid:
    accordion = {"name": "accordion", "interval": interval}
    ranks: dict[str, Any] = {"r1": 1, "r2": 2, "r4": 4}
    rungs = list(ranks)
    policies: dict[str, dict[str, Any]] = {
        "rank 4": {"name": "static", "level": "r4"},
        "rank 2": {"name": "static", "level": "r2"},
        "rank 1": {"name": "static", "level": "r1"},
        "accordion 4-1": {**accordion, "low": "r4", "high": "r1"},
        "accordion 4-2": {**accordion, "low": "r4", "high": "r2"},
        "error-ladder": {"name": "error-ladder", "levels": rungs, "error": 0.5},
        "accordion-ladder": {"name": "accordion-ladder", "levels": rungs, "interval": interval},
    }
    return {name: replace(base, name=name, levels=ranks, policy=p) for name, p in policies.items()}


@grid("small-deficit")
def small_deficit() -> Grid:
    """`regimes ablate small-deficit --seeds 5 --jobs 2`: blurred images and wrong labels in the
    first, middle and last third of training (Achille et al. 2019); 7 minutes, 2 cores."""
    return _deficits(small(), [(0, 6), (6, 12), (12, 18), (18, 24)])


def _deficits(base: RunConfig, windows: list[tuple[int, int]]) -> Grid:
    plain = replace(base, name="none", policy={"name": "static", "level": "dense"})
    cells = {"none": plain}
    for kind in ("blur", "labels"):
        for first, stop in windows:
            name = f"{kind} {first}-{stop - 1}"
            table = {"name": kind, "windows": [[first, stop]]}
            cells[name] = replace(plain, name=name, deficit=table)
    return cells


@grid("small-joint")
def small_joint() -> Grid:
    """`regimes ablate small-joint --seeds 5 --jobs 2`: compression and batch size decided
    together (the paper's future work); 6 minutes, 2 cores."""
    base = replace(_gentle(), batch_levels={"low": 16, "high": 64})
    compression = {"name": "accordion", "interval": 3}
    batch = {"name": "accordion-batch", "interval": 3}
    low = {"name": "static", "level": "low"}
    cells: dict[str, Any] = {"low": (low, None), "compression": (compression, None), "batch": (low, batch),
             "both": (compression, batch)}  # fmt: skip
    return {name: replace(base, name=name, policy=c, batch_policy=b)
            for name, (c, b) in cells.items()}  # fmt: skip


# -- the paper's scale -----------------------------------------------------------------------


def paper(data: str, model: str, low: Any, high: Any, compressor: str = "powersgd") -> RunConfig:
    """The paper's setting (Table 7): 4 workers x 128, 300 epochs, lr 0.1 -> 0.4 in 5 epochs,
    divided by 10 after epochs 150 and 250: counted from 0, epoch 151 is the first at the lower
    rate, so that the decay rule holds until the evaluation after epoch 160."""
    return RunConfig(
        name="accordion",
        epochs=300,
        workers=4,
        batch_size=128,
        data=DataConfig(name=data, augment=True),
        model=ModelConfig(name=model),
        optimizer=OptimizerConfig(lr=0.4, warmup_from=0.1, decay_epochs=(151, 251)),
        compressor={"name": compressor},
        levels={"low": low, "high": high},
        policy={"name": "accordion", "eta": 0.5, "interval": 10},
    )


@preset("paper-resnet18-cifar100")
def paper_resnet18_cifar100() -> RunConfig:
    """`regimes run paper-resnet18-cifar100`: Figures 1 and 2, Table 2; needs a GPU."""
    return paper("cifar100", "resnet18-cifar100", 2, 1)


@grid("paper-figure2")
def paper_figure2() -> Grid:
    """`torchrun --nproc-per-node 4 -m regimes ablate paper-figure2 --seeds 3`; four GPUs."""
    return schedules(paper_resnet18_cifar100(), [(0, 20), (151, 161)], late=(151, 171), interval=10)


@preset("paper-resnet18-cifar10")
def paper_resnet18_cifar10() -> RunConfig:
    """`regimes run paper-resnet18-cifar10`: Table 1, rank 2 / 1; needs a GPU."""
    return paper("cifar10", "resnet18-cifar10", 2, 1)


@preset("paper-vgg19bn-cifar10")
def paper_vgg19bn_cifar10() -> RunConfig:
    """`regimes run paper-vgg19bn-cifar10`: Table 1 and Figure 6, rank 4 / 1; needs a GPU."""
    return paper("cifar10", "vgg19bn-cifar10", 4, 1)


def _table(base: Callable[[], RunConfig]) -> Callable[[], Grid]:
    def cells() -> Grid:
        rows = schedules(base(), [(0, 20), (151, 161)], late=(151, 171), interval=10)
        return {name: rows[name] for name in ("low", "high", "accordion")}

    cells.__doc__ = f"`regimes ablate NAME --seeds 3`: the rows of Table 1 for {base.__name__}."
    return cells


grid("paper-table1-resnet18")(_table(paper_resnet18_cifar10))
grid("paper-table1-vgg19bn")(_table(paper_vgg19bn_cifar10))


# -- the paper's scale: batch size, AdaQS, budget, ladder ------------------------------------


def _paper_batches(data: str, high: int) -> Grid:
    """4 x 128 images and ``high`` times as many; decays after epochs 150 and 250 (section 5.1)."""
    base = paper(data, f"resnet18-{data}", 2, 1)
    critical = [(0, 20), (151, 161)]
    return _batches(base, 128, 128 * high, critical, smith=(160, 800, 4000), interval=10)


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
    cells = _paper_batches("cifar10", 32)
    return {name: cells[name] for name in ("small-batch", "large-batch", "accordion-batch")}


@grid("paper-adaqs")
def paper_adaqs() -> Grid:
    """`regimes ablate paper-adaqs`: Figure 7, VGG-19bn on CIFAR-10, ranks 1, 2, 4; a GPU."""
    return _adaqs(paper_vgg19bn_cifar10(), interval=10)


@grid("paper-budget")
def paper_budget() -> Grid:
    """`regimes ablate paper-budget`: Figure 8, ResNet-18 on CIFAR-100, rank 1 until it has sent
    what rank 2 sends in 300 epochs; a GPU."""
    return _budget(paper_resnet18_cifar100(), 600, interval=10)


@grid("paper-ladder")
def paper_ladder() -> Grid:
    """`regimes ablate paper-ladder`: Figure 9, VGG-19bn on CIFAR-100, ranks 4, 2, 1; a GPU."""
    return _ladder(paper("cifar100", "vgg19bn-cifar100", 4, 1), interval=10)
