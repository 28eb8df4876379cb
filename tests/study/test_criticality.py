"""Harm, intervals and scores of pulses (oracles: own code over the files of synthetic records,
closed forms; a tree that is trained)."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pulses
import pytest
import synthetic
from scipy import stats
from sklearn.metrics import roc_auc_score

from analysis.criticality import criticality, harm, measured, scores
from regimes.base.errors import RecordError
from regimes.records import load_all
from regimes.records.branches import trunk_table

SEEDS, ONSETS = (3, 4, 5), (0, 1, 2, 3, 4)


def cut(folder: Path, trunk: Path, at: int, length: int = 1) -> None:
    """A synthetic run as a branch."""
    header = json.loads((folder / "run.json").read_text())
    header["config"]["branch"] = {
        "of": f"../../{trunk.parent.name}/{trunk.name}",
        "at": at,
        "length": length,
    }
    header["trunk"] = trunk_table(trunk, at, header["config"], None)
    (folder / "run.json").write_text(json.dumps(header))
    for path in folder.glob("*.jsonl"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[at:]))
    (folder / "chain.jsonl").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pulses of three seeds, and a null pulse; every metric is a draw."""
    root = tmp_path_factory.mktemp("synthetic")
    for seed in SEEDS:
        trunk = synthetic.make(root, "trunk", seed)
        for onset in ONSETS:
            cut(synthetic.make(root, f"pulse from {onset}", seed), trunk, onset)
    return root


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]


def by_hand(root: Path) -> dict[int, dict[int, float]]:
    """Points of accuracy that the trunk's last epoch has more, by onset and seed."""
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for onset, seed in itertools.product(ONSETS, SEEDS):
        ends = [
            rows(root / name / f"seed-{seed}")[-1]["metric"]
            for name in ("trunk", f"pulse from {onset}")
        ]
        found[onset][seed] = 100 * (ends[0] - ends[1])
    return found


def computed(root: Path) -> pd.DataFrame:
    return measured.by_run(measured.by_unit(measured.pair_branches(load_all(root))))


def test_pulses_of_two_trunks_have_harm_but_no_common_signals(tree: Path, tmp_path: Path) -> None:
    """Without its trunk a branch is one sentence, as are runs without branches."""
    two = [tmp_path / name / "seed-3" for name in ("dense trunk", "dense from 2")]
    for name in ("trunk", "pulse from 2"):
        shutil.copytree(tree / name / "seed-3", tmp_path / name / "seed-3")
    synthetic.make(tmp_path, "dense trunk", 3)
    cut(synthetic.make(tmp_path, "dense from 2", 3), two[0], 2)
    ends = [rows(folder)[-1]["metric"] for folder in two]
    harms = computed(tmp_path).set_index("arm")["harm"]
    assert harms["dense"] == pytest.approx(100 * (ends[0] - ends[1]))
    assert harms["pulse"] == pytest.approx(by_hand(tree)[2][3])
    runs = load_all(tmp_path)
    with pytest.raises(RecordError, match=r"branches of .*trunk, .*trunk: choose one with --where"):
        measured.list_trunks(measured.pair_branches(runs))
    with pytest.raises(RecordError, match="not among the runs"):
        measured.pair_branches([run for run in runs if "trunk" not in run.name])
    with pytest.raises(RecordError, match="the runs have no branch"):
        measured.pair_branches([run for run in runs if "trunk" in run.name])


def test_harm_by_onset_with_intervals_and_holm(tree: Path) -> None:
    wanted, table = by_hand(tree), harm.curve(computed(tree))
    assert [*table["onset"]] == [*ONSETS]
    p = []
    for row, onset in zip(table.to_dict("records"), ONSETS, strict=True):
        values = [wanted[onset][seed] for seed in SEEDS]
        half = 4.302652729911275 * np.std(values, ddof=1) / math.sqrt(3)  # t of two degrees
        mean = sum(values) / 3
        assert (row["harm"], row["ci_low"], row["ci_high"]) == pytest.approx(
            (mean, mean - half, mean + half)
        )
        assert row["n"] == 3
        assert row["left"] == 6 - onset - 1
        p.append(stats.ttest_1samp(values, 0).pvalue)
    steps = sorted(p)
    holm = [max(min(1, (5 - j) * steps[j]) for j in range(steps.index(one) + 1)) for one in p]
    assert [*table["p_holm"]] == pytest.approx(holm)


def test_more_harm_is_worse_whatever_the_metric(tree: Path, tmp_path: Path) -> None:
    """A branch whose metric is not finite has no harm: not that of its last finite unit."""
    shutil.copytree(tree, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("run.json"):
        header = json.loads(path.read_text())
        path.write_text(json.dumps(header | {"metric": "bits per byte"}))
    bits, points = computed(tmp_path), computed(tree)
    assert bits["harm"].to_numpy() == pytest.approx(-points["harm"].to_numpy() / 100)
    file = tmp_path / f"pulse from {ONSETS[0]}" / "seed-3" / "epochs.jsonl"
    *before, last = map(json.loads, file.read_text().splitlines())
    file.write_text("".join(json.dumps(x) + "\n" for x in (*before, last | {"metric": None})))
    with pytest.raises(RecordError, match=r"seed-3: the .* not finite in unit 5"):
        computed(tmp_path)


def test_recovery_is_the_difference_in_each_unit(tree: Path) -> None:
    table = harm.recovery(measured.by_unit(measured.pair_branches(load_all(tree)))).set_index(
        ["onset", "unit"]
    )
    for onset in ONSETS:
        assert [*table.loc[onset].index] == [*range(onset, 6)]
        for unit in range(onset, 6):
            each = []
            for seed in SEEDS:
                trunk = rows(tree / "trunk" / f"seed-{seed}")[unit]["metric"]
                own = rows(tree / f"pulse from {onset}" / f"seed-{seed}")[unit - onset]["metric"]
                each.append(100 * (trunk - own))
            assert table.loc[(onset, unit), "harm"] == pytest.approx(np.mean(each))
    after = computed(tree).set_index(["onset", "seed"])["after"]
    assert after[2].mean() == pytest.approx(table.loc[(2, 2), "harm"])


def test_onsets_that_tie_for_the_worst_third_share_its_places() -> None:
    """Oracle: the mean of scikit-learn's area over all choices of the tied ones."""
    rng = np.random.default_rng(5)
    for harms, count in (([1, 1, 1, 1, 0, 0], 2), ([3, 1, 2, 2, 2, 0, 0], 2), ([0, 1, 2], 1)):
        order = stats.rankdata(harms)
        signal = rng.integers(0, 4, len(harms)).astype(float)
        edge = sorted(harms, reverse=True)[count - 1]
        sure = [i for i, one in enumerate(harms) if one > edge]
        tied = [i for i, one in enumerate(harms) if one == edge]
        choices = itertools.combinations(tied, count - len(sure))
        areas = [
            roc_auc_score([i in (*sure, *some) for i in range(len(harms))], signal)
            for some in choices
        ]
        found = scores.auc(signal, scores.share_among_worst(order, count))
        assert found == pytest.approx(np.mean(areas))


def test_scores_by_own_code(tree: Path) -> None:
    """The norm of a pulse's unit, its change, time and rate against the harm of each seed."""
    runs = load_all(tree)
    found = measured.pair_branches(runs)
    signals = scores.by_seed(measured.list_trunks(found), runs)
    each = scores.scores(computed(tree), signals).set_index(["seed", "signal"])
    wanted = by_hand(tree)
    for seed in SEEDS:
        trunk = rows(tree / "trunk" / f"seed-{seed}")
        norms = [math.hypot(*(r["statistics"]["norm:update"][i] for i in (0, 2))) for r in trunk]
        change = [abs(norms[i] - norms[i - 1]) / norms[i - 1] for i in range(1, 5)]
        harms = [wanted[onset][seed] for onset in ONSETS][1:]  # unit 0 has no change
        worst = [sum(h > one for h in harms) < 1 for one in harms]  # round(4 / 3)
        for name, values in (
            ("norm", norms[1:5]),
            ("change of norm", change),
            (scores.TIME, [-1, -2, -3, -4]),
        ):
            row = each.loc[(seed, name)]
            assert row["rank"] == pytest.approx(stats.spearmanr(values, harms).statistic)
            assert row["auc"] == pytest.approx(roc_auc_score(worst, values))
        assert math.isnan(each.loc[(seed, scores.RATE), "rank"])  # constant
        assert each.loc[(seed, scores.RATE), "auc"] == 0.5
    over = scores.over_seeds(each.reset_index()).set_index("signal").loc["norm"]
    values = each.xs("norm", level="signal")["rank"].to_numpy()
    ends = np.clip(stats.t.interval(0.95, 2, values.mean(), stats.sem(values)), -1, 1)
    assert (over["rank"], over["rank_ci_low"], over["rank_ci_high"]) == pytest.approx(
        (values.mean(), *ends)
    )
    with pytest.raises(RecordError, match="no arm has 4 onsets"):
        scores.scores(computed(tree).query("onset < 3"), signals)
    dull = scores.against_dull(each.reset_index())
    assert set(dull["of"]) == set(each["arm"])
    dull = dull.set_index(["arm", "control"])
    time = each.xs(scores.TIME, level="signal")["rank"].to_numpy()
    assert dull.loc[("norm", scores.TIME), "difference"] == pytest.approx((values - time).mean())
    assert dull.loc[("norm", scores.RATE), "n"] == 0


def test_a_pulse_of_several_units_has_their_mean_or_what_was_known_before() -> None:
    table = pd.DataFrame({"a": [9.0, 1, 2, 6, 5], **{dull: range(5) for dull in scores.DULL}})
    places = pd.DataFrame({"onset": [0, 2], "length": [2, 2]})
    assert [*scores.of_pulses(table, places)["a"]] == [5, 4]
    known = scores.of_pulses(table, places, known=True)
    assert math.isnan(known["a"][0])
    assert known["a"][1] == 1
    assert [*known[scores.RATE]] == [0.5, 2.5]


def test_reliability_is_that_of_a_two_way_layout() -> None:
    """Against the variance that is put in, and its two ends."""
    draws = np.random.default_rng(2)
    curve, noise = np.linspace(0, 1, 200), 0.4
    seeds = curve + draws.normal(0, noise, (3, 200)) + np.array([[5.0], [0.0], [-5.0]])
    size, spread = harm.reliability(pd.DataFrame(seeds))
    assert spread == pytest.approx(noise, rel=0.1)
    var = np.var(curve, ddof=1)
    assert size == pytest.approx(var / (var + noise**2 / 3), abs=0.06)
    assert harm.reliability(pd.DataFrame([curve, curve + 1]))[0] == pytest.approx(1)
    assert math.isnan(harm.reliability(pd.DataFrame([curve]))[0])


@pytest.mark.slow
def test_a_trained_tree(tmp_path: Path) -> None:
    """A null pulse has harm 0; instruments of another run than the trunk are its signals."""
    trained = pulses.tree(tmp_path / "tree")
    paths = criticality.main(trained, out=tmp_path)
    table = pd.read_csv(tmp_path / "criticality-onsets.csv")
    assert (table.loc[table["arm"] == "same", "harm"] == 0).all()
    ends = [
        [rows(trained / name / f"seed-{seed}")[-1]["metric"] for seed in (0, 1, 2)]
        for name in ("trunk", "pulse from 1")
    ]
    wanted = 100 * (np.array(ends[0]) - np.array(ends[1]))
    first = table[(table["arm"] == "pulse") & (table["onset"] == 1)].iloc[0]
    assert first["harm"] == pytest.approx(np.mean(wanted))
    signals = {*pd.read_csv(tmp_path / "criticality-scores.csv")["signal"]}
    assert {"norm", "eigenvalue", "change of eigenvalue", *scores.DULL} <= signals
    assert len(paths) == len({*paths})
