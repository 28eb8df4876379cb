"""CPU scale: grids that ask what the paper's figures leave open (`regimes figure claims`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regimes.config import RunConfig
from regimes.presets import cpu, families, language
from regimes.presets.registry import Grid, grid


def _rules(base: RunConfig, early: tuple[int, int]) -> Grid:
    """ACCORDION's interval, signal and decay rule, one changed at a time, and what it is held
    against."""
    accordion = {"name": "accordion", "interval": 3}
    policies: dict[str, dict[str, Any]] = {
        "low": families.static("low"),
        "high": families.static("high"),
        "low-early": families.windows(early),
        "accordion": accordion,
        **{f"interval {n}": {**accordion, "interval": n} for n in (1, 2, 4)},
        "no decay rule": {**accordion, "decay_rule": False},
        "norm x lr": {
            "name": "detected",
            "decay_rule": True,
            "detector": {"name": "norm-change", "interval": 3, "statistic": "norm*lr"},
        },
    }
    cells = families.follow(base, policies)
    for signal in ("global", "worker0"):
        name = f"signal {signal}"
        cells[name] = replace(cells["accordion"], name=name, signal=signal)
    return cells


@grid("smoke-rules")
def smoke_rules() -> Grid:
    """`regimes ablate smoke-rules --seeds 8 --jobs 2`: ACCORDION's parameters on digits; 4
    minutes, 2 cores."""
    return _rules(cpu.smoke(), (0, 6))


@grid("smoke-long")
def smoke_long() -> Grid:
    """`regimes ablate smoke-long --seeds 8 --jobs 2`: the same for 48 epochs, decays at 36 and 44;
    8 minutes, 2 cores."""
    base = cpu.smoke()
    return _rules(
        replace(base, epochs=48, optimizer=replace(base.optimizer, decay_epochs=(36, 44))), (0, 6)
    )


def _quirks(base: RunConfig) -> Grid:
    cells = families.schedules(base, [(0, 6)], late=(12, 18), interval=3)
    chosen = {name: cells[name] for name in ("low", "high", "accordion")}
    return chosen | {
        f"{name}, authors": replace(cell, name=f"{name}, authors", quirks="authors")
        for name, cell in chosen.items()
    }


@grid("small-quirks")
def small_quirks() -> Grid:
    """`regimes ablate small-quirks --seeds 5 --jobs 2`: what the published code does otherwise,
    PowerSGD; 5 minutes, 2 cores."""
    return _quirks(cpu.small())


@grid("smoke-quirks-topk")
def smoke_quirks_topk() -> Grid:
    """`regimes ablate smoke-quirks-topk --seeds 16 --jobs 2`: the same with TopK 10 % / 0.3 % on
    digits; 6 minutes, 2 cores."""
    return _quirks(
        replace(cpu.smoke(), compressor={"name": "topk"}, levels={"low": 10, "high": 0.3})
    )


@grid("smoke-resnet8")
def smoke_resnet8() -> Grid:
    """`regimes ablate smoke-resnet8 --seeds 5 --jobs 2`: Figure 2 in a network with skip
    connections; 3 minutes, 2 cores."""
    base = cpu.smoke()
    return _figure2(replace(base, model=replace(base.model, name="resnet8")))


@grid("smoke-full")
def smoke_full() -> Grid:
    """`regimes ablate smoke-full --seeds 5 --jobs 2`: Figure 2 with three times the digits; 5
    minutes, 2 cores."""
    base = cpu.smoke()
    return _figure2(replace(base, data=replace(base.data, train_size=1200)))


def _figure2(base: RunConfig) -> Grid:
    cells = cpu.figure2(base)
    return {n: cells[n] for n in ("dense", "low", "high", "high-in-critical", "accordion")}


RIVALS: dict[str, tuple[Any, ...]] = {  # levels, by compressor
    "powersgd": (1, 2, 4),
    "acp-sgd": (1, 2, 4, 8),
    "topk": (0.3, 1, 3, 10),
    "dct-topk": (1, 3, 10),
    "randomk": (1, 10),
    "quantise": (2, 4, 8),
    "sign": (1,),
    "cast": ("bf16",),
}


def _rivals(base: RunConfig, lr: float) -> Grid:
    """Dense training, and what each compressor would have made of its gradients."""
    tables = [{"name": name, "level": level} for name, levels in RIVALS.items() for level in levels]
    tables += [{"name": "acp-sgd", "iterations": 2, "level": rank} for rank in (1, 2, 4)]
    dense = replace(
        families.at_rate(base, lr),
        name="dense",
        policy=families.static("dense"),
        union_pass=False,
        instruments={"rivals": {"tables": tables}},
    )
    return {"dense": dense}


@grid("smoke-rivals")
def smoke_rivals() -> Grid:
    """`regimes ablate smoke-rivals --seeds 3`: error per float of every compressor on digits, at
    dense's best rate; 2 minutes on one core."""
    return _rivals(cpu.smoke(), 0.05)


@grid("lm-rivals")
def lm_rivals() -> Grid:
    """`regimes ablate lm-rivals --seeds 3`: the same on a text, `lm-small`; 20 minutes on one
    core."""
    return _rivals(language.lm_small(), 0.006)
