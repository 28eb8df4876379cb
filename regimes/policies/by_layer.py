"""A policy of its own for groups of layers, chosen by name. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from regimes.base.capabilities import declared_needs
from regimes.base.errors import ConfigError, suggest_nearest, unexpected_value
from regimes.policies.base import Decision, Policy, split_policy
from regimes.policies.history import History, LevelCost, PastEpoch, as_history
from regimes.policies.registry import make_policy


@dataclass(frozen=True)
class ByLayer:
    """Gives each group of layers a policy of its own, by the names of the layers.

    A layer belongs to the first group with a pattern that its name matches (``*`` stands for any
    characters), or else to ``otherwise``. The policy of a group sees the statistics, levels and
    costs of its own layers. The bytes of a step, and statistics of the whole model, count all
    layers.

    >>> from regimes.policies.schedules import Static
    >>> rule = ByLayer({"embedding*": Static("dense")}, otherwise=Static("high"))
    >>> [decision.level for decision in rule.decide([], ["embedding.weight", "head.weight"])]
    ['dense', 'high']

    Attributes:
        groups: A policy (a table, or the object) for each pattern. Several patterns are separated
            by spaces.
        otherwise: The policy of all other layers.

    Raises:
        ConfigError: a group has no pattern; or, at the first decision, no layer matches a pattern,
            or all layers of a group belong to earlier groups.
    """

    groups: dict[str, Any] = field(default_factory=dict)
    otherwise: Any = field(default_factory=lambda: {"name": "static", "level": "low"})

    def __post_init__(self) -> None:
        named = isinstance(self.groups, dict) and all(
            isinstance(key, str) and key.split() for key in self.groups
        )
        if not named:
            raise unexpected_value("policy.groups", self.groups, "a table of patterns and policies")
        self.rules  # noqa: B018  (checks the tables)

    @cached_property
    def rules(self) -> tuple[Policy, ...]:
        """Return the policy of each group, in order, and ``otherwise``."""
        named = {f"policy.groups.{key!r}": table for key, table in self.groups.items()}
        return tuple(
            _policy(t, w) for w, t in {**named, "policy.otherwise": self.otherwise}.items()
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the statistics that any of the policies reads."""
        return tuple(dict.fromkeys(need for rule in self.rules for need in rule.needs))

    @property
    def requires(self) -> frozenset[str]:
        """Name the capabilities that any of the policies needs of a job, by the words of
        ``regimes.base.capabilities``."""
        return frozenset().union(*map(declared_needs, self.rules))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that any of the policies may choose."""
        return tuple(dict.fromkeys(name for rule in self.rules for name in rule.names))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the decision for each layer, by the policy of its group.

        Raises:
            ConfigError: at the first decision, no layer matches a pattern, or a group has no layer
                of its own.
        """
        group = self._groups_of(layers)
        if not history:
            for pattern in (word for key in self.groups for word in key.split()):
                if not any(fnmatchcase(layer, pattern) for layer in layers):
                    raise ConfigError(
                        f"policy.groups: no compressed layer matches {pattern!r}; "
                        f"{suggest_nearest(pattern, layers)}"
                    )
            for number, key in enumerate(self.groups):
                if number not in group:
                    raise ConfigError(
                        f"policy.groups: all layers that {key!r} matches belong to a group before "
                        "it: write this group first"
                    )
        past = as_history(history)
        decided: dict[int, Decision] = {}
        for number, rule in enumerate(self.rules):
            members = tuple(i for i, own in enumerate(group) if own == number)
            if members:
                part = _Slice(members)
                own_past = past.accumulate(part, History, part)
                decisions = rule.decide(own_past, [layers[i] for i in members])
                decided.update(zip(members, decisions, strict=True))
        return [decided[i] for i in range(len(layers))]

    def _groups_of(self, layers: Sequence[str]) -> list[int]:
        """The number of each layer's group; ``otherwise`` has the last."""
        groups = [key.split() for key in self.groups]
        return [
            next(
                (i for i, own in enumerate(groups) if any(fnmatchcase(layer, x) for x in own)),
                len(groups),
            )
            for layer in layers
        ]


def _policy(table: Any, where: str) -> Policy:
    if isinstance(table, dict):
        return make_policy(table, where)
    if isinstance(table, Policy):
        if split_policy(table)[1]:
            raise ConfigError(
                f"{where}: all groups share one compressor: name its levels, "
                'PowerSGD(rank={"low": 4, "high": 1}), and those of the policies by these names'
            )
        return table
    raise unexpected_value(where, table, "a table with a name")


@dataclass(frozen=True)
class _Slice:
    """Appends epochs, with the values of some layers alone, to a history; the key of its cache."""

    members: tuple[int, ...]

    def __call__(self, history: History, epochs: Sequence[PastEpoch]) -> History:
        history.extend(self._part(epoch) for epoch in epochs)
        return history

    def _part(self, past: PastEpoch) -> PastEpoch:
        return replace(
            past,
            statistics={name: self._own(values) for name, values in past.statistics.items()},
            levels=self._own(past.levels),
            costs={x: LevelCost(self._own(c.floats), c.bytes) for x, c in past.costs.items()},
        )

    def _own(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.members]
