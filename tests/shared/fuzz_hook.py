"""Strangers' calls of the hook, on a group of one process, for `fuzz.py`."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from outcome import one_sentence
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes

ODD = [
    -1,
    0,
    1,
    2,
    10**30,
    0.5,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    None,
    True,
    "",
    "x",
    "dense",
    "topk",
    "static",
    "regimes:PowerSGD",
    "os:path",
    [],
    [1],
    {},
    {"name": "x"},
    {"name": "topk"},
    {"low": 4, "high": 1},
    {"low": "4"},
    {1: 2},
    {"name": "accordion", "interval": 1},
    object(),
    torch.ones(2),
    Path("\0"),
]
ARGUMENTS = (
    "policy",
    "compressor",
    "levels",
    "signal",
    "seed",
    "start_compressing_after",
    "optimizer",
    "every",
    "scaler",
    "timeout",
    "record",
)
CALLS = (
    "step",
    "step",
    "step",
    "epoch_end",
    "epoch_end",
    "log",
    "state",
    "load",
    "spoilt",
    "close",
)

odd = st.sampled_from(range(len(ODD)))  # by number: a few of them do not compare
arguments = st.dictionaries(st.sampled_from(ARGUMENTS), odd, max_size=2)
calls = st.lists(st.tuples(st.sampled_from(CALLS), odd), max_size=8)


def hook(given: dict[str, int], then: list[tuple[str, int]]) -> None:
    """Attached with odd arguments and called in an odd order: each call is fine or refused."""
    _join()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    odds = {name: ODD[i] for name, i in given.items()}
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
        if isinstance(odds.get("record"), str):
            odds["record"] = str(Path(place, odds["record"]))
        usual = {"levels": {"low": 2, "high": 1}, "optimizer": optimizer} | odds
        if not one_sentence("hook", lambda: found.append(regimes.attach(model, **usual))):
            return
        for name, i in then:
            one_sentence("hook", functools.partial(_call, found, model, optimizer, name, ODD[i]))
        one_sentence("hook", found[0].close)


def _call(found: list[Any], model: nn.Module, optimizer: Any, name: str, value: Any) -> None:
    attached = found[0]
    if name == "step":
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    elif name == "epoch_end":
        attached.epoch_end(lr=value)
    elif name == "log":
        attached.log(metric=value, mine=value)
    elif name == "state":
        found[1:] = [copy.deepcopy(attached.state_dict())]
    elif name == "load":
        attached.load_state_dict(found[1] if len(found) > 1 else value)
    elif name == "spoilt" and len(found) > 1 and found[1]:
        state = copy.deepcopy(found[1])
        state[sorted(state, key=str)[len(str(value)) % len(state)]] = value
        attached.load_state_dict(state)
    elif name == "close":
        attached.close()


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
