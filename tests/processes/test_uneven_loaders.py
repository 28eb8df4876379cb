"""Loaders of different lengths, and then a collective of the script, as of a metric, ``close()``,
or the end of the script: the process that waits in the gradients says who waits where, long before
any timeout."""

from __future__ import annotations

import atexit
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.collectives import call_guard


def wrapped(way: str) -> tuple[Any, dict[str, Any]]:
    """A model, and arguments of ``attach``."""
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    if way == "ddp":
        return DistributedDataParallel(model), {"compressor": "powersgd", "level": 1}
    if way == "shards":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh), {"shards": mesh, "scatter": {"level": 8}}
    shape = (dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    given = {"replicas": mesh["replicate"], "compressor": "powersgd", "level": 1}
    return fully_shard(model, mesh=mesh["shard"]), given


def uneven(
    rank: int, kind: str, lengths: list[int], every: int, way: str = "ddp", compared: bool = True
) -> str:
    call_guard.SOON = 0.2
    warnings.filterwarnings("ignore", "process . has waited")  # on a machine that is busy
    model, given = wrapped(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = {"optimizer": optimizer, "every": every, "summary": False}
    hook = regimes.attach(
        model,
        timeout=60.0,
        record=regimes.RecordOptions(compare_weights=compared),
        **counted,
        **given,
    )
    try:
        for _ in range(lengths[rank]):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        if kind == "close":
            hook.close()
        elif kind in ("exit", "destroyed"):
            if kind == "destroyed":
                dist.destroy_process_group()
            atexit._run_exitfuncs()
        elif kind == "all_gather_object":
            dist.all_gather_object([None] * len(lengths), rank)
        else:
            dist.all_reduce(torch.ones(()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "well"


@pytest.mark.parametrize(
    ("kind", "lengths", "every"),
    [
        ("all_reduce", [6, 4], 100),
        ("all_reduce", [4, 6, 6], 100),
        ("all_gather_object", [6, 4], 4),  # a unit begins in the step that is missing
    ],
)
def test_a_sentence_names_process_and_step(kind: str, lengths: list[int], every: int) -> None:
    said = group.run(uneven, len(lengths), kind, lengths, every)
    short = lengths.index(4)
    sentences = [x for x in said if x.startswith("ConfigError")]
    assert sentences
    for sentence in sentences:
        assert f"process {short} is in {kind}() of the script after 4 steps, but" in sentence
        assert "is in step 5 without it: every process" in sentence


@pytest.mark.parametrize("way", ["ddp", "replicas", "shards"])
@pytest.mark.parametrize(
    ("kind", "compared"), [("close", True), ("close", False), ("exit", True), ("destroyed", True)]
)
def test_a_script_that_ends_earlier(way: str, kind: str, compared: bool) -> None:
    """The longer one names it; of ``close()`` the shorter one does as well."""
    said = group.run(uneven, 2, kind, [6, 4], 100, way, compared)
    call = "close()" if kind == "close" else "exit()"
    sentence = f"ConfigError: process 1 is in {call} after 4 steps, but process 0 is in step 5"
    # within FSDP2's own collectives torch may see that a process has gone before its post is read
    lost = "TrainingError: process 0 of 2 lost contact with the others in FSDP2's all-gather"
    gone = (sentence, lost) if way == "shards" and kind != "close" else sentence
    assert said[0].startswith(gone), said[0]
    assert said[1].startswith(sentence if kind == "close" else "well")


@pytest.mark.parametrize("kind", ["all_reduce", "close", "exit"])
def test_even_loaders_end_well(kind: str) -> None:
    assert group.run(uneven, 2, kind, [4, 4], 2) == ["well"] * 2
