"""CPU scale: minutes on two cores, with the paper's phenomena where they show."""

from __future__ import annotations

from dataclasses import replace

from regimes.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets import families
from regimes.presets.registry import GRIDS, Grid, add, preset

DEFICITS = [(0, 6), (6, 12), (12, 18)]


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


def _figure2(base: RunConfig) -> Grid:
    """Figure 2 and its controls, in 24 epochs with decays at 12 and 20."""
    return families.schedules(base, [(0, 6), (12, 14)], late=(12, 18), interval=3)


def _compressed(base: RunConfig, name: str, low: float, high: float) -> Grid:
    return _figure2(replace(base, compressor={"name": name}, levels={"low": low, "high": high}))


def _gentle() -> RunConfig:
    """`small` at a learning rate that leaves room to be scaled with the batch."""
    optimizer = replace(small().optimizer, lr=0.1, warmup_from=0.02)
    return replace(small(), optimizer=optimizer)


def _batches() -> Grid:
    critical = [(0, 6), (12, 14)]
    cells = families.batches(_gentle(), 16, 64, critical, smith=(20, 100, 500), interval=3)
    for name in ("large-batch", "accordion-batch"):
        largest = {"low": 16, "high": 128}
        cells[f"{name}-8x"] = replace(cells[name], name=f"{name}-8x", batch_levels=largest)
    return cells


def _joint() -> Grid:
    base = replace(_gentle(), batch_levels={"low": 16, "high": 64})
    policies = {"low": families.static("low"), "compression": base.policy}
    cells = families.follow(base, policies)
    for name, fixed in (("batch", "low"), ("both", "compression")):
        batch = {"name": "accordion-batch", "interval": 3}
        cells[name] = replace(cells[fixed], name=name, batch_policy=batch)
    return cells


MANY = "--seeds 5 --jobs 2"
_GRIDS = {
    "smoke": (f"{MANY}: Figure 2 and its controls; 2 minutes, 2 cores", lambda: _figure2(smoke())),
    "small": (f"{MANY}: Figure 2 and its controls; 12 minutes, 2 cores", lambda: _figure2(small())),
    "smoke-signals": (
        "--seeds 5: Figure 3 and the detector bench on digits; 8 minutes on one core",
        lambda: families.signals(_figure2(smoke()), "low", "accordion"),
    ),
    "small-signals": (
        "--seeds 5: Figure 3 and the detector bench on CIFAR-10; 20 minutes on one core",
        lambda: families.signals(_figure2(small()), "low"),
    ),
    "small-topk": (
        f"{MANY}: Figure 2 with TopK 10 % / 0.3 %; 20 minutes, 2 cores",
        lambda: _compressed(small(), "topk", 10, 0.3),
    ),
    "smoke-quantise": (
        f"{MANY}: Figure 2 with 8 and 2 bits per coordinate; 3 minutes, 2 cores",
        lambda: _compressed(smoke(), "quantise", 8, 2),
    ),
    "small-batch": (
        f"{MANY}: Figures 4b, 5 and 10: batch sizes 64, 256 and 512 of 3,000 images, "
        "uncompressed, at a third of `small`'s learning rate, since four times that rate no "
        "longer trains; 10 minutes, 2 cores",
        _batches,
    ),
    "small-adaqs": (
        f"{MANY}: Figure 7, AdaQS over ranks 1, 2, 4; 6 minutes, 2 cores",
        lambda: families.adaqs(small(), interval=3),
    ),
    "small-budget": (
        f"{MANY}: Figure 8, rank 1 until it has sent what rank 4 sends in 24 epochs; 10 "
        "minutes, 2 cores",
        lambda: families.budget(small(), 120, interval=3),
    ),
    "small-ladder": (
        f"{MANY}: Figure 9: which two ranks ACCORDION is given, and three policies that choose "
        "among ranks 1, 2, 4 themselves; 9 minutes, 2 cores",
        lambda: families.ladder(small(), interval=3),
    ),
    "smoke-deficit": (
        f"{MANY}: `small-deficit` on digits; 2 minutes, 2 cores",
        lambda: families.deficits(smoke(), DEFICITS),
    ),
    "small-deficit": (
        f"{MANY}: blurred images or wrong labels in epochs 0-5, 6-11 or 12-17 of 24 (Achille "
        "et al. 2019); 7 minutes, 2 cores",
        lambda: families.deficits(small(), DEFICITS),
    ),
    "small-joint": (
        f"{MANY}: compression and batch size decided together (the paper's future work); 6 "
        "minutes, 2 cores",
        _joint,
    ),
    "lstm-small": (
        "--seeds 3 --jobs 2: Figure 11 and the controls of Figure 2; 20 minutes, 2 cores",
        lambda: _figure2(lstm_small()),
    ),
}
add(GRIDS, _GRIDS)
