"""What a configuration asks for, and the modes in which it runs (`capabilities`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from regimes.base import capabilities
from regimes.base.capabilities import (
    ALIKE_WORKERS,
    BATCH_SIZES,
    CAPTURED_STEPS,
    HALF_PARAMETERS,
    NAMED_TASK,
    OWN_COLLECTIVES,
    WORKER_MODELS,
    Mode,
    Part,
)
from regimes.base.config import DataConfig, ModelConfig, OuterConfig, RunConfig
from regimes.compression.needs import compressor_parts
from regimes.data import deficits
from regimes.instruments import make_instruments
from regimes.instruments.needs import needs_of, policy_parts, signal_parts
from regimes.policies.schedules import period_of
from regimes.records import OWN

if TYPE_CHECKING:
    from regimes.training.checks import PlugIns

# Fields that need something where they have another value than by default: needs, and what an error
# expects in place of the value.
FIELDS: dict[str, tuple[frozenset[str], str]] = {
    "channels_last": (frozenset({NAMED_TASK}), "false"),
    "label_smoothing": (frozenset({NAMED_TASK}), "0.0"),
    "graphs": (frozenset({CAPTURED_STEPS}), "none"),
    "batch_policy": (frozenset({BATCH_SIZES}), "none"),
    "sync_policy": (frozenset({WORKER_MODELS}), "none"),
}


def parts_of(config: RunConfig, plug_ins: PlugIns) -> Iterator[Part]:
    """Everything in a configuration that needs something.

    Raises:
        ConfigError: an instrument that does not exist, or has wrong fields.
    """
    for field, (needs, instead) in FIELDS.items():
        value = getattr(config, field)
        if value:
            shown = value if isinstance(value, bool | int | float) else capabilities.ABSENT
            yield Part(field, needs, shown, instead)
    if config.dtype in ("bfloat16", "float16"):
        yield Part("dtype", {HALF_PARAMETERS}, config.dtype, "float32 or float64")
    data = config.data
    if data != DataConfig(name=data.name, drop_last=data.drop_last, reshuffle=data.reshuffle):
        yield Part("data", {NAMED_TASK})
    if config.model != ModelConfig(name=config.model.name):
        yield Part("model", {NAMED_TASK})
    yield from outer_parts(config.outer)
    yield from compressor_parts(plug_ins.compressor)
    for name, tool in make_instruments(config.instruments).items():
        yield Part(f"instruments.{name}", needs_of(tool))
    for field, rule in plug_ins.policies.items():
        yield from policy_parts(rule, field)
    yield from signal_parts(config.signal, *plug_ins.policies.values())
    if config.deficit is not None:
        needs = capabilities.declared_needs(plug_ins.deficit, deficits.UNDECLARED)
        yield Part("deficit", needs, config.deficit["name"])


def outer_parts(outer: OuterConfig) -> Iterator[Part]:
    """What a synchronisation after local steps does."""
    if outer != OuterConfig():
        yield Part("outer", {WORKER_MODELS})
    if outer.delay:
        yield Part("outer.delay", {WORKER_MODELS}, outer.delay, "0")
    if outer.states != "keep":
        needs = {WORKER_MODELS, ALIKE_WORKERS, *([OWN_COLLECTIVES] * (outer.states == "average"))}
        yield Part("outer.states", needs, outer.states, "keep")


def modes_of(
    config: RunConfig,
    plug_ins: PlugIns,
    device: torch.device | None = None,
    processes: int = 1,
) -> list[Mode]:
    """The modes in which a configuration runs, as far as they are known before model and data.

    Args:
        device: None: not yet known.
    """
    local = plug_ins.sync_policy is not None
    found = {
        capabilities.PROCESSES: processes > 1,
        capabilities.SHARED_STEPS: not local,
        capabilities.LOCAL: local,
        capabilities.MIXED_PERIODS: local and _mixes_units(config, plug_ins),
        capabilities.STREAMING: config.outer.streams,
        capabilities.ON_CPU: device is not None and device.type != "cuda",
        capabilities.COMPILED: config.compile,
        capabilities.OWN_OBJECTS: config.data.name == OWN,
        capabilities.mode_of(
            plug_ins.compressor, f"with the compressor {config.compressor['name']!r}"
        ): True,
    }
    return [mode for mode, applies in found.items() if applies]


def periods_of(config: RunConfig, plug_ins: PlugIns) -> set[int]:
    """The periods that a sync policy may choose; none without one."""
    rule = plug_ins.sync_policy
    return set() if rule is None else {period_of(name, config.sync_levels) for name in rule.names}


def _mixes_units(config: RunConfig, plug_ins: PlugIns) -> bool:
    """Are gradients shared at a period of 1, and pseudo-gradients at others?"""
    shares = config.outer.plain and config.outer.period_one == "gradients"
    periods = periods_of(config, plug_ins)
    return shares and 1 in periods and periods != {1}
