"""Detectors and policies that only the study compares: against their rules written out by hand,
brute force, the run and its replay."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from configs import smoke_static as config
from decided import levels
from hypothesis import given
from hypothesis import strategies as st

import regimes
from analysis.plugins.adacomm import AdaComm
from analysis.plugins.allocation import GraVAC, LGreCo, allocate_levels
from analysis.plugins.detectors import FisherChange, MsdrFall, TraceCusum
from analysis.plugins.ladders import AccordionLadder, ErrorLadder
from regimes.base.errors import ConfigError, RecordError
from regimes.policies import Accordion, LevelCost, PastEpoch, make_policy
from regimes.policies.detectors import Detector, make_detector
from regimes.policies.replay.replay import past_epochs, replay_rule
from regimes.records import load_all

make_period = partial(make_policy, where="sync_policy")
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


# -- AdaComm ---------------------------------------------------------------------------------


def test_adacomm_by_hand() -> None:
    """16 sqrt(F / F_0), rounded up: 16, 16 sqrt(1/4) = 8, 16 sqrt(0.1) = 5.06."""
    losses: list[float | None] = [2.0, 0.5, 0.2, None]
    assert levels(AdaComm(16), [0.1] * 4, losses) == ["16", "16", "8", "6", "6"]
    # a rate that falls tenfold asks for sqrt(10) times as many: 8 sqrt(10) = 25.3
    assert levels(AdaComm(16), [0.1, 0.1, 0.01], losses)[2] == "26"
    assert levels(AdaComm(16, rates=False), [0.1, 0.1, 0.01], losses)[2] == "8"
    assert levels(AdaComm(4), [0.1] * 2, [1.0, 0.0])[-1] == "1"


@pytest.mark.parametrize("start", [[0.0, 0.0], [0.01], [0.0, 0.05]])
def test_a_warm_up_leaves_adacomm_its_period(start: list[float]) -> None:
    """The authors' first rate is the highest: with a warm-up that of its end, whatever it starts
    at. At a loss that stays the period then stays, and a decay by 4 doubles it."""
    found = levels(AdaComm(8), [*start, 0.1, 0.1, 0.1, 0.025], [2.0])
    assert found == ["8"] * (len(start) + 3) + ["16"] * 2


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "table", "message"),
    [
        (make_detector, {"name": "fisher-change", "statistic": "norm"}, "unknown key"),
        (make_policy, {"name": "accordion-ladder", "levels": ["low"]}, "two or more different"),
        (make_period, {"name": "adacomm", "base": 0}, "base"),
        (make_period, {"name": "adacomm", "needs": []}, "needs"),
    ],
)
def test_bad_fields_are_refused(make: Any, table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(table)


# -- policies that weigh error against traffic ---------------------------------------------

LADDER = Path(__file__).parents[2] / "data/reference/small-ladder.tar.xz"
LEVELS = ("r1", "r2", "r4")


def epoch(
    norms: list[float], costs: dict[str, LevelCost], **errors: list[float | None]
) -> PastEpoch:
    statistics: dict[str, list[float | None]] = {"norm": [*norms]}
    statistics |= {f"error:{level}": values for level, values in errors.items()}
    return PastEpoch(0.1, 0.1, statistics, ["r4"] * len(norms), costs=costs)


# -- the programme ---------------------------------------------------------------------------

TABLES = st.integers(1, 5).flatmap(
    lambda layers: st.tuples(
        *[
            st.lists(st.tuples(*[st.integers(0, 12)] * 3), min_size=layers, max_size=layers)
            for _ in range(2)
        ],
        st.integers(0, 30),
    )
)


@given(TABLES)
def test_it_finds_what_trying_everything_finds(
    tables: tuple[list[tuple[int, ...]], list[tuple[int, ...]], int],
) -> None:
    """Whole errors in as many bins as the bound: nothing is rounded."""
    errors, floats, bound = tables
    within = [
        sum(row[k] for row, k in zip(floats, columns, strict=True))
        for columns in itertools.product(range(3), repeat=len(errors))
        if sum(row[k] for row, k in zip(errors, columns, strict=True)) <= bound
    ]
    found = allocate_levels(errors, floats, bound, bins=max(bound, 1))
    if found is None:
        assert not within
    else:
        assert sum(row[k] for row, k in zip(errors, found, strict=True)) <= bound
        assert sum(row[k] for row, k in zip(floats, found, strict=True)) == min(within)


@given(st.lists(st.tuples(*[st.floats(0, 3)] * 3), min_size=1, max_size=5), st.floats(0.01, 8))
def test_rounding_never_breaks_the_bound(errors: list[tuple[float, ...]], bound: float) -> None:
    found = allocate_levels(errors, [(1.0, 2.0, 4.0)] * len(errors), bound)
    if found is not None:
        total = sum(row[k] for row, k in zip(errors, found, strict=True))
        assert total <= bound * (1 + 1e-9)


# -- L-GreCo ---------------------------------------------------------------------------------

COSTS = {
    "r1": LevelCost([10.0, 100.0], 440),
    "r2": LevelCost([20.0, 200.0], 880),
    "r4": LevelCost([40.0, 400.0], 1760),
}


def test_it_gives_to_the_layer_where_a_float_buys_more() -> None:
    """The second layer's floats are ten times as many and buy nothing: rank 2 for both loses
    1 * sqrt(.25) + 1 * sqrt(.09) = 0.8; rank 4 and rank 1 lose sqrt(.01) + sqrt(.16) = 0.5 for 140
    floats in place of 220."""
    rule = LGreCo(LEVELS, base={"name": "static", "level": "r2"})
    past = epoch([1.0, 1.0], COSTS, r1=[0.81, 0.16], r2=[0.25, 0.09], r4=[0.01, 0.04])
    decisions = rule.decide([past], ["small", "large"])
    # r2 and r1 would lose 0.5 + 0.4 = 0.9 > 0.8
    assert [d.level for d in decisions] == ["r4", "r1"]
    assert decisions[0].why == {
        "rule": "allocation",
        "base": "r2",
        "new": pytest.approx(0.5),
        "threshold": pytest.approx(0.8),
    }


def test_the_norms_weigh_the_errors() -> None:
    rule = LGreCo(LEVELS, base={"name": "static", "level": "r2"})
    past = epoch([1.0, 100.0], COSTS, r1=[0.81, 0.16], r2=[0.25, 0.09], r4=[0.01, 0.04])
    assert [d.level for d in rule.decide([past], ["small", "large"])] == ["r2", "r2"]


def test_what_was_not_measured_follows_the_base() -> None:
    rule = LGreCo(LEVELS, base={"name": "static", "level": "r2"})
    assert [d.level for d in rule.decide([], ["a", "b"])] == ["r2", "r2"]
    past = epoch([1.0, 1.0], COSTS, r1=[None, 0.1], r2=[0.25, 0.1], r4=[0.01, 0.0])
    assert [d.level for d in rule.decide([past], ["a", "b"])] == ["r2", "r1"]


def test_the_base_keeps_levels_of_its_own() -> None:
    """ACCORDION's second layer is not evaluated at the end of the second epoch and keeps ITS level,
    whatever the allocation had made of it."""
    base = {"name": "accordion", "interval": 2, "low": "r4", "high": "r1", "eta": 0.5}
    rule = LGreCo(LEVELS, base=base)
    losses: dict[str, list[float | None]] = {"r1": [0.2], "r2": [0.1], "r4": [0.0]}
    calm = epoch([1.0], COSTS, **losses)
    wanted = make_policy(base)
    past: list[PastEpoch] = []
    for _ in range(6):
        expected = wanted.decide(past, ["a"])[0].level
        (decision,) = rule.decide([calm] * len(past), ["a"])
        assert (decision.why or {}).get("base", decision.level) == expected
        past.append(PastEpoch(0.1, 0.1, calm.statistics, [expected]))
    assert expected == "r1"


def test_bad_input_and_a_record_without_costs_are_one_sentence() -> None:
    for changes, sentence in (
        ({"name": "l-greco", "base": {"name": "static", "level": "r3"}}, "asks for level 'r3'"),
        ({"name": "l-greco", "base": 3}, r"policy.base = 3: expected a table with a name"),
        ({"name": "l-greco", "base": {"name": "statik"}}, "statik"),
        ({"name": "gravac", "seconds": {"low": 1.0}}, "a positive number for each level"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make_policy({"levels": [*LEVELS], **changes})
    past = epoch([1.0], {}, r1=[0.2], r2=[0.1], r4=[0.0])
    for rule in (LGreCo(LEVELS, base={"name": "static", "level": "r2"}), GraVAC(LEVELS)):
        with pytest.raises(RecordError, match="does not say what a step sends at level"):
            rule.decide([past] * 3, ["a"])


# -- GraVAC ----------------------------------------------------------------------------------


def trace(rule: GraVAC, errors: list[dict[str, float]]) -> list[str]:
    costs = {
        name: LevelCost([1.0], bytes_)
        for name, bytes_ in (("r1", 100.0), ("r2", 200.0), ("r4", 400.0))
    }
    past: list[PastEpoch] = []
    levels = []
    for found in errors:
        levels.append(rule.decide(past, ["a"])[0].level)
        past.append(epoch([1.0], costs, **{k: [v] for k, v in found.items()}))
    return levels


@pytest.mark.parametrize(
    ("second", "ours", "theirs"),
    [
        (1.02, "r2", "r2"),  # the more compressed is the better one
        (0.98, "r4", "r2"),  # alike: the authors take the more compressed
        (0.951, "r4", "r1"),  # 4.9 % of the best, 5.2 % of the second: the authors go on
        (0.9, "r1", "r1"),
    ],
)
def test_gravac_stops_by_our_rule_or_its_authors(second: float, ours: str, theirs: str) -> None:
    """The products of r4 and r2 are 1 and ``second``, that of r1 is 2."""
    errors = {"r4": 0.0, "r2": 1 - (second / 2) ** 2, "r1": 1 - 0.5**2}
    for stopping, expected in (("best", ours), ("authors", theirs)):
        rule = make_policy(
            {
                "name": "gravac",
                "levels": [*LEVELS],
                "smoothing": 1.0,
                "gain": 0.1,
                "stopping": stopping,
            }
        )
        assert trace(rule, [errors] * 6)[3:] == [expected] * 3


def test_gravac_by_seconds_and_smoothed() -> None:
    """Where a step takes as long at every level, the lowest compression has the best product."""
    errors = {"r4": 0.0, "r2": 0.2, "r1": 0.4}
    rule = GraVAC(LEVELS, seconds=dict.fromkeys(LEVELS, 1.0), tolerance=0.0, smoothing=1.0)
    assert trace(rule, [errors] * 6)[-1] == "r4"
    calm = {"r4": 0.0, "r2": 0.0, "r1": 0.0}
    found = GraVAC(LEVELS, smoothing=0.25)._gains(
        [epoch([1.0], {}, r1=[1 - 0.5**2]), epoch([1.0], {}, r1=[calm["r1"]])], "r1"
    )
    assert found == pytest.approx([0.5, 0.75 * 0.5 + 0.25])


# -- in a run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        "policy={name='l-greco', levels=['r1', 'r2', 'r4'], base={name='accordion', interval=1, "
        "low='r4', high='r1'}}",
        "policy={name='gravac', levels=['r1', 'r2', 'r4'], gain=0.5}",
    ],
    ids=["l-greco", "gravac"],
)
def test_a_run_and_its_replay_decide_alike(table: str, tmp_path: Path) -> None:
    c = config("epochs=4", "levels={r1=1, r2=2, r4=4}", table)
    record = regimes.run(c, tmp_path / "run")
    replayed = replay_rule(record, make_policy(c.policy))
    layers = record.layers[record.layers["layer"].isin(replayed["layer"].unique())]
    assert replayed["level"].tolist() == layers["level"].tolist()
    assert replayed["level"].nunique() > 1
    if "l-greco" in table:
        why = [w for w in replayed["why"] if w and w["rule"] == "allocation"]
        assert why
        assert all(w["new"] <= w["threshold"] for w in why)
    assert math.isfinite(record.rows[-1]["train_loss"])


def test_on_the_recorded_ladder_it_sends_a_fifth_less() -> None:
    """Five seeds on CIFAR-10 with the errors of ranks 1, 2 and 4: floats over those of rank 2."""
    rule = LGreCo(LEVELS, base={"name": "static", "level": "r2"})
    shares = []
    for record in load_all(LADDER):
        if record.config["name"] == "error-ladder":
            costs = past_epochs(record)[0].costs
            found = replay_rule(record, rule)
            names = [layer["name"] for layer in record.header["layers"] if layer["compressed"]]
            sent = sum(
                costs[level].floats[names.index(layer)]
                for level, layer in zip(found["level"], found["layer"], strict=True)
            )
            shares.append(sent / (sum(costs["r2"].floats) * found["epoch"].nunique()))
    assert len(shares) == 5
    assert (round(min(shares), 2), round(max(shares), 2)) == (0.81, 0.84)
