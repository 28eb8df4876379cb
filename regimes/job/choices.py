"""The arguments of ``attach``, checked before anything is sent; some are also of local steps."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast, get_args

from regimes import compression, policies
from regimes.capabilities import Part
from regimes.compression import Compressor
from regimes.compression.base import check_level, has_feedback
from regimes.compression.needs import compressor_parts
from regimes.compression.scatter import QuantisedScatter, Weights, WithinReplicas
from regimes.config import (
    DENSE,
    AnyLevel,
    FeedbackLevel,
    GivenLevel,
    Signal,
    as_level,
    plain_levels,
)
from regimes.config.bounds import LONGEST, SECONDS
from regimes.config.convert import from_dict
from regimes.errors import ConfigError, is_whole, require, suggest_nearest, unexpected_value
from regimes.instruments import make_instruments
from regimes.instruments.needs import needs_of, policy_parts, signal_parts
from regimes.job.probe import CurvatureProbe
from regimes.policies import Policy

_CONSTANT = "constant"  # the name of the only level, where no policy chooses


@dataclass(frozen=True)
class Choice:
    """A policy, a compressor with its levels and a signal that go together.

    Attributes:
        dense_start: the first so many steps send the gradient uncompressed.
        instruments: tables of the instruments that the script names.
        probe: what curvature is measured on.
    """

    policy: Policy
    compressor: Compressor
    levels: Mapping[str, AnyLevel]
    signal: Signal
    dense_start: int = 0
    instruments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    probe: CurvatureProbe | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The levels in plain types."""
        return plain_levels(self.levels)

    @property
    def keeps_residuals(self) -> bool:
        """Has the compressor error feedback, throughout or at one of the levels?"""
        return has_feedback(self.compressor, self.levels.values())

    def needed_parts(self) -> Iterator[Part]:
        """What is chosen, with what it needs of a job (``capabilities``)."""
        yield from compressor_parts(self.compressor)
        yield from policy_parts(self.policy, "policy")
        yield from signal_parts(self.signal, self.policy)
        yield from self.instrument_parts()

    def instrument_parts(self) -> Iterator[Part]:
        for name, tool in make_instruments(self.instruments).items():
            yield Part(f"instruments.{name}", needs_of(tool))

    def instrument_facts(self) -> dict[str, Any]:
        """The instruments as an entry of ``shared_facts``, if there are any."""
        return {"instruments": dict(self.instruments)} if self.instruments else {}

    def shared_facts(self) -> dict[str, Any]:
        """The choice in plain types; it must be the same on all processes."""
        return {
            "policy": policies.REGISTRY.table(self.policy),
            "compressor": compression.REGISTRY.table(self.compressor),
            "levels": self.values,
            "signal": self.signal,
            "start_compressing_after": self.dense_start,
            **self.instrument_facts(),
        }


def choose_exchange(
    policy: Any,
    compressor: Any,
    levels: Mapping[str, GivenLevel] | None,
    signal: str,
    dense_start: int,
    probed: tuple[CurvatureProbe | None, Mapping[str, Mapping[str, Any]]] = (None, {}),
) -> Choice:
    """The arguments of ``attach``; ConfigError unless they go together."""
    good = is_whole(dense_start, 0)
    require(good, "start_compressing_after", dense_start, "a number of steps, from 0 up")
    if signal not in get_args(Signal):
        raise ConfigError(f"signal = {signal!r}: {suggest_nearest(str(signal), get_args(Signal))}")
    chosen = pick_compressor(compressor)
    known = pick_levels(chosen, chosen.usual if levels is None else levels)
    objects = "an object with decide(), needs and names"
    rule = pick_policy(policy, f"a name, a table with a name, or {objects}")
    _check_known(rule, chosen, known)
    probe, tables = probed
    return Choice(rule, chosen, known, cast(Signal, signal), dense_start, tables, probe)


UNNAMED = ("quantised-all-reduce", 8)  # harmless in every measurement of `cost/measured.toml`


def warn_of_unnamed() -> None:
    """``attach`` was told of no compressor, level or policy."""
    name, level = UNNAMED
    warnings.warn(
        f"attach: no compressor, level or policy is named, so {level} bits a number are sent: "
        f'compressor="{name}", level={level} says so without this warning. ACCORDION between '
        'ranks 4 and 1, the default before version 0.4, is policy="accordion".',
        stacklevel=3,
    )


def choose_constant(
    policy: Any, level: GivenLevel | None, levels: Mapping[str, GivenLevel] | None
) -> tuple[Any, Mapping[str, GivenLevel] | None]:
    """The policy and its levels for these arguments of ``attach``.

    Raises:
        ConfigError: ``level`` beside one of the others, or a number where a policy wants the name
            of a level.
    """
    if level is not None:
        for name, given in (("policy", policy), ("levels", levels)):
            if given is not None:
                raise ConfigError(
                    f"level = {level!r}: it is one level throughout, which no {name} can change: "
                    f"leave {name} out, or level"
                )
        return {"name": "static", "level": _CONSTANT}, {_CONSTANT: level}
    table = policy if isinstance(policy, Mapping) else {}
    named = table.get("level", "")
    if table.get("name") == "static" and isinstance(named, Real):
        raise ConfigError(
            f'policy.level = {named!r}: expected the name of a level, like "low"; for one level '
            f"throughout leave policy out, attach(..., level={named!r})"
        )
    return "accordion" if policy is None else policy, levels


def refuse_scatter(table: Mapping[str, Any] | None, compressor: Any) -> None:
    """Raise ConfigError for the argument ``scatter`` of ``attach`` beside a compressor."""
    if table is not None:
        raise ConfigError(
            f"compressor = {compressor!r}: with shards it exchanges whole gradients, and scatter "
            "quantises the parts of their owners: leave one of them out"
        )


def choose_scatter(
    table: Mapping[str, Any] | None,
    policy: Any,
    level: GivenLevel | None,
    levels: Mapping[str, GivenLevel] | None,
) -> tuple[Compressor, GivenLevel | None, Mapping[str, GivenLevel] | None]:
    """The compressor, and its level or levels, for the argument ``scatter`` of ``attach``.

    Raises:
        ConfigError: an argument that belongs into ``scatter``, an unknown key, or no level at all.
    """
    for key, value in (("level", level), ("levels", levels)):
        if value is not None:
            raise ConfigError(
                f"{key} = {value!r}: with shards the bits of gradients are in "
                'scatter={"level": 4}, those of weights in gather={"level": 8}, and a rank is for '
                'compressor="powersgd": add it, or leave this out'
            )
    if table is None:
        if policy is not None:
            raise ConfigError(
                "policy: it decides the levels of scatter or of a compressor: add compressor="
                '"powersgd" or scatter={"levels": {"low": 8, "high": 4}}, or leave it out'
            )
        return QuantisedScatter(), DENSE, None
    made = _build_scatter(table)
    named = table.get("levels")
    if not isinstance(named, Mapping | None):
        raise unexpected_value(
            "scatter.levels", named, 'a table of levels by name, like {"low": 8, "high": 4}'
        )
    if policy is None and table.get("level") is None and not named:
        low, high = made.usual.values()
        raise ConfigError(
            f'scatter: it names no level: scatter={{"level": {low}}} for one throughout, or '
            f'{{"levels": {{"low": {low}, "high": {high}}}}} between which the policy decides'
        )
    given = [table.get("level"), *(named or {}).values()]
    owing = made.error_feedback or any(
        isinstance(x, Mapping) and x.get("error_feedback") for x in given
    )
    if made.residual_bits is not None and not owing:
        raise ConfigError(
            f"scatter.residual_bits = {made.residual_bits} has no effect without error feedback: "
            "leave it out, or set scatter.error_feedback"
        )
    return made, table.get("level"), named


def within_replicas(
    scatter: Mapping[str, Any] | None, gather: Mapping[str, Any] | None
) -> WithinReplicas:
    """The arguments ``scatter`` and ``gather`` of ``attach`` beside ``replicas``.

    Raises:
        ConfigError: an unknown key, or what belongs between replicas.
    """
    weights = _choose_gather(gather)
    if scatter is None:
        return WithinReplicas(QuantisedScatter(), DENSE, weights)
    made = _build_scatter(scatter)
    if "levels" in scatter or "level" not in scatter:
        raise ConfigError(
            "scatter.levels: with replicas a policy decides what goes between them, by levels= of "
            'attach: name one level within them, scatter={"level": 8}'
        )
    if made.error_feedback:
        raise ConfigError(
            f"scatter.error_feedback = {made.error_feedback!r}: expected false with replicas: a "
            "job has one residual, that of the compressor between them; round without bias, "
            "stochastic = true"
        )
    level = _plain_number(scatter["level"])
    made.check(level)
    return WithinReplicas(made, level, weights)


def _build_scatter(table: Any) -> QuantisedScatter:
    """The compressor of a table ``scatter``, which has its name and fields beside the levels."""
    if not isinstance(table, Mapping):
        raise unexpected_value("scatter", table, 'a table like {"level": 4}')
    if (name := table.get("name", "quantised")) != "quantised":
        whole = str(name) in compression.REGISTRY
        more = f" A compressor of whole gradients is compressor={name!r}." if whole else ""
        raise ConfigError(
            f"scatter.name = {name!r}: {suggest_nearest(str(name), ['quantised'])}{more}"
        )
    given = {key: value for key, value in table.items() if key not in ("name", "level", "levels")}
    known = {field.name for field in dataclasses.fields(QuantisedScatter) if field.init}
    known -= {"residual"}  # its unit
    if given.get("error_feedback") == "owner":
        raise ConfigError(
            "scatter.error_feedback = 'owner': expected true, false or a share in (0, 1]: the "
            "owner of a part sends nothing on, and so has no error of its own to hold back"
        )
    _check_keys("scatter", table, {"name", "level", "levels", *known})
    try:
        return from_dict(QuantisedScatter, given, "scatter.")
    except ConfigError as error:  # of the compressor, whose fields the user has written here
        raise ConfigError(str(error).replace("compressor.", "scatter.")) from None


def _choose_gather(table: Mapping[str, Any] | None) -> Weights:
    """How weights are gathered, for the argument ``gather`` of ``attach``.

    Raises:
        ConfigError: an unknown key, or a level that is none of the quantiser's.
    """
    if table is not None and not isinstance(table, Mapping):
        raise unexpected_value("gather", table, 'a table like {"level": 8}')
    given = {} if table is None else dict(table)
    _check_keys("gather", given, {"level", "block"})
    level, block = given.get("level", DENSE), given.get("block", 64)
    good = level in (DENSE, 4, 8) and not isinstance(level, bool)
    require(good, "gather.level", level, '4 or 8 (bits), or "dense"')
    require(is_whole(block, 1), "gather.block", block, "a whole number from 1")
    return Weights(_plain_number(level), block)


def _check_keys(argument: str, table: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise ConfigError for a key that is none of those known."""
    unknown = [str(key) for key in table if key not in known]
    if unknown:
        raise ConfigError(f"{argument}.{min(unknown)}: {suggest_nearest(min(unknown), known)}")


def _check_known(rule: Policy, compressor: Compressor, known: Mapping[str, AnyLevel]) -> None:
    """Raise ConfigError where a policy asks for a level that is not among those known, with values
    that the compressor takes."""
    missing = [name for name in rule.names if name not in known and name != DENSE]
    if not missing:
        return
    values = {name: known.get(name, "...") for name in rule.names if name != DENSE}
    for name in missing:
        if (value := _suggest_level(compressor, name, values)) is not None:
            values[name] = value
    pairs = ", ".join(f'"{name}": {x if x == "..." else repr(x)}' for name, x in values.items())
    scattered = isinstance(compressor, QuantisedScatter)
    written = f'scatter={{"levels": {{{pairs}}}}}' if scattered else f"levels={{{pairs}}}"
    raise ConfigError(
        f"the policy asks for level {missing[0]!r}, and levels has only "
        f"{', '.join(known) or 'none'}: say what it is, attach(..., {written})"
    )


def _suggest_level(compressor: Compressor, name: str, values: Mapping[str, Any]) -> Any:
    """A level between the neighbours of one that is missing, by a geometric mean; None: the
    compressor has none there."""
    place = list(values).index(name)
    before = [x for x in [*values.values()][:place] if _is_number(x)]
    after = [x for x in [*values.values()][place + 1 :] if _is_number(x)]
    if not before or not after:
        return None
    middle = math.sqrt(before[-1] * after[0])
    for value in (round(middle), middle):
        with suppress(ConfigError):
            compressor.check(value)
            if value not in values.values():
                return value
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def pick_policy(given: Any, expected: str) -> Policy:
    """A policy from a name, a table or an object; ConfigError with what was expected otherwise."""
    rule = _build_from(given, policies.make_policy)
    if not isinstance(rule, Policy):
        raise unexpected_value("policy", given, expected)
    return rule


def pick_compressor(given: Any) -> Compressor:
    """A compressor from a name, a table or an object; ConfigError otherwise."""
    chosen = _build_from(given, compression.make_compressor)
    if not isinstance(chosen, Compressor):
        raise unexpected_value("compressor", given, "a name, a table with a name, or a Compressor")
    return chosen


def _build_from(given: Any, make: Callable[[dict[str, Any]], Any]) -> Any:
    """What ``make`` builds from a name or a table; anything else unchanged."""
    table = {"name": given} if isinstance(given, str) else given
    return make(dict(table)) if isinstance(table, Mapping) else table


def pick_levels(compressor: Compressor, given: Any) -> dict[str, AnyLevel]:
    """Levels of a compressor by name; ConfigError if it has no such level."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise unexpected_value(
            "levels", given, 'a table of levels by name, like {"low": 4, "high": 1}'
        )
    levels = {name: _pick_level(level, f"levels.{name}") for name, level in given.items()}
    if not levels:
        raise ConfigError(
            f"levels: {type(compressor).__name__} has no default levels: say what low and high "
            'are, e.g. levels={"low": ..., "high": ...}'
        )
    if DENSE in levels:
        raise ConfigError('levels: "dense" is always known, give the level another name')
    for level in levels.values():
        plain = isinstance(level, int | float | str | FeedbackLevel)
        require(plain, f"level of {type(compressor).__name__}", level, "a number or a word")
        check_level(compressor, level)
    return levels


def _pick_level(given: Any, where: str) -> Any:
    if isinstance(given, Mapping) and "level" in given:
        given = {**given, "level": _plain_number(given["level"])}
    return _plain_number(as_level(given, where))


def _plain_number(level: Any) -> Any:
    """A number of Python for one of NumPy, which a record could not write."""
    if isinstance(level, bool | int | float) or not isinstance(level, Real):
        return level
    return int(level) if isinstance(level, Integral) else float(level)


def check_seed(seed: Any) -> None:
    """Raise ConfigError unless it is a seed as in a configuration."""
    good = is_whole(seed, -(2**63)) and seed < 2**63
    require(good, "seed", seed, "a whole number of at most 63 bits")


def check_timeout(timeout: Any) -> None:
    """Raise ConfigError unless it is a number of seconds."""
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    require(number and 0 < float(timeout) <= LONGEST, "timeout", timeout, SECONDS)
