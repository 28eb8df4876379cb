"""What counts as a decay of the learning rate, and what ACCORDION and Smith make of it.

The oracle of the shares is the rule counted by hand on closed forms of the rates: with a constant
norm only the first evaluation and the decays speak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from regimes.policies import Accordion, PastEpoch, Policy, Smith, make_policy
from regimes.presets import get_preset
from regimes.training.learning_rate import LearningRate

Rate = Callable[[int, int], float]  # of an epoch and the run's number of them

CONSTANT: Rate = lambda e, n: 1.0  # noqa: E731
STEPS: Rate = lambda e, n: 0.1 ** ((e >= n // 2) + (e >= 5 * n // 6))  # noqa: E731
STEP_LR: Rate = lambda e, n: 0.7**e  # noqa: E731
COSINE: Rate = lambda e, n: (1 + math.cos(math.pi * e / n)) / 2  # noqa: E731
LINEAR: Rate = lambda e, n: 1 - e / n  # noqa: E731


def levels(rule: Policy, rate: Rate, epochs: int) -> list[str]:
    past: list[PastEpoch] = []
    for epoch in range(epochs):
        (decision,) = rule.decide(past, ["layer"])
        now, later = rate(epoch, epochs), rate(epoch + 1, epochs)
        past.append(PastEpoch(now, later, {"norm": [1.0]}, [decision.level]))
    return [level for row in past for level in row.levels]


def low_epochs(rule: Policy, rate: Rate, epochs: int) -> list[int]:
    return [e for e, level in enumerate(levels(rule, rate, epochs)) if level == "low"]


def test_a_decay_is_low_until_the_next_evaluation() -> None:
    """With a constant norm only the decay rule speaks: low in epochs 152-160 and 252-260, nine as
    in the authors' loop."""
    config = get_preset("paper-resnet18-cifar10")
    low = low_epochs(
        make_policy(config.policy),
        lambda e, n: LearningRate(config.optimizer, 1, n)(e),
        config.epochs,
    )
    # 0-10: before the second evaluation there is nothing to compare
    assert low == [*range(11), *range(152, 161), *range(252, 261)]


SHORT = {  # 24 epochs, evaluated after epochs 0, 3, 6, ...
    "constant": (CONSTANT, [0, 1, 2, 3]),
    "steps": (STEPS, [0, 1, 2, 3, 12, 20, 21]),
    "StepLR(0.7)": (STEP_LR, [0, 1, 2, 3, 7, 8, 9]),  # 0.7^7 = 0.082: then below 1/100
    "cosine": (COSINE, [0, 1, 2, 3, 20, 21, 22, 23]),  # 0.067; 0.017 is below half of 0.038
    "linear": (LINEAR, [0, 1, 2, 3, 22, 23]),  # 0.083; 0.042 is half of it
}
LONG = {  # 300 epochs, evaluated after epochs 0, 10, 20, ...
    "constant": (CONSTANT, [*range(11)]),
    "steps": (STEPS, [*range(11), 150, 250]),
    "StepLR(0.7)": (STEP_LR, [*range(11)]),
    "cosine": (COSINE, [*range(11), 239, 240, 298, 299]),  # 0.0986; the last two steps halve
    "linear": (LINEAR, [*range(11), 270, *range(297, 300)]),
}


@pytest.mark.parametrize("name", SHORT)
def test_accordion_compresses_under_any_rate_in_24_epochs(name: str) -> None:
    rate, low = SHORT[name]
    assert low_epochs(Accordion(interval=3), rate, 24) == low


@pytest.mark.parametrize("name", LONG)
def test_accordion_compresses_under_any_rate_in_300_epochs(name: str) -> None:
    rate, low = LONG[name]
    assert low_epochs(Accordion(interval=10), rate, 300) == low


@pytest.mark.parametrize(
    ("rate", "grows"),
    [
        (CONSTANT, []),
        (STEPS, [12, 20]),
        (STEP_LR, [7]),
        (COSINE, [20, 22]),
        (LINEAR, [22, 23]),
    ],
)
def test_smith_grows_the_batch_at_decays_only(rate: Rate, grows: list[int]) -> None:
    found = levels(Smith(), rate, 24)
    assert [e for e in range(1, 24) if found[e] != found[e - 1]] == grows


def test_a_rate_that_rises_never_decays() -> None:
    """A warm-up, from zero too, and warm restarts up to half of the rate before."""
    rates = [0.0, 0.0, 0.1, 0.4, 0.3, 0.4, 0.3, 0.4, 0.4]
    past = [PastEpoch(a, b, {}, ["low"]) for a, b in itertools.pairwise(rates)]
    assert Accordion().decays(past) == []


def test_a_slow_fall_counts_anew_after_each_decay() -> None:
    """A tenth of the highest rate since the last decay, down to 1/100 of the peak."""
    rates = [0.9**e for e in range(100)]
    past = [PastEpoch(a, b, {}, ["low"]) for a, b in itertools.pairwise(rates)]
    assert [epoch for epoch, _, _ in Accordion().decays(past)] == [22]  # 0.0985; then 0.0097
    thirds = Accordion(slow_decay=3).decays(past)
    assert [epoch for epoch, _, _ in thirds] == [11, 22, 33]
    assert thirds[1][1:] == (rates[11], rates[22])


def test_rounding_does_not_hide_a_halving() -> None:
    rate = 0.1
    for lower in (rate / 2, rate / 2 * (1 + 1e-12)):
        assert Accordion().decays([PastEpoch(rate, lower, {}, ["low"])]) == [(1, rate, lower)]
    assert Accordion().decays([PastEpoch(rate, rate / 1.99, {}, ["low"])]) == []
    assert Accordion(step_decay=1.5).decays([PastEpoch(rate, rate / 1.99, {}, ["low"])]) != []
