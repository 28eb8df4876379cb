"""What a rule of the period of local steps decides, unit by unit."""

from __future__ import annotations

from regimes.policies import PastEpoch


def levels(rule: object, rates: list[float], losses: list[float | None] | None = None) -> list[str]:
    """What it decides for each unit of a run, and for the one that would follow."""
    found: list[str] = []
    past: list[PastEpoch] = []
    for unit, lr in enumerate([*rates, rates[-1]]):
        (decision,) = rule.decide(past, ["sync"])  # type: ignore[attr-defined]
        found.append(decision.level)
        assert (decision.why is not None) == (not past or found[-1] != past[-1].levels[0])
        following = [*rates, rates[-1], rates[-1]][unit + 1]
        loss = {} if losses is None else {"train_loss": losses[min(unit, len(losses) - 1)]}
        past.append(PastEpoch(lr, following, {}, [decision.level], model=loss))
    return found
