"""Batch size as a level, budgets, deficits and ladders: closed forms, reductions, equivalences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from configs import smoke_static as config
from runs import resumed_alike, rows, weights

import regimes
from regimes.base.config import RunConfig, from_dict
from regimes.base.errors import ConfigError, DataError
from regimes.policies import (
    BatchAccordion,
    PastEpoch,
    RateLadder,
    Smith,
)
from regimes.policies.replay.replay import replay_batch
from regimes.search import sweep
from regimes.training import build, gradients

torch.set_num_threads(1)
GROW = "batch_policy={name='windows', windows=[[0, 2]], inside='low', outside='high'}"
SIZES = "batch_levels={low=8, high=24}"


def same(a: Path, b: Path, tolerance: float = 0.0) -> None:
    theirs = weights(b)
    for name, tensor in weights(a).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance)


# -- accumulation ----------------------------------------------------------------------------


@pytest.mark.parametrize(("union", "batch"), [(True, 24), (False, 24), (True, 20)])
def test_an_accumulated_gradient_is_that_of_the_whole_batch(union: bool, batch: int) -> None:
    """Without BatchNorm's batch statistics the mean over 24 is the mean of three means over 8, and
    a short last micro-batch weighs its share."""
    parts = build.prepare_run(config(SIZES, GROW, f"union_pass={str(union).lower()}"))
    gradients = parts.gradients
    for module in parts.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0
            module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    x, y = next(iter(parts.batches.rebatched(batch).epoch(0, range(4))))
    losses = gradients.compute_gradients(x, y, 0, 0)
    cut = gradients.stack.clone()
    gradients.micro_batch = None
    whole_losses = gradients.compute_gradients(x, y, 0, 0)
    torch.testing.assert_close(cut, gradients.stack, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(losses, whole_losses, rtol=1e-12, atol=0)


def test_no_two_passes_draw_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker, micro-batch, step and epoch has a seed of its own."""
    parts = build.prepare_run(config("union_pass=false"))
    parts.gradients.micro_batch = 4
    x, y = next(iter(parts.batches.epoch(0, range(4))))
    seeds: list[int] = []
    monkeypatch.setattr(gradients, "seed_generators", lambda seed, _: seeds.append(seed))
    for epoch, step in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        parts.gradients.compute_gradients(x, y, epoch, step)
    assert len(seeds) == len(set(seeds)) == 5 * 4 * math.ceil(x.shape[1] / 4)


def test_rounds_traffic_and_rate_follow_the_batch(tmp_path: Path) -> None:
    record = regimes.run(config(SIZES, GROW), tmp_path / "run")
    small, large = record.epochs.iloc[1], record.epochs.iloc[2]
    assert record.epochs["batch_size"].tolist() == [8, 8, 24]
    assert (small["steps"], large["steps"]) == (6, 2)
    assert small["floats"] == 3 * large["floats"]
    plain = regimes.run(config(), tmp_path / "plain").epochs
    assert large["lr"] == pytest.approx(3 * plain["lr"][2])
    assert record.rows[2]["batch"] == {
        "level": "high",
        "why": {"rule": "outside windows"},
        "multiple": 3,
    }


def test_one_level_is_the_run_without_levels(tmp_path: Path) -> None:
    always = "batch_policy={name='static', level='low'}"
    regimes.run(config(SIZES, always), tmp_path / "a")
    regimes.run(config(), tmp_path / "b")
    same(tmp_path / "a", tmp_path / "b")


def test_resumed_across_the_change(tmp_path: Path) -> None:
    """Stopped after the last small epoch; the large one comes after the resume."""
    c = config(SIZES, "dtype=float32", "batch_policy={name='accordion-batch', interval=1, eta=10}")
    resumed_alike(c, tmp_path, 1)
    assert {row["batch"]["level"] for row in rows(tmp_path / "broken")} == {"low", "high"}


def test_smith_keeps_the_rate_until_the_last_level(tmp_path: Path) -> None:
    """lr / 3 at epochs 1 and 2, and the batch times 3 at the first: the rate falls once."""
    c = config(
        "batch_levels={x1=8, x3=24}",
        "batch_policy={name='smith', levels=['x1', 'x3']}",
        "optimizer={lr=0.2, decay_epochs=[1, 2], decay_factor=3}",
    )
    epochs = regimes.run(c, tmp_path / "run").epochs
    assert epochs["batch_size"].tolist() == [8, 24, 24]
    assert epochs["lr"].tolist() == pytest.approx([0.2, 0.2, 0.2 / 3])


# -- policies in closed form -----------------------------------------------------------------


def past(
    values: list[float],
    levels: list[str],
    name: str = "norm",
    lr: float = 0.1,
    next_lr: float | None = None,
) -> PastEpoch:
    return PastEpoch(lr, lr if next_lr is None else next_lr, {name: list(values)}, levels)


def test_the_batch_only_grows_by_default() -> None:
    history = [past([1.0], ["high"]), past([9.0], ["high"])]
    assert BatchAccordion(interval=1).decide(history, ["batch"])[0].level == "high"
    free = BatchAccordion(interval=1, grow_only=False).decide(history, ["batch"])[0]
    assert free.level == "low"


def test_smith_counts_decays() -> None:
    history = [past([1.0], ["x1"], lr=1.0, next_lr=0.2), past([1.0], ["x5"], lr=1.0, next_lr=0.2)]
    assert [Smith().decide(history[:n], ["batch"])[0].level for n in range(3)] == [
        "x1",
        "x5",
        "x25",
    ]


def followed(policy: RateLadder, rates: list[float]) -> str:
    """The first letter or digit of each level that a policy takes, unit by unit."""
    history: list[PastEpoch] = []
    for rate, after in zip(rates, [*rates[1:], rates[-1]], strict=True):
        level = policy.decide(history, ["l"])[0].level
        history.append(PastEpoch(rate, after, {}, [level]))
    return "".join(epoch.levels[0][-1] for epoch in history)


@pytest.mark.parametrize(
    ("rates", "levels"),
    [
        ([0.0, 0.5, 1.0, 1.0, 0.5, 0.49, 0.15, 0.149], "33333221"),  # a warm-up counts as high
        ([0.1, 0.01, 0.001], "311"),
        ([1.0, 0.6, 0.3, 0.1, 1.0, 0.6, 0.3, 0.1], "33213321"),  # it starts again
        ([0.003, 0.003 / 10**0.5, 0.003 / 10], "321"),
        ([0.0, 0.0], "33"),
    ],
)
def test_the_rate_ladder_by_hand(rates: list[float], levels: str) -> None:
    assert followed(RateLadder(("r1", "r2", "r3")), rates) == levels


def test_the_rate_ladder_says_why_and_takes_other_shares() -> None:
    assert followed(RateLadder(("r1", "r4"), shares=(0.3,)), [1.0, 0.3, 0.29]) == "441"
    policy = RateLadder(("r1", "r2", "r3"))
    past = [PastEpoch(0.4, 0.1, {}, ["r3", "r2"])]
    fallen, kept = policy.decide(past, ["a", "b"])
    assert fallen.why == {"rule": "rate", "old": 0.4, "new": 0.1}
    assert (fallen.level, kept.level, kept.why) == ("r2", "r2", None)
    assert not policy.needs


@pytest.mark.parametrize(
    "shares", [(0.5,), (0.5, 0.15), (0.2, 0.2), (0.0, 0.5), (0.5, 1.0), (0.1, 0.2, 0.3)]
)
def test_shares_that_do_not_fit_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"policy\.shares = .*: expected 2 rising shares between"):
        RateLadder(("r1", "r2", "r3"), shares=shares)


# -- in a run --------------------------------------------------------------------------------


def test_joint_mode_decides_both_and_says_why(tmp_path: Path) -> None:
    record = regimes.run(
        config(
            "epochs=5",
            SIZES,
            "policy={name='accordion', interval=1}",
            "batch_policy={name='accordion-batch', interval=2, eta=3}",
        ),
        tmp_path / "run",
    )
    last = record.rows[-1]
    assert last["batch"]["level"] == "high"
    rule = BatchAccordion(interval=2, eta=3)
    replayed = replay_batch(record, rule)
    assert replayed["level"].tolist() == [row["batch"]["level"] for row in record.rows]
    assert replayed["why"].tolist() == [row["batch"]["why"] for row in record.rows]
    norms = [row["statistics"]["norm:update"] for row in record.rows]
    multiples = [row["batch"]["multiple"] for row in record.rows]
    assert multiples == [1, 1, 1, 3, 3]
    evaluated = [(i, why) for i, why in enumerate(last["layers"]["why"]) if why]
    assert evaluated
    for i, why in evaluated:  # a third of the steps, so the norm counts three times
        assert why["rule"] == "norm change"
        assert (why["old"], why["new"]) == (norms[2][i], pytest.approx(3 * norms[3][i]))


def test_a_budget_ends_the_run_when_it_is_spent(tmp_path: Path) -> None:
    """Rank 1 until it has sent what two epochs of rank 4 send: the first multiple beyond."""
    c = config(
        "epochs=50", "policy={name='static', level='high'}", "budget={level='low', epochs=2}"
    )
    record = regimes.run(c, tmp_path / "run")
    steps = record.header["per_step"]
    ratio = steps["low"]["floats"] / steps["high"]["floats"]
    assert len(record.epochs) == -(-2 * ratio // 1)
    assert record.finished
    assert sweep.is_finished(tmp_path / "run", c)


def test_error_of_a_level_against_the_singular_values(tmp_path: Path) -> None:
    """Rank >= min(n, m) loses nothing; rank 1 no less than what lies beyond the first value."""
    c = config("epochs=1", "levels={low=64, high=1}", "instruments={error={stride=1}}")
    record = regimes.run(c, tmp_path / "run")
    compressed = [x["compressed"] for x in record.header["layers"]]
    statistics = record.rows[0]["statistics"]
    assert statistics["error:low"] == pytest.approx([0.0] * len(compressed), abs=1e-12)
    high = statistics["error:high"]
    assert all((0.01 < e < 1) == matrix for e, matrix in zip(high, compressed, strict=True))


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["batch_levels={low=8, high=20}", GROW], "batch_levels.high = 20: expected a multiple"),
        (["batch_levels={low=24, high=8}", GROW], "low is the level that sends more"),
        (["batch_levels={low=8, high=800}", GROW], "200 training samples are too few"),
        ([GROW], "the batch_policy asks for level 'low', but [batch_levels] defines only none"),
        (["policy={name='adaqs', levels=['low']}"], "expected two or more different levels"),
        (["policy={name='adaqs'}"], "asks for level 'mid'"),
        (["budget={level='middle', epochs=2}"], "budget.level = 'middle': expected one of"),
        (["deficit={name='blurr'}"], "did you mean 'blur'?"),
        (["deficit={name='blur', windows=[[2, 1]]}"], "[2, 1] is no window"),
        (["deficit={name='blur', windows=[[5, 9]]}"], "a window starts in epoch 5"),
        (["instruments={error={levels=['lwo']}}"], "levels = ('lwo',): expected some of"),
    ],
)
def test_bad_input_is_one_sentence(settings: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        regimes.run(config(*settings), tmp_path / "run")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_an_older_record_is_the_same_run(tmp_path: Path) -> None:
    """Fields that came later count as their defaults."""
    c = config()
    regimes.run(c, tmp_path / "run")
    header = (tmp_path / "run" / "run.json").read_text().replace('"batch_levels": {},', "")
    (tmp_path / "run" / "run.json").write_text(header)
    assert sweep.is_finished(tmp_path / "run", c)
    assert from_dict(RunConfig, {}).batch_levels == {}
