"""Workers that leave and join (oracles: loops over copied models, sums that are conserved, the same
run said in another way)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from configs import lstm, smoke_static
from copied_models import ADAMW, DILOCO, SGD, Feedback, Streaming, close, every, steps, text
from corpora import random_walk
from hypothesis import given
from hypothesis import strategies as st
from runs import resumed_alike, rows, same_run, same_weights, weights

import regimes
from analysis.plugins.churn import ChangingWorkers, Churn, Presence
from benchmarks.trainers import Training
from regimes.config import BranchConfig, RunConfig, override
from regimes.cost.cases import recorded_work
from regimes.errors import ConfigError
from regimes.launch.processes import spawn_processes
from regimes.network import Network
from regimes.training import checkpoint
from regimes.training.build import prepare_run
from regimes.training.phases import branch_config
from regimes.training.streaming import divide_layers

torch.set_num_threads(1)
SLOW = pytest.mark.slow
BY_STEP = "churn={per='step',away=[[3,2,9],[0,5,7],[1,11,99]]}"
RANDOM = "churn={per='step',leave=0.3,join=0.5,least=2}"


def present(c: RunConfig) -> Callable[[int], tuple[int, ...]]:
    """By step, from the windows; written anew."""
    churn = c.interventions["churn"]

    def at(step: int) -> tuple[int, ...]:
        away = {w for w, first, stop in churn.away if first <= step < stop}
        return tuple(w for w in range(c.workers) if w not in away)

    return at


def taken(folder: Path, name: str) -> list[tuple[int, int, float]]:
    """(step, worker, norm) of each that left, from the record."""
    events = [event for row in rows(folder) for event in row["churn"]["left"]]
    return [(event["step"], event["worker"], event[name]) for event in events]


def half(delta: torch.Tensor) -> torch.Tensor:
    """The larger half of a matrix's coordinates."""
    kept = delta.abs().flatten().sort(descending=True).indices[: delta.numel() // 2]
    sent = torch.zeros_like(delta).flatten()
    sent[kept] = delta.flatten()[kept]
    return sent.view(delta.shape)


TOP_HALF = ("compressor=topk", "levels={high=50}", "policy={name='static',level='high'}")


# -- shared gradients ------------------------------------------------------------------------


def averaged(c: RunConfig, feedback: Feedback) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """One model, moved by the mean of the present workers' gradients, in a plain loop."""
    model, loss, batches, make = steps(c)
    optimizer, parameters, at = make(model), list(model.parameters()), present(c)
    left, before = [], at(0)
    for step, (x, y) in enumerate(batches):
        left += [(step, w, feedback.leave(w)) for w in before if w not in at(step)]
        before = at(step)
        gradients = {w: torch.autograd.grad(loss(model, x[w], y[w]), parameters) for w in before}
        for i, p in enumerate(parameters):
            p.grad = feedback.mean(i, {w: g[i] for w, g in gradients.items()})
        optimizer.step()
    return dict(model.named_parameters()), left


@pytest.mark.parametrize("compressor", [pytest.param("dense", marks=SLOW), "topk"])
def test_the_mean_is_over_the_workers_that_are_present(compressor: str, tmp_path: Path) -> None:
    """Their samples are the same as if all were there."""
    pressed = TOP_HALF if compressor == "topk" else ()
    c = text(BY_STEP, *SGD, "optimizer.clip=none", "unit_steps=4", *pressed)
    regimes.run(c, tmp_path)
    expected, left = averaged(c, Feedback(half if pressed else None))
    close(weights(tmp_path), expected, 1e-11)
    assert taken(tmp_path, "residual") == [(s, w, pytest.approx(n, 1e-9)) for s, w, n in left]
    assert bool(pressed) == any(norm for *_, norm in left)
    per_step = [row["floats"] / row["steps"] for row in rows(tmp_path)[:4]]
    if pressed:  # gathered coordinates grow with the workers; vectors and the loss do not
        assert len({round(x) for x in per_step}) > 1
    else:
        assert len({*per_step}) == 1


def test_who_is_present_stands_in_the_record(tmp_path: Path) -> None:
    regimes.run(text(BY_STEP, *SGD, "unit_steps=4"), tmp_path)
    found = [row["churn"] for row in rows(tmp_path)]
    assert [unit["present"] for unit in found] == [3, 3, 3, 3, 3]
    assert [unit["worker_steps"] for unit in found] == [14, 10, 14, 12, 3]
    assert [[(e["worker"], e["step"]) for e in unit["joined"]] for unit in found] == [
        [],
        [(0, 7)],
        [(3, 9)],
        [],
        [],
    ]
    frame = regimes.load(tmp_path).epochs
    assert frame["present"].tolist() == [3.5, 2.5, 3.5, 3.0, 3.0]


@pytest.mark.parametrize(
    "compressor",
    ["powersgd", *(pytest.param(x, marks=SLOW) for x in ("acp-sgd", "randomk", "low-pass"))],
)
def test_what_is_not_sent_is_conserved_but_for_what_leaves(compressor: str) -> None:
    """The sum of the residuals, before and after; also of compressors that depend on means."""
    level = {"randomk": 30, "low-pass": 0.5}.get(compressor, 1)
    churn = "churn={}"  # changed by hand below
    c = text(f"compressor={compressor}", f"levels={{high={level}}}", churn, "policy.level=high")
    run = prepare_run(c)
    assert not run.gradients.union
    levels = [run.level_value("high") if layer.compressed else "dense" for layer in run.layers]
    for step, (x, y) in zip(range(3), run.batches.epoch(0, range(4)), strict=False):
        losses = run.gradients.compute_gradients(x, y, 0, step)
        run.exchange.exchange_step(run.gradients.layers, levels, losses, run.gradients.stack)
    before = [None if r is None else r.clone() for r in run.reducer.residuals()]
    intervention = run.interventions["churn"]
    assert isinstance(intervention, ChangingWorkers)
    intervention.change((0, 1, 3), step=3)
    left = [None if r is None else r[2] for r in before]
    for r, b in zip(run.reducer.residuals(), before, strict=True):
        if r is not None and b is not None:
            torch.testing.assert_close(r, b[[0, 1, 3]])
    event = intervention.left[0]
    norm = math.sqrt(sum(float(r.square().sum()) for r in left if r is not None))
    assert event == {
        "worker": 2,
        "step": 3,
        "residual": pytest.approx(norm),
        "movement": 0.0,
    }
    assert norm > 0
    intervention.change((0, 1, 2, 3), step=4)
    for r, b in zip(run.reducer.residuals(), before, strict=True):
        if r is not None and b is not None:
            torch.testing.assert_close(r.sum(0), b.sum(0) - b[2])
            assert not r[2].any()
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor", ["compressor=dense", "compressor={name='powersgd',error_feedback=false}"]
)
def test_where_nothing_is_held_back_one_pass_serves_all(compressor: str, tmp_path: Path) -> None:
    """With BatchNorm, whose statistics follow the first worker that is present."""
    churn = "churn={per='step',away=[[0,1,4],[2,3,6]]}"
    level = "levels={}" if "dense" in compressor else "levels={low=2,high=1}"
    name = "dense" if "dense" in compressor else "high"
    c = smoke_static(compressor, level, f"policy={{name='static',level='{name}'}}", churn)
    for passes in ("true", "false"):
        regimes.run(override(c, [f"union_pass={passes}"]), tmp_path / passes)
    header = regimes.load(tmp_path / "true").header
    assert header["world"]["union_pass"]
    assert header["world"]["workers"] == c.workers
    close(weights(tmp_path / "true"), weights(tmp_path / "false"), 1e-11)


@pytest.mark.slow
def test_a_network_with_a_memory_goes_on_where_it_stays(tmp_path: Path) -> None:
    """One that joins begins with an empty memory, in both passes alike."""
    words = random_walk(tmp_path)
    c = lstm(words, "compressor=dense", "levels={}", "policy={name='static',level='dense'}")
    c = override(c, ["churn={per='step',away=[[0,1,3],[2,2,5]]}", "model.dropout=0"])
    for passes in ("true", "false"):
        regimes.run(override(c, [f"union_pass={passes}"]), tmp_path / passes)
    close(weights(tmp_path / "true"), weights(tmp_path / "false"), 1e-11)


def test_stochastic_rounding_has_a_stream_for_each_worker(tmp_path: Path) -> None:
    """Worker 3 alone draws the numbers of worker 3, whatever row it is in."""
    pressed = ("compressor=quantise", "levels={high=4}", "policy.level=high", *SGD)
    run = prepare_run(text("churn={absent=[0,1,2]}", *pressed))
    run.set_present((3,))
    other = prepare_run(text(*pressed))
    x = torch.randn(4, *run.layers[0].shape, dtype=torch.float64)
    alone, all_four = (
        parts.reducer.reduce([0], [rows], [4], None)[0]
        for parts, rows in ((run, x[3:]), (other, torch.cat([torch.zeros(3, *x.shape[1:]), x[3:]])))
    )
    torch.testing.assert_close(alone, 4 * all_four)


# -- local steps -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start", [pytest.param(x, marks=SLOW) for x in ("copy", "reset")] + ["average"]
)
@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        pytest.param(SGD, (), marks=SLOW),
        pytest.param(ADAMW, DILOCO, marks=SLOW),
        (ADAMW, (*DILOCO, "outer.fragments=3", "outer.delay=2", "outer.mixing=0.5")),
    ],
    ids=["local sgd", "diloco", "streaming"],
)
def test_local_steps_are_the_naive_loop(
    start: str, optimizer: tuple[str, ...], more: tuple[str, ...], tmp_path: Path
) -> None:
    """A worker that leaves in the middle of a round takes its movement, one that joins there
    starts from the synchronised parameters."""
    churn = BY_STEP.replace("{", f"{{optimizer='{start}',")
    c = text(churn, every(5), *optimizer, *more, *TOP_HALF, "unit_steps=4")
    regimes.run(c, tmp_path)
    sizes = [p.numel() for p in prepare_run(c).model.parameters()]
    loop = Streaming(
        c,
        5,
        divide_layers(sizes, c.outer.fragments),
        present=present(c),
        start=start,
        feedback=Feedback(half),
    )
    close(weights(tmp_path), loop.run(), 1e-11)
    for place, name in ((2, "residual"), (3, "movement")):
        wanted = [(left[0], left[1], left[place]) for left in loop.taken]
        assert taken(tmp_path, name) == [(s, w, pytest.approx(n, 1e-8)) for s, w, n in wanted]
    assert any(movement for *_, movement in loop.taken)


def test_a_unit_has_the_norm_of_what_all_that_left_took_together(tmp_path: Path) -> None:
    """Two in a unit: the root of the sum of squares, of residuals and of movements."""
    churn = "churn={per='step',away=[[3,8,99],[1,11,99]]}"
    c = text(churn, every(7), *SGD, *TOP_HALF, "unit_steps=17")
    column = regimes.run(c, tmp_path).rows[0]["churn"]
    for name in ("residual", "movement"):
        norms = [event[name] for event in column["left"]]
        assert len(norms) == 2
        assert min(norms) > 0
        assert column[name] == pytest.approx(math.sqrt(norms[0] ** 2 + norms[1] ** 2), rel=1e-12)


# -- the same in another way -----------------------------------------------------------------


@pytest.mark.slow
def test_without_an_absence_nothing_changes(tmp_path: Path) -> None:
    c = text("unit_steps=5", "union_pass=false", *SGD)
    regimes.run(c, tmp_path / "without")
    regimes.run(override(c, ["churn={least=2}"]), tmp_path / "with")
    same_weights(tmp_path / "without", tmp_path / "with")
    assert "churn" not in rows(tmp_path / "without")[0]


@pytest.mark.parametrize(
    "local",
    [(), pytest.param((every(3), *DILOCO), marks=SLOW)],
    ids=["shared", "local"],
)
def test_a_pulse_of_absence_is_a_window(local: tuple[str, ...], tmp_path: Path) -> None:
    """In units 1 and 2, from a trunk's checkpoint, or in one run."""
    c = text("unit_steps=3", *TOP_HALF, *SGD, *local, "checkpoint_keep=[1]")
    regimes.run(c, tmp_path / "trunk")
    regimes.branch(
        tmp_path / "trunk", at=1, length=2, set={"churn": {"absent": [2]}}, out=tmp_path / "pulse"
    )
    regimes.run(override(c, ["churn={away=[[2,1,3]]}"]), tmp_path / "window")
    same_weights(tmp_path / "pulse", tmp_path / "window")
    units = [[e["worker"] for e in row["churn"]["joined"]] for row in rows(tmp_path / "window")]
    assert units == [[], [], [], [2], [], []]


def test_processes_continue_a_trunk_whose_workers_are_all_there(tmp_path: Path) -> None:
    """The branch has no churn, and as many processes as one likes; else it needs one process."""
    c = smoke_static("churn={away=[[2,0,2]]}", "checkpoint_keep=all", *TOP_HALF, "epochs=4")
    trunk, out = tmp_path / "trunk", tmp_path / "two"
    regimes.run(c, trunk)
    regimes.branch(trunk, at=3, set={"churn": None}, out=tmp_path / "alone")
    forked.train(branch_config(trunk, BranchConfig(at=3), ["churn=none"], out), out, 2)
    same_run(tmp_path / "alone", out, tolerance=1e-9)
    away = tmp_path / "away"
    c = branch_config(trunk, BranchConfig(at=1), ["churn=none"], away)
    for end in Training([c] * 2, away).ends():
        assert "--processes: only workers [0, 1, 3] are present where this run" in end.said


@pytest.mark.parametrize("done", [1, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((*TOP_HALF, *SGD), marks=SLOW),
        (*TOP_HALF, *ADAMW, every(5), *DILOCO, "outer.fragments=2", "outer.delay=2"),
    ],
    ids=["shared", "streaming"],
)
def test_resumed_with_workers_away(settings: tuple[str, ...], done: int, tmp_path: Path) -> None:
    resumed_alike(text("unit_steps=3", RANDOM, *settings), tmp_path, done)
    saved = checkpoint.load(tmp_path / "whole")
    assert saved is not None
    left = [e for row in rows(tmp_path / "whole") for e in row["churn"]["left"]]
    assert len(left) > 2


@pytest.mark.slow
def test_a_policy_decides_from_the_record(tmp_path: Path) -> None:
    """ACCORDION with workers that come and go: what it decides on the rows alone, unit by unit."""
    c = text("unit_steps=3", "policy={name='accordion',interval=1}", "churn={away=[[3,1,4]]}", *SGD)
    c = override(c, ["compressor=powersgd", "levels={low=2,high=1}"])
    record = regimes.run(c, tmp_path)
    parts = prepare_run(c)
    for unit, row in enumerate(record.rows):
        assert parts.controller.decide(record.rows[:unit]).names == row["layers"]["level"]
    assert {row["churn"]["present"] for row in record.rows} == {3, 4}
    assert len({level for row in record.rows for level in row["layers"]["level"]}) > 1


def test_its_seconds_are_of_the_workers_that_are_there(tmp_path: Path) -> None:
    """A run of three of four workers, then of all, on a link so slow that nothing else counts."""
    c = text("unit_steps=5", "churn={away=[[2,0,2]]}", *TOP_HALF, *SGD)
    run = regimes.run(c, tmp_path)
    works = [work for _, work in recorded_work(run)]
    assert [work.present for work in works] == [0.75, 0.75, 1.0, 1.0]
    slow = Network(1.0)
    for row, work, workers in zip(run.rows, works, (3, 3, 4, 4), strict=True):
        size = {kind: n / row["steps"] for kind, n in row["collectives"]["bytes"].items()}
        moved = size["gather"] * (workers - 1) + size["mean"] * 2 * (workers - 1) / workers
        broadcast = size["broadcast"] * math.ceil(math.log2(workers))
        assert work.communicate(slow, 4) == pytest.approx(8 * (moved + broadcast))


# -- drawn schedules -------------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 6),
    st.integers(0, 9),
)
def test_drawn_workers(workers: int, leave: float, join: float, least: int, seed: int) -> None:
    least = min(least, workers)
    churn = Churn(leave=leave, join=join, least=least)
    presence = Presence(churn, workers, seed)
    found = [presence.at(time) for time in range(20)]
    assert found[0] == tuple(range(workers))
    assert all(len(now) >= least for now in found)
    for before, now in itertools.pairwise(found):
        assert {*before} & {*now}
    assert [Presence(churn, workers, seed).at(time) for time in (19, 7)] == [found[19], found[7]]
    assert presence.at(3) == found[3]


def test_drawn_rates_are_those_asked_for() -> None:
    """Of 4,000 workers and units: within four standard errors."""
    presence = Presence(Churn(leave=0.1, join=0.4), 40, 0)
    found = [{*presence.at(time)} for time in range(101)]
    pairs = list(itertools.pairwise(found))
    left, there = (sum(len(x) for x in y) for y in ([a - b for a, b in pairs], found[:-1]))
    assert abs(left / there - 0.1) < 4 * math.sqrt(0.09 / there)
    joined, gone = sum(len(b - a) for a, b in pairs), 4000 - there
    assert abs(joined / gone - 0.4) < 4 * math.sqrt(0.24 / gone)


# -- what does not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("churn={absent=[4]}",), "churn.absent = 4: expected workers from 0 to 3"),
        (("churn={away=[[1,3,3]]}",), r"\[1, 3, 3\]: expected \[worker, first, stop\)"),
        (("churn={away=[[1,0,2]],leave=0.1}",), "not both"),
        (("churn={join=0.1}",), "churn.leave above 0"),
        (("churn={absent=[0,1],least=3}",), "3 of 4 workers present"),
        (("churn={away=[[0,2,4],[1,3,5]],least=3}",), "at unit 3 = .*3 of 4 workers present"),
        (("churn={away=[[0,2,4],[1,2,4],[2,4,6],[3,4,6]]}",), "at unit 4 no worker stays"),
        (("churn={away=[[0,1,2]]}",), "windows that start within the run's 1 units"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    settings: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        regimes.run(text(*settings), tmp_path)


def test_one_must_stay() -> None:
    run = prepare_run(text("churn={absent=[3]}"))
    run.set_present((0, 1))
    with pytest.raises(ConfigError, match=r"workers \[0, 1\] all leave, so \[2, 3\] have none"):
        run.set_present((2, 3))
    run.close()


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="churn: expected none on several processes"):
        spawn_processes(text("churn={absent=[1]}"), tmp_path, 2)
