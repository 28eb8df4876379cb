"""Arguments of public functions, checked against their annotations before any work."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

from regimes.base.errors import CallError, ConfigError, RegimesError, suggest_nearest

P = ParamSpec("P")
T = TypeVar("T")
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
WORDS |= {Path: "a path", type(None): "None"}


def check_arguments(
    *own: str, error: type[RegimesError] = ConfigError
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: a call with an argument of a wrong type raises ``error``, one sentence
    with the argument, its value and what was expected; a call that lacks an argument or has one too
    many raises CallError.

    Types that cannot be checked without using the value (``Any``, shapes, protocols, what an
    iterator yields) pass.

    Args:
        own: arguments that the function checks itself.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            hints = _resolve_hints(function)
            for name, given in _bind(function, signature, args, kwargs).items():
                several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                for value in given if several else [given]:
                    if name not in own and not _fits_hint(value, hints.get(name, Any)):
                        shown = " ".join(f"{value!r}".split())
                        raise error(f"{name} = {shown:.80}: expected {_describe_hint(hints[name])}")
            return function(*args, **kwargs)

        return call

    return decorate


def _bind(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Mapping[str, Any]:
    """The arguments of a call by name; CallError if they are not the function's."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as wrong:
        keywords = any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()
        )
        unknown = [] if keywords else [name for name in kwargs if name not in signature.parameters]
        what = f"{function.__name__}() {wrong}"
        if unknown:
            hint = suggest_nearest(unknown[0], signature.parameters)
            what = f"{function.__name__}() has no argument {unknown[0]!r}: {hint}"
        raise CallError(what) from None


@functools.cache
def _resolve_hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations but those with names that are imported for type checkers only."""
    hints: dict[str, Any] = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError):
            one: Any = types.SimpleNamespace(__annotations__={name: hint})
            hints |= typing.get_type_hints(one, inspect.unwrap(function).__globals__)
    return hints


def _fits_hint(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits_hint(value, one) for one in args)
    if origin is Annotated:
        return _fits_hint(value, args[0])
    if origin is Literal or hint is Any:  # of words the function says more
        return True
    kind = origin or hint
    if kind in (int, float):
        number = isinstance(value, Integral if kind is int else Real)
        return number and not isinstance(value, bool)
    if kind is collections.abc.Callable:
        return callable(value)
    listed = kind in (collections.abc.Sequence, collections.abc.Iterable)
    if listed and args and isinstance(value, str | bytes | Mapping):
        return False  # its letters or keys are not what is meant
    try:
        good = not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol
        return True
    if good and isinstance(value, list | tuple) and len(args) == 1:
        return all(_fits_hint(one, args[0]) for one in value)
    if good and isinstance(value, Mapping) and len(args) == 2:
        return all(_fits_hint(key, args[0]) for key in value)
    return good


def _describe_hint(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_describe_hint, args)))
    kind = origin or hint
    if kind in WORDS:
        return WORDS[kind]
    if kind is collections.abc.Callable:
        return "a function"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a mapping" + (f" from {_describe_hint(args[0])}" if args else "")
    if isinstance(kind, type) and issubclass(kind, Iterable) and args:
        return f"a list, each {_describe_hint(args[0])}" if args[0] is not Any else "a list"
    return f"a {getattr(kind, '__name__', kind)}"
