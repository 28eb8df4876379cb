"""Detectors and policies that only the study compares: against their rules written out by hand."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from configs import smoke_static as config
from hypothesis import given
from hypothesis import strategies as st

import regimes
from analysis.plugins.detectors import FisherChange, MsdrFall, TraceCusum
from analysis.plugins.ladders import AccordionLadder, ErrorLadder
from regimes.base.errors import ConfigError
from regimes.policies import Accordion, PastEpoch, make_policy
from regimes.policies.detectors import Detector, make_detector

POSITIVE = st.floats(1e-3, 1e3)


def calls(rule: Detector, values: list[float | None]) -> list[bool | None]:
    """What a rule says of epochs 0, 1, ..., fed as a run feeds it."""
    return [rule(values[:epoch]).critical for epoch in range(len(values) + 1)]


def past(
    values: list[float], levels: list[str], lr: float = 0.1, next_lr: float = 0.1
) -> PastEpoch:
    return PastEpoch(lr, next_lr, {"norm": list(values)}, levels)


# -- change of the Fisher information --------------------------------------------------------


def test_fisher_change_counts_rises_too() -> None:
    rule = FisherChange(interval=1)
    assert (rule.statistic, rule.per_layer) == ("fisher_trace", False)
    assert [rule([2.0, new]).critical for new in (4.0, 2.5, 1.0)] == [True, False, True]


# -- CUSUM -----------------------------------------------------------------------------------


def cusum(values: list[float], k: float, h: float, warmup: int) -> list[bool]:
    """Page's two sums in his own order, restarted after each alarm."""
    out, base, up, down = [True], [], 0.0, 0.0
    for x in map(math.log, values):
        if len(base) < warmup:
            base = [*base, x]
            out.append(len(base) < warmup)
            continue
        z = (x - statistics.fmean(base)) / max(0.01, statistics.stdev(base))
        up, down = max(0, up + z - k), max(0, down - z - k)
        out.append(max(up, down) > h)
        if out[-1]:
            base, up, down = [x], 0.0, 0.0
    return out


@given(st.lists(POSITIVE, max_size=40), st.integers(2, 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_cusum_by_hand(values: list[float], warmup: int, k: float) -> None:
    assert calls(TraceCusum(k=k, h=4.0, warmup=warmup), values) == cusum(values, k, 4.0, warmup)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_cusum_finds_a_step_either_way_and_then_a_new_baseline(factor: float) -> None:
    quiet = [1.0, 1.1, 0.9, 1.05, 0.95]
    values = quiet * 4 + [factor * v for v in quiet * 4]
    said = calls(TraceCusum(warmup=5), values)
    assert said[:5] == [True] * 5  # no baseline yet
    assert not any(said[5:21])
    assert said[21:25] == [True] * 4  # the alarm at the step begins the new warm-up of 5
    assert not any(said[25:])


def test_cusum_adds_up_what_single_values_hide() -> None:
    """A shift of 1.5 standard deviations adds 1.5 - k = 1 per measurement until it passes h = 5."""
    base = [math.exp(x) for x in (-1.0, 1.0, -1.0, 1.0)]  # mean 0, sd 2 / sqrt(3)
    shifted = [math.exp(1.5 * 2 / math.sqrt(3) * (1 - 1e-9))] * 6
    said = calls(TraceCusum(k=0.5, h=5.0, warmup=4), base + shifted)
    assert said[5:10] == [False] * 5
    assert said[10] is True
    scores = [TraceCusum(warmup=4)(base + shifted[:n]).score for n in range(1, 6)]
    assert scores == pytest.approx([1, 2, 3, 4, 5])


def test_cusum_without_a_measurement_keeps_and_without_a_logarithm_alarms() -> None:
    quiet: list[float | None] = [1.0, 1.1, 0.9, 1.05, 0.95]
    rule = TraceCusum()
    assert rule([*quiet, 1.0]).critical is False
    assert rule([*quiet, None]).critical is None
    assert rule([None]).critical is None
    with_gaps = [v for value in [*quiet, 1.0] for v in (None, value)]
    assert rule(with_gaps).score == rule([*quiet, 1.0]).score
    assert rule([*quiet, -3.0]).critical is True
    assert rule([*quiet, math.nan]).critical is True
    assert rule([2.0] * 8).critical is False  # equal values have no deviation


# -- MSDR ------------------------------------------------------------------------------------


def test_msdr_by_hand() -> None:
    values: list[float | None] = [1.0, 0.8, 0.5, 0.4, None, 0.26, 0.25, 0.9]
    once = MsdrFall(fall=0.5, latch=False)
    assert calls(once, values) == [False, False, False, True, False, None, False, True, False]
    assert calls(MsdrFall(), values) == [False] * 3 + [True, True, None, True, True, True]
    assert once(values[:3]).score == 0.5
    assert once(values[:6]).old == 0.5  # the reference is the value of the last fall


# -- ladders ---------------------------------------------------------------------------------


def test_the_error_ladder_takes_the_highest_compression_within_reach() -> None:
    def decided(**errors: float) -> str:
        statistics: dict[str, list[float | None]] = {f"error:{k}": [v] for k, v in errors.items()}
        policy = ErrorLadder(("r1", "r2", "r4"), error=0.5)
        return policy.decide([PastEpoch(0.1, 0.1, statistics, ["r1"])], ["l"])[0].level

    assert decided(r1=0.4, r2=0.2, r4=0.1) == "r1"
    assert decided(r1=0.9, r2=0.5, r4=0.1) == "r2"
    assert decided(r1=0.9, r2=0.8, r4=0.7) == "r4"


def test_the_error_ladder_evaluates_after_every_so_many_epochs() -> None:
    policy = ErrorLadder(("r1", "r4"), error=0.5, interval=3)
    epoch = PastEpoch(0.1, 0.1, {"error:r1": [0.1], "error:r4": [0.0]}, ["r4"])
    decided = [policy.decide([epoch] * n, ["l"])[0] for n in range(8)]
    assert [d.level for d in decided] == ["r4", "r1", "r4", "r4", "r1", "r4", "r4", "r1"]
    assert [d.why is None for d in decided] == [False, False, True, True, False, True, True, False]


def test_the_accordion_ladder_steps_down_and_jumps_up() -> None:
    policy = AccordionLadder(("r1", "r2", "r4"), interval=1)
    history: list[PastEpoch] = []
    seen = []
    for norm in (1.0, 1.0, 1.0, 1.0, 9.0, 9.0):
        level = policy.decide(history, ["l"])[0].level
        seen.append(level)
        history.append(past([norm], [level]))
    assert seen == ["r4", "r4", "r2", "r1", "r1", "r4"]


@pytest.mark.parametrize("rule", [True, False])
def test_the_accordion_ladder_may_overlook_decays(rule: bool) -> None:
    policy = AccordionLadder(("r1", "r4"), interval=1, decay_rule=rule)
    history = [past([1.0], ["r4"]), PastEpoch(0.1, 0.01, {"norm": [1.0]}, ["r1"])]
    assert policy.decide(history, ["l"])[0].level == ("r4" if rule else "r1")


def test_an_error_ladder_has_what_it_reads_measured(tmp_path: Path) -> None:
    record = regimes.run(
        config(
            "levels={r1=1, r2=2, r4=4}",
            "policy={name='error-ladder', levels=['r1', 'r2', 'r4'], error=0.5}",
        ),
        tmp_path / "run",
    )
    used = set(record.layers["level"])
    assert used <= {"r1", "r2", "r4", "dense"}
    assert len(used) > 2


RATES = {  # of 24 epochs
    "constant": [1.0] * 25,
    "cosine": [(1 + math.cos(math.pi * e / 24)) / 2 for e in range(25)],
    "steps": [0.1 ** ((e >= 12) + (e >= 20)) for e in range(25)],
}


@pytest.mark.parametrize("name", RATES)
def test_an_accordion_ladder_of_two_levels_is_accordion(name: str) -> None:
    """Reduction: with a constant norm, so that the rates speak, and with one that falls."""
    ladder, plain = AccordionLadder(("high", "low"), interval=3), Accordion(interval=3)
    for norms in ([1.0] * 24, [0.7**e for e in range(24)]):
        history: list[PastEpoch] = []
        for rate, after, norm in zip(RATES[name], RATES[name][1:], norms, strict=False):
            decided = plain.decide(history, ["l"])
            assert ladder.decide(history, ["l"]) == decided
            history.append(past([norm], [decided[0].level], rate, after))


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "fisher-change", "statistic": "norm"}, "unknown key 'detector.statistic'"),
    ],
)
def test_bad_fields_of_a_detector(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_detector(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "accordion-ladder", "levels": ["low"]}, "expected two or more different levels"),
    ],
)
def test_bad_fields_of_a_policy(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(table)
