"""The hook's state where the model's layers or the number of processes have changed since.

Oracles: conservation (the mean over processes of what is owed), a simulation of the same step, and
hooks that have gone on without a reload.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from ddp_scripts import cases, group, state_jobs
from ddp_scripts.state_jobs import RESIDUAL
from hypothesis import given
from hypothesis import strategies as st
from tensors import alike
from torch import Tensor

from regimes.base.config import DENSE
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.hook.ddp.source import plain_names
from regimes.job.fit_state import LayerMatch, list_names
from regimes.job.move_residuals import residual_of

LEVELS = dict(cases.Case().levels)


# -- the number of processes -----------------------------------------------------------------


def by_copies(owed: list[Tensor], workers: int) -> list[Tensor]:
    """Each old worker as so many copies that the new ones can be made of whole ones."""
    fine = math.lcm(len(owed), workers)
    copies = torch.stack(owed).repeat_interleave(fine // len(owed), 0)
    return [part.mean(0) for part in copies.split(fine // workers)]


@given(st.integers(1, 6), st.integers(1, 6), st.randoms())
def test_new_workers_owe_what_the_old_ones_owed(old: int, new: int, random: Any) -> None:
    owed = [torch.tensor([random.uniform(-1, 1) for _ in range(3)]).double() for _ in range(old)]
    found = [residual_of(worker, new, owed) for worker in range(new)]
    for ours, theirs in zip(found, by_copies(owed, new), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)
    if new % old == 0:  # copies, bit for bit
        assert all(torch.equal(x, owed[i * old // new]) for i, x in enumerate(found))
    assert residual_of(0, new, [None] * old) is None
    assert torch.equal(residual_of(0, 1, [None, owed[0]]), owed[0] / 2)


def simulated(stage: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The update of the processes' gradients by workers of which each owes the saved mean."""
    saved, count = stage[0]["given"], len(stage)
    shapes, memories = (states.column(saved, key) for key in ("shape", "memory"))
    layers = [Layer(name, tuple(shape)) for name, shape in shapes.items()]
    world, found = World(count), {}
    reducer = Reducer(make_compressor({"name": "powersgd"}), layers, world, seed=7)
    for i, layer in enumerate(layers):
        state = reducer.states[i]
        state.load_shared_state(memories[layer.name])
        owed = [states.column(part, "residual")[layer.name] for part in saved["parts"]]
        if owed[0] is not None:
            state.residual = torch.stack(owed).mean(0).repeat(count, 1, 1)
        stack = torch.stack([process["gradients"][layer.name] for process in stage])
        level = LEVELS.get(stage[0]["levels"][layer.name], DENSE)
        found[layer.name] = reducer.reduce([i], {i: stack}, {i: level})[i]
    return found


def check_owed(stage: list[dict[str, Any]]) -> None:
    """What the processes owe next to what those of the stage before owed."""
    saved = [states.column(part, "residual") for part in stage[0]["given"]["parts"]]
    for name, owed in saved[0].items():
        loaded = [states.owed(process["loaded"])[name] for process in stage]
        if owed is None:
            assert loaded == [None] * len(stage)
            continue
        old = torch.stack([part[name] for part in saved])
        assert len(old) == 1 or not torch.equal(old[0], old[1])
        assert (torch.stack(loaded).mean(0) - old.mean(0)).abs().max() <= 1e-15
        for ours, theirs in zip(loaded, by_copies(list(old), len(stage)), strict=True):
            assert (ours - theirs).abs().max() <= 1e-15
    assert saved[0][RESIDUAL] is not None


@pytest.mark.parametrize("by_torch", [False, True])
def test_on_another_number_of_processes_nothing_owed_is_lost(
    by_torch: bool, tmp_path: Path
) -> None:
    counts = [4, 2, 3]
    for number, count in enumerate(counts):
        stage = group.run(state_jobs.resized, count, number, tmp_path, by_torch)
        if number == 0:
            continue
        saved = stage[0]["given"]
        assert len(saved["parts"]) == counts[number - 1]
        check_owed(stage)
        for name, update in simulated(stage).items():
            scale = update.abs().max()
            assert (stage[0]["updates"][0][name] - update).abs().max() <= 1e-12 * scale, name
        for process in stage:
            for key in ("layers", "rows", "steps", "total", "lr"):
                assert alike(process["loaded"][key], saved[key])
            assert alike(process["loaded"]["parts"][0]["traffic"], saved["parts"][0]["traffic"])


def test_an_epoch_goes_on_on_another_number_of_processes(tmp_path: Path) -> None:
    first, second, third = (
        group.run(state_jobs.resized, count, stage, tmp_path)[0]
        for stage, count in enumerate([1, 2, 1])
    )
    assert [len(x["rows"]) for x in (first, second, third)] == [1, 1, 2]
    parts = [first["updates"][3], *second["updates"], *third["updates"][:3]]
    norms = third["rows"][1]["statistics"]["norm:update"]
    for name, norm in zip(third["loaded"]["layers"], norms, strict=True):
        whole = sum(part[name] for part in parts)
        assert norm == pytest.approx(float(whole.norm()), rel=1e-12)
    assert third["rows"][1]["steps"] == 7


def test_on_the_same_number_it_is_each_ones_own_state() -> None:
    results = group.run(state_jobs.same_number, 2)
    for result in results:
        own, (from_own, from_full) = result["own"], result["loaded"]
        assert alike(from_own, own)
        assert alike(from_full, own)
        assert alike(result["after"][1], result["after"][2])
        for ours, theirs in zip(result["after"][0], result["after"][1], strict=True):
            for name, gradient in ours.items():  # scales are powers of two
                assert torch.equal(gradient, theirs[name]), name
        assert alike(result["rows"][1], result["rows"][0])
        assert alike(result["rows"][2], result["rows"][0])
    a, b = (states.owed(result["own"])[RESIDUAL] for result in results)
    assert not torch.equal(a, b)
    assert results[0]["refused"] == (
        "ConfigError: cannot load the hook's state: it was saved within an epoch, when each of 2 "
        "processes had its own sums for the norm's signal; this job has 1: on another number of "
        "processes load a state that was saved right after epoch_end"
    )


def test_what_process_0_does_wrong_all_hear_in_one_sentence() -> None:
    first, second = group.run(state_jobs.refused, 2)
    not_full = "it was not returned by hook.full_state_dict() on process 0"
    expected = {
        "nothing": "process 0 must pass the value that hook.full_state_dict() returned there",
        "one of them": (
            f"{not_full}: it is the state of one process, load it with hook.load_state_dict()"
        ),
        "other things": not_full,
        "less than all": "it does not hold the states of all processes in their order",
        "no layers": "it is damaged (KeyError: 'layers')",
        "no process": "it is damaged (KeyError: 'process')",
    }
    for name, words in expected.items():
        assert first[name] == f"ConfigError: cannot load the hook's state: {words}", name
        assert second[name] == first[name], name
    for heard in (first, second):
        assert heard["full for one"].endswith(
            "the state of all processes, load it with hook.load_full_state_dict()"
        )
        assert (
            "another model and has no layer in common with this one: the state has 'old."
            in heard["nothing in common"]
        )
        assert "saved by process 2 of 4" in heard["another number"]
        assert "hook.full_state_dict() loads on any number of processes" in heard["another number"]
        assert "'gauges'" in heard["damaged"]
        assert "\n" not in "".join(heard.values())
        assert heard["fine"] == "no error"
        assert "cannot be saved within an epoch" in heard["within an epoch"]


def test_a_unit_that_is_due_ends_before_it_is_saved() -> None:
    """Where its statistics cannot be saved; in its middle that is still refused."""
    for found in group.run(state_jobs.due, 2):
        assert found["early"].endswith(
            "cannot be saved within an epoch: save with full_state_dict() after a multiple of "
            "3 steps"
        )
        assert found["units"] == 1
        whole, continued = found["rows"]
        assert len(whole) == 2
        assert alike(continued, whole)


# -- the model's layers ----------------------------------------------------------------------

ACCORDION = {"name": "accordion", "interval": 2, "eta": 0.2}
LADDER = {"name": "error-ladder", "levels": ["high", "low"], "error": 0.9}


@pytest.mark.parametrize(
    ("policy", "within"), [(ACCORDION, True), (LADDER, False)], ids=["ACCORDION", "error-ladder"]
)
def test_unfrozen_layers_are_new_and_the_old_ones_go_on(policy: Any, within: bool) -> None:
    results = group.run(state_jobs.unfrozen, 2, policy, within)
    assert results[0]["said"] == [
        [
            "hook: the state has no layer 'inner.weight', 'inner.bias', 'side.weight' and 1 other: "
            "no residual at first"
        ],
        ["hook: the model does not train 'head.weight', 'head.bias' of the state: left out"],
    ]
    assert results[1]["said"] == [[], []]
    for result in results:
        old, more, less = result["names"][:3]
        fresh = set(more) - set(old)
        kept = [name for name in less if name not in fresh]
        assert len(kept) == len(old) - 2
        for now in zip(*result["updates"], strict=True):
            for name in old:
                assert torch.equal(now[1][name], now[0][name]), name
            for name in kept:
                assert torch.equal(now[2][name], now[0][name]), name
        check_the_new(result, fresh)
        check_the_past(result, old, more)
        for i, names in ((1, old), (2, kept)):
            for name in set(names) & result["decided"][0].keys():
                assert result["decided"][i][name] == result["decided"][0][name]
            for key, values in result["norms"][0].items():
                ours = dict(zip(result["names"][i], result["norms"][i][key], strict=True))
                theirs = dict(zip(old, values, strict=True))
                assert [ours[name] for name in names] == [theirs[name] for name in names]


def check_the_new(result: dict[str, Any], fresh: set[str]) -> None:
    """As in a hook that has just been attached."""
    for name in fresh:
        assert result["levels"][1][name] == result["levels"][3][name]
        ours, theirs = (result["updates"][i][0][name] for i in (1, 3))
        assert torch.equal(ours, theirs), name
        assert result["decided"][1].get(name) == result["decided"][3].get(name)


def check_the_past(result: dict[str, Any], old: list[str], more: list[str]) -> None:
    """Values of old layers under their names, of the new ones what is known of them: nothing."""
    assert len(result["rows"][0]) == 2
    for before, now in zip(result["rows"][0], result["rows"][1], strict=True):
        start = result["levels"][3]
        known = dict(zip(old, before["layers"]["level"], strict=True))
        assert now["layers"]["level"] == [known.get(name, start[name]) for name in more]
        assert now["statistics"].keys() == before["statistics"].keys()
        for key, values in before["statistics"].items():
            known = dict(zip(old, values, strict=True))
            assert now["statistics"][key] == [known.get(name) for name in more]


@pytest.mark.slow
def test_a_compiled_model_has_the_same_names_and_numbers() -> None:
    result = group.run(state_jobs.compiled, 1)[0]
    plain, whole, part, wrapped = result["names"]
    assert whole == part == plain
    assert wrapped == [f"module.{name}" for name in plain]  # the user's own name
    assert alike(result["before"][1], result["before"][0])
    assert alike(result["before"][2], result["before"][0])
    assert any(not torch.equal(*x) for x in zip(*result["before"][::3], strict=True))  # by the name
    assert alike(result["after"][1], result["after"][0])
    assert alike(result["after"][2], result["after"][0])
    assert result["news"] == []


def test_names_lose_what_wrappers_add_unless_two_become_one() -> None:
    names = ["_orig_mod.a.w", "b._orig_mod.module.w", "module.module.w"]
    assert list(plain_names(names).values()) == ["a.w", "b.module.w", "module.module.w"]
    assert list(plain_names(names, {"b._orig_mod", ""}).values()) == ["a.w", "b.w", "module.w"]
    two = ["fast._orig_mod.w", "fast.w"]
    assert plain_names(two) == {name: name for name in two}


def test_a_match_is_by_name_whatever_the_order() -> None:
    layers = [Layer("c", (2,)), Layer("a", (1, 2)), Layer("new", (3,))]
    match = LayerMatch({"a": [1, 2], "b": [1], "c": [2]}, layers)
    assert match.match_values([1, 2, 3], [7, 8, 9]) == [3, 1, 9]
    flat = match.match_sums({"global": [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])]})["global"][0]
    assert flat.tolist() == [4, 5, 1, 2, 0, 0, 0]
    rows = match.match_sums({"workers": [torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])]})["workers"][0]
    assert rows.tolist() == [flat.tolist()]
    each = match.match_sums({"update": [torch.tensor([[1.0, 2.0]]), torch.ones(1), torch.ones(2)]})
    assert [x.tolist() for x in each["update"]] == [[1, 1], [[1, 2]], [0, 0, 0]]
    assert not match.is_same
    assert list_names([*"abcde"]) == "'a', 'b', 'c' and 2 others"
