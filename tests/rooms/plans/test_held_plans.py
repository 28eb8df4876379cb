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


def test_a_loss_between_two_lengths_is_on_a_line_over_the_logarithm() -> None:
    truth = plans.Truth("115k", losses())
    found = truth.at("dense", 150 * 2**1.5)
    assert found is not None
    assert found == pytest.approx((2.85, 0.01 / math.sqrt(3)))
    assert truth.at("dense", 100) is None
    assert truth.at("dense", 1300) == truth.at("dense", 1200)
