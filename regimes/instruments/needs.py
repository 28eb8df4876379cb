"""What instruments, and the policies that read their statistics, need of a job (`capabilities`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regimes.base.capabilities import (
    CONSTANT_UNIT,
    OWN_COLLECTIVES,
    SAMPLES,
    WHOLE_LAYERS,
    WORKER_GRADIENTS,
    Part,
    declared_needs,
)
from regimes.base.config import Signal
from regimes.base.config.recorded import RECORDED
from regimes.instruments import REGISTRY
from regimes.instruments.gradient_norm import OF_GRADIENTS, REQUIRES
from regimes.policies import Policy
from regimes.policies.detectors.statistics import INSTRUMENT, Statistic

UNDECLARED = frozenset({WHOLE_LAYERS, SAMPLES})  # what an instrument without ``requires`` needs


def needs_of(instrument: Any) -> frozenset[str]:
    """Return what an instrument, or its class, needs."""
    return declared_needs(instrument, UNDECLARED)


def _needs_of_statistic(name: str) -> frozenset[str]:
    """What measuring a statistic needs; "norm" is the norm that the job's signal names, which is a
    part of its own."""
    statistic = Statistic.parse(name)
    if not statistic.is_norm:
        return needs_of(REGISTRY.load(statistic.instrument))
    variant: Any = statistic.name.partition(":")[2]
    return REQUIRES.get(variant, frozenset())


def policy_parts(rule: Policy, field: str) -> Iterator[Part]:
    """Yield the statistics that a policy reads, and the training loss if it does."""
    for name in rule.needs:
        needs = _needs_of_statistic(name)
        yield Part(f"{field}.needs", needs, name, "another statistic", statistic_needs)
    if needs := declared_needs(rule):
        yield Part(field, needs, type(rule).__name__, "another policy")
    if getattr(rule, "reads_loss", False):
        instead = "one that does not read the training loss"
        yield Part(field, {OWN_COLLECTIVES}, type(rule).__name__, instead)


def signal_parts(signal: Signal, *rules: Policy) -> Iterator[Part]:
    """Yield the norm that is always read, beside the policies that may read it."""
    yield Part("signal", signal_needs()[signal], signal, others=signal_needs)
    if any(Statistic.parse(need).is_norm for rule in rules for need in rule.needs):
        yield Part("signal", _UNITS[signal], signal, others=lambda: _UNITS)


_UNITS: dict[str, frozenset[str]] = {
    name: frozenset({CONSTANT_UNIT} if name in OF_GRADIENTS else ()) for name in REQUIRES
}


def signal_needs() -> dict[str, frozenset[str]]:
    """Return what each signal needs, by name. A run with a signal of single workers has a pass for
    each, whatever ``union_pass`` says."""
    return {name: needs - {WORKER_GRADIENTS} for name, needs in REQUIRES.items()}


def statistic_needs() -> dict[str, frozenset[str]]:
    """Return what each statistic of the toolkit needs, by name."""
    listed = [name for name in INSTRUMENT if name not in RECORDED["instrument"]]
    return {name: _needs_of_statistic(name) for name in listed}
