"""The arguments of ``attach``, checked before anything is sent; some are also of local steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, cast, get_args

from regimes import compression, policies
from regimes.base.capabilities import Part
from regimes.base.config import (
    DENSE,
    AnyLevel,
    FeedbackLevel,
    GivenLevel,
    Signal,
    as_level,
    is_by_name,
    plain_levels,
)
from regimes.base.config.bounds import LONGEST, SECONDS
from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest, unexpected_value
from regimes.compression import Compressor
from regimes.compression.base import check_level, has_feedback
from regimes.compression.elementwise import Dense
from regimes.compression.needs import compressor_parts
from regimes.compression.scatter import QuantisedScatter
from regimes.instruments import make_instruments
from regimes.instruments.needs import needs_of, policy_parts, signal_parts
from regimes.job.probe import CurvatureProbe
from regimes.policies import Policy
from regimes.policies.base import split_policy

_CONSTANT = "constant"  # the name of the only level, where no policy chooses


@dataclass(frozen=True)
class Choice:
    """Holds a policy, a compressor with its levels, and a signal, which go together.

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
        """Return the levels in plain types."""
        return plain_levels(self.levels)

    @property
    def keeps_residuals(self) -> bool:
        """Return whether the compressor has error feedback, throughout or at one of the levels."""
        return has_feedback(self.compressor, self.levels.values())

    def needed_parts(self) -> Iterator[Part]:
        """Yield what is chosen, each part with what it needs of a job (``capabilities``)."""
        yield from compressor_parts(self.compressor)
        yield from policy_parts(self.policy, "policy")
        yield from signal_parts(self.signal, self.policy)
        yield from self.instrument_parts()

    def instrument_parts(self) -> Iterator[Part]:
        """Yield each instrument, with what it needs of a job."""
        for name, tool in make_instruments(self.instruments).items():
            yield Part(f"instruments.{name}", needs_of(tool))

    def instrument_facts(self) -> dict[str, Any]:
        """Return the instruments as an entry of ``shared_facts``, if there are any."""
        return {"instruments": dict(self.instruments)} if self.instruments else {}

    def shared_facts(self) -> dict[str, Any]:
        """Return the choice in plain types; it must be the same on all processes."""
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
    """Check the arguments of ``attach`` and make the choice of them. Raise ConfigError unless they
    go together."""
    good = is_integer(dense_start, 0)
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


UNNAMED = {"name": "quantised-all-reduce", "level": 8}  # its clock is 1: `cost/clocks.toml`


def warn_of_unnamed() -> None:
    """Warn that the call of ``attach`` names neither a compressor nor a policy."""
    bits = UNNAMED["level"]
    warnings.warn(
        f"attach: no compressor or policy is named, so {bits} bits a number are sent: "
        f"compressor=regimes.QuantisedAllReduce(bits={bits}) says so without this warning. "
        'ACCORDION between ranks 4 and 1, the default before version 0.4, is policy="accordion".',
        stacklevel=5,  # past the function that all kinds of models share, and its decorator
    )


def choose_levels(
    policy: Any, compressor: Any, usual: str = "powersgd"
) -> tuple[Any, Compressor, Mapping[str, GivenLevel] | None]:
    """Return the policy, the compressor and its levels by name, for these arguments of ``attach``.

    Args:
        usual: the compressor where none is named.

    Raises:
        ConfigError: two of them say what the levels are, or one does not say it.
    """
    policy, of_policy = split_policy(policy)
    if of_policy:
        if compressor is not None:
            raise ConfigError(
                f"compressor = {compressor!r}: the policy's levels are compressors already: leave "
                "it out, or let the policy have names of levels"
            )
        return policy, *join_compressors(of_policy)
    chosen, level, levels = take_level(usual if compressor is None else compressor)
    policy, levels = _choose_constant(policy, level, levels)
    return policy, chosen, levels


def take_level(given: Any) -> tuple[Compressor, GivenLevel | None, Any]:
    """Split a name, a table or an object into a compressor without its level, the one level, and
    the levels by name.

    Raises:
        ConfigError: it is no compressor, or has a level twice.
    """
    table = dict(given) if isinstance(given, Mapping) else {}
    level, levels = table.pop("level", None), table.pop("levels", None)
    chosen = pick_compressor(table if isinstance(given, Mapping) else given)
    several = [x for x in (level, levels, chosen.level) if x is not None]
    if len(several) > 1:
        raise ConfigError(f"compressor: it has two levels, {several[0]!r} and {several[1]!r}")
    own = chosen.level if level is None else level
    if levels is None and is_by_name(own):
        own, levels = None, own
    return chosen.with_level(None), own, levels


def join_compressors(
    given: Mapping[str, Any],
) -> tuple[Compressor, dict[str, GivenLevel]]:
    """Return one compressor and its levels by name, for a policy that has a compressor in place of
    each name. "dense" is a level of any.

    Raises:
        ConfigError: they differ in more than level and error feedback, or one has no single level.
    """
    dense = {name for name, one in given.items() if type(one) is Dense}
    several = [one for name, one in given.items() if name not in dense] or [*given.values()]
    first = several[0]
    joined, levels = first.with_level(None), dict[str, GivenLevel]()
    for name, one in given.items():
        if name in dense:
            levels[name] = DENSE
            continue
        if one.level is None or is_by_name(one.level):
            raise ConfigError(f"policy.{name} = {one!r}: expected a compressor with one level")
        alike = type(one) is type(joined) and joined == replace(
            one.with_level(None), error_feedback=joined.error_feedback
        )
        if not alike:
            raise ConfigError(
                f"policy.{name} = {one!r}: the levels of a policy are of one compressor, and may "
                f"differ in level and error feedback; another is {first!r}"
            )
        same = one.error_feedback == joined.error_feedback
        own = {"level": one.level, "error_feedback": one.error_feedback}
        levels[name] = one.level if same else own
    return joined, levels


def _choose_constant(
    policy: Any, level: GivenLevel | None, levels: Mapping[str, GivenLevel] | None
) -> tuple[Any, Mapping[str, GivenLevel] | None]:
    """The policy and its levels.

    Raises:
        ConfigError: one level beside a policy, or a number where a policy wants the name of a
            level.
    """
    if level is not None:
        if policy is not None:
            raise ConfigError(
                f"level = {level!r}: it is one level throughout, which no policy can change: leave "
                'the policy out, or name levels, PowerSGD(rank={"low": 4, "high": 1})'
            )
        return {"name": "static", "level": _CONSTANT}, {_CONSTANT: level}
    table = policy if isinstance(policy, Mapping) else {}
    named = table.get("level", "")
    if table.get("name") == "static" and isinstance(named, Real):
        raise ConfigError(
            f'policy.level = {named!r}: expected the name of a level, like "low"; for one level '
            f"throughout leave the policy out, attach(..., compressor=PowerSGD(rank={named!r}))"
        )
    return "accordion" if policy is None else policy, levels


def _check_known(rule: Policy, compressor: Compressor, known: Mapping[str, AnyLevel]) -> None:
    """Raise ConfigError where a policy asks for a level that is not among those known."""
    missing = [name for name in rule.names if name not in known and name != DENSE]
    if not missing:
        return
    pairs = ", ".join(
        f'"{name}": {repr(known[name]) if name in known else "..."}'
        for name in rule.names
        if name != DENSE
    )
    scattered = isinstance(compressor, QuantisedScatter)
    argument, rest = ("scatter", "") if scattered else ("compressor", '"name": ..., ')
    written = f'{argument}={{{rest}"levels": {{{pairs}}}}}'
    raise ConfigError(
        f"the policy asks for level {missing[0]!r}, and levels has only "
        f"{', '.join(known) or 'none'}: say what it is, attach(..., {written})"
    )


def pick_policy(given: Any, expected: str) -> Policy:
    """Make a policy of a name, a table or an object; raise ConfigError, with what was expected, for
    anything else."""
    rule = _build_from(given, policies.make_policy)
    if not isinstance(rule, Policy):
        raise unexpected_value("policy", given, expected)
    return rule


def pick_compressor(given: Any) -> Compressor:
    """Make a compressor of a name, a table or an object; raise ConfigError for anything else."""
    chosen = _build_from(given, compression.make_compressor)
    if not isinstance(chosen, Compressor):
        raise unexpected_value("compressor", given, "a name, a table with a name, or a Compressor")
    return chosen


def _build_from(given: Any, make: Callable[[dict[str, Any]], Any]) -> Any:
    """What ``make`` builds from a name or a table; anything else unchanged."""
    table = {"name": given} if isinstance(given, str) else given
    return make(dict(table)) if isinstance(table, Mapping) else table


def pick_levels(compressor: Compressor, given: Any) -> dict[str, AnyLevel]:
    """Check levels of a compressor by name, and return them; raise ConfigError if it has no such
    level."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise unexpected_value(
            "levels", given, 'a table of levels by name, like {"low": 4, "high": 1}'
        )
    levels: dict[str, Any] = {}
    for name, level in given.items():
        table = isinstance(level, Mapping) and "level" in level
        plain = {**level, "level": plain_number(level["level"])} if table else level
        levels[name] = plain_number(as_level(plain, f"levels.{name}"))
    if not levels:
        raise ConfigError(
            f"levels: {type(compressor).__name__} has no default levels: say what low and high "
            'are, e.g. {"name": ..., "levels": {"low": ..., "high": ...}}'
        )
    if DENSE in levels:
        raise ConfigError('levels: "dense" is always known, give the level another name')
    for chosen in levels.values():
        plain = isinstance(chosen, int | float | str | FeedbackLevel)
        require(plain, f"level of {type(compressor).__name__}", chosen, "a number or a word")
        check_level(compressor, chosen)
    return levels


def plain_number(level: Any) -> Any:
    """Turn a number of NumPy, which a record could not write, into one of Python; return anything
    else as it is."""
    if isinstance(level, bool | int | float) or not isinstance(level, Real):
        return level
    return int(level) if isinstance(level, Integral) else float(level)


def check_seed(seed: Any) -> None:
    """Raise ConfigError unless the seed is a whole number of at most 63 bits, as in a
    configuration."""
    good = is_integer(seed, -(2**63)) and seed < 2**63
    require(good, "seed", seed, "a whole number of at most 63 bits")


def check_timeout(timeout: Any) -> None:
    """Raise ConfigError unless the timeout is a number of seconds above 0."""
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    require(number and 0 < float(timeout) <= LONGEST, "timeout", timeout, SECONDS)
