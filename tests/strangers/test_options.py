"""Any value of any option: accepted and written back, or refused in one sentence that names it.

Oracle: the annotations of the options, judged by a few lines of their own. Where two options do not
fit together (a window after the last epoch, say), a sentence that names one of them will do.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import regimes
from regimes import compression, instruments, policies
from regimes.base.config import AnyLevel, RunConfig, bounds, override_fields, to_dict, to_toml
from regimes.base.config.bounds import Bounds
from regimes.base.config.convert import from_dict
from regimes.base.config.registry import Registry
from regimes.base.config.toml import PLUG_INS
from regimes.base.errors import ConfigError
from regimes.compression.base import check_level
from regimes.data import deficits
from regimes.policies import detectors
from regimes.training.plug_ins import PlugIns

BASE = regimes.get_preset("smoke")
LOCAL = {"sync_levels": {"low": 2, "high": 8}, "sync_policy": {"name": "static", "level": "low"}}
BEFORE: dict[str, dict[str, Any]] = {  # what an option needs beside it
    "outer": LOCAL,
    "sync_levels": LOCAL,
    "batch_levels": {"batch_levels": {"low": 8, "high": 16}, "batch_policy": "static"},
    "branch": {"branch.of": "trunk"},
}
REQUIRED: dict[str, dict[str, Any]] = {  # fields without which a plug-in cannot be made
    "qsr": {"alpha": 1.0},
    "first-share": {"epochs": 9},
    "random-windows": {"epochs": 9},
}
REGISTRIES: dict[str, Registry] = {
    "compressor": compression.REGISTRY,
    "policy": policies.REGISTRY,
    "detector": detectors.REGISTRY,
    "deficit": deficits.REGISTRY,
    "instrument": instruments.REGISTRY,
}


@dataclass(frozen=True)
class Option:
    """``accept`` raises ConfigError for a value, or has shown that it is written back."""

    path: str
    hint: Any
    accept: Callable[[Any], None]


# -- the schema ------------------------------------------------------------------------------------


def find_options() -> Iterator[Option]:
    yield from find_settings(RunConfig)
    for kind, registry in REGISTRIES.items():
        for name in registry:
            for field, hint in hints_of(registry.dataclass(name)).items():
                yield Option(f"{kind}.{field}", hint, made_by(registry, name, field))
    for name in compression.REGISTRY:
        yield Option("level", AnyLevel, chosen_level(name))


def find_settings(cls: Any, prefix: str = "") -> Iterator[Option]:
    """The fields of a configuration and of its tables, but not of what a name chooses."""
    for name, hint in hints_of(cls).items():
        path = prefix + name
        for kind in kinds_of(hint):
            if dataclasses.is_dataclass(kind):
                yield from find_settings(kind, f"{path}.")
            elif typing.get_origin(kind) is dict and name.endswith("levels"):
                yield Option(f"{path}.low", typing.get_args(kind)[1], set_to(f"{path}.low"))
        yield Option(path, hint | str if path in PLUG_INS else hint, set_to(path))


def hints_of(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def kinds_of(hint: Any) -> list[Any]:
    """What a union is made of, without the bounds of its numbers."""
    hint = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    return [kind for one in typing.get_args(hint) for kind in kinds_of(one)]


def limits_of(hint: Any) -> Bounds | None:
    found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Bounds)]
    return next(filter(None, [*found, *map(limits_of, typing.get_args(hint))]), None)


# -- what accepts a value --------------------------------------------------------------------------


def set_to(path: str) -> Callable[[Any], None]:
    def accept(value: Any) -> None:
        before = BEFORE.get(path.partition(".")[0], {})
        config = override_fields(BASE, {**before, path: value})
        PlugIns.from_config(config)
        assert from_dict(RunConfig, to_dict(config)) == config
        assert from_dict(RunConfig, tomllib.loads(to_toml(config))) == config

    return accept


def made_by(registry: Registry, name: str, field: str) -> Callable[[Any], None]:
    def accept(value: Any) -> None:
        plug_in = registry.make({"name": name, **REQUIRED.get(name, {}), field: value})
        assert registry.make(registry.table(plug_in)) == plug_in

    return accept


def chosen_level(compressor: str) -> Callable[[Any], None]:
    made = compression.make_compressor({"name": compressor})
    return lambda value: check_level(made, value)


# -- which values are right ------------------------------------------------------------------------


def fits(hint: Any, value: Any) -> bool:
    """Is a value of the type that an annotation names? What a table holds, other options say."""
    return any(fits_kind(kind, value) for kind in kinds_of(hint))


def fits_kind(kind: Any, value: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        each = inner[:1] * len(value) if isinstance(value, list) and inner[-1] is ... else inner
        return isinstance(value, list) and len(each) == len(value) and all(map(fits, each, value))
    if origin is dict or dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    if origin is Literal:
        return type(value) in (str, int) and value in inner
    if kind is float:
        return type(value) in (int, float) and -math.inf < value < math.inf and abs(value) < 2**1024
    if kind is int:
        return type(value) is int and -(2**63) < value < 2**63
    return kind is Any or type(value) is kind


def describe_limits(hint: Any, value: Any) -> str:
    """The bounds that a number, or one of a list, is outside of, in words; empty: none."""
    numbers = value if isinstance(value, list) else [value]
    limits = limits_of(hint)
    if limits is None or not {type(number) for number in numbers} <= {int, float}:
        return ""
    good = (
        limits.low <= number <= limits.high and limits.above < number < limits.below
        for number in numbers
    )
    return "" if all(good) else limits.text


NUMBERS = [-1, 0, 1, 2, 3, 10**30, 10**400, 2**63, -(2**63), 0.5, -0.5, 1e308, math.inf, math.nan]
TEXTS = ["", "x", "none", "dense", "low", "1", "\x1b[2J", "os:path", "no.such:Thing"]
LISTS = [[], [0], [-1], [0.5], [math.nan], ["low"], [True], [None], [[0, 1]], [[1, 0]], [[[]]]]
TABLES = [{}, {"x": {}}, {"name": "x"}, {"name": 3}, {"low": -1}, {"level": 1, "error_feedback": 2}]
HOSTILE = st.sampled_from([*NUMBERS, *TEXTS, *LISTS, *TABLES, None, True, False])


OPTIONS = list(find_options())
EACH = st.tuples(*[HOSTILE] * len(OPTIONS))


def find_edges(option: Option) -> list[Any]:
    """The ends of what an option allows and the numbers beside them, in a list where it has one."""
    limits, kinds = limits_of(option.hint) or Bounds(""), kinds_of(option.hint)
    ends = filter(math.isfinite, (limits.low, limits.high, limits.above, limits.below))
    step = 0.1 if float in kinds else 1
    near = [type(step)(number) for end in ends for number in (end - step, end, end + step)]
    listed = any(typing.get_origin(kind) is tuple for kind in kinds)
    return [[number] if listed else number for number in near]


def check_option(option: Option, value: Any) -> None:
    said = ""
    try:
        option.accept(value)
    except ConfigError as error:
        said = str(error)
    table, _, leaf = option.path.rpartition(".")
    if value is not None and not fits(option.hint, value):  # None: as if nothing were written
        assert said.startswith(option.path), (option.path, value, said)
    elif limits := describe_limits(option.hint, value):
        assert f"{leaf} = " in said, (option.path, value, said)
        assert said.endswith(f": expected {limits}"), (option.path, value, said)
    if said:
        names = [leaf, table.rstrip("s"), value if isinstance(value, str) else ""]
        assert any(name in said for name in names if name), (option.path, value, said)
        assert "\n" not in said, (option.path, value, said)


@settings(
    max_examples=8, derandomize=True, database=None, phases=[Phase.generate]
)  # what fails says its option and value: nothing to shrink
@given(EACH)
def test_any_value_of_any_option_is_written_back_or_refused(values: tuple[Any, ...]) -> None:
    for option, value in zip(OPTIONS, values, strict=True):
        check_option(option, value)


def test_numbers_are_refused_outside_of_what_their_option_allows() -> None:
    held = [(option, value) for option in OPTIONS for value in find_edges(option)]
    assert len(held) > 300
    for option, value in held:
        check_option(option, value)


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("Count", [1, 10**9], [0, -1]),
        ("Epochs", [1, 10_000_000], [0, 10_000_001]),
        ("Period", [1, 10**9], [0, 10**9 + 1]),
        ("Natural", [0], [-1]),
        ("NonNegative", [0.0], [-1e-9]),
        ("Positive", [1e-9], [0.0, -1.0]),
        ("Factor", [1.0], [0.999, 0.0]),
        ("Rate", [1e-9, 1e30], [0.0, -1.0, 1.1e30]),
        ("Decay", [0.0, 1e30], [-1e-9, 1.1e30]),
        ("Momentum", [0.0, 0.999], [-1e-9, 1.0]),
        ("Share", [0.0, 1.0], [-1e-9, 1.001]),
        ("InnerShare", [1e-9, 0.999], [0.0, 1.0]),
        ("Timeout", [1e-9, 1e9], [0.0, 1.1e9]),
    ],
)
def test_each_kind_of_number_ends_where_its_words_say(
    kind: str, inside: list[float], outside: list[float]
) -> None:
    limits = limits_of(getattr(bounds, kind))
    assert limits is not None
    assert [number in limits for number in (*inside, *outside)] == [True] * len(inside) + [
        False
    ] * len(outside)
