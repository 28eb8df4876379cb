"""Learning rates of arms that have their own: chosen by trials, on other seeds and held-out data
(oracle: the committed trials and records)."""

from __future__ import annotations

import json
import math
import re
from statistics import fmean, stdev

import pandas as pd
import pytest

from analysis.findings.numbers import NUMBERS
from analysis.findings.sources import REFERENCE, entries, records, trials
from analysis.tournament import tournament
from regimes.base.config import to_dict
from regimes.presets import get_grid

RATES = {  # that were tried, as the heads of the grids' files say
    "tournament-smoke": (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
    "tournament-lm": (0.0015, 0.003, 0.006, 0.012),
    "tournament-small": (0.0125, 0.025, 0.05, 0.1, 0.2),
}
TUNED = (
    "lm-start",
    "lm-local",
    "lm-local-sgd",
    "small-local",
    "falling-lm",
    "falling-lm-cosine",
    "falling-lm-constant",
    "falling-wikitext",
    "ladder-115k",
    "momentum-lm",
)


def scores(source: str) -> dict[str, dict[float, float]]:
    """The mean score of each arm at each rate."""
    found: dict[str, dict[float, float]] = {}
    for row in trials(source):
        found.setdefault(row["schedule"], {})[row["rate"]] = fmean(row["scores"])
    return found


@pytest.mark.parametrize("source", TUNED)
def test_an_arm_has_the_rate_of_its_best_mean_score(source: str) -> None:
    best = max if source == "small-local" else min
    tried, rates = scores(source), {r.name: r.config["optimizer"]["lr"] for r in records(source)}
    common = tried.keys() & rates.keys()
    assert len(common) > 2
    for arm in common:
        assert rates[arm] == best(tried[arm], key=tried[arm].__getitem__), arm


@pytest.mark.parametrize("source", [*TUNED, "tournament-lm", "tournament-small"])
def test_seeds_that_chose_are_not_those_of_the_result(source: str) -> None:
    for run in records(source):
        assert run.seed not in {1000, 1001, 1002, 1003, *run.config.get("tuned_on", ())}


@pytest.mark.parametrize(
    ("source", "at_an_end"),
    [
        ("tournament-small", ["rank 1", "last 6"]),
        ("tournament-lm", []),
        ("falling-lm", ["coin 2-1"]),
        ("falling-lm-cosine", []),
        ("falling-lm-constant", []),
        ("ladder-115k", []),
        ("momentum-lm", []),
        ("lm-local", []),
        ("lm-local-sgd", []),
        ("small-local", []),
    ],
)
def test_which_arms_chose_an_end_of_their_list(source: str, at_an_end: list[str]) -> None:
    rates = pd.Series({run.name: run.config["optimizer"]["lr"] for run in records(source)})
    found = tournament.edges(REFERENCE / f"{source}-tune.json", rates)
    assert sorted(found) == sorted(at_an_end)
    tried = {row["rate"] for row in trials(source)}
    if source in RATES:
        assert tried == {*RATES[source]}


def test_validation_scores_beyond_an_end_are_close() -> None:
    """Of the two arms of CIFAR-10 that chose the smallest rate: the next two are within a point."""
    for arm in ("rank 1", "last 6"):
        first, *others = (100 * score for score in scores("tournament-small")[arm].values())
        assert max(first - other for other in others[:2]) < 0.9


def test_two_arms_of_local_steps_were_tried_further() -> None:
    tried = scores("lm-local")
    assert {arm for arm, found in tried.items() if len(found) > 4} == {"every 2", "diloco 32"}
    rates = {run.name: run.config["optimizer"]["lr"] for run in records("lm-local")}
    assert (rates["every 2"], rates["diloco 32"]) == (0.012, 0.0015)  # of 0.0015 to 0.012


@pytest.mark.slow
def test_arms_at_one_rate_have_that_rate() -> None:
    runs = records("tournament-smoke-shared")
    assert {run.config["optimizer"]["lr"] for run in runs} == {0.4}
    assert {run.seed for run in runs} == {*range(3000, 3008)}


def test_the_grids_at_own_rates_have_what_was_chosen() -> None:
    for source, grid in (("tournament-small", "small-own"), ("small-batch-own", "small-batch-own")):
        cells = get_grid(grid)
        for run in records(source):
            if run.name in cells:
                cell, ours = cells[run.name], run.config
                assert ours["optimizer"]["lr"] == cell.optimizer.lr
                warm = pytest.approx(cell.optimizer.warmup_from)
                assert ours["optimizer"]["warmup_from"] == warm
                assert ours["data"]["validation_size"] == 1000
                assert ours["policy"] == to_dict(cell)["policy"]
    for name in ("small-overlap-own", "small-signals-own"):
        for schedule, cell in get_grid(name).items():
            arm = get_grid("small-own")["rank 4" if schedule == "low" else schedule]
            assert cell.optimizer == arm.optimizer
            assert cell.data == arm.data
            assert cell.levels["low"] == arm.levels["r4"]


def test_batch_sizes_have_their_rates() -> None:
    runs = records("small-batch-own")
    assert {run.seed for run in runs} == {*range(3000, 3008)}
    rates = pd.Series({run.name: run.config["optimizer"]["lr"] for run in runs})
    cells = get_grid("small-batch-own")
    assert rates.to_dict() == {name: cell.optimizer.lr for name, cell in cells.items()}
    assert not tournament.edges(REFERENCE / "small-batch-own-tune.json", rates)


@pytest.mark.parametrize(
    ("source", "n"),
    [
        ("tournament-small", 10),
        ("lm-local", 8),
        ("lm-local-sgd", 8),
        ("small-local", 8),
        ("falling-lm", 10),
        ("falling-lm-cosine", 6),
        ("falling-lm-constant", 6),
        ("falling-wikitext", 8),
    ],
)
def test_every_arm_has_as_many_seeds(source: str, n: int) -> None:
    assert {len(runs) for _, runs in entries(source)[0].groupby("name")} == {n}


def test_choices_of_all_trials_are_counted() -> None:
    """By own code over the files of trials: in all, at an end, near another rate."""
    total = ends = near = several = 0
    for path in REFERENCE.glob("*-tune.json"):
        text = json.loads(path.read_text())
        for arm, words in text["chosen"].items():
            rate = words.split("=")[1]
            mine = [row for row in text["trials"] if row["schedule"] == arm]
            rates = sorted(float(row["values"].split("=")[1]) for row in mine)
            own = next(r["scores"] for r in mine if float(r["values"].split("=")[1]) == float(rate))
            total += 1
            ends += float(rate) in (rates[0], rates[-1])
            several += len(own) > 1
            away = [abs(fmean(r["scores"]) - fmean(own)) for r in mine if r["scores"] is not own]
            near += len(own) > 1 and min(away, default=math.inf) <= stdev(own)
    wanted = {"all": total, "ends": ends, "several_seeds": several, "near": near}
    assert NUMBERS["choices_counted"]() == wanted
    counted = re.findall(r"` (\d+) of", NUMBERS["choices_at_an_end"]())
    assert sum(map(int, counted)) == ends
