"""From phases to a schedule, beside controls that send as many bytes: policies, and a grid for
``regimes ablate``. No torch, but for the formulas of a compressor.

- *one level*: throughout, the level (rank, percentage, bits, period, size of the batch) between the
  trunk's and the pulse's with the nearest bytes;
- *rate ladder*: the pulse's level in about as many steps, those with the lowest learning rates
  (`regimes.policies.RateLadder`, which measures nothing).

Both know nothing of harm. A schedule from harm is worth its price where it beats both.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regimes.config import DENSE, RunConfig, as_level, to_dict
from regimes.policies import make_policy
from regimes.policies.history import History, PastEpoch
from regimes.records import OWN, Record

if TYPE_CHECKING:
    from regimes.harms.kinds import Kind
    from regimes.harms.result import Harm

STEPS = 40  # of a bisection between two percentages
SEEDS = 3  # of the grid
ONE, LADDER, FROM_HARM = "one level", "rate ladder", "from harm"
LEVELS = {"policy": "levels", "sync_policy": "sync_levels", "batch_policy": "batch_levels"}


@dataclass(frozen=True)
class Controls:
    """Schedules that send about as many bytes as one from harm.

    Attributes:
        policies: tables by name, the trunk's included.
        levels: further levels that they name.
        bytes: of each, as a share of the trunk's.
    """

    policies: Mapping[str, dict[str, Any]]
    levels: Mapping[str, Any]
    bytes: Mapping[str, float]


def controls_of(found: Harm, trunk: Record) -> dict[str, Controls]:
    """The schedules of each arm that has one."""
    made = {}
    for arm in found.known.rules.arms:
        best, kind = found.known.best(arm), found.kinds[arm]
        saved = found.saved.get(best, 0.0) if best else 0.0
        if best is not None and kind.within is not None and saved > 0:
            made[arm] = _controls(kind, trunk, best.spans, 1 - saved)
    return made


def _controls(
    kind: Kind, trunk: Record, spans: Sequence[tuple[int, int]], target: float
) -> Controls:
    assert kind.within is not None
    field, inside, outside = kind.within
    rule = kind.schedule(spans)
    assert rule is not None
    policies = {"trunk": {"name": "static", "level": outside}, FROM_HARM: rule}
    sent: dict[str, float] = {"trunk": 1.0, FROM_HARM: target}
    levels: dict[str, Any] = {}
    values = kind.setup.get(LEVELS[field]) or trunk.config["levels"]
    share = _cost(trunk, field, values, outside)
    level = share and _between(share, values, outside, inside, target)
    if level is not None:
        levels, policies[ONE] = {"one": level}, {"name": "static", "level": "one"}
        sent[ONE] = share(level)
    steps = sum(row["steps"] for first, stop in spans for row in trunk.rows[first:stop])
    if (ladder := _ladder(trunk, inside, outside, steps)) is not None:
        policies[LADDER] = kind.in_group(ladder)
        sent[LADDER] = 1 - (1 - target) * _steps_at(ladder, inside, trunk) / steps
    return Controls(policies, levels, sent)


# -- one level -------------------------------------------------------------------------------


class _Share:
    """The bytes of a step at a level of the compressor, as a share of the bytes at the trunk's
    level, by the compressor's formula."""

    def __init__(self, trunk: Record, own: Any) -> None:
        from regimes.collectives.requests import Layer  # torch, so late
        from regimes.compression import make_compressor

        self.compressor = make_compressor(dict(trunk.config["compressor"]))
        layers = trunk.header["layers"]
        self.layers = [Layer(each["name"], tuple(each["shape"])) for each in layers]
        self.workers = trunk.config["workers"]
        whole = sum(row["bytes"] for row in trunk.rows)
        of_layers = sum(sum(row["layers"]["bytes"]) for row in trunk.rows)
        self.own = self._bytes(own)
        self.layers_share = of_layers / whole if whole else 0.0  # the rest are losses and buffers

    def _bytes(self, level: Any) -> float:
        from regimes.compression.traffic import traffic_table

        return float(traffic_table(self.compressor, self.layers, level, self.workers)[1])

    def __call__(self, level: Any) -> float:
        return 1 - self.layers_share * (1 - self._bytes(level) / self.own)


def _cost(trunk: Record, field: str, values: Mapping[str, Any], own: str) -> Any:
    """The share of the trunk's bytes that a level throughout sends, as a function of the level."""
    if field != "policy":
        return lambda level: values[own] / level  # one exchange in so many steps, or samples
    value = as_level(values.get(own, DENSE))
    return None if isinstance(value, str) and value != DENSE else _Share(trunk, value)


def _between(share: Any, values: Mapping[str, Any], own: str, other: str, target: float) -> Any:
    """The level between two with the bytes nearest to a share; None where levels are no numbers,
    or one of both is nearest."""
    ends: list[Any] = [values.get(own), values.get(other)]
    if not all(isinstance(end, int | float) for end in ends):
        return None
    low, high = sorted(ends)
    if isinstance(low, int) and isinstance(high, int):
        known = range(low, high + 1)
        found: Any = min(known, key=lambda level: abs(share(level) - target))
    else:
        rises = share(high) > share(low)
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if (share(middle) > target) == rises else (middle, high)
        found = float(f"{(low + high) / 2:.4g}")
    return None if found in ends else found


# -- the ladder ------------------------------------------------------------------------------


def _ladder(trunk: Record, inside: str, outside: str, steps: int) -> dict[str, Any] | None:
    """The ladder of two levels with the higher compression in about so many steps; None where no
    share of the rate divides the run."""
    rates = [float(row["lr"]) for row in trunk.rows]
    following = [float(row["next_lr"]) for row in trunk.rows]
    highest = max(rates)
    shares = sorted({rate / highest for rate in (*rates, *following) if rate < highest})
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


def grid_toml(found: Harm, trunk: RunConfig, used: int) -> str:
    """The schedules as a grid's file, with seeds that the search has not used.

    Args:
        used: seeds from the trunk's on that were used.
    """
    import tomli_w

    own = trunk.data.name == OWN
    base = _changed_fields(to_dict(replace(trunk, name="run", seed=0, checkpoint_keep=None)))
    schedules: dict[str, Any] = {}
    for arm, controls in found.controls.items():
        kind = found.kinds[arm]
        assert kind.within is not None
        field = kind.within[0]
        for name, rule in controls.policies.items():
            table: dict[str, Any] = {} if name == "trunk" else {**kind.setup, field: rule}
            if name == ONE:
                key = LEVELS[field]
                table[key] = {**kind.setup.get(key, {}), **controls.levels}
            label = name if len(found.controls) == 1 or name == "trunk" else f"{name}, {arm}"
            schedules[label] = table
    seeds = [trunk.seed + used + i for i in range(SEEDS)]
    lines = [f"# {line}" for line in found.sentences()]
    for arm, controls in found.controls.items():
        known = {k: v for k, v in controls.bytes.items() if k != "trunk"}
        said = ", ".join(f"{name} {share:.2f}" for name, share in known.items())
        lines.append(f"# Bytes, of those of the trunk ({arm}): {said}.")
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
