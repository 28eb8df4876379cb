"""A schedule that measures nothing and saves about as many bytes as the pulse in the safe phase, as
a grid for ``regimes ablate``. No torch.

A *rate ladder* (`regimes.policies.RateLadder`) has one level where the learning rate is below a
share of the highest, and another one above. The one written here has the pulse's level in about as
many steps as the safe phase has, those with the lowest rates.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regimes.base.config import RunConfig, to_dict
from regimes.policies import make_policy
from regimes.policies.history import History, PastEpoch
from regimes.records import OWN, Record
from regimes.search.harms.kinds import PulseKind
from regimes.search.harms.result import Harm, Ladder

SEEDS = 3  # of the grid: the fewest that give an interval
NAME = "rate ladder"  # of the schedule in it


def ladders_of(answer: Harm, trunk: Record) -> dict[str, Ladder]:
    """Make the ladder of each arm with a safe phase that saves bytes, where there is one."""
    made: dict[str, Ladder] = {}
    for arm in answer.known.rules.arms:
        best, kind = answer.known.best(arm), answer.kinds[arm]
        saved = answer.saved.get(best, 0.0) if best else 0.0
        if best is not None and kind.by_policy is not None and saved > 0:
            ladder = _fit_ladder(kind, trunk, best.spans, saved)
            made |= {} if ladder is None else {arm: ladder}
    return made


def _fit_ladder(
    kind: PulseKind, trunk: Record, spans: Sequence[tuple[int, int]], saved: float
) -> Ladder | None:
    """The ladder with about as many steps as these spans.

    Args:
        saved: the share of the trunk's bytes that the pulse's level in the spans does not send.
    """
    assert kind.by_policy is not None
    _, inside, outside = kind.by_policy
    steps = sum(row["steps"] for first, stop in spans for row in trunk.rows[first:stop])
    if (table := _nearest_table(trunk, inside, outside, steps)) is None:
        return None
    # the ladder saves as much per step, in its own number of steps
    return Ladder(kind.in_group(table), 1 - saved * _steps_at(table, inside, trunk) / steps)


def _nearest_table(trunk: Record, inside: str, outside: str, steps: int) -> dict[str, Any] | None:
    """The table of the ladder with the level ``inside`` in about so many steps, and ``outside`` in
    the others; None where no share of the rate divides the run."""
    rates = [float(row["lr"]) for row in trunk.rows]
    following = [float(row["next_lr"]) for row in trunk.rows]
    highest = max(rates)
    shares = sorted({rate / highest for rate in (*rates, *following) if rate < highest})
    # one ladder for each two neighbouring rates of the run: its share lies between them
    cuts = [(a + b) / 2 for a, b in itertools.pairwise([*shares, 1.0]) if a < b]
    tables = [
        {"name": "rate-ladder", "levels": [inside, outside], "shares": [float(f"{cut:.4g}")]}
        for cut in cuts
        if 0 < float(f"{cut:.4g}") < 1
    ]

    def count(table: dict[str, Any]) -> int:
        return _steps_at(table, inside, trunk)

    # counts rise with the share: the nearest is the first table of the next count, up or down
    nearest = [bisect.bisect_left(tables, steps, key=count)]
    if nearest[0] > 0:
        nearest += [bisect.bisect_left(tables, count(tables[nearest[0] - 1]), key=count)]
    known = [tables[i] for i in sorted(nearest) if i < len(tables)]
    return min(known, key=lambda table: abs(count(table) - steps), default=None)


def _steps_at(table: dict[str, Any], level: str, trunk: Record) -> int:
    """In how many steps of a run a policy that measures nothing has a level."""
    rule, past, count = make_policy(dict(table)), History(), 0
    for row in trunk.rows:
        (decision,) = rule.decide(past, ["all"])
        count += row["steps"] * (decision.level == level)
        past.append(PastEpoch(row["lr"], row["next_lr"], {}, [decision.level]))
    return count


# -- the grid --------------------------------------------------------------------------------


def grid_toml(answer: Harm, trunk: RunConfig, used: int) -> str:
    """Write the trunk and the ladders as a grid's file, with seeds that the search has not used.

    Args:
        used: seeds from the trunk's on that were used.
    """
    import tomli_w

    own = trunk.data.name == OWN
    base = _changed_fields(to_dict(replace(trunk, name="run", seed=0, checkpoint_keep=None)))
    schedules: dict[str, Any] = {"trunk": {}}
    for arm, ladder in answer.ladders.items():
        kind = answer.kinds[arm]
        assert kind.by_policy is not None
        label = NAME if len(answer.ladders) == 1 else f"{NAME}, {arm}"
        schedules[label] = {**kind.setup, kind.by_policy.field: ladder.policy}
    seeds = [trunk.seed + used + i for i in range(SEEDS)]
    lines = [f"# {line}" for line in answer.sentences()]
    for arm, ladder in answer.ladders.items():
        lines.append(f"# Bytes, of those of the trunk ({arm}): {NAME} {ladder.bytes:.2f}.")
    if own:
        lines.append(
            "# Model and data were passed by a program: regimes.simulate(..., policy=...)."
        )
    else:
        lines.append("# regimes ablate FILE")
    plain = tomli_w.dumps({"seeds": seeds, "base": base, "schedules": schedules})
    return "\n".join([*lines, "", plain])


def _changed_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that have another value than by default."""
    usual, kept = to_dict(RunConfig()), {}
    for key, value in config.items():
        if key in ("data", "model", "optimizer", "outer"):
            value = {k: v for k, v in value.items() if v != usual[key].get(k)}
            if value:
                kept[key] = value
        elif value != usual.get(key):
            kept[key] = value
    return kept
