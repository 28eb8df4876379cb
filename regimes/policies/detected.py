"""Policies that follow a detector of critical regimes, such as ACCORDION. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeGuard

from regimes.base.config import LevelName, level_name
from regimes.base.config.bounds import Count, Positive
from regimes.base.errors import unexpected_value
from regimes.policies.base import Decision, FollowsDecays
from regimes.policies.detectors import Detector, NormChange, Online, Verdict, make_detector
from regimes.policies.detectors.statistics import Statistic
from regimes.policies.history import PastEpoch, as_history, root_of_squares

Values = list[float | None]


class FollowsDetector(FollowsDecays):
    """Is the base of policies that follow a detector.

    From a decay of the learning rate until the next verdict the level is the first of ``names``.
    Otherwise it is ``level_for`` of the verdict on a layer. Without a verdict a layer's level
    stays.

    Attributes:
        decay_rule: Use low compression from each decay of the learning rate until the next verdict.
        low: The name of the level in critical regimes. In a script it may also be a compressor at
            this level, such as ``PowerSGD(rank=4)``.
        high: The name of the level elsewhere, likewise.
    """

    decay_rule: bool
    low: LevelName
    high: LevelName

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may choose: ``low`` and ``high``."""
        return (level_name(self.low, "low"), level_name(self.high, "high"))

    @property
    def rule(self) -> Detector:
        """Return the detector that is followed."""
        raise NotImplementedError

    def level_for(self, critical: bool, before: str) -> str:
        """Return the level that a layer gets by a verdict.

        Args:
            critical: whether the next epoch is critical.
            before: the level of the layer in the past epoch.
        """
        return self.names[0] if critical else self.names[-1]

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the level of each layer for epoch ``len(history)``, by the detector's verdicts and
        the decays of the learning rate."""
        history = as_history(history)
        if self.decay_rule and (why := self.just_decayed(history)):
            return [Decision(self.names[0], why)] * len(layers)
        verdicts = _current_verdicts(history, self.rule, len(layers))
        return [self._decision(history, i, verdict) for i, verdict in enumerate(verdicts)]

    def _decision(self, history: Sequence[PastEpoch], layer: int, verdict: Verdict) -> Decision:
        if not history:
            return Decision(self.names[-(verdict.critical is False)], {"rule": "start"})
        before = history[-1].levels[layer]
        if verdict.critical is None:
            return _unchanged(before)
        why = verdict.why(_in_words(type(self.rule).__name__))
        return Decision(self.level_for(verdict.critical, before), why)


@lru_cache
def _unchanged(level: str) -> Decision:
    return Decision(level)


@lru_cache
def _in_words(name: str) -> str:
    """``NormChange`` as "norm change"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


@dataclass(frozen=True)
class Detected(FollowsDetector):
    """Uses low compression where a detector marks an epoch as critical, and high compression
    elsewhere.

    Attributes:
        detector: A table such as ``{name = "eigenvalue-change", eta = 0.5}``, or the object.
    """

    detector: Any = field(default_factory=lambda: {"name": "norm-change"})
    decay_rule: bool = False
    low: LevelName = "low"
    high: LevelName = "high"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule  # noqa: B018  (checks the table)

    @cached_property
    def rule(self) -> Detector:
        """Return the detector that is followed, made from the table if ``detector`` is one."""
        if isinstance(self.detector, dict):
            return make_detector(self.detector, "policy.detector")
        if isinstance(self.detector, Detector):
            return self.detector
        raise unexpected_value("policy.detector", self.detector, "a table with a name")

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the statistic that the detector reads; none for one that measures nothing."""
        text = self.rule.statistic
        return () if text is None else (Statistic.parse(text).name,)


@dataclass(frozen=True)
class Accordion(FollowsDetector):
    """Uses low compression in critical regimes: ACCORDION, for each layer (the paper's algorithm
    1).

    Every ``interval`` epochs the gradient norm of a layer is compared with its value ``interval``
    epochs earlier. If it has changed by ``eta`` or more, relative to that value, the layer has low
    compression until the next comparison, and otherwise high compression. With ``decay_rule`` all
    layers have low compression from each decay of the learning rate until the next comparison. They
    start with low compression, as in the authors' code.

    >>> Accordion(eta=0.3).decide([], ["conv"])
    [Decision(level='low', why={'rule': 'start'})]

    In a script ``low`` and ``high`` may also be compressors: ``Accordion(low=PowerSGD(rank=4),
    high=PowerSGD(rank=1))``.

    Attributes:
        eta: The relative change of the norm from which on a regime is critical.
        interval: The number of epochs between two comparisons.
    """

    eta: Positive = 0.5
    interval: Count = 10
    decay_rule: bool = True
    low: LevelName = "low"
    high: LevelName = "high"
    needs: tuple[str, ...] = field(default=("norm",), init=False)

    @cached_property
    def rule(self) -> NormChange:
        """Return the detector that is followed: the change of the norm, by ``eta`` and
        ``interval``."""
        return NormChange(self.eta, self.interval)


@dataclass(frozen=True)
class BatchAccordion(Accordion):
    """Uses small batches (``low``) in critical regimes and large ones elsewhere: ACCORDION for the
    batch size (the paper's section 4.2).

    Attributes:
        grow_only: Keep a large batch to the end ("for training stability", Appendix A).
    """

    grow_only: bool = True

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the level of each layer for epoch ``len(history)``, as `Accordion` does. With
        ``grow_only`` a layer that had ``high`` in the past epoch keeps it."""
        decided = super().decide(history, layers)
        if not (self.grow_only and history):
            return decided
        low, high = self.names
        return [
            Decision(high, {**(now.why or {}), "rule": "grow only"})
            if (before, now.level) == (high, low)
            else now
            for before, now in zip(history[-1].levels, decided, strict=True)
        ]


# -- what a detector reads -------------------------------------------------------------------


def signal_values(history: Sequence[PastEpoch], rule: Detector, layer: int) -> Values:
    """Return a detector's statistic in all past epochs, of a layer or the whole model, one value
    per epoch; the list must not be changed.

    The whole model's norm is the root of the sum of squares over the compressed layers.
    """
    columns = _columns(history, rule)
    return columns[layer if _by_layer(rule) else 0] if columns else []


def _columns(history: Sequence[PastEpoch], rule: Detector) -> list[Values]:
    """The values of each layer, or of the whole model alone; empty before the first epoch."""
    statistic = None if rule.statistic is None else Statistic.parse(rule.statistic)
    row = _of_layers if _by_layer(rule) else _of_model

    def extend(columns: list[Values], epochs: Sequence[PastEpoch]) -> list[Values]:
        rows = [row(statistic, past) for past in epochs]
        columns = columns or [[] for _ in rows[0]]
        for column, more in zip(columns, zip(*rows, strict=True), strict=True):
            column.extend(more)
        return columns

    # One table for all layers, so that the epochs are read once and not once per layer.
    return as_history(history).accumulate((row, statistic), list, extend)


def _by_layer(rule: Detector) -> bool:
    return rule.per_layer and rule.statistic is not None


def _of_layers(statistic: Statistic | None, past: PastEpoch) -> Sequence[float | None]:
    assert statistic is not None
    values = past.statistics.get(statistic.name) or [None] * len(past.levels)
    return (
        [_scale_values(value, statistic, past) for value in values]
        if statistic.times_lr
        else values
    )


def _of_model(statistic: Statistic | None, past: PastEpoch) -> Sequence[float | None]:
    if statistic is None:
        return (None,)
    norms = past.statistics.get(statistic.name) if statistic.is_norm else None
    value = root_of_squares(norms) if norms else past.model.get(statistic.name)
    return (_scale_values(value, statistic, past),)


def _scale_values(value: float | None, statistic: Statistic, past: PastEpoch) -> float | None:
    return value * past.lr if statistic.times_lr and value is not None else value


class OnlineState(NamedTuple):
    """Holds an online detector's own state, its last verdict, and how many verdicts were
    critical."""

    state: Any
    verdict: Verdict
    critical: int = 0


def online_state(history: Sequence[PastEpoch], rule: Online, layer: int) -> OnlineState:
    """Return the state of an online detector after all past epochs, for a layer or the whole
    model."""
    values = signal_values(history := as_history(history), rule, layer)

    def extend(online: OnlineState, epochs: Sequence[PastEpoch]) -> OnlineState:
        for value in values[len(values) - len(epochs) :]:
            state, verdict = rule.update(online.state, value)
            online = OnlineState(state, verdict, online.critical + (verdict.critical is True))
        return online

    return history.accumulate((rule.update, layer), lambda: OnlineState(*rule.begin()), extend)


def _current_verdicts(history: Sequence[PastEpoch], rule: Detector, layers: int) -> list[Verdict]:
    """A detector's verdicts on the next epoch, for each layer."""
    if not rule.per_layer:
        return [_current_verdict(history, rule, 0)] * layers
    columns = _columns(history, rule)
    if _is_online(rule) or not (columns and _by_layer(rule)):
        return [_current_verdict(history, rule, i) for i in range(layers)]
    return [rule(columns[i]) for i in range(layers)]


def _current_verdict(history: Sequence[PastEpoch], rule: Detector, layer: int) -> Verdict:
    """A detector's verdict on the next epoch, for a layer or the whole model."""
    if _is_online(rule):
        return online_state(history, rule, layer).verdict
    return rule(signal_values(history, rule, layer))


def _is_online(rule: Detector) -> TypeGuard[Online]:
    """A subclass with a ``__call__`` of its own may answer differently from its updates."""
    return isinstance(rule, Online) and type(rule).__call__ is Online.__call__
