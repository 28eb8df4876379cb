"""Models with parameters that are unused, frozen, tied, of one axis, three or none, and modules in
evaluation, under weight decay, momentum and clipping: trainer on one process and on two, and the
hook (oracle: backward passes of plain torch, and each layer's compressor alone)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ddp_scripts import featured, group
from ddp_scripts.featured import COMPRESSORS, FEATURES, Case, drawn
from runs import stop_after

SEEDS = [*range(len(COMPRESSORS)), 40]  # the last one is in one pass over all workers


def equal(mine: dict[str, Any], theirs: dict[str, Any], what: Any) -> None:
    """Relative to the largest number of each tensor."""
    assert mine.keys() == theirs.keys(), what
    for name, tensor in theirs.items():
        assert (mine[name] is None) == (tensor is None), (what, name)
        if tensor is not None:
            scale = tensor.abs().max().clamp_min(1e-30)
            assert (mine[name] - tensor).abs().max() / scale <= 1e-12, (what, name)


def check(cases: list[Case], folder: Path) -> None:
    """All ways to train each case end with the same numbers."""
    real = group.run(featured.on_processes, 2, cases, folder)
    for i, case in enumerate(cases):
        oracle = featured.stepwise(case) if case.period == 1 else featured.local(case)
        alone = featured.simulate(case, folder / f"alone-{case.seed}")
        equal(alone, oracle["weights"], case)
        for rank in range(2):
            found = real[rank][i]
            equal(found["trainer"], oracle["weights"], (case, rank))
            if case.hooked:
                if rank == 0:  # DDP leaves each process its own last statistics
                    equal(found["weights"], oracle["weights"], ("hook", case))
                owed = {
                    name: r if r is None else r[rank : rank + 1]
                    for name, r in oracle["residuals"].items()
                }
                equal(found["residuals"], owed, ("hook", case, rank))


def test_trainer_processes_and_hook_are_the_same_whatever_a_model_has(tmp_path: Path) -> None:
    cases = [drawn(seed) for seed in SEEDS]
    assert {case.compressor for case in cases} == {*COMPRESSORS}
    assert {f for case in cases for f in case.features} == {*FEATURES}
    assert {case.optimizer for case in cases} == {"sgd", "adamw"}
    assert {case.union for case in cases} == {True, False}
    check(cases, tmp_path)


def test_workers_that_step_alone_leave_alone_what_they_do_not_use(tmp_path: Path) -> None:
    has = ("never used", "used by turns", "frozen", "scalar", "tied")
    kinds = [("sgd", "keep"), ("adamw", "average"), ("sgd", "average")]
    cases = [
        Case(seed, has, "dense", name, period=3, states=states)
        for seed, (name, states) in enumerate(kinds)
    ]
    check(cases, tmp_path)


@pytest.mark.parametrize("period", [1, 3])
def test_a_run_that_was_cut_off_goes_on_with_what_it_has_not_used(
    period: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of optimisers that have no state of some parameters yet."""
    case = Case(4, ("never used", "used by turns"), "topk", "adamw", period=period)
    whole = featured.simulate(case, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            featured.simulate(case, tmp_path / "broken")
    equal(featured.simulate(case, tmp_path / "broken"), whole, case)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 100, 20))
def test_more_of_the_same(first: int, tmp_path: Path) -> None:
    check([drawn(seed) for seed in range(first, first + 20)], tmp_path)
