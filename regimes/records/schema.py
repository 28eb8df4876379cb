"""What stands where in the files of a record: the one table by which all commands read them.

A record may come from a stranger, so that readers take nothing for granted but this. Keys that are
not in the table are free, because a later version or a plug-in may add some. No torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any

from regimes.config import MOST_EPOCHS, RunConfig
from regimes.records.kinds import (
    AMOUNT,
    AMOUNTS,
    COUNT,
    FREE,
    LEVEL,
    NAME,
    NUMBER,
    NUMBERS,
    SECONDS,
    STEPS,
    TEXT,
    TEXTS,
    TRUE_OR_FALSE,
    WHOLE,
    WHYS,
    Each,
    Fields,
    Kind,
    Maybe,
    fault,
    whole,
)
from regimes.records.said import hooked

SCHEMA = 1
MOST_WORKERS = 1_000_000
EPOCHS = whole(0, MOST_EPOCHS, f"from 0 to {MOST_EPOCHS}")
WORKERS = whole(1, MOST_WORKERS, f"from 1 to {MOST_WORKERS}")
PLUG_IN = Fields({"name": NAME})
ONE_EACH = Fields({"mean": AMOUNT, "gather": AMOUNT}, further=AMOUNT)
VALUES = Each(Maybe(NUMBER), dict)

ROWS: dict[str, Fields | Each] = {
    "epochs.jsonl": Fields(
        {
            "epoch": EPOCHS,
            "lr": NUMBER,
            "next_lr": NUMBER,
            "steps": STEPS,
            "batch_size": Maybe(STEPS),
            "train_loss": Maybe(NUMBER),
            "test_loss": Maybe(NUMBER),
            "metric": Maybe(NUMBER),
            "floats": AMOUNT,
            "bytes": AMOUNT,
            "collectives": Fields({"calls": ONE_EACH, "bytes": ONE_EACH}),
            "layers": Fields({"level": TEXTS, "floats": AMOUNTS, "bytes": AMOUNTS, "why": WHYS}),
            "statistics": Each(NUMBERS, dict),
        },
        {
            "unit": Fields({"first": COUNT, "stop": COUNT}),
            "perplexity": Maybe(NUMBER),
            "batch": Fields({}, {"level": Maybe(TEXT), "multiple": STEPS}),
            "skipped": COUNT,
            "sync": Fields({}, {"level": Maybe(TEXT), "period": STEPS, "rounds": COUNT}),
            "group_lr": Maybe(NUMBERS),
            "validation": VALUES,
            "model": VALUES,
            "logged": VALUES,
        },
    ),
    "seconds.jsonl": Fields({"epoch": EPOCHS}, {"processes": Each(Each(SECONDS), dict)}, SECONDS),
    "instruments.jsonl": Fields({"epoch": EPOCHS, "instrument": NAME}),
    "events.jsonl": Fields({"time": TEXT, "event": NAME}, {"why": TEXT}),
    "superseded.jsonl": Fields({"file": NAME, "epoch": EPOCHS}),
    "chain.jsonl": Fields({"files": Each(Fields({"lines": COUNT, "sha256": TEXT}), dict)}),
}


@functools.cache
def header() -> Fields:
    """Of ``run.json``."""
    data, model = (
        Fields(PLUG_IN.needed, _fields(RunConfig)[x].kind.others) for x in ("data", "model")
    )
    config = {
        "name": NAME,
        "seed": WHOLE,
        "epochs": Maybe(EPOCHS),
        "workers": WORKERS,
        "signal": NAME,
        "levels": Each(LEVEL, dict),
        "compressor": PLUG_IN,
        "policy": PLUG_IN,
        "data": data,
        "model": model,
        "optimizer": _fields(RunConfig)["optimizer"].kind,
    }
    cost = Fields({"floats": AMOUNT, "bytes": AMOUNT}, {"layers": AMOUNTS})
    layer = Fields({"name": NAME, "shape": Each(COUNT), "compressed": TRUE_OR_FALSE})
    counts = dict.fromkeys(("train", "test", "validation", "words"), Maybe(COUNT))
    return Fields(
        {
            "schema": STEPS,
            "config": Fields(config, _fields(RunConfig) | OF_THEIR_OWN),
            "metric": NAME,
            "world": Fields({"workers": WORKERS, "processes": WORKERS}, {"groups": WORKERS}),
            "data": Fields({"digest": Maybe(TEXT)}, counts),
            "steps_per_epoch": Maybe(STEPS),
            "per_step": Each(cost, dict),
            "layers": Each(layer),
        },
        {
            "written_by": TEXT,
            "units": Maybe(EPOCHS),
            "budget": Maybe(AMOUNT),
            "code": Each(Maybe(TEXT), dict),
            "machine": Fields({}, {"gpus": TEXTS}),
        },
    )


OF_THEIR_OWN = {
    "instruments": FREE,  # the first records have a list
    "batch_policy": Maybe(PLUG_IN),
    "sync_policy": Maybe(PLUG_IN),
    "dtype": Kind("float32 or float64", ("float32", "float64").__contains__),
}


def _fields(cls: type) -> dict[str, Any]:
    """The fields of a configuration by their annotations; null stands for what nobody knows."""
    hints = typing.get_type_hints(cls)
    return {f.name: Maybe(_annotated(hints[f.name])) for f in dataclasses.fields(cls)}


def _annotated(hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return Fields({}, _fields(typing.cast(type, hint)))
    if origin in (typing.Union, types.UnionType):
        known = [x for x in args if x is not type(None)]
        return _annotated(known[0]) if len(known) == 1 else LEVEL
    if origin is dict:
        return Each(_annotated(args[1]), dict)
    if origin is tuple:
        return Each(_annotated(args[0]))
    plain = {int: WHOLE, float: NUMBER, bool: TRUE_OR_FALSE, Any: FREE}
    return plain.get(hint, TEXT)  # one of several words is a text: a later version may add some


def header_fault(found: dict[str, Any]) -> str | None:
    """What in a header is not as it should be, or does not go together; or None."""
    return fault(found, header()) or _contradiction(found)


def _contradiction(header: dict[str, Any]) -> str | None:
    names, world = [layer["name"] for layer in header["layers"]], header["world"]
    if header["config"]["epochs"] is None and not hooked(header):
        return f"config.epochs is None, expected {EPOCHS.expected}"
    if len({*names}) < len(names):
        return "two layers have one name"
    if world["workers"] % world["processes"]:
        return f"{world['workers']} workers are not shared by {world['processes']} processes"
    odd = [x for x in header["per_step"].values() if len(x.get("layers", names)) != len(names)]
    return f"per_step has no cost for each of {len(names)} layers" if odd else None


def misfit(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str | None:
    """What in a run's rows does not go with its header, with the line; or None."""
    found = ((number, row_misfit(header, row)) for number, row in enumerate(rows, start=1))
    return next((f"line {number} is damaged: {why}" for number, why in found if why), None)


def row_misfit(header: dict[str, Any], row: dict[str, Any]) -> str | None:
    """What in a row does not go with the header, or None."""
    count = len(header["layers"])
    for table in ("layers", "statistics"):
        for name, values in row[table].items():
            if type(values) is not list or len(values) != count:
                return f"{table}.{name} has no {count} layers"
    ours = header["metric"] == "accuracy" and "written_by" not in header  # others log per cent
    if ours and not 0 <= (row["metric"] or 0) <= 1:
        return f"metric is {row['metric']!r:.40}, expected an accuracy from 0 to 1"
    by_steps = header["config"].get("unit_steps")
    return "unit is missing" if by_steps and "unit" not in row else None
