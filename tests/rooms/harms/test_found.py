"""What a search says (oracles: a law that the harms follow, counts of seeds)."""

from __future__ import annotations

import math

import pytest

from regimes.errors import RecordError
from regimes.harms.decide import Known, Pulse, Rules, Run
from regimes.harms.found import Harm
from regimes.harms.kinds import Kind
from regimes.plotting.looks import named

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
    return Harm(Known(rules, harms), kinds, named("loss"), "epoch", **given)  # type: ignore[arg-type]


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
