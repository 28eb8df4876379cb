"""What a search says (oracle: counts of seeds)."""

from __future__ import annotations

import math

import pytest
from drawn import misplaced
from matplotlib.text import Text

from regimes.plotting import style
from regimes.plotting.looks import find_metric
from regimes.search.harms.evidence import HarmEvidence, Pulse, PulseRun, Rules
from regimes.search.harms.kinds import PolicyLevels, PulseKind
from regimes.search.harms.result import Harm

RATES = [1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1]


def found() -> Harm:
    """Harm of a unit = 0.3 x (mean rate of the pulse) ^ 2, alike in three seeds but for a
    little."""
    rules = Rules(8, ("high",), 0.1)
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    windows = rules.coarse("high")
    for pulse in [*windows, *(half for each in windows for half in rules.halves(each))]:
        ((first, stop),) = pulse.spans
        rate = sum(RATES[first:stop]) / (stop - first)
        for seed in range(3):
            harms[pulse, seed] = (stop - first) * 0.3 * (1 + 0.1 * (seed - 1)) * rate**2
    kinds = {"high": PulseKind("high", "rank 1", by_policy=PolicyLevels("policy", "high", "low"))}
    known, shown = HarmEvidence(rules, harms), find_metric("loss")
    return Harm(known, kinds, shown, "epoch", rates=RATES, minutes=0.5)


def test_the_time_until_a_decision_is_that_of_its_runs() -> None:
    """A third seed of the pulse of [6, 8): its trunk is there, and a branch trains two units."""
    whole = found()
    last = Pulse("high", ((6, 8),))
    coarse = {None, *whole.known.rules.coarse("high")}
    harms = {run: h for run, h in whole.known.harms.items() if run[0] in coarse}
    del harms[last, 2]
    known = HarmEvidence(whole.known.rules, harms)
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
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    for arm, values in means.items():
        for pulse, mean in zip(rules.coarse(arm), values, strict=True):
            wide = arm == "deletion" and mean == 0.4
            spread = 1.5 if wide else 0.1
            harms |= {(pulse, seed): mean + spread * (seed - 1) for seed in range(3)}
    kinds = {arm: PulseKind(arm, arm) for arm in means}
    answer = Harm(
        HarmEvidence(rules, harms), kinds, find_metric("accuracy"), "epoch", rates=[0.5] * 24
    )
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


@pytest.mark.parametrize("untried", [0, 1])
def test_the_figure_says_what_a_question_mark_is_where_it_has_one(untried: int) -> None:
    rules = Rules(8, ("high",), 1.0)
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    for pulse in rules.coarse("high")[untried:]:
        harms |= {(pulse, seed): 0.1 * (seed - 1) for seed in range(3)}
    kinds = {"high": PulseKind("high", "rank 1")}
    drawn = Harm(HarmEvidence(rules, harms), kinds, find_metric("accuracy"), "epoch").figure()
    said = [" ".join(text.get_text().split()) for text in drawn.findobj(Text)]
    assert said.count("?") == untried
    assert any("?: not tried" in text for text in said) == bool(untried)


def test_a_half_that_was_not_tried_says_what_is_known_of_the_whole() -> None:
    rules = Rules(8, ("high",), 1.0, parts=2)
    early, late = rules.coarse("high")
    second = rules.halves(early)[1]
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    for pulse, mean in ((early, 4.0), (late, 0.0), (second, 0.0)):
        harms |= {(pulse, seed): mean + 0.1 * (seed - 1) for seed in range(3)}
    kinds = {"high": PulseKind("high", "rank 1")}
    answer = Harm(HarmEvidence(rules, harms), kinds, find_metric("accuracy"), "epoch", minutes=0.05)
    untried, *_ = answer.sentences()
    # 3 seeds of a run from the start, whose trunks are there: 24 epochs of 3 seconds
    said = "epochs 0-1  unresolved  not tried: 72 seconds for 3 seeds; epochs 0-3: 4.0 ["
    assert untried.startswith(said)
    del harms[second, 0], harms[second, 1], harms[second, 2]  # of no half anything is known
    whole = Harm(HarmEvidence(rules, harms), kinds, find_metric("accuracy"), "epoch")
    assert [row["call"] for _, row in whole.table.iterrows()] == ["harmful", "safe"]
    assert whole.sentences()[0].startswith("epochs 0-3  harmful     4.0 [")
    assert len(whole.known.windows("high")) == 3
    nothing = Harm(HarmEvidence(rules, {}), kinds, find_metric("accuracy"), "epoch", minutes=0.05)
    assert nothing.sentences()[0].endswith("not tried: 2 minutes for 3 seeds")
