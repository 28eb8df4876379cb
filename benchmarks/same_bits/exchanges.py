"""The cases of hooks and of local steps in a user's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.same_bits.case import Case
from benchmarks.same_bits.hook import HIGH_LOW_HIGH, Collective, CollectiveWithin, Hooked, Sharded
from benchmarks.same_bits.local import ShardedSteps, Stepped

PAIRS: dict[str, dict[str, Any]] = {  # levels of each compressor
    "powersgd": {"low": 2, "high": 1},
    "topk": {"low": 40, "high": 5},
    "quantise": {"low": 8, "high": 4},
    "threshold": {"low": 1e-4, "high": 1e-3},
    "dense": {"low": "dense", "high": "dense"},
    "acp-sgd": {"low": 2, "high": 1},
    "randomk": {"low": 40, "high": 5},
    "sign": {"low": "dense", "high": 1},
    "dct-topk": {"low": 40, "high": 5},
    "low-pass": {"low": 0.5, "high": 0.1},
    "cast": {"low": "dense", "high": "bf16"},
    "chunked-topk": {"low": 40, "high": 5},
    "quantised-all-reduce": {"low": 8, "high": 4},
}
FIELDS = {"chunked-topk": {"chunk": 16}, "quantised-all-reduce": {"block": 16}}
LADDER = {"levels": {"low": 3, "mid": 2, "high": 1}}
ACCORDION = {"name": "accordion", "interval": 1, "eta": 0.3}
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMS = {**DILOCO, "fragments": 2, "delay": 1, "mixing": 0.4}
QUICK = {
    "hook-powersgd",
    "hook-topk-skipped",
    "fsdp2-powersgd",
    "fsdp2-own-4-gather",
    "fsdp2-own-within-8",
    "own-local-diloco",
    "own-local-streaming",
}


def compressed(name: str) -> dict[str, Any]:
    """The options of a hook with a compressor."""
    return {"compressor": {"name": name, **FIELDS.get(name, {})}, "levels": PAIRS[name]}


TOPK = compressed("topk")
LONG: dict[str, Any] = {"ends": (15,)}  # units enough for a detector to change its mind
TOLD: dict[str, Any] = {"told": True}  # the hook has the optimiser
WITHIN: dict[str, Any] = {"ends": (4, 9), "counted": (2, 1)}  # saved within a unit
HOOKS: dict[str, dict[str, Any]] = {
    **{name: {"options": compressed(name), "told": name == "threshold"} for name in PAIRS},
    # policies and what they read
    "accordion": {"options": {"policy": ACCORDION}, **LONG},
    "by-layer": {
        "options": {"policy": {"name": "by-layer", "groups": {"inner*": ACCORDION}}},
        **LONG,
    },
    "adaqs": {"options": {"policy": {"name": "adaqs", "fall": 0.1}, **LADDER}, **LONG},
    "error-ladder": {"options": {"policy": {"name": "error-ladder", "error": 0.3}, **LADDER}},
    "gravac": {"options": {"policy": {"name": "gravac", "gain": 0.5}, **LADDER}},
    "global": {"options": {"policy": ACCORDION, "signal": "global"}, **LONG},
    "local-mean": {"options": {"policy": ACCORDION, "signal": "local-mean"}, **LONG},
    "worker0": {"options": {"policy": ACCORDION, "signal": "worker0"}, **LONG},
    "curvature": {"options": {"instruments": {"curvature": {"max_products": 6}}}, "probed": 2},
    # units and records
    "every": {"options": {"every": 3, "start_compressing_after": 3}, "counted": (4, 1)},
    "record": {"options": {"every": 3, "record": "run", **TOPK}},
    "record-epochs": {"options": {"record": "run"}},
    # buckets and backward passes
    "one-bucket": {"options": TOPK, "ddp": {}},
    "views": {"options": TOPK, "ddp": {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}},
    "side": {"options": TOPK, "side": True},
    "side-powersgd": {"side": True},
    "accumulate": {"accumulate": 3},
    "accumulate-topk": {"accumulate": 2, "options": TOPK, "side": True},
    # steps that do not count
    "skipped": {"bad": 4},
    "topk-skipped": {"bad": 4, "options": TOPK},
    "quantise-skipped": {"bad": 4, "options": compressed("quantise")},
    "scaler": {"bad": 4, "scaled": True, "options": TOPK},
    # optimisers, precision
    "adamw": {"optimizer": "adamw", "clip": 0.5},
    "muon": {"optimizer": "muon", "options": {"every": 3}},
    "float64": {"dtype": torch.float64, "options": TOPK},
    "bfloat16": {"dtype": torch.bfloat16, "options": TOPK},
    "autocast": {"autocast": True},
    # error feedback
    "update-unit": {"options": {"compressor": {"name": "powersgd", "residual": "update"}}, **TOLD},
    "fading": {"options": {**TOPK, "compressor": {"name": "topk", "error_feedback": 0.9}}},
    "forgets": {"options": {**TOPK, "compressor": {"name": "topk", "error_feedback": False}}},
    # processes
    "alone": {"counts": (1,), "options": TOPK},
    "alone-powersgd": {"counts": (1,)},
    "three": {"counts": (3,), "options": TOPK},
    # saved and continued, within a unit and at its end
    "resumed": {"counts": (2, 2), **WITHIN},
    "resumed-topk": {"counts": (2, 2), **WITHIN, "options": TOPK, "full": True},
    "resumed-record": {
        "counts": (2, 2),
        "ends": (4, 9),
        "options": {"every": 3, "record": "run", **TOPK},
    },
    "resized": {"counts": (2, 3), **WITHIN, "options": TOPK, "full": True},
    "fewer": {"counts": (3, 2), **WITHIN, "full": True},
    "branch": {
        "counts": (2, 2),
        "ends": (3, 9),
        "options": {"every": 3, "record": "run"},
        "changes": {"record": "branch", "policy": {"name": "static", "level": "low"}},
    },
    "branch-compressor": {"counts": (2, 2), "ends": (3, 9), "changes": TOPK},
}
SHARDED: dict[str, dict[str, Any]] = {
    **{name: {"options": compressed(name), "told": name == "threshold"} for name in PAIRS},
    "accordion": {"options": {"policy": ACCORDION}, **LONG},
    "record": {"options": {"every": 3, "record": "run"}},
    "accumulate": {"accumulate": 2},
    "accumulate-topk": {"accumulate": 2, "options": TOPK, "side": True},
    "skipped": {"bad": 4},
    "topk-skipped": {"bad": 4, "options": TOPK},
    "adamw": {"optimizer": "adamw", "clip": 0.5},
    "bfloat16": {"dtype": torch.bfloat16},
    "resumed": {"counts": (4, 4), "ends": (4, 9), "options": {"every": 3}},
    "resumed-topk": {"counts": (4, 4), "ends": (4, 9), "options": {"every": 3, **TOPK}},
}
BITS: dict[str, dict[str, Any]] = {  # of what FSDP2 exchanges
    **{f"{bits}": {"scatter": {"level": bits}} for bits in (8, 4)},
    **{
        f"{bits}-gather": {"scatter": {"level": bits}, "gather": {"level": bits}} for bits in (8, 4)
    },
}
TWO_LEVELS = {"levels": {"low": 8, "high": 4}, "block": 16}
OWED = {"level": 4, "stochastic": False, "error_feedback": True}
COLLECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"options": given} for name, given in BITS.items()},
    "only-gather": {"options": {"gather": {"level": 8}}},
    "windows": {"options": {"policy": HIGH_LOW_HIGH, "scatter": TWO_LEVELS}},
    "accordion": {"options": {"policy": ACCORDION, "scatter": TWO_LEVELS}, **LONG},
    "record": {"options": {"every": 3, "record": "run", "scatter": TWO_LEVELS}},
    "feedback": {"options": {"scatter": OWED}},
    "feedback-in-8-bits": {"options": {"scatter": {**OWED, "residual_bits": 8}}},
    "nearest": {"options": {"scatter": {"level": 8, "stochastic": False}}},
    "accumulate": {"accumulate": 2, "options": BITS["4-gather"], "side": True},
    "skipped": {"bad": 4, "options": {"scatter": OWED}},
    "adamw": {"optimizer": "adamw", "clip": 0.5, "options": BITS["8-gather"]},
    "bfloat16": {"dtype": torch.bfloat16, "options": BITS["4-gather"]},
    "four": {"counts": (4,), "options": BITS["4-gather"]},
    "resumed": {
        "counts": (2, 2),
        "ends": (4, 9),
        "options": {"every": 3, "scatter": OWED},
    },
}
COLLECTIVES_WITHIN: dict[str, dict[str, Any]] = {
    **{name: {"options": given} for name, given in BITS.items()},
    "topk": {"options": {**TOPK, **BITS["8-gather"]}},
}
LOCAL: dict[str, dict[str, Any]] = {
    "mean": {"options": {"policy": 4, "outer": {"states": "average"}}},
    "reset": {"options": {"policy": 4, "outer": {"states": "reset"}}},
    "diloco": {"options": {"policy": 4, "outer": DILOCO}},
    "streaming": {"options": {"policy": 4, "outer": STREAMS}},
    "delay": {"options": {"policy": 4, "outer": {"delay": 1}}},
    "mixing": {"options": {"policy": 4, "outer": {"mixing": 0.4}}},
    "each-step": {"options": {"policy": 1}},
    "periods": {"options": {"policy": ACCORDION, "periods": {"low": 1, "high": 4}}},
    "post": {"options": {"policy": "post-local", "periods": {"low": 1, "high": 4}}},
    "qsr": {"options": {"policy": {"name": "qsr", "alpha": 0.05, "base": 2}}},
    "adacomm": {"options": {"policy": {"name": "adacomm", "base": 4}}},
    "record": {"options": {"policy": 4, "outer": DILOCO, "record": "run"}},
    "sgd": {"options": {"policy": 4, "outer": DILOCO}, "optimizer": "sgd"},
    "alone": {"options": {"policy": 4, "outer": DILOCO}, "counts": (1,)},
    "alone-streaming": {"options": {"policy": 4, "outer": STREAMS}, "counts": (1,)},
    "streaming-topk": {
        "options": {"policy": 4, "outer": STREAMS, "compressor": "topk", "level": 20}
    },
    "resumed": {
        "options": {"policy": 4, "outer": DILOCO, "compressor": "topk", "level": 20},
        "counts": (2, 2),
        "ends": (6, 18),
    },
    "resumed-streaming": {
        "options": {"policy": 4, "outer": STREAMS, "record": "run"},
        "counts": (2, 2),
        "ends": (6, 18),
    },
    **{
        f"diloco-{name}": {
            "options": {
                "policy": 4,
                "outer": DILOCO,
                "compressor": {"name": name, **FIELDS.get(name, {})},
                "level": PAIRS[name]["high"],
            }
        }
        for name in PAIRS
        if name != "dense"
    },
}
SHARDED_LOCAL: dict[str, dict[str, Any]] = {
    "diloco": {"options": {"policy": 4, "outer": DILOCO}},
    "streaming": {"options": {"policy": 4, "outer": STREAMS}},
    "powersgd": {"options": {"policy": 4, "compressor": "powersgd", "level": 2}},
}


def _cases() -> Iterator[Case]:
    tables: tuple[tuple[str, type[Case], dict[str, dict[str, Any]], dict[str, Any]], ...] = (
        ("hook", Hooked, HOOKS, {}),
        ("fsdp2", Sharded, SHARDED, {}),
        ("fsdp2-own", Collective, COLLECTIVES, {}),
        ("fsdp2-own-within", CollectiveWithin, COLLECTIVES_WITHIN, {}),
        ("own-local", Stepped, LOCAL, {"optimizer": "adamw"}),
        ("fsdp2-local", ShardedSteps, SHARDED_LOCAL, {"optimizer": "adamw"}),
    )
    for prefix, kind, table, usual in tables:
        for short, fields in table.items():
            name = f"{prefix}-{short}"
            yield kind(name=name, quick=name in QUICK, **{**usual, **fields})


CASES = list(_cases())
