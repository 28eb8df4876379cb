"""A level that would send more of a layer than it has: the layer travels as without compression, in
each way to run, and the job says so. Torch's own numbers are the oracle, or those at "dense"."""

from __future__ import annotations

import pytest
import torch
from ddp_scripts import factors, fsdp, group, sent_whole
from ddp_scripts.factors import Case


@pytest.mark.parametrize("local", [False, True], ids=["DDP", "local steps"])
def test_a_rank_above_all_is_dense_and_said(local: bool) -> None:
    for rank, (pressed, dense) in enumerate(group.run(sent_whole.both, 2, local)):
        for ours, theirs in zip(pressed["weights"], dense["weights"], strict=True):
            assert torch.equal(ours, theirs)
        assert pressed["floats"] == [sent_whole.SIZES] * sent_whole.STEPS
        (cost,) = (cost for level, cost in pressed["per_step"].items() if level != "dense")
        assert cost["layers"] == sent_whole.SIZES
        assert cost["whole"] == ["row", "first.weight", "second.weight"]
        sentence = "because 64 would not send less of them (row, first.weight, second.weight)"
        assert (sentence in pressed["said"]) == (rank == 0)
        assert "sent whole" not in dense["said"]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_replicas_of_shards_get_the_gradients_of_torch(shape: tuple[int, int]) -> None:
    """Matrices of 8 x 8 and 4 x 8, whose rows are on one or two processes."""
    pairs = [({"name": "powersgd"}, 4), ({"name": "chunked-topk", "bits": 32}, 100)]
    cases = [Case("replicas", None, table, level) for table, level in pairs]
    count = shape[0] * shape[1]
    for torchs, *ours in group.run(factors.reduced, count, shape, [Case("torch", None), *cases]):
        for case, gradients in zip(cases, ours, strict=True):
            assert torch.allclose(gradients, torchs, rtol=1e-12, atol=1e-14), case


def test_collectives_of_fsdp2_with_a_scale_for_each_number_are_torchs() -> None:
    """8 bits and a scale are more than a number: such pieces travel as they are."""
    cases = [fsdp.Case({"level": 8, "block": 1}), fsdp.Case({"level": "dense"})]
    cases.append(fsdp.Case(attach=False))
    for ours, dense, torchs in group.run(fsdp.trained, 2, 2, cases):
        for row, plain in zip(ours["rows"], dense["rows"], strict=True):
            assert row["layers"]["bytes"] == plain["layers"]["bytes"]
            assert row["collectives"] == plain["collectives"]
        for name, tensor in torchs["weights"].items():
            assert torch.equal(ours["weights"][name], tensor), name
