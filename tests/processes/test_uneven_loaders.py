"""Loaders of different lengths, and then a collective of the script, as of a metric: the process
that waits in the gradients says who waits where, long before any timeout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.collectives import call_guard


def uneven(rank: int, kind: str, lengths: list[int], every: int) -> str:
    call_guard.SOON = 0.2
    model = DistributedDataParallel(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    regimes.attach(model, level=1, optimizer=optimizer, every=every, timeout=60.0)
    try:
        for _ in range(lengths[rank]):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        if kind == "all_gather_object":
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


def test_even_loaders_end_well() -> None:
    assert group.run(uneven, 2, "all_reduce", [4, 4], 2) == ["well"] * 2
