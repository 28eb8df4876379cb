"""What was predicted of cifar10-fast (oracles: verdicts by hand over intervals and over runs whose
rows are written here, scipy's intervals, and the heads of the grids' files)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import plain
import pytest
import scipy.stats

from analysis.findings import predictions
from analysis.findings.predictions import PREDICTIONS, Prediction, gather, judge, judge_claims
from analysis.findings.values import Interval
from regimes.base.errors import RecordError
from regimes.records import RecordWriter, load_all

GRIDS = Path(__file__).parents[2] / "analysis" / "grids"
SEEDS = (26000, 26001, 26002)
NOISE = (-0.05, 0.0, 0.05)  # points, by seed: an interval of +- 0.124 around the mean
DECAYS = (15, 25)


def write(root: Path, arm: str, seed: int, end: float, *, epochs: int = 30, **other: Any) -> None:
    """A run of 30 epochs with this accuracy in % in all of them.

    Args:
        epochs: trained; fewer than 30 are an unfinished run.
        other: early, accuracy of epochs 10 to 14; floats of an epoch; norms by epoch; measured, a
            statistic of the model by epoch; overlap, by measured epoch.
    """
    config = {"name": arm, "seed": seed, "epochs": 30, "data": {"name": "folder"}}
    rates = {"lr": 0.4, "decay_epochs": [*DECAYS], "decay_factor": 10.0}
    header = plain.header({**config, "optimizer": rates}, units=30)
    writer = RecordWriter.create(root / arm / f"seed-{seed}", header)
    norms = other.get("norms") or [1.0] * 30
    for epoch in range(epochs):
        early = 10 <= epoch < 15
        metric = other.get("early", end) if early else end
        row = plain.row(epoch, metric=metric / 100, floats=other.get("floats", 10.0))
        row["statistics"] = {"norm:update": [norms[epoch]]}
        if "eigenvalues" in other:
            row["model"] = {"eigenvalue": other["eigenvalues"][epoch]}
        writer.epoch(row, {"compute": 1.0})
    writer.close()


def around(mean: float) -> tuple[float, ...]:
    return tuple(mean + noise for noise in NOISE)


def verdicts(*roots: Path, **others: Any) -> dict[str, dict[str, Any]]:
    rows = judge(gather({root.name: load_all(root) for root in roots}, **others))
    return {row["number"]: row for row in rows.to_dict("records")}


# -- the rule --------------------------------------------------------------------------------


def test_a_rule_over_intervals() -> None:
    within = Prediction("g", "1", "", "", lambda *_: [], (-0.3, 0.3))
    one_sided = Prediction("g", "2", "", "", lambda *_: [], (-0.5, 0.5), allowed=(-0.5, math.inf))
    mean = Prediction("g", "3", "", "", lambda *_: [], (89, 91), of_mean=True)
    alone = Prediction("g", "4", "", "", lambda *_: [], (-math.inf, 1), seeds=1)
    for rule, ends, n, verdict in (
        (within, (-0.2, 0.2), 3, "holds"),
        (within, (-0.3, 0.3), 3, "holds"),
        (within, (-0.4, 0.2), 3, "open"),
        (within, (-0.4, 0.4), 3, "open"),
        (within, (-0.9, -0.31), 3, "refuted"),
        (within, (0.31, 0.9), 3, "refuted"),
        (within, (-0.2, 0.2), 2, "open"),
        (within, (0.31, 0.9), 2, "open"),
        (one_sided, (-0.9, -0.6), 3, "refuted"),
        (one_sided, (-0.4, 0.4), 3, "holds"),
        (one_sided, (0.6, 0.9), 3, "open"),  # its rule does not name this side
        (mean, (88.5, 90.0), 3, "holds"),
        (mean, (87.5, 90.0), 3, "refuted"),
        (mean, (88.0, 91.0), 0, "open"),
        (alone, (0.9, 0.9), 1, "holds"),
        (alone, (1.1, 1.1), 1, "refuted"),
        (alone, (0.9, 1.3), 3, "open"),  # an interval, if there is one
    ):
        low, high = ends if n >= 3 else (math.nan, math.nan)
        found = Interval(sum(ends) / 2, low, high, n=n)
        assert rule.verdict(found)[0] == verdict, (rule.number, ends, n)
    same = Interval(0.25, math.nan, math.nan, n=3)  # all seeds alike
    assert within.verdict(same)[0] == "holds"


def test_every_prediction_of_the_files_is_judged() -> None:
    for file, marks in (
        ("cifar10-fast", ""),
        ("cifar10-fast-batch", "batch "),
        ("cifar10-fast-topk", "TopK "),
    ):
        text = (GRIDS / f"{file}.toml").read_text(encoding="utf-8")
        written = {int(x) for x in re.findall(r"^# +(\d+)\. ", text, re.MULTILINE)}
        every = (re.fullmatch(rf"{marks}(\d+)[a-c]?", each.number) for each in PREDICTIONS)
        assert written == {int(found[1]) for found in every if found}
        assert written
    assert len({each.number for each in PREDICTIONS}) == len(PREDICTIONS) == 30
    assert {each.grid for each in PREDICTIONS} <= {*predictions.GRIDS}


# -- runs by hand ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "cifar10-fast"
    norms = [1.0] * 15 + [1.3, 1.1, 1.0, *[1.0] * 7] + [1.6, 1.5, 1.5, 1.5, 1.5]
    arms: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
        "dense": ((90.0, 90.0, 90.0), {}),
        "rank 4": (around(89.8), {"floats": 100.0, "norms": norms}),
        "rank 1": ((84.8, 84.7, 84.9), {"early": 80.0}),
        "accordion": ((89.0, 89.6, 89.1), {"floats": 50.0}),
        "accordion 10": (around(89.9), {"floats": 79.0}),
        "critical 8": ((88.95, 89.05, 89.0), {}),
        "last 8": (around(88.0), {}),
        "high in critical 8": ((89.9, 89.9), {}),
    }
    for arm, (ends, other) in arms.items():
        for seed, end in zip(SEEDS, ends, strict=False):
            write(root, arm, seed, end, **other)
    write(root, "high in critical 8", SEEDS[2], 89.9, epochs=20)
    write(root, "rank 1 longer", 7, 89.0)  # a seed that no other arm has
    return root


def test_verdicts_are_those_by_hand(fast: Path) -> None:
    found = verdicts(fast)
    holds = ("1a", "2", "4a", "5a", "6a", "12a")  # 90; 0.2; 9.8; 50 %; 0.1; 1.3 and 1.6
    # 5; 79 %; -0.8; 1.0 above; 1.5 / 1.5: it stays in the second epoch
    refuted = ("3a", "6b", "8a", "8b", "8c", "12b")
    unresolved = ("4b", "5b", "7", "9")  # -0.2 to 0.8, an interval that holds 1; 0.2 to 0.8
    by_hand = dict.fromkeys(holds, "holds") | dict.fromkeys(refuted, "refuted")
    by_hand |= dict.fromkeys(unresolved, "open")
    assert {number: found[number]["verdict"] for number in by_hand} | by_hand == by_hand
    for number, why in {
        "5b": predictions.BOTH,
        "7": "no finished run of rank 2",
        "9": "n = 2 of 3",  # the third seed is not finished
        "11": "rank 1 longer and accordion have no seed in common",
        "1b": "no finished run at full width",
        "3b": "trials of rank 4 are missing",
        "14": "no finished run of rank 4",
    }.items():
        assert found[number]["why"] == why, number
    means = {
        "1a": 90.0,
        "3a": 5.0,
        "4a": 9.8,
        "4b": 89.8 - 267.7 / 3,
        "5a": 50.0,
        "8c": 1.0,
        "12a": 1.3,
        "12b": 1.0,
    }
    for number, mean in means.items():
        assert found[number]["mean"] == pytest.approx(mean), number
    gaps = [89.75 - 89.0, 89.8 - 89.6, 89.85 - 89.1]
    interval = scipy.stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
    row = found["5b"]
    expected = (3, interval.low, interval.high)
    assert (row["n"], row["ci_low"], row["ci_high"]) == pytest.approx(expected)


def test_full_width_and_own_rates_are_of_one_seed(fast: Path, tmp_path: Path) -> None:
    wide = tmp_path / "cifar10-fast-wide"
    write(wide, "dense", 26100, 91.0)

    def trials(rank_1: float) -> list[dict[str, Any]]:
        scores = {"rank 4": (0.80, 0.88, 0.90, 0.87), "rank 1": (0.80, rank_1, 0.85, 0.84)}
        return [
            {"schedule": arm, "values": f"optimizer.lr={rate}", "scores": [score]}
            for arm, of_arm in scores.items()
            for rate, score in zip((0.1, 0.2, 0.4, 0.8), of_arm, strict=True)
        ]

    for rank_1, verdict in ((0.855, "holds"), (0.87, "refuted")):  # 0.5 or 2 points made up for
        found = verdicts(fast, wide, trials=trials(rank_1))
        assert found["3b"]["verdict"] == verdict
        assert found["3b"]["mean"] == pytest.approx(100 * (rank_1 - 0.85))
        assert (found["1b"]["verdict"], found["1b"]["n"]) == ("holds", 1)  # 1 point
    ends = [x for x in trials(0.87) if x["values"] != "optimizer.lr=0.1"]
    assert (
        verdicts(fast, trials=ends)["3b"]["why"] == "rank 1 chose 0.2, an end of its list of rates"
    )


def test_signals_are_of_the_one_run(tmp_path: Path) -> None:
    root = tmp_path / "cifar10-fast-signals"
    falling = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 2.0, *[2.0] * 8, 2.4, *[2.4] * 9, *[1.7] * 5]
    write(root, "rank 4", SEEDS[0], 88.0, eigenvalues=falling)
    found = verdicts(root)
    assert (found["13a"]["verdict"], found["13a"]["mean"]) == ("holds", pytest.approx(2 / 9))
    # 2.0 to 2.4 is 20 %, 2.4 to 1.7 is 29 %
    assert (found["13b"]["verdict"], found["13b"]["mean"]) == (
        "refuted",
        pytest.approx(100 * 0.7 / 2.4),
    )
    assert found["14"]["why"] == "no support overlap in cifar10-fast-signals"


def test_one_epoch_with_half_of_the_coordinates_refutes(tmp_path: Path) -> None:
    write(tmp_path, "rank 4", 1, 88.0)
    (run,) = load_all(tmp_path)
    for shares, verdict in (([0.2, 0.49], "holds"), ([0.2, 0.5, 0.3], "refuted")):
        lines = [
            {"instrument": "overlap", "epoch": 3 * i, "sizes": {"128": {"mean": share}}}
            for i, share in enumerate(shares)
        ]
        rows = judge(gather({"cifar10-fast-signals": [run._changed(details=lines)]}))
        (row,) = rows[rows["number"] == "14"].to_dict("records")
        assert (row["verdict"], row["mean"]) == (verdict, pytest.approx(100 * max(shares)))


def test_the_papers_claims_stand_beside_the_predictions(fast: Path) -> None:
    evidence = gather({"cifar10-fast": load_all(fast)})
    rows = judge_claims(evidence, judge(evidence)).set_index("claim")
    loses = rows.loc["high compression loses accuracy"]
    assert (loses["outcome"], loses["n"], loses["predictions"]) == ("supported", 3, "3a refuted")
    assert loses["mean"] == pytest.approx(5.0)
    assert rows.loc["... all of it", "outcome"] == "contradicted"  # dense ends at 90 %
    budget = rows.loc["ACCORDION beats high compression that is trained to low's budget"]
    assert (budget["outcome"], budget["predictions"]) == ("open", "11 open")
    assert "no seed in common" in budget["why"]
    made_up = rows.loc["high compression in the critical windows is not made up for"]
    assert (made_up["outcome"], made_up["why"]) == ("open", "n = 2")


def test_without_records_everything_is_open() -> None:
    rows = judge(gather({}))
    assert {*rows["verdict"]} == {"open"}
    assert rows["why"].str.len().min() > 0
    paper = judge_claims(gather({}), rows)
    assert {*paper["outcome"]} == {"open"}
    assert [*paper["n"]] == [0] * len(paper)


# -- the command and the page ----------------------------------------------------------------


def test_the_command_writes_both_tables(fast: Path, tmp_path: Path) -> None:
    trials = tmp_path / "tune.json"
    trials.write_text(json.dumps({"trials": []}))
    predictions.main((fast,), tmp_path, trials)
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table["number"].to_list() == [each.number for each in PREDICTIONS]
    assert len(pd.read_csv(tmp_path / "claims.csv")) == 14
    first, *_ = (tmp_path / "predictions.md").read_text().splitlines()
    counts = table["verdict"].value_counts()
    assert first == f"{counts['holds']} holds; {counts['refuted']} refuted; {counts['open']} open."
    with pytest.raises(RecordError, match="expected a name of cifar10-fast, cifar10-fast-wide"):
        predictions.main((fast.parent,), tmp_path)
