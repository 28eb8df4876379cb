"""What a search says (oracles: a law that the harms follow, counts of seeds)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from drawn import misplaced

from regimes.errors import RecordError
from regimes.harms.decide import Known, Pulse, Rules, Run
from regimes.harms.kinds import Kind
from regimes.harms.result import Harm
from regimes.plotting import style
from regimes.plotting.looks import find_metric

RATES = [1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1]


def found(exponent: float = 2.0, level: float = 0.3, **changes: object) -> Harm:
    """Harm of a unit = level x (mean rate of the pulse) ^ exponent, alike in three seeds but for a
    little."""
    rules = Rules(8, ("high",), 0.1)
    harms: dict[Run, float] = {(None, seed): 0.0 for seed in range(3)}
    windows = rules.coarse("high")
    for pulse in [*windows, *(half for each in windows for half in rules.halves(each))]:
        ((first, stop),) = pulse.spans
        rate = sum(RATES[first:stop]) / (stop - first)
        for seed in range(3):
            harms[pulse, seed] = (stop - first) * level * (1 + 0.1 * (seed - 1)) * rate**exponent
    kinds = {"high": Kind("high", "rank 1", within=("policy", "high", "low"))}
    given = {"rates": RATES, "minutes": 0.5, **changes}
    return Harm(Known(rules, harms), kinds, find_metric("loss"), "epoch", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_a_law_that_holds_is_found_and_predicts(exponent: float) -> None:
    law, score = found(exponent).law()
    assert law.exponent.value == pytest.approx(exponent, abs=1e-3)
    assert law.level == pytest.approx(0.3, rel=1e-3)
    assert score is not None
    assert (score.r2, score.n) == (pytest.approx(1.0, abs=1e-3), 12 - 3)
    (words,) = found(exponent).law_in_words()
    assert f"harm of one epoch = 0.3000 loss x rate^{exponent:.1f}" in words


def test_a_law_needs_rates() -> None:
    with pytest.raises(RecordError, match="rates of this search are not known"):
        found(rates=()).law()
    assert "not fitted" in found(rates=[1.0] * 8).law_in_words()[0]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_law_needs_a_pulse_with_a_finite_harm(broken: int) -> None:
    one = found()
    harms = {(pulse, 0): math.inf for pulse in one.known.windows("high")[:broken]}
    known = replace(one.known, harms={(None, 0): 0.0, **harms})
    with pytest.raises(RecordError, match="no pulse of 'high' has ended with a finite harm"):
        replace(one, known=known).law()
    assert "not fitted" in replace(one, known=known).law_in_words()[0]


def test_the_time_until_a_decision_is_that_of_its_runs() -> None:
    """A third seed of the pulse of [6, 8): its trunk is there, and a branch trains two units."""
    whole = found()
    last = Pulse("high", ((6, 8),))
    coarse = {None, *whole.known.rules.coarse("high")}
    harms = {run: h for run, h in whole.known.harms.items() if run[0] in coarse}
    del harms[last, 2]
    known = Known(whole.known.rules, harms)
    answer = Harm(known, whole.kinds, whole.shown, "epoch", minutes=0.5)
    row = answer.table.iloc[-1]
    assert (row["call"], row["n"], row["minutes"]) == ("unresolved", 2, 2 * 0.5)
    assert "2 seeds; 3 at least, 60 seconds" in str(answer)
    unknown = Harm(known, whole.kinds, whole.shown, "epoch", minutes=math.nan)
    assert "2 seeds; 3 at least, 1 run" in str(unknown)


def test_the_figure_tells_calls_apart_without_colour_in_one_column() -> None:
    """Each call has a look of its own; no text leaves the figure or lies on another."""
    rules = Rules(24, ("high", "deletion"), 1.0)
    means = {"high": (6.0, 0.1, 0.2, 0.1), "deletion": (3.0, 0.4, 0.1, 0.0)}
    harms: dict[Run, float] = {(None, seed): 0.0 for seed in range(3)}
    for arm, values in means.items():
        for pulse, mean in zip(rules.coarse(arm), values, strict=True):
            wide = arm == "deletion" and mean == 0.4
            spread = 1.5 if wide else 0.1
            harms |= {(pulse, seed): mean + spread * (seed - 1) for seed in range(3)}
    kinds = {arm: Kind(arm, arm) for arm in means}
    answer = Harm(Known(rules, harms), kinds, find_metric("accuracy"), "epoch", rates=[0.5] * 24)
    with style.theme():
        drawn = answer.figure()
        assert misplaced(drawn) == []
    assert drawn.get_size_inches()[0] <= 3.3
    (legend,) = drawn.legends
    looks = {
        text.get_text(): (line.get_marker(), line.get_linestyle(), line.get_markerfacecolor())
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }
    assert looks.keys() == {"safe", "harmful", "unresolved"}
    shapes = {(str(marker), style, face == "white") for marker, style, face in looks.values()}
    assert len(shapes) == 3
    first = drawn.axes[0]
    heights = [line.get_ydata()[0] for line in first.get_lines() if line.get_marker() in ("o", "X")]
    judged = [answer.known.of(pulse) for pulse in answer.known.phases("high")]
    assert heights == pytest.approx([each.harm for each in judged if each.n])


def test_a_half_that_was_not_tried_says_what_is_known_of_the_whole() -> None:
    rules = Rules(8, ("high",), 1.0, parts=2)
    early, late = rules.coarse("high")
    second = rules.halves(early)[1]
    harms: dict[Run, float] = {(None, seed): 0.0 for seed in range(3)}
    for pulse, mean in ((early, 4.0), (late, 0.0), (second, 0.0)):
        harms |= {(pulse, seed): mean + 0.1 * (seed - 1) for seed in range(3)}
    kinds = {"high": Kind("high", "rank 1")}
    answer = Harm(Known(rules, harms), kinds, find_metric("accuracy"), "epoch", minutes=0.05)
    untried, *_ = answer.sentences()
    # 3 seeds of a run from the start, whose trunks are there: 24 epochs of 3 seconds
    said = "epochs 0-1  unresolved  not tried: 72 seconds for 3 seeds; epochs 0-3: 4.0 ["
    assert untried.startswith(said)
    del harms[second, 0], harms[second, 1], harms[second, 2]  # of no half anything is known
    whole = Harm(Known(rules, harms), kinds, find_metric("accuracy"), "epoch")
    assert [row["call"] for _, row in whole.table.iterrows()] == ["harmful", "safe"]
    assert whole.sentences()[0].startswith("epochs 0-3  harmful     4.0 [")
    assert len(whole.known.windows("high")) == 3
    nothing = Harm(Known(rules, {}), kinds, find_metric("accuracy"), "epoch", minutes=0.05)
    assert nothing.sentences()[0].endswith("not tried: 2 minutes for 3 seeds")
