"""Sharded replicas in jobs as they are: equal to torch's own HSDP where nothing is compressed."""

from __future__ import annotations

import pytest
import torch
from ddp_scripts import group, hsdp_jobs


@pytest.mark.slow
def test_wrapped_compiled_or_with_muon_they_equal_torchs_hsdp() -> None:
    for found in group.run(hsdp_jobs.trained, 4):
        assert found.keys() == hsdp_jobs.WAYS.keys()
        for way, sides in found.items():
            assert "2.down.weight" in sides["ours"]["layers"], way
            assert "2.base.weight" not in sides["ours"]["layers"], way
            for name, tensor in sides["theirs"]["weights"].items():
                mine = sides["ours"]["weights"][name]
                # Muon's iteration runs in bfloat16 and magnifies small singular values
                assert torch.allclose(mine, tensor, rtol=0, atol=5e-3 if way == "Muon" else 1e-6), (
                    way,
                    name,
                )


def test_todays_replicate_is_a_replica_of_one() -> None:
    for ours, ddp in group.run(hsdp_jobs.replicated, 2):
        for name, tensor in ddp.items():
            assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-12), name


@pytest.mark.slow
def test_mixed_precision_stays_near_float32() -> None:
    """Four steps of AdamW at 0.01 move a weight by 0.04 at most; bfloat16 has eight bits."""
    for found in group.run(hsdp_jobs.precisions, 4):
        assert len(found) == 3
        assert all(0 < difference < 0.02 for difference in found.values()), found
