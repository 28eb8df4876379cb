"""Local steps of a loop with several optimisers; oracle: DiLoCo written by hand."""

from __future__ import annotations

import torch
from ddp_scripts import group, muon


def test_diloco_with_muon_and_adamw_is_diloco_by_hand() -> None:
    results = group.run(muon.both, 2)
    for listed, in_a_tuple, by_hand in results:
        for a, b, c, first in zip(listed, in_a_tuple, by_hand, results[0][0], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, first)  # the same on both processes
            assert torch.allclose(a, c, rtol=1e-12, atol=1e-12)
