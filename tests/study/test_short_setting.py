"""The numbers of the paper's network in few epochs (oracles: the records' own rows; the levels that
ACCORDION sent; the lines that the machines printed)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from analysis.findings.numbers import detection, differences
from analysis.findings.sources import records
from regimes.plotting.groups import compressed_layers
from regimes.records import Record

SHORT = "paper-cifar10-short"
MACHINES = Path(__file__).parents[2] / "benchmarks" / "gpu"


def runs_of(arm: str) -> dict[int, Record]:
    return {run.seed: run for run in records(SHORT) if run.name == arm}


def last(run: Record) -> float:
    return float(np.mean([row["metric"] for row in run.rows if row["metric"] is not None][-3:]))


def test_every_run_that_a_machine_has_ended_is_in_the_archive_once() -> None:
    ended = {
        row["name"]: (row["metric"], row["floats"], row["epochs"])
        for file in sorted(MACHINES.glob("*.jsonl"))
        for row in map(json.loads, file.read_text().splitlines())
        if row["part"] == "setting" and row["ok"]
    }
    kept = {
        f"{run.name}/seed-{run.seed}": (
            last(run),
            sum(r["floats"] for r in run.rows),
            len(run.rows),
        )
        for run in records(SHORT)
    }
    assert kept.keys() == ended.keys()
    for name, (metric, floats, epochs) in ended.items():
        assert kept[name] == (pytest.approx(metric, rel=1e-12), floats, epochs), name


def test_a_difference_in_an_epoch_is_that_of_the_rows() -> None:
    ours, theirs = runs_of("accordion 4-1"), runs_of("rank 4")
    by_seed = [100 * (ours[s].rows[9]["metric"] - theirs[s].rows[9]["metric"]) for s in (1, 2, 3)]
    found = differences.effect_in_epoch(SHORT, "accordion 4-1", "rank 4", 9)
    assert found.n == 3
    assert found.mean == pytest.approx(np.mean(by_seed), rel=1e-9)


def test_seeds_that_only_one_arm_has_are_left_out() -> None:
    ours, theirs = runs_of("rank 2 short at 0.4"), runs_of("rank 1 short at 0.4")
    assert (sorted(ours), sorted(theirs)) == ([1, 2, 3], [1, 2])
    expected = [100 * (last(ours[seed]) - last(theirs[seed])) for seed in (1, 2)]
    arms = "rank 2 short at 0.4", "rank 1 short at 0.4"
    assert differences.effect_by_seed(SHORT, *arms) == pytest.approx(expected, rel=1e-9)
    sent = [sum(row["floats"] for row in runs[1].rows) for runs in (ours, theirs)]
    assert differences.floats_of(SHORT, *arms) == pytest.approx(sent[0] / sent[1], rel=1e-9)


def test_a_replay_departs_where_accordion_did() -> None:
    """Each of these runs replays, on its own norms, the levels that it sent."""
    sent = []
    for run in runs_of("accordion 4-1").values():
        names = [layer["name"] for layer in compressed_layers(run)]
        rows = run.layers[run.layers["layer"].isin(names)]
        low = (rows["level"] == "r4").groupby(rows["epoch"]).all()
        sent.append(int(low.cumprod().sum()))
    assert detection.low_from_start(SHORT, "accordion 4-1", 1) == min(sent)
    assert detection.low_from_start(SHORT, "accordion 4-1", 20) == 20  # never asked: low throughout


def test_the_runs_of_a_code_are_counted() -> None:
    before = {run.seed for run in records(SHORT) if run.header["code"]["commit"].endswith("+")}
    assert before == {1}
    assert differences.runs_of_code(SHORT, "c4d21fc3fc7a") == 10
    assert differences.runs_of_code(SHORT, "") == len(records(SHORT))
