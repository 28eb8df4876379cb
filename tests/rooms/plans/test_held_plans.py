"""Plans beside what trainings did (oracle: numbers worked out by hand)."""

from __future__ import annotations

import math

import pytest

from benchmarks import plans
from regimes.search.plans.clock import Probe


def losses(size: str = "115k") -> plans.Losses:
    """Dense: 3 bits at 150 steps and 0.1 fewer with each doubling; "dense/8" 0.05 above."""
    found: plans.Losses = {}
    for method, above in (("dense", 0.0), ("dense/8", 0.05)):
        for steps in plans.lengths(size, method):
            for seed, shift in zip(plans.SEEDS, (-0.01, 0.0, 0.01), strict=True):
                loss = 3 + above + shift - 0.1 * math.log2(steps / 150)
                found[size, Probe(method, steps, 0.0, seed)] = loss
            found[size, Probe(method, steps, 1.0, plans.SEEDS[0])] = 2.0  # of one seed alone
    return found


def line(chosen: str, rate: float = 0.0, **ends: tuple[float, float]) -> dict:
    case = plans.SITUATIONS[0]
    rows = [
        {"method": "dense", "steps": 300, "low": ends["dense"][0], "high": ends["dense"][1]},
        {"method": "dense/8", "steps": 1200, "low": ends["local"][0], "high": ends["local"][1]},
    ]
    for row in rows:
        row["rate"] = 0.003 * 2**rate
    seconds = {"dense": 0.05, "dense/8": 0.0125}
    return {
        "situation": case.name,
        "chosen": chosen,
        "decided": True,
        "rows": rows,
        "seconds": seconds,
    }


def test_a_loss_between_two_lengths_is_on_a_line_over_the_logarithm() -> None:
    truth = plans.Truth("115k", losses())
    found = truth.at("dense", 150 * 2**1.5)
    assert found is not None
    assert found == pytest.approx((2.85, 0.01 / math.sqrt(3)))
    assert truth.at("dense", 100) is None
    assert truth.at("dense", 1300) == truth.at("dense", 1200)


def test_regret_is_above_the_best_method_in_the_same_seconds() -> None:
    (worse,) = plans.verdicts([line("dense", dense=(2.8, 2.95), local=(2.9, 3.0))], losses())
    # dense ends at 2.9 after 300 steps, every 8 steps at 2.75 after 1200
    assert worse.best == "dense/8"
    assert worse.regret["plan"] == worse.regret["always dense"] == pytest.approx(0.15)
    assert worse.regret["always dense/8"] == 0
    assert worse.covered == (1, 2)
    (right,) = plans.verdicts([line("dense/8", dense=(2.8, 2.95), local=(2.7, 2.8))], losses())
    assert right.regret["plan"] == 0
    assert right.covered == (2, 2)
    assert "0.150" in plans.markdown([worse])
    assert "2 of 2 (100%)" in plans.markdown([right])


def test_regret_at_the_rate_that_the_plan_prints() -> None:
    """The one that a user pays, whatever the best rate."""
    known = {key: loss for key, loss in losses().items() if key[1].rate == 0.0}
    worse = {("115k", Probe("dense/8", n, 1.0, plans.SEEDS[0])): 3.0 for n in (600, 2400)}
    ends = {"dense": (2.8, 2.95), "local": (2.7, 2.8)}
    (best,) = plans.verdicts([line("dense/8", **ends)], known | worse)
    (high,) = plans.verdicts([line("dense/8", rate=1.0, **ends)], known | worse)
    assert best.regret[plans.AT_ITS_RATE] == best.regret["plan"] == high.regret["plan"] == 0
    assert high.regret[plans.AT_ITS_RATE] == pytest.approx(0.25)  # 3.0 after 1200 steps, not 2.75


def test_what_is_trained_next() -> None:
    wanted = plans.wanted_lengths("115k")
    todo = plans.missing("115k", {}, wanted)
    assert len(todo) == 3 * sum(map(len, plans.METHODS.values()))
    done = {("115k", p): 3 + 0.1 * p.rate for p in todo}  # the lowest rate is the best
    assert {p.rate for p in plans.missing("115k", done, wanted)} == {-2.0}
    best = {("115k", p): abs(p.rate - 0.1) for p in todo}
    more = plans.missing("115k", best, wanted)
    two = {(rate, seed) for rate in (0.0, 1.0) for seed in plans.SEEDS[1:]}
    assert {(p.rate, p.seed) for p in more} == two
    assert not plans.missing("115k", best | {("115k", p): 0.0 for p in more}, wanted)
