"""torchtitan's way to use FSDP2, against torch's own HSDP."""

from __future__ import annotations

import pytest
import torch
from ddp_scripts import group, titan
from ddp_scripts.titan import STEPS, Case

TORCH = Case(hook=False)
OURS = [
    Case(),
    Case(native=False),
    Case(late=False),
    Case(experts=0),
    Case(compressor="powersgd", level=8, experts=0),
    Case(compressor="powersgd", level=8),
    Case(compressor="quantised-all-reduce", level=8),
]
IDLE = [Case(idle=True), Case(idle=True, native=False, compressor="powersgd", level=1)]


@pytest.fixture(scope="module")
def found() -> list[list[dict]]:
    return group.run(titan.trained, 4, [TORCH, *OURS, *IDLE, Case(hook=False, idle=True)])


def largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("i", range(len(OURS)), ids=[str(case) for case in OURS])
def test_gradients_and_weights_are_those_of_torchs_hsdp(found: list, i: int) -> None:
    for torchs, *ours in found:
        dense = OURS[i].compressor == "dense"
        assert largest(ours[i]["gradients"], torchs["gradients"]) < (1e-12 if dense else 0.9)
        if dense:
            assert largest(ours[i]["weights"], torchs["weights"]) < 1e-12
            assert largest(ours[i]["after"], torchs["after"]) < 1e-12
        (row,) = ours[i]["rows"]  # one exchange for each step of the optimiser
        assert row["steps"] == STEPS
        replicas_differ = largest(ours[i]["weights"], found[0][1 + i]["weights"])
        assert replicas_differ == 0


def test_experts_that_are_idle_on_one_replica_count_as_zero(found: list) -> None:
    for results in found:
        *_, exact, low_rank, torchs = results
        for key in ("gradients", "weights"):
            assert largest(exact[key], torchs[key]) < 1e-12
        # floats and bytes are those of any other step, and all replicas have the same weights
        assert exact["rows"] == results[1]["rows"]
        assert largest(low_rank["weights"], found[0][-2]["weights"]) == 0
