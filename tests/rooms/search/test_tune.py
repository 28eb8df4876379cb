"""``regimes tune`` against brute force, with records that cost nothing to train."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain
import pytest
import searches
from configs import smoke as short
from hypothesis import given
from hypothesis import strategies as st

import regimes
from regimes import presets
from regimes.base.config import RunConfig, load_toml, override
from regimes.base.errors import ConfigError, RecordError
from regimes.presets import get_grid
from regimes.records import RecordWriter
from regimes.search import sweep, tune
from regimes.search.rounds import LOG

SEEDS = (5, 6)
VALUES = {"optimizer.lr": ["0.1", "0.2", "0.4", "0.8"], "optimizer.momentum": ["0.5", "0.9"]}


def cells() -> dict[str, RunConfig]:
    base = override(regimes.get_preset("smoke"), ["data.validation_size=40"])
    return {
        name: override(base, ["policy=static", f"policy.level={name}"]) for name in ("low", "high")
    }


def trained_by(
    monkeypatch: pytest.MonkeyPatch,
    ran: list[tuple[Path, RunConfig]],
    train: Callable[[RunConfig], str | None],
) -> None:
    """Runs are over at once, some with an error; what was run."""

    def each(todo: list[tuple[Path, RunConfig]], progress: Any) -> list[str]:
        ran.extend(todo)
        for folder, config in todo:
            progress(folder, train(config))
        return []

    monkeypatch.setattr(sweep, "make_trainer", lambda *given: contextlib.nullcontext(each))


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, RunConfig]]:
    """Runs that are over at once, with a score by formula; what was run."""
    ran: list[tuple[Path, RunConfig]] = []

    trained_by(monkeypatch, ran, lambda config: None)

    def scores(folders: list[Path]) -> tuple[str, tuple[float, ...]]:
        known = dict(ran)
        return "accuracy", tuple(searches.by_level(known[folder]) for folder in folders)

    monkeypatch.setattr(sweep, "is_finished", lambda folder, config: False)
    monkeypatch.setattr(tune, "read_scores", scores)
    return ran


def brute_force(cell: RunConfig) -> str:
    """The best combination, by trying them all in a loop."""

    def mean(settings: list[str]) -> float:
        made = [override(cell, [*settings, f"seed={seed}"]) for seed in SEEDS]
        return sum(map(searches.by_level, made)) / len(made)

    every = [
        [f"{k}={v}" for k, v in zip(VALUES, texts, strict=True)]
        for texts in itertools.product(*VALUES.values())
    ]
    return " ".join(max(every, key=mean))


@pytest.mark.parametrize("halving", [None, 2, 3])
def test_each_cell_gets_its_best(halving: int | None, untrained: list[Any], tmp_path: Path) -> None:
    found = tune.tune(cells(), VALUES, SEEDS, tmp_path, halving=halving)
    found.write(tmp_path)
    assert {c: t.label for c, t in found.chosen.items()} == {
        name: brute_force(cell) for name, cell in cells().items()
    }
    assert json.loads((tmp_path / "tune.json").read_text())["seeds"] == list(SEEDS)
    assert sum("chosen" in row for row in found.table().rows) == 2


@pytest.mark.parametrize("names", [("low", "high", "a", "Z"), ("a", "low", "high", "Z")])
def test_what_was_chosen_has_the_order_of_its_grid(names: tuple[str, ...], tmp_path: Path) -> None:
    """A file that `regimes tune` did not write comes last; without its table all are by name."""
    cell = cells()["low"]
    trials = {n: [tune.Trial("as it is", replace(cell, name=n), (0.5,))] for n in names}
    tune.Tuned("accuracy", trials, (5,)).write(tmp_path)
    shutil.copy(tmp_path / "chosen" / "a.toml", tmp_path / "chosen" / "added.toml")
    assert [*get_grid(str(tmp_path / "chosen"))] == [*names, "added"]
    for odd in ("", "[]", '{"chosen": 3}', '{"chosen": [[]]}', "{"):
        (tmp_path / "tune.json").write_text(odd)
        assert [*get_grid(str(tmp_path / "chosen"))] == sorted([*names, "added"])


def test_halving_trains_what_it_says(untrained: list[Any], tmp_path: Path) -> None:
    """8 trials, halved: 8 for 3 epochs, 4 for 6, 2 for 12, 1 for 24, with 2 seeds and 2 cells."""
    tune.tune(cells(), VALUES, SEEDS, tmp_path, halving=2, budget=4 * 96)
    epochs = [config.epochs for _, config in untrained]
    assert {e: epochs.count(e) for e in epochs} == {3: 32, 6: 16, 12: 8, 24: 4}
    with pytest.raises(ConfigError, match="need 384 epochs of training, the budget is 383"):
        tune.tune(cells(), VALUES, SEEDS, tmp_path, halving=2, budget=383)


@pytest.mark.parametrize("settings", [["epochs=3"], ["epochs=1", "unit_steps=5"], ["steps=7"]])
def test_a_round_is_no_longer_than_it_says(
    settings: list[str], untrained: list[Any], tmp_path: Path
) -> None:
    """An eighth of each is less than one, and rounds up to eight times what the table would say."""
    cell = {"low": override(cells()["low"], settings)}
    unit = settings[0].split("=")[0]
    with pytest.raises(ConfigError, match=f"low: .* trains 0.125 of its {unit}, less than one"):
        tune.tune(cell, VALUES, SEEDS, tmp_path, halving=2)
    assert not untrained
    tune.tune({"low": override(cells()["low"], ["steps=80"])}, VALUES, SEEDS, tmp_path, halving=2)
    steps = [config.steps for _, config in untrained]
    assert {s: steps.count(s) for s in steps} == {10: 16, 20: 8, 40: 4, 80: 2}


def test_a_budget_in_epochs_counts_no_steps(untrained: list[Any], tmp_path: Path) -> None:
    cell = {"low": override(cells()["low"], ["steps=100000"])}
    with pytest.raises(
        ConfigError, match="low: --budget counts epochs, and its length is in steps"
    ):
        tune.tune(cell, VALUES, SEEDS, tmp_path, budget=1000)
    assert not untrained


def test_a_warm_up_keeps_its_ratio(untrained: list[Any], tmp_path: Path) -> None:
    tune.tune(cells(), {"optimizer.lr": ["0.1", "0.8"]}, SEEDS, tmp_path)
    ratios = {round(c.optimizer.warmup_from / c.optimizer.lr, 9) for _, c in untrained}
    assert ratios == {0.25}
    untrained.clear()
    both = {"optimizer.lr": ["0.1", "0.8"], "optimizer.warmup_from": ["0.01"]}
    tune.tune(cells(), both, SEEDS, tmp_path)
    assert {c.optimizer.warmup_from for _, c in untrained} == {0.01}


def test_the_seeds_that_chose_do_not_make_the_result(untrained: list[Any], tmp_path: Path) -> None:
    tune.tune(cells(), VALUES, SEEDS, tmp_path).write(tmp_path)
    chosen = load_toml(tmp_path / "chosen" / "low.toml")
    assert chosen.seed not in SEEDS
    assert get_grid(str(tmp_path / "chosen")).keys() == {"low", "high"}
    with pytest.raises(ConfigError, match="seed = 5: expected another: this one has chosen"):
        regimes.run(override(chosen, ["seed=5"]), tmp_path / "run")


def test_a_trial_that_fails_is_never_chosen(
    untrained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broke = "the loss is not finite"
    trained_by(monkeypatch, untrained, lambda c: broke if c.optimizer.lr == 0.4 else None)
    found = tune.tune(cells(), {"optimizer.lr": ["0.2", "0.4", "0.8"]}, SEEDS, tmp_path)
    assert {t.label for t in found.chosen.values()} == {"optimizer.lr=0.2"}
    assert sum("not finite" in cell for row in found.table().rows for cell in row) == 2


def test_the_best_of_an_earlier_round_is_chosen_where_the_last_one_failed(
    untrained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loss, which is the lower the better: a third of nine trials goes on, then one, fails."""
    cell = {"low": cells()["low"]}
    rates = [f"{n / 10}" for n in range(9, 0, -1)]

    whole, broke = cell["low"].epochs, "the loss is not finite"
    trained_by(monkeypatch, untrained, lambda c: broke if c.epochs == whole else None)

    def losses(folders: list[Path]) -> tuple[str, tuple[float, ...]]:
        return "loss", tuple(dict(untrained)[folder].optimizer.lr for folder in folders)

    monkeypatch.setattr(tune, "read_scores", losses)
    found = tune.tune(cell, {"optimizer.lr": rates}, SEEDS, tmp_path, halving=3)
    assert found.metric == "loss"
    assert found.chosen["low"].label == "optimizer.lr=0.2"  # that of 0.1 failed


def test_what_was_chosen_is_written_though_another_cell_failed(
    untrained: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broke = "the loss is not finite"
    trained_by(monkeypatch, untrained, lambda c: broke if c.policy["level"] == "low" else None)
    found = tune.tune(cells(), {"optimizer.lr": ["0.2"]}, SEEDS, tmp_path)
    with pytest.raises(RecordError, match=r"every trial of low failed: the loss"):
        found.write(tmp_path)
    assert [path.name for path in (tmp_path / "chosen").iterdir()] == ["high.toml"]


def test_no_trial_is_the_better_one_if_nobody_knows_which_way_is_better() -> None:
    """An error of which less is better, under a name of its own, would choose the worst."""
    trials = [tune.Trial(f"optimizer.lr={x}", RunConfig(), (x,)) for x in (0.1, 9.0)]
    assert [t.scores for t in tune._rank_trials(trials, "loss")] == [(0.1,), (9.0,)]
    assert [t.scores for t in tune._rank_trials(trials, "accuracy")] == [(9.0,), (0.1,)]
    with pytest.raises(ConfigError, match="metric 'mae': whether less of it is better is not"):
        tune._rank_trials(trials, "mae")


@pytest.mark.parametrize("metrics", [[None, None, None], [0.1, 0.1, None]])
def test_a_metric_that_was_not_finite_is_no_score(
    metrics: list[float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of 800 nats is finite, its perplexity is not: JSON has null for it."""
    cell = {"low": cells()["low"]}

    def train(todo: list[tuple[Path, RunConfig]], progress: Any) -> None:
        for folder, config in todo:
            writer = RecordWriter.create(folder, plain.header(metric="perplexity"))
            for epoch, metric in enumerate(metrics if config.optimizer.lr == 0.1 else [0.5] * 3):
                writer.epoch(plain.row(epoch, validation={"loss": 1.0, "metric": metric}), {})
            writer.close()
            progress(folder, None)

    monkeypatch.setattr(sweep, "make_trainer", lambda *given: contextlib.nullcontext(train))
    found = tune.tune(cell, {"optimizer.lr": ["0.1", "0.2"]}, SEEDS, tmp_path)
    assert found.chosen["low"].label == "optimizer.lr=0.2"
    assert found.trials["low"][0].failed == "the validation perplexity is not finite"


@given(st.integers(1, 100), st.integers(2, 5))
def test_rounds_end_with_the_whole_run_and_one_trial(trials: int, halving: int) -> None:
    shares, left = zip(*tune._rounds(trials, halving), strict=True)
    assert shares[-1] == 1
    assert left[0] == trials
    assert left[-1] == 1
    assert list(left) == sorted(left, reverse=True)


@pytest.mark.parametrize(
    ("settings", "values", "says"),
    [
        ([], {"optimizer.lr": ["0.1"]}, "has no validation data"),
        (["data.validation_size=40"], {"optimizer.rate": ["1"]}, "unknown key 'optimizer.rate'"),
    ],
)
def test_bad_input_is_one_sentence(
    settings: list[str], values: dict[str, list[str]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        tune.tune({"low": short(*settings)}, values, SEEDS, tmp_path)


def test_a_cell_that_cannot_run_is_refused_before_any_trial(
    untrained: list[Any], tmp_path: Path
) -> None:
    """Its level is none of its compressor's."""
    wrong = override(cells()["low"], ["compressor=quantised-all-reduce", "levels.low=2"])
    with pytest.raises(ConfigError, match="expected 4 or 8"):
        tune.tune(cells() | {"bits": wrong}, VALUES, SEEDS, tmp_path)
    assert not untrained


def test_a_command_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no values to choose from: give --values"):
        tune.run_tuning({"low": short()}, [], SEEDS, tmp_path / "out", 1, None, None)
    assert not [*tmp_path.iterdir()]


def test_values_that_are_none() -> None:
    odd = ("0.1,0.1", "0.1,0.2,0.10", ",", "0.1,", "[4,8],[4, 8]", "a,'a'")
    for texts, says in (
        (["optimizer.lr"], "needs the form key=value,value"),
        (["optimizer.lr=0.1,0.2", "optimizer.lr=0.4"], "lr has values already"),
        *(([f"optimizer.lr={text}"], "expected values, each once") for text in odd),
    ):
        with pytest.raises(ConfigError, match=says):
            tune.read_values(texts)


def test_the_real_thing(tmp_path: Path) -> None:
    """Two rates on digits: the record of each trial is there, and going on trains nothing again."""
    cell = {"low": short("data.validation_size=40", "dtype=float32", epochs=8)}
    values = {"optimizer.lr": ["0.00001", "0.2"]}
    found = tune.tune(cell, values, (5,), tmp_path)
    assert found.chosen["low"].label == "optimizer.lr=0.2"
    again = tune.tune(cell, values, (5,), tmp_path, show=lambda *_: pytest.fail("trained"))
    assert again == found


def test_a_folder_trains_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are added, a run that failed for a reason that is gone, a record that is gone;
    also where an earlier version has left no log."""
    full = [True]
    formula = searches.by_level

    def train(config: RunConfig) -> float | str:
        return searches.FAILS if full[0] and config.seed == 6 else formula(config)

    trainer = searches.Trainer(train)
    monkeypatch.setattr(sweep, "make_trainer", trainer.make_trainer)
    cell = {"low": cells()["low"]}

    def trained(*rates: str) -> tuple[str, list[str]]:
        trainer.rounds.clear()
        found = tune.tune(cell, {"optimizer.lr": rates}, SEEDS, tmp_path)
        runs = [
            folder.relative_to(tmp_path).as_posix() for each in trainer.rounds for folder, _ in each
        ]
        return found.chosen["low"].label.partition("=")[2], runs

    first, last = "low/optimizer.lr=0.1/seed-", "low/optimizer.lr=0.4/seed-"
    assert trained("0.1") == ("0.1", [f"{first}5", f"{first}6"])  # the last one failed
    full[0] = False
    assert trained("0.1") == ("0.1", [f"{first}6"])
    assert trained("0.1", "0.4") == ("0.4", [f"{last}5", f"{last}6"])
    assert trained("0.1") == ("0.1", [])
    shutil.rmtree(tmp_path / f"{last}5")
    assert trained("0.4", "0.1") == ("0.4", [f"{last}5"])
    (tmp_path / LOG).unlink()
    assert trained("0.4", "0.1") == ("0.4", [])


# -- what it takes, and what it refuses before it trains -------------------------------------


def test_the_documented_commands_tune_every_arm(
    command: Any, untrained: list[Any], tmp_path: Path
) -> None:
    """Those of README and of the page; `smoke` is a grid and a preset."""
    words = "--values optimizer.lr=0.1,0.2,0.4 --set data.validation_size=100 --seeds 1 --budget 1"
    done = command("tune", "smoke", *words.split())
    epochs = [cell.epochs for cell in get_grid("smoke").values()]
    assert len(epochs) == 9
    assert f"the trials need {3 * sum(epochs)} epochs" in done.stderr  # at 3 rates
    assert "smoke: the grid with the schedules " in done.stdout
    assert get_grid("smoke").keys() == presets.select_arms("smoke").keys()
    assert presets.select_arms("smoke", ["low"]).keys() == {"low"}
    assert presets.select_arms("lm-smoke").keys() == {"lm-smoke"}  # no grid has this name
    assert presets.select_arms("smoke/low").keys() == {"smoke/low"}


def test_the_price_is_that_of_the_longest_trials(untrained: list[Any], tmp_path: Path) -> None:
    values = {"epochs": ["2", "100"]}
    with pytest.raises(ConfigError, match="need 204 epochs of training, the budget is 50"):
        tune.tune({"low": cells()["low"]}, values, SEEDS, tmp_path, budget=50)
    assert not untrained
    # halved: both for half of their epochs, then the longer one for all of them
    with pytest.raises(ConfigError, match="need 302 epochs"):
        tune.tune({"low": cells()["low"]}, values, SEEDS, tmp_path, halving=2, budget=301)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", "nan"], "--budget = nan: expected a number of epochs above 0"),
        (["--budget", "-1"], "--budget = -1.0: expected a number of epochs above 0"),
        (["--halving", "1"], "--halving = 1: expected a whole number from 2 up"),
        (["--seeds", "0"], "--seeds = 0: expected 1 to 10000"),
        (["--seeds", "1000000000"], "--seeds = 1000000000: expected 1 to 10000"),
        (["--jobs", "0"], "--jobs = 0: expected at least 1"),
    ],
)
def test_odd_numbers_are_one_sentence(
    words: list[str], says: str, command: Any, untrained: list[Any]
) -> None:
    given = ["--set", "data.validation_size=40", "--values", "optimizer.lr=0.1"]
    done = command("tune", "smoke", *given, *words)
    assert (done.returncode, done.stderr) == (2, f"error: {says}\n")
    assert not untrained
