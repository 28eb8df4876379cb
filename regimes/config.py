"""One run, described: frozen dataclasses, checked before any work, in and out as TOML.

A configuration is a diff from the defaults. Plug-ins (compressor, policy) are tables with a
``name`` that is either registered or spelt ``package.module:Class``; the rest of the table are
the fields of that class. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import tomllib
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from regimes.errors import ConfigError, nearest

T = TypeVar("T")
Level = float | int | str  # a rank, a kept percentage, a number of bits, or "dense"
DENSE = "dense"
RENAMED = {"parcel_mb": "bucket_mb"}  # keys of earlier versions, still read
Signal = Literal["update", "global", "local-mean", "worker0"]


@dataclass(frozen=True)
class DataConfig:
    """Which images or text, how much of it, and in what order (``regimes.data``)."""

    name: str = "digits"  # "digits", "cifar10", "cifar100", "folder" or "wikitext-2"
    path: str | None = None  # image folder or archive for "folder"; root for the others
    train_size: int | None = None  # images, equally many per class; or tokens; None = all
    test_size: int | None = None
    image_size: int | None = None  # pixels; average-pooled down to it; None = as they are
    augment: bool = False  # random crop with padding 4, random horizontal flip
    drop_last: bool = False  # leave out an epoch's last, short batch
    reshuffle: bool = True  # False: one order for all epochs (the authors' sampler)
    download: bool = False
    sequence: int = 35  # tokens per step and stream of a text (the window of truncated BPTT)
    vocabulary: int | None = None  # most frequent words of a text that are kept; None = all


@dataclass(frozen=True)
class ModelConfig:
    """Which network (see ``models/``)."""

    name: str = "vgg7"
    width: int | None = None  # channels of the first layer, where the family has a choice
    depth: int | None = None  # layers, likewise
    dropout: float | None = None  # likewise


@dataclass(frozen=True)
class OptimizerConfig:
    """SGD with momentum; linear warm-up, then division at each decay (`training.learning_rate`)."""

    lr: float = 0.4  # after the warm-up
    warmup_from: float | None = None  # lr of the first epoch; None = no warm-up
    warmup_epochs: int = 5
    decay_epochs: tuple[int, ...] = ()  # first epoch that trains at the lower lr
    decay_factor: float = 10.0
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    scale_with_batch: bool = True  # the rate times batch size / batch_size (Goyal et al., 2017)
    clip: float | None = None  # largest norm of each worker's gradient; None = as it is


@dataclass(frozen=True)
class Budget:
    """A run ends with the epoch in which it has sent as many floats as ``epochs`` epochs at
    ``level`` (paper, Figure 8); its own ``epochs`` are the most it may take."""

    level: str = "low"
    epochs: int = 24


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of a run. ``processes`` and ``device`` only divide work.

    Attributes:
        name: of the schedule; figures and tables group runs by it.
        seed: of all random streams.
        epochs: how many are trained, unless a budget ends the run before.
        workers: logical workers W.
        compressor: a registered name, or ``package.module:Class``, and the fields of the class.
        levels: what the words of a policy mean for this compressor, e.g. ``{low = 4, high = 1}``
            for PowerSGD ranks. "dense" is always known and sends the gradient uncompressed.
        policy: what decides the levels, likewise.
        batch_levels: words for batch sizes, e.g. ``{low = 16, high = 128}``: samples per worker and
            step, each a multiple of ``batch_size``, which is accumulated that often.
        batch_policy: which of them is trained at, decided once for the whole model; without one
            it is ``batch_size`` throughout.
        budget: floats after which the run ends.
        deficit: what makes the training worse in chosen epochs (``data/deficits.py``).
        signal: the norm that detectors read, per layer and epoch: "update", "global",
            "local-mean" or "worker0" (``instruments/gradient_norm.py``).
        instruments: what is measured besides, by name: ``{fisher = {}}``.
        dtype: of parameters, gradients and traffic.
        autocast: forward and backward in half precision.
        tensorboard: write scalars for it beside the record.
        quirks: "authors" replaces fields so as to do what the published code does.
    """

    name: str = "run"
    seed: int = 0
    epochs: int = 24
    workers: int = 4
    batch_size: int = 8  # samples per worker and step
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compressor: dict[str, Any] = field(default_factory=lambda: {"name": "powersgd"})
    levels: dict[str, Level] = field(default_factory=lambda: {"low": 4, "high": 1})
    policy: dict[str, Any] = field(default_factory=lambda: {"name": "static"})
    batch_levels: dict[str, int] = field(default_factory=dict)
    batch_policy: dict[str, Any] | None = None
    budget: Budget | None = None
    deficit: dict[str, Any] | None = None
    signal: Signal = "update"
    instruments: dict[str, dict[str, Any]] = field(default_factory=dict)  # see ``instruments/``
    quirks: Literal["none", "authors"] = "none"
    union_pass: bool = True  # one pass over all hosted workers' batches, where it is exact
    dtype: Literal["float32", "float64"] = "float32"
    autocast: Literal["none", "bfloat16"] = "none"
    channels_last: bool = False  # of the activations; parameters stay as they are
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:0"
    checkpoint_every: int = 1  # epochs
    timeout: float = 600.0  # seconds that a process waits for the others
    bucket_mb: float = 25.0  # gradients that are reduced at once, while backward goes on
    tensorboard: bool = False

    def digest(self) -> str:
        """SHA-256 of all that decides the numbers; processes compare it at start-up."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()


def check_windows(where: str, windows: tuple[tuple[int, int], ...]) -> None:
    """Raise ConfigError unless all are ``[first, stop)`` of epochs."""
    for first, stop in windows:
        if not 0 <= first < stop:
            raise ConfigError(
                f"{where}: [{first}, {stop}] is no window; "
                "expected [first, stop) with 0 <= first < stop"
            )


def in_windows(windows: Iterable[tuple[int, int]], epoch: int) -> bool:
    """Does an epoch lie in one of the windows ``[first, stop)``?"""
    return any(first <= epoch < stop for first, stop in windows)


# -- dictionaries and TOML -------------------------------------------------------------------


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dictionary, without the fields that are ``None``."""
    plain = dataclasses.asdict(config)
    return json.loads(json.dumps(_without_none(plain)))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a dataclass from a nested dictionary; every key and type is checked.

    Raises:
        ConfigError: an unknown key (with the nearest known one) or a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    values = {RENAMED.get(key, key) if cls is RunConfig else key: v for key, v in values.items()}
    names = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {where + key!r}: {nearest(key, names)}")
    made = {k: convert(hints[k], v, where + k) for k, v in values.items()}
    try:
        return cls(**made)
    except TypeError as error:
        raise ConfigError(f"{where.rstrip('.') or cls.__name__}: {error}") from None


def convert(kind: Any, value: Any, where: str) -> Any:
    """Check ``value`` against an annotation; integers pass as floats, lists as tuples."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_dict(typing.cast(type, kind), value, where + ".")
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is Literal:
        if value in args and not isinstance(value, bool):
            return value
        raise ConfigError(f"{where} = {value!r}: {nearest(str(value), map(str, args))}")
    if origin is tuple and isinstance(value, list | tuple):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(args) == len(value):
            pairs = enumerate(zip(args, value, strict=True))
            return tuple(convert(a, v, f"{where}[{i}]") for i, (a, v) in pairs)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    number = isinstance(kind, type) and isinstance(value, kind)
    if number and (kind is bool or not isinstance(value, bool)):  # True is no number here
        return value
    raise ConfigError(f"{where} must be {_spell(kind)}, got {value!r}")


def _convert_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    exact = [k for k in kinds if isinstance(k, type) and type(value) is k]
    for kind in (*exact, *kinds):
        try:
            return convert(kind, value, where)
        except ConfigError:
            continue
    spelt = " or ".join(_spell(k) for k in kinds if k is not type(None))
    raise ConfigError(f"{where} must be {spelt}, got {value!r}")


def _spell(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is tuple:
        inner = _spell(get_args(kind)[0]).removeprefix("a ")
        return f"a list of {f'{inner}s'.replace('list of', 'lists of').replace('ss', 's')}"
    if get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "a table"
    return str(kind)


def override(config: RunConfig, settings: list[str]) -> RunConfig:
    """Apply ``a.b=c`` settings; values are read as TOML, bare words as text.

    >>> config = override(RunConfig(), ["policy=accordion", "policy.eta=0.3", "levels.low=2"])
    >>> config.policy, config.levels
    ({'name': 'accordion', 'eta': 0.3}, {'low': 2, 'high': 1})

    Another plug-in takes none of the fields of the one before:

    >>> override(config, ["policy.name=static"]).policy
    {'name': 'static'}

    Raises:
        ConfigError: a setting without "=", an unknown key, a wrong type.
    """
    plain: dict[str, Any] = dataclasses.asdict(config)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} needs the form key=value, e.g. optimizer.lr=0.2")
        *parents, key = path.strip().split(".")
        if not parents:
            key = _present_name(key)
        table = plain
        for parent in parents:
            if table is plain["instruments"]:
                table.setdefault(parent, {})  # naming an instrument's field switches it on
            if not isinstance(table.get(parent), dict):
                raise ConfigError(f"unknown key {path.strip()!r}: {nearest(parent, table)}")
            table = table[parent]
        value = read_value(text.strip())
        if path.strip() in ("compressor", "policy") and isinstance(value, str):
            value = {"name": value}
        if path.strip() in ("compressor.name", "policy.name") and table.get("name") != value:
            table.clear()  # another plug-in: the fields of the old one mean nothing to it
        table[key] = value
    return from_dict(RunConfig, _without_none(plain))


def _present_name(key: str) -> str:
    """A key's name today; says so once when that has changed."""
    if key in RENAMED:
        warnings.warn(f"{key} is called {RENAMED[key]} now", FutureWarning, stacklevel=3)
    return RENAMED.get(key, key)


def read_value(text: str) -> Any:
    """A value from the command line: TOML; "none" is None; anything else is text.

    >>> [read_value(text) for text in ("4", "1e-3", "true", "[[0, 6]]", "none", "cifar10")]
    [4, 0.001, True, [[0, 6]], None, 'cifar10']
    """
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def load_toml(path: str | Path) -> RunConfig:
    """Read a configuration file.

    Raises:
        ConfigError: a missing file, a syntax error, an unknown key or wrong type.
    """
    try:
        table = tomllib.loads(Path(path).read_text())
        return from_dict(RunConfig, {_present_name(key): value for key, value in table.items()})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML; ``load_toml`` gives it back."""
    import tomli_w

    return tomli_w.dumps(to_dict(config))


# -- plug-ins --------------------------------------------------------------------------------


def plug_in(
    kind: str, table: Mapping[str, Any], registry: Mapping[str, str], where: str | None = None
) -> Any:
    """Make the plug-in that a configuration table names.

    Args:
        kind: "compressor" or "policy", for messages.
        table: ``{"name": ..., field: value, ...}``.
        registry: short name -> ``package.module:Class``.
        where: the table's place in the configuration, if that is not ``kind``.

    Raises:
        ConfigError: an unknown name, a module or class that cannot be imported, bad fields.
    """
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name is missing: {nearest('', registry)}")
    target = registry.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, registry)}")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot import the {kind} {target!r}: {error}") from None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"the {kind} {target!r} is no dataclass: see the contract it must keep")
    return from_dict(cls, values, f"{where or kind}.")


class Registry(dict[str, Any]):
    """The names of one kind of thing: presets, policies, detectors, ...

    A name stands for an object, or for ``package.module:Class`` (imported when it is asked for).
    """

    def __init__(self, kind: str, known: Mapping[str, Any] | None = None) -> None:
        super().__init__(known or {})
        self.kind = kind

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator: what follows is known by this name."""

        def keep(thing: T) -> T:
            self[name] = thing
            return thing

        return keep

    def find(self, name: str) -> Any:
        """What a name stands for, or ConfigError with the nearest name."""
        if name not in self:
            raise ConfigError(f"unknown {self.kind} {name!r}: {nearest(name, self)}")
        return self[name]

    def make(self, table: Mapping[str, Any], where: str | None = None) -> Any:
        """The plug-in that a configuration table names: see ``plug_in``."""
        return plug_in(self.kind, table, self, where)
