"""Language models on any machine, without a download: a GPT on the source of the standard library.

Bytes, in windows that are drawn anew in every epoch; bits per byte. `_optimizer` holds what the
runs are tuned by, and each preset its length.
"""

from __future__ import annotations

from dataclasses import replace

from regimes.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets.registry import preset


def _optimizer(lr: float) -> OptimizerConfig:
    """SGD without weight decay, as the LSTM's; the warm-up is long, or it diverges."""
    return OptimizerConfig(
        lr=lr, warmup_from=lr / 10, warmup_epochs=4, decay_epochs=(16, 21), weight_decay=0.0
    )


@preset("lm-small")
def lm_small() -> RunConfig:
    """`regimes run lm-small`: a GPT of 115 k parameters on bytes of the standard library, windows
    of 64, 4 workers x 8 of them, 20 steps an epoch; 30 s on one core."""
    return RunConfig(
        name="accordion",
        epochs=24,
        workers=4,
        batch_size=8,
        data=DataConfig(
            name="stdlib", train_size=41_000, test_size=16_385, sequence=64, windows="sampled",
            drop_last=True,
        ),
        model=ModelConfig(name="gpt", width=64, depth=2, heads=4),
        optimizer=_optimizer(0.06),
        policy={"name": "accordion", "interval": 3},
    )  # fmt: skip


@preset("lm-smoke")
def lm_smoke() -> RunConfig:
    """`regimes run lm-smoke`: `lm-small` in 4 epochs of 10 steps; 3 s on one core."""
    base = lm_small()
    return replace(
        base,
        epochs=4,
        data=replace(base.data, train_size=20_500, test_size=4_097),
        optimizer=replace(base.optimizer, warmup_epochs=1, decay_epochs=(3,)),
        policy={"name": "accordion", "interval": 1},
    )


@preset("lm-gpu")
def lm_gpu() -> RunConfig:
    """`regimes run lm-gpu`: all of it, a GPT of 10.7 M parameters, windows of 256, 4 workers x 16
    of them; one GPU, minutes (not timed)."""
    base = lm_small()
    return replace(
        base,
        batch_size=16,
        data=replace(base.data, train_size=None, test_size=None, sequence=256),
        model=replace(base.model, width=384, depth=6, heads=6),
        autocast="bfloat16",
        device="cuda",
    )
