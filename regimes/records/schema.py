"""The types of a record's header and rows, and the checks that follow from them.

Keys that are not listed are free: a later version or a plug-in may add some.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, cast

from regimes.base.config import MOST_EPOCHS, RunConfig
from regimes.records import kinds
from regimes.records.kinds import AMOUNT, NAME, STEPS, Items, Nullable, Object, find_fault

SCHEMA = 1  # the highest format of records that this version reads and writes
MOST_WORKERS = 1_000_000  # a header with more is damaged
DTYPES = ("float32", "float64", "bfloat16", "float16")
EPOCHS = kinds.integer(0, MOST_EPOCHS, f"from 0 to {MOST_EPOCHS}")

Epoch = Annotated[int, EPOCHS]
Count = Annotated[int, kinds.COUNT]
Steps = Annotated[int, STEPS]
Workers = Annotated[int, kinds.integer(1, MOST_WORKERS, f"from 1 to {MOST_WORKERS}")]
Amount = Annotated[float, AMOUNT]
Amounts = Annotated[list[float], kinds.AMOUNTS]
Numbers = Annotated[list[float | None], kinds.NUMBERS]
Texts = Annotated[list[str], kinds.TEXTS]
Name = Annotated[str, NAME]
ByOperation = Annotated[dict[str, float], Object({"mean": AMOUNT, "gather": AMOUNT}, extra=AMOUNT)]


class Collectives(TypedDict):
    """Says in what one worker's part of a unit was sent, by operation ("mean", "gather", ...);
    "dense": the bytes of the same without compression, where they were counted."""

    calls: ByOperation
    bytes: ByOperation
    dense: NotRequired[Annotated[dict[str, float], Object(extra=AMOUNT)]]


class Unit(TypedDict):
    """Spans steps, counted at ``batch_size``."""

    first: Count
    stop: Count


class Batch(TypedDict, total=False):
    """Says what the policy of the batch size chose: ``multiple`` times ``batch_size``."""

    level: str | None
    multiple: Steps
    why: Any


class Sync(TypedDict, total=False):
    """Says what the policy of local steps chose, and how many synchronisations there were."""

    level: str | None
    period: Steps
    rounds: Count
    why: Any


class Data(TypedDict):
    """Describes the data set: SHA-256 and numbers of samples, or of tokens and of words."""

    digest: str | None
    train: NotRequired[Count | None]
    test: NotRequired[Count | None]
    validation: NotRequired[Count | None]
    words: NotRequired[Count | None]
    classes: NotRequired[Any]
    loss: NotRequired[str]  # of a user's own training, as `metric`: the name of a function
    metric: NotRequired[str]
    model: NotRequired[str]  # of a user's own training: the digest of its text
    weights: NotRequired[str]  # likewise: of its first weights


class Cost(TypedDict):
    """Says what one worker sends in a step at one level; ``layers`` are the floats of each layer,
    ``whole`` the names of those that are sent whole, because the level would not send less."""

    floats: Amount
    bytes: Amount
    layers: NotRequired[Amounts]
    whole: NotRequired[list[Name]]


LEFT = Object({"worker": kinds.COUNT, "step": kinds.COUNT}, extra=AMOUNT)
Churn = Annotated[  # of workers that could be absent, up to version 0.4
    dict[str, Any],
    Object(
        {"present": STEPS, "worker_steps": STEPS},
        {"left": Items(LEFT), "joined": Items(LEFT), "residual": AMOUNT, "movement": AMOUNT},
    ),
]


class LayerColumns(TypedDict):
    """Holds one value per layer."""

    level: Texts
    floats: Amounts
    bytes: Amounts
    why: Annotated[list[dict[str, Any] | None], kinds.TABLES]


class Row(TypedDict):
    """Holds a line of ``epochs.jsonl``; null is what was not logged, or was not finite."""

    epoch: Epoch
    lr: float
    next_lr: float
    steps: Count  # 0: a branch has left the unit out
    batch_size: Steps | None
    train_loss: float | None
    test_loss: float | None
    metric: float | None
    floats: Amount
    bytes: Amount
    collectives: Collectives
    layers: LayerColumns
    statistics: dict[str, Numbers]
    unit: NotRequired[Unit]
    perplexity: NotRequired[float | None]
    batch: NotRequired[Batch]
    skipped: NotRequired[Count]
    sync: NotRequired[Sync]
    churn: NotRequired[Churn]
    group_lr: NotRequired[Numbers | None]
    validation: NotRequired[dict[str, float | None]]
    model: NotRequired[dict[str, float | None]]
    logged: NotRequired[dict[str, float | None]]


class WorldEntry(TypedDict):
    """Counts workers, the processes that share them, and replicas' groups and shards."""

    workers: Workers
    processes: Workers
    groups: NotRequired[Workers]
    shards: NotRequired[Workers]


class LayerEntry(TypedDict):
    """Names a layer, its shape, and whether its gradient is compressed."""

    name: Name
    shape: list[Count]
    compressed: bool


class FileState(TypedDict):
    """Counts the lines of a file, and digests them."""

    lines: Count
    sha256: str  # of all of them


class Trunk(TypedDict):
    """Says what a branch shares with another record, see `branches`."""

    files: dict[str, FileState]  # of the trunk's, before the branch
    before: dict[str, Any]  # the trunk's values of the fields that the branch has changed
    next_lr: float | None  # of the branch's first unit, at the batch of the unit before


class Header(TypedDict):
    """Holds the content of ``run.json``."""

    schema: Steps
    config: dict[str, Any]
    metric: Name
    world: WorldEntry
    data: Data
    steps_per_epoch: Steps | None
    per_step: dict[str, Cost]
    layers: list[LayerEntry]
    written_by: NotRequired[str]
    units: NotRequired[Epoch | None]
    budget: NotRequired[Amount | None]
    trunk: NotRequired[Trunk]
    code: NotRequired[dict[str, str | None]]
    machine: NotRequired[dict[str, Any]]


class Event(TypedDict):
    """Holds a line of ``events.jsonl``: "start", "resume", "stopped", "end", ..."""

    time: str
    event: Name
    why: NotRequired[str]  # it has stopped


class Announcement(TypedDict):
    """Holds a line of ``chain.jsonl``: the states that files are going to have, see `chain`."""

    files: dict[str, FileState]


def is_hooked(header: Mapping[str, Any]) -> bool:
    """Answer whether a hook, a callback or ``local_steps`` wrote the record."""
    return header.get("written_by") == "hook"


def _kind_of_annotation(hint: Any) -> Any:
    """The check of an annotation; of a configuration's dataclass, each field may be missing or
    null, because a hook does not know all."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return hint.__metadata__[0]
    if origin is NotRequired:
        return _kind_of_annotation(args[0])
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        required = {
            k: _kind_of_annotation(x) for k, x in hints.items() if k in hint.__required_keys__
        }
        return Object(
            required, {k: _kind_of_annotation(x) for k, x in hints.items() if k not in required}
        )
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        names = [f.name for f in dataclasses.fields(hint)]
        return Object({}, {name: Nullable(_kind_of_annotation(hints[name])) for name in names})
    if origin in (typing.Union, types.UnionType):
        known = [x for x in args if x is not type(None)]
        # A text may stand in place of a list, such as "last" for `checkpoint_keep`.
        lists = any(typing.get_origin(x) is tuple for x in known)
        kind = (
            _kind_of_annotation(known[0])
            if len(known) == 1
            else kinds.FREE
            if lists
            else kinds.SCALAR
        )
        return kind if len(known) == len(args) else Nullable(kind)
    if origin is dict:
        return Object(extra=_kind_of_annotation(args[1]))
    if origin in (list, tuple):
        return Items(_kind_of_annotation(args[0]))
    plain = {int: kinds.WHOLE, float: kinds.NUMBER, bool: kinds.BOOLEAN, Any: kinds.FREE}
    return plain.get(hint, kinds.TEXT)  # Literal: a later version may add words


@functools.cache
def row_kinds() -> dict[str, Object]:
    """Return the kind of each file's lines."""
    clocks = Object(extra=Items(kinds.SECONDS))
    return {
        "epochs.jsonl": _kind_of_annotation(Row),
        "seconds.jsonl": Object({"epoch": EPOCHS}, {"processes": clocks}, kinds.SECONDS),
        "instruments.jsonl": Object({"epoch": EPOCHS, "instrument": NAME}),
        "events.jsonl": _kind_of_annotation(Event),
        "superseded.jsonl": Object({"file": NAME, "epoch": EPOCHS}),
        "chain.jsonl": _kind_of_annotation(Announcement),
    }


@functools.cache
def _header_kind() -> Object:
    """The kind of ``run.json``."""
    fields, plug_in = _kind_of_annotation(RunConfig).optional, Object({"name": NAME})
    required = {
        "name": NAME,
        "seed": kinds.WHOLE,
        "epochs": Nullable(EPOCHS),
        "workers": _kind_of_annotation(Workers),
        "signal": NAME,
        "levels": Object(extra=kinds.LEVEL),
        "compressor": plug_in,
        "policy": plug_in,
        "data": Object(plug_in.required, fields["data"].kind.optional),
        "model": Object(plug_in.required, fields["model"].kind.optional),
        "optimizer": fields["optimizer"].kind,
    }
    fields |= {
        "instruments": kinds.FREE,  # the first records have a list
        "batch_policy": Nullable(plug_in),
        "sync_policy": Nullable(plug_in),
        "branch": Nullable(
            Object(
                {"of": NAME, "at": EPOCHS},
                {"length": Nullable(STEPS), "skip": Nullable(kinds.BOOLEAN)},
            )
        ),
        "dtype": kinds.ValueKind("float32, float64, bfloat16 or float16", DTYPES.__contains__),
    }
    kind: Object = _kind_of_annotation(Header)
    kind.required["config"] = Object(required, fields)
    kind.optional["machine"] = Object({}, {"gpus": kinds.TEXTS})
    return kind


def header_fault(table: Any) -> str | None:
    """Find what in a header is of another kind or contradicts itself; None if nothing is."""
    if why := find_fault(table, _header_kind()):
        return why
    names, world = [layer["name"] for layer in table["layers"]], table["world"]
    if table["config"]["epochs"] is None and not is_hooked(table):
        return f"config.epochs is None, expected {EPOCHS.expected}"
    if bool(table["config"].get("branch")) != ("trunk" in table):
        return "config.branch and trunk do not fit: both are there, or neither"
    if len({*names}) < len(names):
        return "two layers have one name"
    if "shards" in world:
        replicas, rest = divmod(world["processes"], world["shards"])
        if (
            rest
            or world["workers"] % replicas
            or (is_hooked(table) and world["workers"] != replicas)
        ):
            return (
                f"{world['workers']} workers are not shared by {world['processes']} processes in "
                f"replicas of {world['shards']}"
            )
    elif world["workers"] % world["processes"]:
        return f"{world['workers']} workers are not shared by {world['processes']} processes"
    if any(len(x.get("layers", names)) != len(names) for x in table["per_step"].values()):
        return f"per_step has no cost for each of {len(names)} layers"
    return None


def row_fault(header: Header, row: Row) -> str | None:
    """Find what in a row does not fit the header; None if all fits."""
    count = len(header["layers"])
    for table in ("layers", "statistics"):
        for name, values in cast("dict[str, Any]", row[table]).items():
            if type(values) is not list or len(values) != count:
                return f"{table}.{name} has no {count} layers"
    ours = header["metric"] == "accuracy" and "written_by" not in header  # others log per cent
    if ours and not 0 <= (row["metric"] or 0) <= 1:
        return f"metric is {row['metric']!r:.40}, expected an accuracy from 0 to 1"
    by_steps = header["config"].get("unit_steps")
    return "unit is missing" if by_steps and "unit" not in row else None
