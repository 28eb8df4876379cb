"""How arguments of ``attach`` and ``local_steps`` were spelled up to version 0.4. For one release
they are rewritten, with a warning that has the new spelling."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from regimes.base.errors import ConfigError
from regimes.compression import REGISTRY, Compressor
from regimes.job.recorder import RecordOptions

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Call:
    """Carries a call in an earlier spelling to the present one.

    Attributes:
        function: the name of the function.
        arguments: by keyword.
        more: leading arguments after the model.
        written: the new spelling of what was rewritten, argument by argument.
    """

    function: str
    arguments: dict[str, Any]
    more: tuple[Any, ...] = ()
    written: dict[str, str] | None = None

    def write(self, name: str, text: str) -> None:
        """Note the new spelling of an argument."""
        self.written = {**(self.written or {}), name: text}

    def __str__(self) -> str:
        mesh = ["mesh"] if self.function in ("attach_replicas", "attach_shards") else []
        parts = [f"{name}={text}" for name, text in (self.written or {}).items()]
        return f"{self.function}({', '.join(['model', *mesh, *parts])})"


# -- what becomes of each argument -----------------------------------------------------------------


def _move_level(call: Call, name: str) -> None:
    """A level, or levels by name, belong to the compressor."""
    given = call.arguments
    level, other = given.pop(name), "levels" if name == "level" else "level"
    if level is None:
        return
    if given.get(other) is not None:
        raise ConfigError(
            f"level = {level if name == 'level' else given[other]!r}: it is one level throughout, "
            "which no levels can change: leave one of them out"
        )
    if call.function == "attach_shards" and given.get("compressor") is None:
        raise ConfigError(
            f'{name} = {level!r}: the bits of gradients are in scatter={{"level": 4}}, those of '
            'weights in gather={"level": 8}, and a rank is for compressor=PowerSGD(rank=4): add '
            "it, or leave this out"
        )
    usual = "dense" if call.function == "local_steps" else "powersgd"
    compressor = given.get("compressor")
    compressor = usual if compressor is None else compressor
    if isinstance(compressor, Compressor):
        given["compressor"] = compressor.with_level(level)
    else:
        table = {"name": compressor} if isinstance(compressor, str) else compressor
        given["compressor"] = {**table, name: level} if isinstance(table, Mapping) else table
    call.write("compressor", spell_compressor(given["compressor"]))


def spell_compressor(given: Any, module: str = "") -> str:
    """Write a compressor as a script does; a class of the user's own as it is.

    >>> spell_compressor({"name": "powersgd", "level": 4, "wire": "bf16"}, "regimes.")
    "regimes.PowerSGD(rank=4, wire='bf16')"
    """
    if not isinstance(given, Mapping) or given.get("name") not in REGISTRY:
        return repr(given)
    cls: Any = REGISTRY.load(given["name"])
    words = {"level": cls.level_word, "levels": cls.level_word}
    fields = {words.get(key, key): value for key, value in given.items() if key != "name"}
    order = sorted(fields, key=lambda name: name != cls.level_word)
    written = ", ".join(f"{name}={fields[name]!r}" for name in order)
    return f"{module}{cls.__name__}({written})"


def _move_record(call: Call, name: str) -> None:
    """What is recorded, measured and checked is in one object."""
    record, value = call.arguments.get("record"), call.arguments.pop(name)
    options = record if isinstance(record, RecordOptions) else RecordOptions(record)
    call.arguments["record"] = replace(options, **{name: value})
    written = (call.written or {}).get("record", "RecordOptions(folder)").removesuffix(")")
    value = value if isinstance(value, bool | int | float) else ...
    call.write("record", f"{written}, {name}={'...' if value is ... else value})")


def _move_mesh(call: Call, name: str) -> None:
    """Each kind of model has a function of its own; with both arguments it is that of replicas,
    which gathers by itself."""
    mesh = call.arguments.pop(name)
    if mesh is None:
        return
    if name == "shards" and call.function == "attach_replicas":
        if call.arguments.get("gather") is None:
            call.arguments["gather"] = {}
            call.write("gather", "{}")
        return
    call.function, call.more = f"attach_{name}", (mesh,)


def _keep_scatter(call: Call, name: str) -> None:
    """What compresses FSDP2's own collectives belongs to the functions of divided models."""
    if call.arguments[name] is None:
        del call.arguments[name]
    elif call.function == "attach":
        raise ConfigError(
            f"{name}: it compresses what FSDP2 exchanges: attach_shards(model, mesh, {name}=...), "
            "or leave it out"
        )


_OF_RECORD = dict.fromkeys(
    ("instruments", "probe", "check_every", "check_cosine", "summary", "compare_weights"),
    _move_record,
)
_OF_LEVEL = {"level": _move_level, "levels": _move_level}
# by function and argument, in the order in which they are rewritten
EARLIER: dict[str, dict[str, Callable[[Call, str], None]]] = {
    "attach": {
        "replicas": _move_mesh,
        "shards": _move_mesh,
        "scatter": _keep_scatter,
        "gather": _keep_scatter,
        **_OF_LEVEL,
        **_OF_RECORD,
    },
    "attach_replicas": {**_OF_LEVEL, **_OF_RECORD},
    "attach_shards": {**_OF_LEVEL, **_OF_RECORD},
    "local_steps": {**_OF_LEVEL, **_OF_RECORD},
}


def takes_earlier(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that arguments in an earlier spelling are rewritten, and process 0
    warns."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        table = EARLIER[function.__name__]
        earlier = [name for name in table if name in kwargs]
        if not earlier:
            return function(*args, **kwargs)
        now = Call(function.__name__, dict(kwargs))
        for name in earlier:
            table[name](now, name)
        made: Any = function.__globals__[now.function](
            args[0], *now.more, *args[1:], **now.arguments
        )
        if made.world.rank == 0 and (now.written or now.more):
            warnings.warn(
                f"{function.__name__}({', '.join(f'{name}=...' for name in earlier)}) is spelled "
                f"{now} now; the earlier spelling goes with the next version",
                FutureWarning,
                stacklevel=2,
            )
        return made

    return call
