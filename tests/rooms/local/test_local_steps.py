"""Local steps: against naive loops over copied models, and against the shared step."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from configs import smoke as images
from copied_models import ADAMW, DENSE, DILOCO, SGD, clip, close, every, step_each, steps, text
from runs import resumed_alike, same_run, same_weights, weights

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError
from regimes.records import read_lines
from regimes.training import loop
from regimes.training.build import Run, prepare_run
from regimes.training.local_rounds import Rounds

torch.set_num_threads(1)
# -- against naive loops ---------------------------------------------------------------------


def naive(c: RunConfig, period: int, *, states: str = "keep") -> dict[str, torch.Tensor]:
    """Local SGD or DiLoCo with a copy of the model for each worker, as one would write it down."""
    start, loss, batches, make = steps(c)
    models = [copy.deepcopy(start) for _ in range(c.workers)]
    optimizers = [make(model) for model in models]
    velocity = [torch.zeros_like(p) for p in start.parameters()]
    todo = list(batches)
    for done, (x, y) in enumerate(todo, start=1):
        step_each(c, models, optimizers, loss, x, y)
        if done % period and done < len(todo):
            continue
        with torch.no_grad():
            for i, (p, v) in enumerate(zip(start.parameters(), velocity, strict=True)):
                rows = torch.stack([list(model.parameters())[i] for model in models])
                movement = p - rows.mean(0)
                v.mul_(c.outer.momentum).add_(movement)
                ahead = movement + c.outer.momentum * v if c.outer.nesterov else v
                p -= c.outer.lr * ahead
                for model in models:
                    list(model.parameters())[i].copy_(p)
        if states == "reset":
            optimizers = [make(model) for model in models]
        if states == "average":
            for i in range(len(velocity)):
                mine = [
                    o.state[list(m.parameters())[i]]
                    for o, m in zip(optimizers, models, strict=True)
                ]
                for key in ("exp_avg", "exp_avg_sq"):
                    mean = torch.stack([state[key] for state in mine]).mean(0)
                    for state in mine:
                        state[key].copy_(mean)
    return dict(start.named_parameters())


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param((), marks=pytest.mark.slow),
        DILOCO,
        pytest.param(("outer.lr=0.5",), marks=pytest.mark.slow),
    ],
    ids=["mean", "diloco", "half"],
)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_it_is_the_naive_loop(
    optimizer: tuple[str, ...], outer: tuple[str, ...], tmp_path: Path
) -> None:
    c = text(every(5), *optimizer, *outer)  # 17 steps: the last round is shorter
    regimes.run(c, tmp_path)
    close(weights(tmp_path), naive(c, 5), 1e-11)


@pytest.mark.parametrize("states", ["average", "reset"])
def test_the_workers_momenta_are_averaged_or_forgotten(states: str, tmp_path: Path) -> None:
    c = text(every(4), *ADAMW, f"outer.states={states}")
    regimes.run(c, tmp_path)
    found = weights(tmp_path)
    close(found, naive(c, 4, states=states), 1e-11)
    other = naive(c, 4)
    assert any(not torch.allclose(found[name], t, atol=1e-6) for name, t in other.items())


def test_a_period_of_one_is_the_shared_step_of_sgd(tmp_path: Path) -> None:
    """Momentum is linear: the mean of the workers' steps is the step along the mean gradient."""
    settings = DENSE
    for name, more in (("shared", ()), ("alone", (every(1), "outer.period_one=parameters"))):
        c = override(images(*settings), more)
        regimes.run(c, tmp_path / name)
    shared, alone = weights(tmp_path / "shared"), weights(tmp_path / "alone")
    own = {k: v for k, v in alone.items() if "running" not in k}  # theirs follow worker 0
    close(own, {k: shared[k] for k in own}, 1e-12)


def test_gradients_are_shared_at_a_period_of_one(tmp_path: Path) -> None:
    c = images("policy=static", "union_pass=false", "dtype=float32")
    regimes.run(c, tmp_path / "plain")
    regimes.run(override(c, [every(1)]), tmp_path / "one")
    same_weights(tmp_path / "plain", tmp_path / "one")


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(every(5), id="static", marks=pytest.mark.slow),
        pytest.param(
            "sync_policy={name='windows',windows=[[1,2],[3,4]],inside='1',outside='4'}",
            id="to and fro",
        ),
    ],
)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_a_worker_alone_is_a_plain_loop(
    rule: str, optimizer: tuple[str, ...], tmp_path: Path
) -> None:
    settings = ("workers=1", "batch_size=8", "unit_steps=3", *optimizer)
    regimes.run(text(*settings), tmp_path / "plain")
    regimes.run(text(*settings, rule), tmp_path / "alone")
    close(weights(tmp_path / "alone"), weights(tmp_path / "plain"), 1e-12)


# -- rounds ----------------------------------------------------------------------------------


def test_a_change_waits_for_the_synchronisation(tmp_path: Path) -> None:
    """17 steps in units of 3: period 7 to the unit of step 9, then 2; synchronised after steps 7
    and 14, where 2 is taken up: 16, and the last step of the run, 17."""
    rule = "sync_policy={name='windows',windows=[[3,99]],inside='2',outside='7'}"
    record = regimes.run(text("unit_steps=3", rule), tmp_path)
    assert [row["sync"]["rounds"] for row in record.rows] == [0, 0, 1, 0, 1, 2]
    assert [row["sync"]["period"] for row in record.rows] == [7, 7, 7, 2, 2, 2]
    assert [row["sync"]["level"] for row in record.rows][::5] == ["7", "2"]
    assert [bool(row["statistics"]) for row in record.rows] == [
        bool(row["sync"]["rounds"]) for row in record.rows
    ]
    assert len({row["test_loss"] for row in record.rows[:2]}) == 1  # nobody has met yet
    assert all(row["train_loss"] for row in record.rows)


def test_each_shared_step_is_a_round(tmp_path: Path) -> None:
    """17 steps in units of 3: a period of 4, from step 7 of 1, which is taken up when all meet
    after step 8, from step 13 of 4 again: they meet after steps 4, 8, 9, 10, 11, 12, 16, 17."""
    rule = "sync_policy={name='windows',windows=[[2,4]],inside='1',outside='4'}"
    record = regimes.run(text("unit_steps=3", rule), tmp_path)
    assert [row["sync"]["period"] for row in record.rows] == [4, 4, 1, 1, 4, 4]
    assert [row["sync"]["rounds"] for row in record.rows] == [0, 1, 2, 3, 0, 2]


def test_floats_are_those_of_the_rounds(tmp_path: Path) -> None:
    size = sum(p.numel() for p in prepare_run(text()).model.parameters())
    for more, states in (((), 0), (("outer.states=average",), 2)):
        record = regimes.run(text(every(5), *ADAMW, *more), tmp_path / str(states))
        assert [row["floats"] for row in record.rows] == [4 * (1 + states) * size]
    compressed = text(every(5), "policy.level=high")
    record = regimes.run(compressed, tmp_path / "high")
    assert record.rows[0]["floats"] == 4 * record.header["per_step"]["high"]["floats"]


def test_a_budget_ends_at_a_synchronisation(tmp_path: Path) -> None:
    c = text(every(5), "unit_steps=3", "epochs=4", "budget={level='dense',epochs=1}")
    record = regimes.run(c, tmp_path)
    assert record.finished
    assert all(row["sync"]["rounds"] == 1 for row in record.rows)


# -- the same run on any division, resumed, measured -----------------------------------------

SWITCH = "sync_policy={name='windows',windows=[[2,3]],inside='1',outside='4'}"
KINDS = {
    "topk": (
        *SGD,
        every(4),
        "compressor=topk",
        "levels.high=5",
        "levels.low=50",
        "policy.level=high",
        *DILOCO,
    ),
    "to and fro": (*ADAMW, SWITCH),
    "averaged": (*ADAMW, every(4), "outer.states=average"),
}


def test_processes_equal_simulation(tmp_path: Path) -> None:
    """To and fro between local and shared steps, with BatchNorm's statistics."""
    c = images("policy=static", SWITCH, "unit_steps=2", "signal=movement", *ADAMW)
    regimes.run(c, tmp_path / "one")
    forked.train(c, tmp_path / "two", 2)
    same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_within_a_round(kind: str, tmp_path: Path) -> None:
    c = text("unit_steps=3", *KINDS[kind], "dtype=float32")
    resumed_alike(c, tmp_path, 2)  # six steps: two into the second round


@pytest.mark.slow
def test_resumed_on_another_number_of_processes(tmp_path: Path) -> None:
    c = text("unit_steps=3", *KINDS["topk"])
    resumed_alike(c, tmp_path, 2, processes=2)


def test_instruments_see_what_is_exchanged_and_leave_no_trace(tmp_path: Path) -> None:
    tables = [
        "noise={}",
        "error={}",
        "overlap={batches=[3],count=2}",
        "curvature={images=8,batch=4,probes=2,max_products=6}",
    ]
    c = text(every(3), "unit_steps=5", *SGD)
    plain = regimes.run(c, tmp_path / "none")
    record = regimes.run(override(c, [f"instruments.{t}" for t in tables]), tmp_path / "all")
    same_weights(tmp_path / "none", tmp_path / "all")
    assert [row["train_loss"] for row in plain.rows] == [row["train_loss"] for row in record.rows]
    norms = record.rows[0]["statistics"]["norm:update"]
    moved = naive_movement(c)
    torch.testing.assert_close(torch.tensor(norms), moved, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", [every(3), SWITCH], ids=["local", "to and fro"])
def test_the_residual_is_that_of_the_present_exchange(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each unit's end: of movements where each worker has a model of its own, else of
    gradients."""
    owed: list[tuple[bool, float]] = []
    original = loop._train_unit

    def wrapped(run: Run, *more: Any) -> Any:
        found = original(run, *more)
        assert run.local is not None
        reducer = run.local.reducer if run.local.is_local else run.reducer
        norms = [float(r.norm()) for r in reducer.residuals() if r is not None]
        owed.append((run.local.is_local, math.hypot(*norms)))
        return found

    monkeypatch.setattr(loop, "_train_unit", wrapped)
    given = "unit_steps=3", *SGD, "policy.level=high", "instruments.residual={}", kind
    rows = regimes.run(text(*given), tmp_path).rows
    expected = [norm / 2 for _, norm in owed]  # four workers
    assert [row["model"]["residual"] for row in rows] == pytest.approx(expected, rel=1e-10)
    kinds = {True} if kind == every(3) else {True, False}
    assert {local for local, norm in owed if norm > 0} == kinds


def naive_movement(c: RunConfig) -> torch.Tensor:
    """How far the mean of the workers has gone in three steps, by layer."""
    before, after = naive_rounds(c, 3, 1)
    moved = [torch.linalg.vector_norm(a - b) for a, b in zip(before, after, strict=True)]
    return torch.stack(moved).float()


def test_the_movement_of_adamw_is_that_of_its_own_rounds(tmp_path: Path) -> None:
    """Of two rounds a unit, without what weight decay has taken in each: the rate of a step times
    the decay times the parameters at the round's start, as often as it has steps."""
    c = text(
        every(3),
        "optimizer.name=adamw",
        "optimizer.lr=0.01",
        "optimizer.weight_decay=0.5",
        "optimizer.schedule=constant",
        "optimizer.warmup_from=none",
        "signal=movement",
        "unit_steps=6",
        "steps=12",
    )
    rows = regimes.run(c, tmp_path).rows
    common = naive_rounds(c, 3, 4)
    for unit, row in enumerate(rows):
        first, middle, last = common[2 * unit : 2 * unit + 3]
        decays = [0.5 if p.ndim > 1 else 0.0 for p in first]
        expected = [
            float((b - a + 3 * 0.01 * decay * (a + m)).norm())
            for a, m, b, decay in zip(first, middle, last, decays, strict=True)
        ]
        assert row["statistics"]["norm:movement"] == pytest.approx(expected, rel=1e-9)


def naive_rounds(c: RunConfig, period: int, rounds: int) -> list[list[torch.Tensor]]:
    """The parameters at which all workers are after so many rounds, those of the start first."""
    start, loss, batches, make = steps(c)
    models = [copy.deepcopy(start) for _ in range(c.workers)]
    optimizers = [make(model) for model in models]
    common = [[p.detach().clone() for p in start.parameters()]]
    for _ in range(rounds):
        for _, (x, y) in zip(range(period), batches, strict=False):
            for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss(model.train(), x[worker], y[worker]).backward()
                clip(model, c.optimizer.clip)
                optimizer.step()
        rows = zip(*(model.parameters() for model in models), strict=True)
        common.append([torch.stack(list(row)).mean(0).detach() for row in rows])
        with torch.no_grad():
            for model in models:
                for p, mean in zip(model.parameters(), common[-1], strict=True):
                    p.copy_(mean)
    return common


def test_a_loss_that_is_not_finite_names_its_step(tmp_path: Path) -> None:
    c = text(
        every(5),
        "optimizer.lr=1e25",
        "optimizer.momentum=0",
        "optimizer.nesterov=false",
        "unit_steps=3",
    )
    with pytest.raises(regimes.TrainingError, match=r"not finite in epoch 0, step [123]"):
        regimes.run(c, tmp_path)
    assert read_lines(tmp_path / "events.jsonl")[-1]["event"] == "stopped"


def test_no_second_of_losses_without_a_synchronisation_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that ends between two synchronisations has a collective of its losses, which takes as
    long as the network does; its time is in the record."""
    flush = Rounds.flush_losses

    def slow(rounds: Rounds) -> list[Any]:
        time.sleep(0.3)
        return flush(rounds)

    monkeypatch.setattr(Rounds, "flush_losses", slow)
    record = regimes.run(text(every(100), "unit_steps=5"), tmp_path / "run")
    spent = record.epochs.filter(like="seconds_").sum(axis=1)
    assert spent.ge(0.3).all(), record.epochs.filter(like="seconds_")


# -- refused ---------------------------------------------------------------------------------

WRONG = {
    "sync_levels={low=8,high=2}": "sync_levels.low = 8 is longer than sync_levels.high = 2",
    "sync_policy={name='static',level='mid'}": "the sync_policy asks for level 'mid'",
    "outer.nesterov=true": "outer.nesterov = True: expected false, or a momentum above 0",
}


@pytest.mark.parametrize("setting", WRONG)
def test_what_makes_no_sense_is_refused(setting: str, tmp_path: Path) -> None:
    name = setting.split("=")[0]
    usual = ["sync_levels={low=1,high=8}", every(4)]
    settings = [*(s for s in usual if not s.startswith(name)), setting]
    with pytest.raises(ConfigError) as error:
        regimes.run(override(text(), settings), tmp_path / "run")
    assert WRONG[setting] in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ("sync_levels={low=2,high=8}", "sync_policy={name='accordion'}"),  # movements throughout
        ("sync_levels={low=1,high=8}", "sync_policy={name='accordion'}", "signal=movement"),
        (SWITCH, "unit_steps=3"),  # no rule reads a norm
    ],
)
def test_norms_of_one_thing_may_be_read(settings: tuple[str, ...], tmp_path: Path) -> None:
    assert regimes.run(text(*settings), tmp_path / "run").finished
