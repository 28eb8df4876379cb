"""Harm beside that of the same units left out (oracles: gradient descent on a quadratic in closed
form, t tests, differences of records)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import misplaced
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import regimes
from regimes.base.statistics import ratio_interval
from regimes.plotting import style
from regimes.plotting.looks import find_metric
from regimes.search.harms.decide import BudgetLeft, next_round
from regimes.search.harms.evidence import DELETION, HarmEvidence, Pulse, PulseRun, Rules
from regimes.search.harms.judge import judge_lost_time
from regimes.search.harms.kinds import PulseKind
from regimes.search.harms.result import Harm

# -- a quadratic -----------------------------------------------------------------------------

UNITS, STEPS = 8, 3
RATES = np.repeat([0.5, 0.5, 0.4, 0.4, 0.2, 0.1, 0.1, 0.05], STEPS)  # of each step
CURVATURE = np.array([1.0, 0.4, 0.1])


def start(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(2.0, 0.1, 3)


def in_closed_form(seed: int, shares: np.ndarray) -> float:
    """The loss where each step takes a share of its rate: 0 leaves the step out."""
    ends = start(seed) * np.prod(1 - np.outer(RATES * shares, CURVATURE), axis=0)
    return float(0.5 * np.sum(CURVATURE * ends**2))


def descend(pulse: Pulse | None, seed: int) -> float:
    """Gradient descent, step by step; in a pulse it has a quarter of the gradient, and a deletion
    leaves its steps out."""
    w = start(seed)
    for step, rate in enumerate(RATES):
        spans = pulse.spans if pulse else ()
        inside = any(first <= step // STEPS < stop for first, stop in spans)
        if inside and pulse == Pulse(DELETION, spans):
            continue
        w = w - rate * CURVATURE * w * (0.25 if inside else 1.0)
    return float(0.5 * np.sum(CURVATURE * w**2))


def harms_of(first: int, stop: int, share: float) -> np.ndarray:
    """Of the first seeds, in closed form."""
    unit = np.arange(len(RATES)) // STEPS
    shares = np.where((unit >= first) & (unit < stop), share, 1.0)
    whole = np.ones(len(RATES))
    return np.array([in_closed_form(s, shares) - in_closed_form(s, whole) for s in range(50)])


def test_lost_time_is_that_of_the_quadratic_in_closed_form(tmp_path: Path) -> None:
    given_: dict[str, Any] = {"units": UNITS, "margin": 0.01, "out": tmp_path, "deletion": True}
    found = regimes.harm(descend, runs=60, **given_)
    assert found.known.rules.arms == ("high",)
    for row in found.table.to_dict("records"):
        harm, lost = (harms_of(row["first"], row["last"] + 1, s)[: row["n"]] for s in (0.25, 0.0))
        assert row["n"] == row["lost_n"] >= 3
        assert row["harm"] == pytest.approx(harm.mean(), rel=1e-9)
        assert row["lost"] == pytest.approx(lost.mean(), rel=1e-9)
        assert row["times"] == pytest.approx(harm.mean() / lost.mean(), rel=1e-9)
        assert row["times_ci_low"] < row["times"] < row["times_ci_high"] < 1
        assert row["beside"] == "less"  # a quarter of the gradient is better than none
        # seeds that are as different as these say the same of a multiple
        assert 0.3 < row["times"] < 0.95
    text = str(found)
    assert text.count("lost time   ") == len(found.table)
    assert text.count("times that: less") == len(found.table)
    assert regimes.harm(descend, runs=60, **given_).table.equals(found.table)
    without = regimes.harm(descend, units=UNITS, margin=0.01, out=tmp_path / "without", runs=9)
    assert without.table["lost"].isna().all()
    assert "lost time" not in str(without)


def test_a_trainer_leaves_units_out_as_the_closed_form_does(tmp_path: Path) -> None:
    """A linear model on one batch is a quadratic. A rate of nothing in a pulse is lost time."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=random, dtype=torch.float64)
    data, hessian = (x, x @ torch.ones(3, 1, dtype=torch.float64)), 2 * (x.T @ x / 64).numpy()
    starts: list[np.ndarray] = []

    def model() -> nn.Module:
        made = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        made.weight.data.add_(4.0)  # from where all seeds have much to lose
        starts.append(made.weight.detach().numpy()[0] - 1)
        return made

    found = regimes.harm(
        model,
        data,
        data,
        loss=nn.functional.mse_loss,
        pulse="optimizer.lr=1e-9",
        epochs=4,
        workers=2,
        optimizer={"lr": 0.1, "schedule": "cosine", "momentum": 0.0, "weight_decay": 0.0},
        set={"dtype": "float64"},
        runs=15,
        parts=2,
        margin=1e-3,
        out=tmp_path,
    )
    rates = [row["lr"] for row in regimes.load(tmp_path / "trunk/seed-0").rows]

    def loss(begin: np.ndarray, units: list[int]) -> float:
        for unit in units:
            begin = begin - rates[unit] * hessian @ begin
        return float(begin @ hessian @ begin / 2)

    for row in found.table.to_dict("records"):
        first, stop, lost = row["first"], row["last"] + 1, []
        for seed in range(row["lost_n"]):
            trunk = regimes.load(tmp_path / f"trunk/seed-{seed}")
            branch = regimes.load(
                tmp_path / f"{DELETION}, {stop - first} units from {first}/seed-{seed}"
            )
            ends = [run.rows[-1]["metric"] for run in (trunk, branch)]
            closed = [loss(w, [0, 1, 2, 3]) for w in starts]
            (mine, *_) = (
                w
                for w, end in zip(starts, closed, strict=True)
                if end == pytest.approx(ends[0], rel=1e-9)
            )
            assert ends[1] == pytest.approx(
                loss(mine, [u for u in range(4) if not first <= u < stop]), rel=1e-9
            )
            assert branch.rows[first]["steps"] == 0
            lost.append(ends[1] - ends[0])
        assert row["lost"] == pytest.approx(np.mean(lost), rel=1e-9)
        assert row["lost_n"] == row["n"] == 3
        assert row["times"] == pytest.approx(1.0, rel=1e-6)


# -- what the numbers say --------------------------------------------------------------------


@pytest.mark.parametrize("grain", [0.0, 2.0])
def test_the_multiple_has_the_interval_of_a_t_test(grain: float) -> None:
    """Its ends are the multiples m at which harm - m x lost time has p = 0.05; the call is that of
    the paired difference."""
    random = np.random.default_rng(0)
    harm, lost = random.normal(2.0, 0.1, 3), random.normal(1.0, 0.1, 3)
    found = judge_lost_time([*harm], [*lost], margin=0.5)
    assert found.times == pytest.approx(harm.mean() / lost.mean())
    for end in (found.low, found.high):
        assert stats.ttest_1samp(harm - end * lost, 0.0).pvalue == pytest.approx(0.05)
    assert found.low < found.times < found.high
    assert found.call == ("more" if stats.ttest_rel(harm, lost).pvalue < 0.05 else "open") == "more"
    assert judge_lost_time([*lost], [*harm], margin=0.5).call == "less"
    assert judge_lost_time([*harm], [*(harm + 0.1 * lost - 0.1)], margin=0.5).call == "open"
    coarse = judge_lost_time([*harm], [*lost], margin=0.5, grain=grain)
    assert coarse.high - coarse.low >= found.high - found.low or math.isnan(coarse.low)


def test_lost_time_that_may_be_nothing_has_no_multiple() -> None:
    found = judge_lost_time([5.0, 5.1, 5.2], [-0.1, 0.0, 0.1], margin=1.0)
    assert math.isnan(found.times)
    assert math.isnan(found.low)
    assert found.call == "more"
    assert judge_lost_time([1.0, 1.1], [0.5, 0.5], margin=1.0).call == "open"
    assert judge_lost_time([1.0, math.inf, 1.0], [0.5, 0.5, 0.5], margin=1.0).call == "more"


# -- whole searches --------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    means=st.lists(st.floats(0.0, 0.8), min_size=4, max_size=10),
    share=st.floats(0.3, 2.0),
    spread=st.floats(0.02, 1.0),
    units=st.floats(50.0, 2000.0),
    slots=st.integers(1, 3),
)
def test_each_pulse_has_the_same_units_left_out_beside_it(
    means: list[float], share: float, spread: float, units: float, slots: int
) -> None:
    """By the same seeds, within the budget; and it ends where all is decided, or the rest of the
    budget has no room for one seed more of what is not."""
    rules = Rules(len(means), ("high",), 1.0, parts=3, least=2, lost_time=True)
    harms: dict[PulseRun, float] = {}

    def cost(runs: list[PulseRun]) -> float:
        """Units that are trained."""
        whole = len(means)
        return sum(
            whole - (0 if p is None else p.first if p.arm == "high" else p.spans[0][1])
            for p, _ in runs
        )

    while runs := next_round(HarmEvidence(rules, harms), BudgetLeft(units - cost([*harms])), slots):
        for pulse, seed in runs:
            assert (pulse, seed) not in harms
            if pulse is None:
                harms[pulse, seed] = 0.0
                continue
            each = sum(sum(means[first:stop]) for first, stop in pulse.spans)
            random = np.random.default_rng([seed, pulse.arm == "high", *sum(pulse.spans, ())])
            harms[pulse, seed] = (
                each * (share if pulse.arm == "high" else 1) + spread * random.normal()
            )
    known, spent = HarmEvidence(rules, harms), cost([*harms])
    assert spent <= max(units, slots * len(means))
    assert known.cost([*harms]) == spent
    for pulse in known.windows("high"):
        found, beside = known.of(pulse), known.lost_time(pulse)
        assert beside is not None
        undecided = found.call == "open" or (found.call == "harmful" and beside.call == "open")
        more = found.n + (undecided and beside.lost.n >= found.n)
        if 3 <= found.n < 200:
            runs = known.missing(pulse, more)  # what is left out at the end trains nothing
            assert not known.cost(runs) or known.cost(runs) > units - spent


def test_a_search_of_before_gets_what_it_lacks(tmp_path: Path) -> None:
    """One that has begun without lost time goes on with it, and without it again."""
    given_: dict[str, Any] = {"units": UNITS, "margin": 0.01, "parts": 2, "out": tmp_path}
    before = regimes.harm(descend, runs=9, **given_)
    found = regimes.harm(descend, runs=40, deletion=True, **given_)
    assert (found.table["n"] == found.table["lost_n"]).all()
    assert before.known.harms.items() < found.known.harms.items()
    again = regimes.harm(descend, runs=len(found.known.harms), **given_)
    assert again.table["harm"].equals(found.table["harm"])
    assert again.table["lost"].isna().all()


# -- in words, and drawn ---------------------------------------------------------------------


def answer(lost: dict[int, tuple[float, float]]) -> Harm:
    """Harm 4 +- 0.2, 2, 1 and 0.1 in four windows; of the deletion mean and spread by window."""
    rules = Rules(16, ("high",), 0.5, lost_time=True)
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    for place, (pulse, mean) in enumerate(
        zip(rules.coarse("high"), (4.0, 2.0, 1.0, 0.1), strict=True)
    ):
        harms |= {(pulse, seed): mean + 0.2 * (seed - 1) for seed in range(3)}
        if place in lost:
            mean, spread = lost[place]
            beside = Pulse(DELETION, pulse.spans)
            harms |= {(beside, s): mean + spread * (s * s % 3 - 0.667) for s in range(3)}
    kinds = {
        "high": PulseKind("high", "rank 1"),
        DELETION: PulseKind(DELETION, "leaving units out", skip=True),
    }
    known = HarmEvidence(rules, harms)
    return Harm(known, kinds, find_metric("accuracy"), "epoch", rates=[1.0] * 16, minutes=0.1)


def test_each_phase_says_what_leaving_it_out_costs() -> None:
    lines = answer({0: (2.0, 0.1), 1: (4.0, 0.1), 2: (1.0, 1.0), 3: (0.0, 0.1)}).sentences()
    assert lines[0].startswith("epochs 0-3    harmful     4.0 [")
    beside = [line for line in lines if "lost time" in line]
    assert [line.partition("points, ")[2].partition(" [")[0] for line in beside[:2]] == [
        "harm is 2.0",
        "harm is 0.50",
    ]
    assert [line.rpartition("times that: ")[2] for line in beside[:2]] == ["more", "less"]
    assert beside[2].endswith(": not decided")
    assert "which may be nothing" in beside[3]
    assert max(map(len, lines)) <= 100
    few = answer({0: (2.0, 0.1), 1: (4.0, 0.1), 2: (1.0, 0.1)}).sentences()
    assert [line for line in few if "lost time" in line][-1].endswith("not tried")


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0, 3.0])
def test_a_ratio_has_two_ends_unless_its_lower_mean_may_be_zero(mean: float) -> None:
    random = np.random.default_rng(int(10 * mean))
    for _ in range(20):
        over, under = random.normal([[2.0], [mean]], 1.0, (2, 4))
        ends = ratio_interval([*over], [*under])
        two = bool(stats.ttest_1samp(under, 0).pvalue < 0.05)
        assert [math.isfinite(end) for end in ends] == [two, two]
        assert [stats.ttest_1samp(over - end * under, 0).pvalue for end in ends if two] == (
            pytest.approx([0.05] * 2 * two)
        )


def test_one_window_is_compared_with_leaving_it_out_and_several_are_not() -> None:
    known = answer({}).known
    one, union = Pulse("high", ((0, 4),)), Pulse("high", ((0, 4), (8, 12)))
    assert known.beside(one) == Pulse(DELETION, ((0, 4),))
    assert known.beside(union) is known.beside(Pulse(DELETION, ((0, 4),))) is None


def test_the_figure_shows_what_leaving_units_out_costs() -> None:
    found = answer({0: (2.0, 0.1), 1: (4.0, 0.1), 2: (1.0, 0.4), 3: (0.0, 0.1)})
    with style.theme():
        drawn = found.figure()
        assert misplaced(drawn) == []
    (legend,) = drawn.legends
    assert "left out" in [text.get_text() for text in legend.get_texts()]
    panel = drawn.axes[0]
    heights = [line.get_ydata()[0] for line in panel.get_lines() if line.get_marker() == "D"]
    assert heights == pytest.approx(found.table["lost"].to_list())
