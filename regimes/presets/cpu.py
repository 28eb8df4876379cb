"""CPU scale: minutes on two cores, with the paper's phenomena where they show."""

from __future__ import annotations

from dataclasses import replace

from regimes.base.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets import families
from regimes.presets.registry import Grid, grid, preset


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


@preset("cifar10-fast")
def cifar10_fast() -> RunConfig:
    """`regimes run cifar10-fast` (with `--set data.name=folder --set data.path=ARCHIVE` for an
    image archive): all of CIFAR-10, a speedrun network of 498 k parameters, 4 workers x 128; 20
    minutes on one core that multiplies in bfloat16 (elsewhere `--set precision=strict`)."""
    return RunConfig(
        name="accordion",
        epochs=30,
        workers=4,
        batch_size=128,
        data=DataConfig(name="cifar10", augment=True, drop_last=True),
        model=ModelConfig(name="speednet"),
        optimizer=OptimizerConfig(
            lr=0.4,
            warmup_from=0.08,
            warmup_epochs=2,
            decay_epochs=(15, 25),
            weight_decay=5e-4,
        ),
        policy={"name": "accordion", "interval": 1},
        label_smoothing=0.1,
        precision="bfloat16",
        evaluate_precision="training",
        channels_last=True,
    )


@preset("lstm-small")
def lstm_small() -> RunConfig:
    """`regimes run lstm-small` (with `--set data.path=FOLDER`, or `--set data.download=true`):
    60,000 tokens of WikiText-2 in 2,000 words, a 2-layer LSTM of 197 k parameters, 4 workers x 5
    streams of 35 tokens, TopK 99 % / 2 %; 80 s on one core."""
    return RunConfig(
        name="accordion",
        epochs=24,
        workers=4,
        batch_size=5,
        data=DataConfig(
            name="wikitext-2", vocabulary=2000, train_size=60_000, test_size=50_000, sequence=35
        ),
        model=ModelConfig(name="lstm", width=64, depth=2, dropout=0.4),
        optimizer=OptimizerConfig(
            lr=4.0,
            warmup_from=1.0,
            warmup_epochs=3,
            decay_epochs=(12, 20),
            weight_decay=0.0,
            clip=0.25,
        ),
        compressor={"name": "topk"},
        levels={"low": 99, "high": 2},
        policy={"name": "accordion", "interval": 3},
    )


@grid("smoke")
def smoke_grid() -> Grid:
    """`regimes ablate smoke --seeds 5 --jobs 2`: Figure 2 and its controls; 2 minutes, 2 cores."""
    return _figure2(smoke())


@grid("small")
def small_grid() -> Grid:
    """`regimes ablate small --seeds 5 --jobs 2`: Figure 2 and its controls; 12 minutes, 2 cores."""
    return _figure2(small())


@grid("lstm-small")
def lstm_small_grid() -> Grid:
    """`regimes ablate lstm-small --seeds 3 --jobs 2`: Figure 11 and the controls of Figure 2; 20
    minutes, 2 cores."""
    return _figure2(lstm_small())


def _figure2(base: RunConfig) -> Grid:
    """Figure 2 and its controls, in 24 epochs with decays at 12 and 20."""
    return families.figure2_schedules(base, [(0, 6), (12, 14)], late=(12, 18), interval=3)
