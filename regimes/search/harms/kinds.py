"""What a pulse changes, in words of the command line. No torch.

- a level of the configuration, "high" or "dense": of all layers, or of a group of them;
- "no-feedback": what is not sent is dropped;
- "period=8": workers take so many steps alone between two synchronisations;
- "batch=4": batches of so many times the size, at a rate that grows with them (`scale_with_batch`);
- "precision": forward and backward in bfloat16;
- "deletion": the same units left out, which costs time alone;
- "FIELD=VALUE": any field that a branch may change, as with ``--set``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from regimes.base.config import DENSE, RunConfig, override, override_fields
from regimes.base.errors import ConfigError, require, suggest_nearest
from regimes.plotting.looks import level_text
from regimes.search.harms.evidence import DELETION

Spans = Sequence[tuple[int, int]]
Field = Literal["policy", "batch_policy", "sync_policy"]
WORDS = ("no-feedback", "period=8", "batch=4", "precision", DELETION)


class PolicyLevels(NamedTuple):
    """Says how a policy makes the change of a pulse in several spans of one run.

    Attributes:
        field: of the policy, in a configuration.
        inside, outside: its levels within and outside of the spans.
    """

    field: Field
    inside: str
    outside: str


@dataclass(frozen=True)
class PulseKind:
    """Says what pulses of one arm change.

    Attributes:
        name: of the arm.
        text: what it is, in a sentence.
        changes: fields by dotted path, during a pulse.
        setup: the changes that a policy needs in the whole run, such as ``sync_levels``.
        skip: its units are left out.
        by_policy: how a policy makes the change, in several spans of one run; None: no policy can,
            and a run has one span.
        group: patterns of the names of layers that it is in; None: all.
    """

    name: str
    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    skip: bool = False
    by_policy: PolicyLevels | None = None
    group: str | None = None

    def schedule(self, spans: Spans) -> dict[str, Any]:
        """Return the table of the policy with this change in spans of units."""
        assert self.by_policy is not None
        windows = {
            "name": "windows",
            "windows": [list(span) for span in spans],
            "inside": self.by_policy.inside,
            "outside": self.by_policy.outside,
        }
        return self.in_group(windows)

    def in_group(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Restrict a policy to the layers of the group; the others have the trunk's level."""
        if self.group is None or self.by_policy is None:
            return policy
        otherwise = {"name": "static", "level": self.by_policy.outside}
        return {"name": "by-layer", "groups": {self.group: policy}, "otherwise": otherwise}


LEFT_OUT = PulseKind(DELETION, "leaving units out", skip=True)


def trunk_config(config: RunConfig) -> RunConfig:
    """Return the run that pulses disturb: the configuration at one level throughout, its own if its
    policy is static, else "low".

    Raises:
        ConfigError: it has no such level, is a branch, or ends by a budget of floats.
    """
    require(config.branch is None, "branch", config.branch and config.branch.of, "none in a trunk")
    require(config.budget is None, "budget", config.budget and config.budget.level, "none in harm")
    policy = dict(config.policy)
    if policy["name"] != "static":
        policy = {"name": "static", "level": "low"}
    level = policy.get("level", "low")
    expected = f"one of {', '.join([*config.levels, DENSE])}: set policy.name=static and this field"
    require(level in (*config.levels, DENSE), "policy.level", level, expected)
    return replace(config, name="trunk", policy=policy, drawn_per_seed=())


def kinds_of(words: Sequence[str], groups: Sequence[str], trunk: RunConfig) -> dict[str, PulseKind]:
    """Return the arms of a search, by name.

    Args:
        words: what pulses change, each an arm.
        groups: patterns of layers' names; a level then has an arm for each of them.

    Raises:
        ConfigError: a word that is none, or does not fit the trunk.
    """
    kinds: list[PulseKind] = []
    for word in words:
        if word not in (*trunk.levels, DENSE):
            require(not groups, "pulse", word, "a level with groups of layers")
            kinds.append(_make_word_kind(word, trunk))
        elif groups:
            kinds += [_make_level_kind(word, group, trunk) for group in groups]
        else:
            kinds.append(_make_level_kind(word, None, trunk))
    return _by_name(kinds, words, f"a level, or one of {', '.join(WORDS)}")


def kinds_of_job(words: Sequence[str]) -> dict[str, PulseKind]:
    """Return the arms of a function of the user's, which knows itself what its words mean.

    Raises:
        ConfigError: no word, or one twice.
    """
    kinds = [PulseKind(word, word, by_policy=PolicyLevels("policy", word, "low")) for word in words]
    return _by_name(kinds, words, "a word that the function knows")


def _by_name(
    kinds: Sequence[PulseKind], words: Sequence[str], expected: str
) -> dict[str, PulseKind]:
    found = {kind.name: kind for kind in kinds}
    require(len(found) == len(kinds), "pulse", list(words), "each once")
    require(bool(found), "pulse", list(words), expected)
    return found


def _make_level_kind(level: str, group: str | None, trunk: RunConfig) -> PulseKind:
    own = trunk.policy.get("level", "low")
    require(level != own, "pulse", level, f"another level than the trunk's, {own}")
    form, value = level_text(trunk.compressor["name"]), trunk.levels.get(level)
    text = form.format(value) if form and value not in (None, DENSE) else level
    by_policy = PolicyLevels("policy", level, own)
    if group is None:
        changes: dict[str, Any] = {"policy": {"name": "static", "level": level}}
        return PulseKind(level, text, changes, by_policy=by_policy)
    rule = {
        "name": "by-layer",
        "groups": {group: {"name": "static", "level": level}},
        "otherwise": {"name": "static", "level": own},
    }
    name = f"{level} in {group.replace('/', ' ')}"
    return PulseKind(name, f"{text} in {group}", {"policy": rule}, by_policy=by_policy, group=group)


def _make_word_kind(word: str, trunk: RunConfig) -> PulseKind:
    key, equals, value = word.partition("=")
    if word == DELETION:
        return LEFT_OUT
    if word == "precision":
        return PulseKind("precision", "bfloat16", {"precision": "bfloat16"})
    if word == "no-feedback":
        return PulseKind("no feedback", "no error feedback", {"compressor.error_feedback": False})
    if key in ("period", "batch") and equals:
        good = value.isdecimal() and int(value) > 1
        require(good, f"pulse {key}", value, "a whole number above 1")
        if key == "period":
            what, levels = "sync", {"low": 1, "high": int(value)}
            name, text = f"period {int(value)}", f"a period of {int(value)} steps"
        else:
            what, size = "batch", trunk.batch_size
            levels = {"low": size, "high": int(value) * size}
            name, text = f"batch {int(value)}", f"batches {int(value)} times as large"
        setup = {f"{what}_levels": levels}
        changes = {**setup, f"{what}_policy": {"name": "static", "level": "high"}}
        by_policy = PolicyLevels(cast(Field, f"{what}_policy"), "high", "low")
        return PulseKind(name, text, changes, setup, by_policy=by_policy)
    if not equals:
        known = [*trunk.levels, DENSE, *WORDS]
        raise ConfigError(f"pulse {word!r}: {suggest_nearest(word, known)} or FIELD=VALUE.")
    override(trunk, [word])  # raises for what is no field
    return PulseKind(word.replace("/", " "), word, {"": word})  # as written, for ``apply_pulse``


def apply_pulse(config: RunConfig, kind: PulseKind, spans: Spans) -> RunConfig:
    """Return a trunk's configuration as the pulse has it; with several spans as the whole run has
    it.

    Raises:
        ConfigError: a field that does not exist.
    """
    if len(spans) > 1:
        assert kind.by_policy is not None
        return override_fields(config, {**kind.setup, kind.by_policy.field: kind.schedule(spans)})
    changes = dict(kind.changes)
    if "" in changes:  # a setting as it was written
        return override(config, [changes[""]])
    return override_fields(config, changes)
