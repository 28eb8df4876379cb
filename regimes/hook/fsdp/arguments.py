"""The arguments ``scatter`` and ``gather`` of ``attach_shards`` and ``attach_replicas``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from regimes import compression
from regimes.base.config import DENSE, is_by_name
from regimes.base.config.convert import from_dict
from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest, unexpected_value
from regimes.compression import Compressor
from regimes.compression.scatter import QuantisedScatter, WeightGather, WithinReplicas
from regimes.job.choices import join_compressors, plain_number
from regimes.policies.base import split_policy


def has_whole_levels(policy: Any) -> bool:
    """Return whether a policy has compressors of whole gradients in place of names of levels."""
    levels = split_policy(policy)[1].values()
    return bool(levels) and not any(isinstance(x, QuantisedScatter) for x in levels)


def choose_scatter(given: Any, policy: Any) -> tuple[Any, Compressor]:
    """Return the policy, whose levels are names, and the compressor with its level or levels, for
    the arguments ``scatter`` and ``policy`` of ``attach_shards``.

    Raises:
        ConfigError: an unknown key, no level at all, or levels in both arguments.
    """
    named, of_policy = split_policy(policy)
    if of_policy:
        if given is not None:
            raise ConfigError(
                f"scatter = {given!r}: the policy's levels are compressors already: leave it out, "
                "or let the policy have names of levels"
            )
        joined, levels = join_compressors(of_policy)
        return named, joined.with_level(levels)
    return policy, _choose_table(given, policy)


def _choose_table(given: Any, policy: Any) -> Compressor:
    """The compressor of the argument ``scatter`` beside a policy whose levels are names."""
    if given is None:
        if policy is not None:
            raise ConfigError(
                "policy: it decides the levels of scatter or of a compressor: add compressor="
                'PowerSGD(rank={"low": 4, "high": 1}) or scatter={"levels": {"low": 8, "high": '
                "4}}, or leave it out"
            )
        return QuantisedScatter().with_level(DENSE)
    made, level, named = _build_scatter(given)
    if not isinstance(named, Mapping | None):
        raise unexpected_value(
            "scatter.levels", named, 'a table of levels by name, like {"low": 8, "high": 4}'
        )
    if policy is None and level is None and not named:
        low, high = made.usual.values()
        raise ConfigError(
            f'scatter: it names no level: scatter={{"level": {low}}} for one throughout, or '
            f'{{"levels": {{"low": {low}, "high": {high}}}}} between which the policy decides'
        )
    owing = made.error_feedback or any(
        isinstance(x, Mapping) and x.get("error_feedback") for x in [level, *(named or {}).values()]
    )
    if made.residual_bits is not None and not owing:
        raise ConfigError(
            f"scatter.residual_bits = {made.residual_bits} has no effect without error feedback: "
            "leave it out, or set scatter.error_feedback"
        )
    return made.with_level(named if level is None else level)


def within_replicas(scatter: Any, gather: Mapping[str, Any] | None) -> WithinReplicas:
    """Check the arguments ``scatter`` and ``gather`` of ``attach_replicas``, and join them.

    Raises:
        ConfigError: an unknown key, or what belongs between replicas.
    """
    weights = choose_gather(gather)
    if scatter is None:
        return WithinReplicas(QuantisedScatter(), DENSE, weights)
    made, given, named = _build_scatter(scatter)
    if named is not None or given is None:
        raise ConfigError(
            "scatter.levels: a policy decides what goes between replicas, by the levels of the "
            'compressor: name one level within them, scatter={"level": 8}'
        )
    if made.error_feedback:
        raise ConfigError(
            f"scatter.error_feedback = {made.error_feedback!r}: expected false with replicas: a "
            "job has one residual, that of the compressor between them; round without bias, "
            "stochastic = true"
        )
    level = plain_number(given)
    made.check(level)
    return WithinReplicas(made, level, weights)


def _build_scatter(given: Any) -> tuple[QuantisedScatter, Any, Any]:
    """The compressor of the argument ``scatter``, and its level, or its levels by name."""
    if isinstance(given, QuantisedScatter):
        level = given.level
        both = (None, level) if is_by_name(level) else (level, None)
        return given.with_level(None), *both
    if not isinstance(given, Mapping):
        raise unexpected_value("scatter", given, 'a table like {"level": 4}, or QuantisedScatter')
    if (name := given.get("name", "quantised")) != "quantised":
        whole = str(name) in compression.REGISTRY
        more = f" A compressor of whole gradients is compressor={name!r}." if whole else ""
        raise ConfigError(
            f"scatter.name = {name!r}: {suggest_nearest(str(name), ['quantised'])}{more}"
        )
    table = {key: value for key, value in given.items() if key not in ("name", "level", "levels")}
    known = {field.name for field in dataclasses.fields(QuantisedScatter) if field.init}
    known -= {"residual", "bits"}  # the residual's unit, which no table chooses; "level" has bits
    if table.get("error_feedback") == "owner":
        raise ConfigError(
            "scatter.error_feedback = 'owner': expected true, false or a share in (0, 1]: the "
            "owner of a part sends nothing on, and so has no error of its own to hold back"
        )
    _check_keys("scatter", given, {"name", "level", "levels", *known})
    try:
        made = from_dict(QuantisedScatter, table, "scatter.")
    except ConfigError as error:  # of the compressor, whose fields the user has written here
        raise ConfigError(str(error).replace("compressor.", "scatter.")) from None
    return made, given.get("level"), given.get("levels")


def choose_gather(table: Mapping[str, Any] | None) -> WeightGather:
    """Read from the argument ``gather`` how weights are gathered.

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
    require(is_integer(block, 1), "gather.block", block, "a whole number from 1")
    return WeightGather(plain_number(level), block)


def _check_keys(argument: str, table: Mapping[Any, Any], known: Collection[str]) -> None:
    """Raise ConfigError for a key that is none of those known."""
    unknown = [str(key) for key in table if key not in known]
    if unknown:
        raise ConfigError(f"{argument}.{min(unknown)}: {suggest_nearest(min(unknown), known)}")
