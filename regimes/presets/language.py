"""Language models on any machine, without a download: a GPT on the source of the standard library.

Bytes in windows, one pass over them, counted in steps; AdamW, a warm-up, then the rate divided by
the root of ten after 60 and 80 % of the run; a unit is 25 steps. The metric is bits per byte.
"""

from __future__ import annotations

from dataclasses import replace

from regimes.base.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from regimes.presets import families
from regimes.presets.registry import Grid, grid, preset

DEMO_RATES = {  # chosen of 0.00075 to 0.024 on text held out: data/reference/lm-demo-tune.json
    "dense": 0.003,
    "low": 0.003,
    "mid": 0.0015,
    "high": 0.012,
    "low-first": 0.003,
    "low-last": 0.012,
    "accordion": 0.003,
}


def _in_steps(steps: int, unit: int, test_windows: int) -> RunConfig:
    """`lm_small` in so many steps, and units of so many."""
    return RunConfig(
        name="accordion",
        epochs=1,
        unit_steps=unit,
        workers=4,
        batch_size=8,
        data=DataConfig(
            name="stdlib",
            train_size=steps * 32 * 64 + 1,
            test_size=test_windows * 64 + 1,
            sequence=64,
            windows="contiguous",
            drop_last=True,
        ),
        model=ModelConfig(name="gpt", width=64, depth=2, heads=4),
        optimizer=_optimizer(0.003, steps),
        levels={"low": 4, "mid": 2, "high": 1},
        policy={"name": "accordion", "interval": 3},
    )


def _optimizer(lr: float, steps: int) -> OptimizerConfig:
    return OptimizerConfig(
        name="adamw",
        lr=lr,
        per="step",
        warmup_steps=steps // 10,
        decay_steps=(6 * steps // 10, 8 * steps // 10),
        decay_factor=10**0.5,
        weight_decay=0.1,
    )


@preset("lm-small")
def lm_small() -> RunConfig:
    """`regimes run lm-small`: a GPT of 115 k parameters on 1.2 MB of the standard library's source,
    4 workers x 8 windows of 64 bytes, 600 steps in 24 units; 30 s on one core."""
    return _in_steps(600, 25, 256)


@grid("lm-small")
def lm_small_grid() -> Grid:
    """`regimes ablate lm-small --seeds 3 --jobs 2`: dense and ranks 4, 2, 1 throughout, rank 4 in
    the first, second or last quarter, ACCORDION; 12 minutes, 2 cores."""
    base = lm_small()
    quarters = {"low-first": (0, 6), "low-second": (6, 12), "low-last": (18, 24)}
    policies = {level: families.static_table(level) for level in ("dense", "low", "mid", "high")}
    policies |= {name: families.windows_table(quarter) for name, quarter in quarters.items()}
    return families.grid_of_policies(base, {**policies, "accordion": base.policy})


@grid("lm-demo")
def lm_demo() -> Grid:
    """`regimes ablate lm-demo --seeds 3 --jobs 2`: `lm-small` in 192 steps, 24 units of 8: dense,
    ranks 4, 2 and 1, rank 4 in the first or last quarter, ACCORDION, each at its own learning
    rate; 3.5 minutes, 2 cores."""
    arms = lm_small_grid()
    cells = families.grid_of_policies(
        _in_steps(192, 8, 128), {name: arms[name].policy for name in DEMO_RATES}
    )
    return {name: families.at_rate(cell, DEMO_RATES[name]) for name, cell in cells.items()}


@preset("lm-smoke")
def lm_smoke() -> RunConfig:
    """`regimes run lm-smoke`: `lm-small` in 40 steps, 8 units of 5; 3 s on one core."""
    return replace(_in_steps(40, 5, 64), policy={"name": "accordion", "interval": 1})


@preset("sparseloco-small")
def sparseloco_small() -> RunConfig:
    """`regimes run sparseloco-small`: `lm-small` by SparseLoCo (Sarfi et al., 2025: 1 to 3 % of the
    movements in 2 bits), here with 15 local steps of AdamW, 1.56 % of each block of 64 x 64
    movements, feedback 0.95 and outer rate 1; 30 s on one core."""
    return replace(
        lm_small(),
        name="sparseloco",
        sync_levels={"h": 15},
        sync_policy=families.static_table("h"),
        compressor={"name": "chunked-topk", "bits": 2, "error_feedback": 0.95},
        levels={"high": 1.5625},
        policy=families.static_table("high"),
    )
