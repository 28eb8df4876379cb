"""ACCORDION around a decay of the learning rate, in the paper's own setting."""

from __future__ import annotations

from regimes.learning_rate import learning_rate
from regimes.policies import PastEpoch, policy
from regimes.presets import get_preset


def test_a_decay_is_low_until_the_next_evaluation() -> None:
    """With a constant norm only the decay rule speaks: low in epochs 151-160 and 251-260."""
    config = get_preset("paper-resnet18-cifar10")
    rule, past = policy(config.policy), []
    low = []
    for epoch in range(config.epochs):
        (decision,) = rule.decide(past, ["layer"])
        if decision.level == "low":
            low.append(epoch)
        rate, later = (learning_rate(config.optimizer, e) for e in (epoch, epoch + 1))
        past.append(PastEpoch(rate, later, {"norm": [1.0]}, [decision.level]))
    # 0-10: before the second evaluation there is nothing to compare
    assert low == [*range(11), *range(151, 161), *range(251, 261)]
