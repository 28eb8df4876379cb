"""Detectors, and the `detected` policy on top of them. Their rules over any history stand in
`test_decisions`."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regimes import policies
from regimes.base.errors import ConfigError
from regimes.policies import Detected, detectors
from regimes.policies.detected import signal_values
from regimes.policies.detectors import (
    Detector,
    EigenvalueChange,
    FirstShare,
    FixedWindows,
    NormChange,
    RandomWindows,
    RelativeChange,
    RelativeFall,
    SharpnessChange,
    make_detector,
)
from regimes.policies.detectors.baselines import place_windows
from regimes.policies.detectors.statistics import lacking_statistics, with_statistics
from regimes.policies.history import PastEpoch, read_history

POSITIVE = st.floats(1e-3, 1e3)
MAYBE = st.one_of(st.none(), POSITIVE)


def calls(rule: Detector, values: list[float | None]) -> list[bool | None]:
    """What a rule says of epochs 0, 1, ..., fed as a run feeds it."""
    return [rule(values[:epoch]).critical for epoch in range(len(values) + 1)]


# -- change ----------------------------------------------------------------------------------


def test_direction_and_scope() -> None:
    rising = [1.0, 2.0]
    assert EigenvalueChange(interval=1)(rising).critical is False
    assert EigenvalueChange(interval=1, direction="either")(rising).critical is True
    assert SharpnessChange(interval=1)(rising).critical is True
    rules = (NormChange(), EigenvalueChange(), SharpnessChange(), RelativeFall())
    assert [r.statistic for r in rules] == ["norm", "eigenvalue", "critical_sharpness", "msdr"]
    assert [r.per_layer for r in rules] == [True, False, False, False]
    assert RelativeChange(interval=1)([-2.0, -5.0]).score == 1.5  # signed statistics, too


def test_a_change_of_exactly_eta_is_critical() -> None:
    """The paper's rule is "at least"; halves and quarters are exact in binary."""
    rule = NormChange(eta=0.5, interval=1)
    assert [rule([4.0, new]).critical for new in (2.0, 2.0625, 5.9375, 6.0)] == [
        True,
        False,
        False,
        True,
    ]
    falls = NormChange(eta=0.5, interval=1, direction="decay")
    assert [falls([4.0, new]).critical for new in (2.0, 2.0625, 6.0)] == [True, False, False]


def test_an_eigenvalue_that_is_not_a_number_is_critical() -> None:
    assert EigenvalueChange(interval=1)([1.0, math.nan]).critical
    assert EigenvalueChange(interval=1)([math.inf, 1.0]).critical


# -- fall ------------------------------------------------------------------------------------


def test_fall_by_hand() -> None:
    """A fall of exactly the share is one."""
    values: list[float | None] = [1.0, 0.8, 0.5, 0.4, None, 0.26, 0.25, 0.9]
    rule = RelativeFall(fall=0.5)
    assert calls(rule, values) == [False, False, False, True, False, None, False, True, False]
    assert rule(values[:3]).score == 0.5
    assert rule(values[:6]).old == 0.5  # the reference is the value of the last fall


# -- controls --------------------------------------------------------------------------------


@given(st.integers(1, 60), st.floats(0, 1), st.integers(1, 6), st.integers(0, 99))
def test_random_windows_have_the_length_asked_for(
    epochs: int, share: float, count: int, seed: int
) -> None:
    rule = RandomWindows(share=share, epochs=epochs, count=count, seed=seed)
    said = [rule([None] * epoch).critical for epoch in range(epochs)]
    assert sum(map(bool, said)) == round(share * epochs)
    assert rule.chosen == RandomWindows(share, epochs, count, seed).chosen
    edges = sum(bool(b) and not a for a, b in zip([False, *said], said, strict=False))
    assert edges <= count
    first = FirstShare(share, epochs)
    assert [bool(first([None] * e).critical) for e in range(epochs)] == sorted(
        map(bool, said), reverse=True
    )


def test_random_windows_are_placed_evenly() -> None:
    drawn = [RandomWindows(share=0.2, epochs=5, count=1, seed=s).chosen for s in range(500)]
    for epoch in range(5):
        assert 70 < sum(epoch in d for d in drawn) < 130  # 100 expected, sd 9
    assert len({RandomWindows(0.25, 24, 2, s).chosen for s in range(50)}) > 30


def test_windows_of_different_lengths_come_in_any_order() -> None:
    """One epoch and two among four: two orders times three places, all as likely."""
    draw, number = random.Random(1), 6000
    found = Counter(tuple(place_windows([1, 2], 4, draw)) for _ in range(number))
    assert len(found) == 6
    assert all(abs(count - number / 6) < 150 for count in found.values())  # 5 deviations


def test_fixed_windows_are_half_open() -> None:
    rule = FixedWindows(windows=((0, 2), (4, 5)))
    assert calls(rule, [None] * 5) == [True, True, False, False, True, False]


# -- by name ---------------------------------------------------------------------------------


def test_every_registered_detector_keeps_the_contract() -> None:
    for name in detectors.REGISTRY:
        fields = {"epochs": 9} if name in ("first-share", "random-windows") else {}
        rule = make_detector({"name": name, **fields})
        assert isinstance(rule, Detector), name
        assert rule([]).critical is not None, name  # epoch 0 has an answer


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "norm-chnage"}, "unknown detector 'norm-chnage': did you mean 'norm-change'"),
        ({"name": "norm-change", "eat": 1}, "'detector.eat'.*'eta'"),
        ({"name": "eigenvalue-change", "statistic": "norm"}, "unknown key 'detector.statistic'"),
        ({"name": "eigenvalue-change", "direction": "decya"}, "did you mean 'decay'"),
        ({"name": "first-share"}, "epochs = 0: expected the length of the run"),
        ({"name": "fixed-windows", "windows": [[3, 3]]}, "is no window"),
    ],
)
def test_bad_fields_are_one_sentence(table: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=message):
        make_detector(table)


# -- the policy ------------------------------------------------------------------------------


def past(model: list[float | None], rates: list[float], levels: list[str]) -> list[PastEpoch]:
    return [
        PastEpoch(
            rates[e],
            rates[e + 1],
            {"norm": [3.0, 4.0]},
            levels,
            {} if value is None else {"eigenvalue": value},
        )
        for e, value in enumerate(model)
    ]


def test_a_detector_of_the_model_decides_for_all_layers() -> None:
    policy = policies.make_policy(
        {"name": "detected", "detector": {"name": "eigenvalue-change", "interval": 1}}
    )
    assert policy.needs == ("eigenvalue",)
    assert policy.names == ("low", "high")
    start = policy.decide([], ["a", "b"])
    assert [d.level for d in start] == ["low", "low"]
    assert start[0].why == {"rule": "start"}
    flat = policy.decide(past([2.0, 2.0], [1.0] * 3, ["low", "low"]), ["a", "b"])
    assert [d.level for d in flat] == ["high", "high"]
    assert flat[0].why == {
        "rule": "eigenvalue change",
        "old": 2.0,
        "new": 2.0,
        "ratio": 0.0,
        "threshold": 0.5,
    }
    kept = policy.decide(past([2.0, None], [1.0] * 3, ["low", "high"]), ["a", "b"])
    assert [(d.level, d.why) for d in kept] == [("low", None), ("high", None)]


def test_the_decay_rule_of_detected() -> None:
    table = {"name": "eigenvalue-change", "interval": 1}
    after = past([2.0, 2.0], [1.0, 1.0, 0.1], ["high", "high"])
    assert Detected(table).decide(after, ["a", "b"])[0].level == "high"
    decided = Detected(table, decay_rule=True).decide(after, ["a", "b"])
    assert decided[0].level == "low"
    assert decided[0].why == {"rule": "lr decay", "old": 1.0, "new": 0.1}


def test_a_detector_that_is_calm_at_the_start_starts_high() -> None:
    assert Detected(RelativeFall()).decide([], ["a"])[0].level == "high"
    assert Detected(FixedWindows(((1, 2),))).decide([], ["a"])[0].level == "high"


def test_what_a_detector_reads() -> None:
    epochs = past([7.0, None], [0.5, 0.25, 0.25], ["low", "low"])
    assert signal_values(epochs, NormChange(), 1) == [4.0, 4.0]
    assert signal_values(epochs, NormChange(statistic="norm*lr"), 1) == [2.0, 1.0]
    assert signal_values(epochs, NormChange(per_layer=False), 0) == [5.0, 5.0]
    assert signal_values(epochs, EigenvalueChange(), 0) == [7.0, None]
    assert signal_values(epochs, FirstShare(epochs=4), 0) == [None, None]
    assert Detected(NormChange(statistic="norm*lr")).needs == ("norm",)
    assert Detected(FirstShare(epochs=4)).needs == ()


def test_the_signal_is_there_under_both_its_names() -> None:
    row = {
        "lr": 1.0,
        "next_lr": 1.0,
        "layers": {"level": ["low", "dense"]},
        "statistics": {"norm:update": [1.0, 2.0], "norm:global": [3.0, 4.0]},
    }
    assert read_history([row], [0], "update")[0].statistics == {
        "norm:update": [1.0],
        "norm": [1.0],
        "norm:global": [3.0],
    }


def test_a_policy_without_a_detector_is_refused() -> None:
    with pytest.raises(ConfigError, match="detector = 3: expected a table with a name"):
        policies.make_policy({"name": "detected", "detector": 3})
    with pytest.raises(ConfigError, match="did you mean 'sharpness-change'"):
        policies.make_policy({"name": "detected", "detector": {"name": "sharpness-changes"}})
    with pytest.raises(ConfigError, match=r"policy\.detector\.eat"):
        policies.make_policy({"name": "detected", "detector": {"name": "norm-change", "eat": 1}})


def test_what_is_set_of_an_instrument_stays() -> None:
    """A statistic that lacks a mode adds the mode; one that needs a number has it already."""
    given = {"curvature": {"probes": 4, "images": 20}}
    found = with_statistics(given, ["hessian_trace:batch"])
    modes = ["eval", "batch-statistics"]
    assert found == {"curvature": {"probes": 4, "images": 20, "modes": modes}}
    none = with_statistics({"curvature": {"probes": 0}}, ["hessian_trace"])
    assert none["curvature"]["probes"] == 10
    assert lacking_statistics(found, ["hessian_trace", "hessian_trace:batch"]) == []
