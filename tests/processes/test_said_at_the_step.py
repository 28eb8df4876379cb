"""Jobs of FSDP2 say in one sentence what has no effect, and what would go wrong, as it happens."""

from __future__ import annotations

import pytest
from ddp_scripts import group, said
from torch.distributed.fsdp import FSDPModule


def test_a_value_of_which_each_process_has_a_part_is_refused_on_every_process() -> None:
    for sentences in group.run(said.logged, 2):
        assert len(sentences) == 3
        for sentence in sentences:
            assert sentence.startswith("log: norm is a DTensor of which each process has a part")


def test_a_step_before_replicas_have_exchanged_is_refused() -> None:
    for sentences in group.run(said.stepped, 2):
        assert len(sentences) == 4
        for sentence in sentences:
            assert sentence.startswith("an optimiser has stepped within the backward pass")


def test_an_option_of_torchs_without_effect_is_said_once() -> None:
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        pytest.skip("torch has this option since 2.13")
    first, other = group.run(said.without_effect, 2)
    assert [len(heard) for heard in first] == [1, 0, 0]
    assert first[0][0].startswith("set_separate_reduce_scatter_group has no effect")
    assert other == [[], [], []]
