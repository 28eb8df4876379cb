"""Trials within local steps: against a naive loop with a universe of its own for the treated, on
any division, resumed, and what they leave behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from copied_models import DILOCO, SGD, Feedback, close, every, step_each, steps, text
from ddp_scripts import group
from ddp_scripts import trials as own_loop
from runs import break_off, rows, same_bits, same_run, same_weights, weights

import regimes
from regimes.config import RunConfig, override
from regimes.errors import ConfigError
from regimes.job.move_residuals import on_processes
from regimes.plotting.trials import draw_harms
from regimes.policies import Trial, make_policy
from regimes.replay.replay import past_epochs
from regimes.report import content, pictures
from regimes.seeding import derive_seed
from regimes.training import checkpoint
from regimes.training.build import Run, prepare_run
from regimes.training.changes import fit_checkpoint

torch.set_num_threads(1)
PRESSED = ("compressor={name='quantise',stochastic=false,error_feedback=true}",)
LEVELS = ("levels={high=4,low=8}",)
RULE = "policy={name='trial',every=3,rounds=2,samples=8}"
ROUNDS = (every(2), *SGD, *DILOCO, *PRESSED, *LEVELS, RULE, "unit_steps=3")  # nine of two steps


def rounded(delta: torch.Tensor, bits: int) -> torch.Tensor:
    """Multiples of the largest magnitude over 2^(bits - 1) - 1, rounded to the nearest."""
    most = 2 ** (bits - 1) - 1
    scale = delta.abs().max() / most
    return (delta / scale + 0.5).floor().clamp(-most, most) * scale


class Universe:
    """An outer optimiser's parameters and velocity, and the residuals of what is sent to it."""

    def __init__(self, c: RunConfig, start: list[torch.Tensor], send: Callable[..., Any]) -> None:
        self.c, self.at, self.feedback = c, [p.detach().clone() for p in start], Feedback(send)
        self.velocity = [torch.zeros_like(p) for p in self.at]

    def at_level(self, bits: int) -> Universe:
        """A copy that sends at another level from now on."""
        other = copy.deepcopy(self)
        other.feedback.send = functools.partial(rounded, bits=bits)
        return other

    def step(self, moved: list[dict[int, torch.Tensor]]) -> None:
        for i, own in enumerate(moved):
            movement, outer = self.feedback.mean(i, own), self.c.outer
            self.velocity[i].mul_(outer.momentum).add_(movement)
            self.at[i] -= outer.lr * (movement + outer.momentum * self.velocity[i])


def scored_on(c: RunConfig, parts: Run, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a trial."""
    seed, size = derive_seed(c.seed, "trial", number), c.policy["samples"]
    (batch,) = parts.task.samples(parts.batches, seed, 0, 1, size)
    return batch


def naive(c: RunConfig, period: int, other: int) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Both universes in full: where everybody is but the treated, and where those are."""
    start, loss, batches, make = steps(c)
    rule, parts = make_policy(c.policy), prepare_run(c)
    assert isinstance(rule, Trial)
    models = [copy.deepcopy(start) for _ in range(c.workers)]
    optimizers = [make(model) for model in models]
    mine = Universe(c, list(start.parameters()), functools.partial(rounded, bits=4))
    theirs: Universe | None = None
    treated: tuple[int, ...] = ()
    found, left, synced, todo = list[dict[str, Any]](), 0, 0, list(batches)
    for done, (x, y) in enumerate(todo, start=1):
        step_each(c, models, optimizers, loss, x, y)
        if done % period and done < len(todo):
            continue
        with torch.no_grad():
            left -= 1
            if theirs is not None and not left:
                batch = scored_on(c, parts, len(found))
                scores = [float(loss(model.eval(), *batch)) for model in models]
                means = [
                    sum(s for w, s in enumerate(scores) if (w in treated) is x) / 2
                    for x in (True, False)
                ]
                found.append({"scores": scores, "treated": [*treated], "diff": means[0] - means[1]})
            own = [list(model.parameters()) for model in models]
            moved = [
                {
                    w: (theirs.at if theirs and w in treated else mine.at)[i] - own[w][i]
                    for w in range(c.workers)
                }
                for i in range(len(mine.at))
            ]
            if not left or done == len(todo):
                theirs = None
            if synced % rule.every == 0 and done < len(todo):
                theirs, left = mine.at_level(other), rule.rounds
                treated = rule.assignment("high", len(found), c.workers, c.seed).treated
            synced += 1
            if theirs is not None:
                theirs.step(moved)
            mine.step(moved)
            for w, tensors in enumerate(own):
                at = theirs.at if theirs and w in treated else mine.at
                for p, synced_p in zip(tensors, at, strict=True):
                    p.copy_(synced_p)
    return mine.at, found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    c, folder = text(*ROUNDS, "checkpoint_keep=[3]"), tmp_path_factory.mktemp("trials") / "run"
    regimes.run(c, folder)
    return c, folder


def tried(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for row in found for trial in row["trials"]]


def same_trials(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(tried(found)) == len(tried(expected)) > 1
    for mine, theirs in zip(tried(found), tried(expected), strict=True):
        for key in ("number", "level", "base", "treated", "bytes"):
            assert mine[key] == theirs[key], key
        assert mine["scores"] == pytest.approx(theirs["scores"], rel=1e-11)
        assert mine["difference"] == pytest.approx(theirs["difference"], rel=1e-9)


def test_it_is_a_naive_loop_of_two_universes(run: tuple[RunConfig, Path]) -> None:
    """Weights, who was treated, scores and differences, of trials of two rounds at DiLoCo's outer
    step."""
    c, folder = run
    at, expected = naive(c, 2, 8)
    found = tried(rows(folder))
    names = [name for name, _ in prepare_run(c).model.named_parameters()]
    close(weights(folder), dict(zip(names, at, strict=True)), 1e-11)
    assert [(t["level"], t["base"]) for t in found] == [("low", "high")] * 3
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["treated"] == theirs["treated"]
        assert mine["scores"] == pytest.approx(theirs["scores"], rel=1e-10)
        assert mine["difference"] == pytest.approx(theirs["diff"], abs=1e-10)


def test_processes_equal_simulation_and_the_loop_of_a_user(
    run: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    """Two processes of two workers, and four of one, continued within a trial by other objects."""
    c, folder = run
    forked.train(c, tmp_path / "two", 2)
    same_run(folder, tmp_path / "two")
    same_trials(rows(tmp_path / "two"), rows(folder))
    parts = prepare_run(c)
    own = [[(x[w], y[w]) for x, y in parts.batches.epoch(0, range(4))] for w in range(4)]
    probes = [scored_on(c, parts, number) for number in range(3)]
    for parameters, found in group.run(own_loop.trained, 4, c, parts.model, own, probes, 9):
        close(weights(folder), parameters, 1e-11)
        same_trials(found, rows(folder))


def resumed(c: RunConfig, to: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    """After nine steps, on so many processes: the second trial has had one of its rounds."""
    break_off(c, to, 3)
    if count > 1:
        forked.train(c, to, count)
    else:
        regimes.run(c, to, resume=True)


def test_resumed_within_a_trial(
    run: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the residuals of its level, and its offset: the same bits."""
    c, folder = run
    resumed(c, tmp_path / "broken", monkeypatch)
    same_bits(folder, tmp_path / "broken")


@pytest.mark.slow
def test_resumed_within_a_trial_on_two_processes(
    run: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, folder = run
    resumed(c, tmp_path / "broken", monkeypatch, 2)
    same_run(folder, tmp_path / "broken")
    same_trials(rows(tmp_path / "broken"), rows(folder))


def test_no_trace_but_what_the_treated_have_learnt(
    run: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    """Null trials cost bytes and change no bit: the treated start where all do."""
    c, _ = run
    null = regimes.run(override(c, ["policy.null=true"]), tmp_path / "null")
    plain = regimes.run(override(c, ["policy={name='static',level='high'}"]), tmp_path / "plain")
    same_weights(tmp_path / "null", tmp_path / "plain")
    for a, b in zip(null.rows, plain.rows, strict=True):
        assert a["train_loss"] == b["train_loss"]
        assert a["test_loss"] == b["test_loss"]
    assert "trials" not in plain.rows[0]
    spent = sum(row["bytes"] for row in null.rows) - sum(row["bytes"] for row in plain.rows)
    one = sum(sum(row["layers"]["bytes"]) for row in plain.rows) / 9  # synchronisations
    assert [trial["bytes"] for trial in tried([*null.rows])] == [2 * one + 8] * 3  # and a score
    assert spent == 3 * (2 * one + 8)


@pytest.mark.slow
def test_instruments_change_no_trial(run: tuple[RunConfig, Path], tmp_path: Path) -> None:
    c, folder = run
    regimes.run(override(c, ["instruments.noise={}", "instruments.error={}"]), tmp_path / "seen")
    same_weights(folder, tmp_path / "seen")
    assert tried(rows(tmp_path / "seen")) == tried(rows(folder))


def test_a_branch_within_a_trial_goes_on_where_all_are(
    run: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    """At step 9 two workers have an offset, which another policy takes back before their movement
    is measured."""
    c, folder = run
    state = checkpoint.load_at(folder, 3)
    assert state is not None
    current = state["outer"]["trials"]["current"]
    branch = override(c, ["policy={name='static',level='high'}"])
    found, _ = fit_checkpoint(prepare_run(branch), state, c)
    assert "trials" not in found["outer"]
    offset = [layer["offset"] for layer in current["layers"].values()]
    assert max(float(t.abs().max()) for t in offset) > 0
    for worker in range(4):
        before, after = (x["parts"][0]["replicas"][worker]["tensors"] for x in (state, found))
        for a, b, moved in zip(before, after, offset, strict=True):
            torch.testing.assert_close(b, a - moved if worker in current["treated"] else a)
    again, _ = fit_checkpoint(prepare_run(override(c, ["policy.samples=4"])), state, c)
    assert again["outer"]["trials"] == {**state["outer"]["trials"], "current": None}
    (tmp_path / "trunk").symlink_to(folder)
    there = ["branch.of=../trunk", "branch.at=3", "policy={name='static',level='high'}"]
    record = regimes.run(override(c, there), tmp_path / "branch")
    assert [len(row.get("trials", ())) for row in record.rows] == [0, 1, 0, 0, 0, 0]


def test_a_record_gives_back_its_trials_and_the_report_draws_them(
    run: tuple[RunConfig, Path],
) -> None:
    """Of the recorded trials, and of as many as show harm: the numbers of the policy itself."""
    record = regimes.load(run[1])
    assert record.trials["difference"].tolist() == [t["difference"] for t in tried([*record.rows])]
    assert record.trials["epoch"].tolist() == [1, 3, 5]
    (picture,) = pictures._draw_trials(content.read_study(run[1], run[1]))
    assert "blocks of trials" in picture.caption
    assert picture.uri
    known = {"level": "low", "base": "high", "scores": [], "treated": [], "bytes": 1}
    rows_: list[Any] = [
        {
            **row,
            "trials": [
                {**known, "number": 4 * i + k, "difference": -1 - 0.01 * k} for k in range(4)
            ],
        }
        for i, row in enumerate(record.rows)
    ]
    fig, numbers = draw_harms(replace(record, rows=rows_))
    assert numbers["level"].tolist() == ["high"] * 6
    assert numbers["blocks"].tolist() == [2, 4, 6, 8, 10, 12]
    assert numbers["mean"].tolist() == pytest.approx([1.015] * 6)
    assert numbers["shown"].tolist() == [False, False, True, True, True, True]
    rule = make_policy(record.config["policy"])
    assert isinstance(rule, Trial)
    last = rule.intervals(past_epochs(replace(record, rows=rows_)))["high"]
    assert numbers.iloc[-1][["blocks", "mean", "low", "high"]].tolist() == [*last]
    (mean, point, _) = fig.axes[0].get_lines()
    assert mean.get_xdata()[-4:].tolist() == [2, 3, 4, 5]  # type: ignore[union-attr]
    assert point.get_xdata().tolist() == [2]  # type: ignore[union-attr]
    assert (
        draw_harms(replace(record, rows=[{**row, "trials": []} for row in rows_]))[1][
            "blocks"
        ].max()
        == 0
    )  # type: ignore[typeddict-item]


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no local steps": (("sync_policy=none", "outer={}"), "without a sync_policy: workers that"),
    "fragments": (("outer.fragments=2",), "with fragments, a delay or mixing: there workers are"),
    "delay": (("outer.delay=1", "outer.mixing=0.5"), "with fragments, a delay or mixing: there wo"),
    "churn": (("churn={absent=[3]}",), "with churn: "),
    "shared gradients": ((every(1), "outer={}"), "with a period of 1 that shares gradients: worke"),
    "a period": (
        ("sync_policy={name='trial'}",),
        "sync_policy = 'trial': expected another policy:",
    ),
    "feedback": (
        ("levels={high={level=8,error_feedback=false},low=8}", "policy.rounds=1"),
        "policy.rounds = 1: expected 2 or more: levels that differ in error feedback alone",
    ),
    "a part": (
        ("policy={name='by-layer',otherwise={name='trial'}}",),
        "policy: ByLayer has a policy by trials as its part",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_one_sentence(name: str, tmp_path: Path) -> None:
    settings, said = WRONG[name]
    with pytest.raises(ConfigError) as error:
        regimes.run(override(text(*ROUNDS), settings), tmp_path / "run")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_other_processes_have_the_same_batches_and_other_policies_decide_levels() -> None:
    for rank, (said, found) in enumerate(group.run(own_loop.other_policies, 2)):
        assert "process 1 has probe = " in said, rank
        assert [row["layers"]["level"][0] for row in found] == ["high", "low", "high"]
        assert found[1]["floats"] > found[0]["floats"] == found[2]["floats"]
        assert [row["layers"]["why"][0] for row in found][1] == {"rule": "window"}


IN_A_LOOP: dict[str, tuple[dict[str, Any], str]] = {
    "no probe": (
        {"probe": None},
        "without a probe: workers are scored on batches of yours: add pr",
    ),
    "a manager": ({"manager": object()}, "with a manager: its replicas come and go"),
    "sharded": ({"replicas": object()}, "with a sharded model: each process holds some rows of ea"),
    "fragments": (
        {"outer": {"fragments": 2}},
        "with fragments, a delay or mixing: there workers a",
    ),
    "a period": (
        {"policy": "trial"},
        "policy = 'Trial': expected another policy: a trial compares",
    ),
    "a level": ({"level": 4}, "level = 4: expected levels with level_policy"),
    "no policy": ({"level_policy": None}, "levels = {'low': 2, 'high': 1}: expected none without"),
    "only a probe": (
        {"level_policy": None, "levels": None},
        'probe: it is for trials: add level_policy={"name": "trial"}',
    ),
    "feedback": (
        {"levels": {"low": 1, "high": {"level": 1, "error_feedback": False}}},
        "policy.rounds = 1: expected 2 or more",
    ),
}


@pytest.mark.parametrize("name", IN_A_LOOP)
def test_what_cannot_work_in_a_loop_is_one_sentence(name: str) -> None:
    wrong, said = IN_A_LOOP[name]
    model = torch.nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "compressor": "powersgd",
        "levels": {"low": 2, "high": 1},
        "level_policy": {"name": "trial"},
        "probe": (torch.nn.functional.mse_loss, torch.ones(4, 2)),
    }
    with pytest.raises(ConfigError) as error:
        regimes.local_steps(model, own, **{**options, **wrong})
    assert said in str(error.value)


def test_a_state_of_a_trial_is_no_other_number_of_processes(run: tuple[RunConfig, Path]) -> None:
    state = checkpoint.load_at(run[1], 3)
    assert state is not None
    part = {**state["parts"][0], "sums": {}}
    outer = {**state["outer"], "fragments": [{"since": 0, "left": None}]}  # right after one
    with pytest.raises(ConfigError, match="saved within a trial of another level"):
        on_processes({**state, "outer": outer, "parts": [part]}, 2)


@pytest.mark.slow
def test_steps_that_are_shared_after_all_end_a_trial(tmp_path: Path) -> None:
    """AdaComm may come to a period of 1: the trial has no result, and all have one model."""
    rule = "sync_policy={name='adacomm',base=2}"
    warm_up = ("optimizer.lr=0.5", "optimizer.warmup_from=0.01", "optimizer.warmup_epochs=1")
    more = ("outer={}", *warm_up, "epochs=2", "policy.every=2")
    record = regimes.run(override(text(*ROUNDS), [rule, *more]), tmp_path / "run")
    periods = [row["sync"]["period"] for row in record.rows]
    assert set(periods) == {1, 2}
    shared = periods.index(1)
    assert any(row["trials"] for row in record.rows[:shared])
    assert not any(row["trials"] for row in record.rows[shared + 1 :])
    assert record.rows[-1]["test_loss"] < record.rows[0]["test_loss"]
