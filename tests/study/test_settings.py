"""Tables over trees of pulses (oracle: own code over the files of the
committed archives, with scipy and scikit-learn)."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from archives import REFERENCE, Rows, rows_of
from scipy import stats
from sklearn.metrics import roc_auc_score

from analysis.criticality import law, lost_time, settings
from analysis.criticality.onset import titles, tree
from analysis.findings.numbers import NUMBERS
from regimes.base.errors import RecordError
from regimes.records import Record, load, load_all, unpack_records
from regimes.search.harms import rates

COSINE = REFERENCE / "harm-lm-cosine.tar.xz"


def harms(rows: dict[tuple[str, int], Rows], arm: str) -> dict[int, dict[int, float]]:
    """Bits per byte more in the end than without the pulse, by onset and seed."""
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for (schedule, seed), own in rows.items():
        if schedule.startswith(f"{arm} from "):
            onset = int(schedule.removeprefix(f"{arm} from "))
            found[onset][seed] = own[-1]["metric"] - rows["trunk", seed][-1]["metric"]
    return found


def t_interval(values: list[float]) -> tuple[float, float, float]:
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return float(np.mean(values)), float(low), float(high)


def spearman(one: list[float], other: list[float]) -> float:
    """Of values rounded so that a mean of equal numbers is a tie."""
    return float(stats.spearmanr([round(x, 12) for x in one], other).statistic)


PEAKS = {"harm-lm": 0.0015, "harm-lm-cosine": 0.003, "harm-lm-wsd": 0.003}


def rate_of_step(tree: str, step: int) -> float:
    """The share of the peak at a step of 600, from the text of the grids: 60 steps of warm-up, then
    steps at 360 and 480, a cosine, or a linear fall over the last 240."""
    if step < 60:
        return step / 60
    if tree == "harm-lm-cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - 60) / 540))
    if tree == "harm-lm-wsd":
        return min(1.0, (600 - step) / 240)
    return 10 ** (-0.5 * ((step >= 360) + (step >= 480)))


def by_step(tree: str) -> list[float]:
    """The mean rate of each of the 24 units of 25 steps."""
    steps = [PEAKS[tree] * rate_of_step(tree, step) for step in range(600)]
    return [sum(steps[25 * unit : 25 * unit + 25]) / 25 for unit in range(24)]


def trunk_of(name: str) -> Record:
    with unpack_records(REFERENCE / f"{name}.tar.xz") as root:
        return load(min((root / "trunk").iterdir()))


@pytest.mark.parametrize("name", PEAKS)
def test_the_rate_of_a_unit_is_the_mean_over_its_steps(name: str) -> None:
    """Also of a unit inside which the rate falls, and of the first, whose first step has none."""
    trunk = trunk_of(name)
    means = rates.mean_rates(trunk).to_list()
    assert means == pytest.approx(by_step(name), rel=1e-9)
    assert trunk.epochs["lr"][0] == 0 < means[0]
    assert means[14] < trunk.epochs["lr"][14]  # from step 350 to 374


def test_a_rate_per_epoch_and_one_without_a_schedule_are_those_of_the_rows(tmp_path: Path) -> None:
    """Also where the rows have the factor of a larger batch. Phases are those of the rate."""

    def with_rates(name: str, *wanted: float, **more: Any) -> Record:
        by_row = {"change": lambda row: {"lr": wanted[row["epoch"]]}}
        return load(synthetic.make(tmp_path, name, 3, **by_row, **more))

    wanted = (0.4, 0.8, 0.8, 0.4, 0.04, 0.08)
    without = with_rates("b", *wanted, optimizer={"lr": None, "schedule": None})
    for run in (with_rates("a", *wanted), without):
        assert rates.mean_rates(run).to_list() == pytest.approx(wanted)
    trunk = with_rates("trunk", 0.1, 0.4, 0.4, 0.2, 0.21, 0.05)
    assert settings.phases(trunk) == {settings.HIGH: [1, 2, 3, 4], settings.FALLEN: [5]}


def test_harm_by_phase_and_scores_of_a_committed_tree() -> None:
    wanted = harms(rows_of("harm-lm"), "rank 1")
    runs = load_all(REFERENCE / "harm-lm.tar.xz")
    with pytest.raises(RecordError, match="harm-lm has no pulses 'rank 9'"):
        settings.of_tree("harm-lm", runs, "rank 9")
    found, scored = settings.of_tree("harm-lm", runs, "rank 1")
    by_phase = found.set_index("phase")
    # decays at steps 360 and 480 of 600: units 1 to 14 have more than half of the peak, middle 7.5.
    # The middle of a pulse from 6 is 7, of one from 9 10; of units 15 to 23 it is 19, as from 18
    for phase, onset in ((settings.START, 0), (settings.HIGH, 6), (settings.FALLEN, 18)):
        row = by_phase.loc[phase]
        assert (row["onset"], row["n"]) == (onset, 3)
        ends = (row["harm"], row["harm_ci_low"], row["harm_ci_high"])
        assert ends == pytest.approx(t_interval([*wanted[onset].values()]))
    scores = scored.set_index(["seed", "signal"])
    for seed in (11000, 11001, 11002):
        harm = [wanted[onset][seed] for onset in sorted(wanted)]
        worst = [sum(h > one for h in harm) < 3 for one in harm]  # round(8 / 3)
        pulses = [float(np.mean(by_step("harm-lm")[onset : onset + 3])) for onset in sorted(wanted)]
        row = scores.loc[(seed, "learning rate")]
        assert row["rank"] == pytest.approx(spearman(pulses, harm))
        assert row["auc"] == pytest.approx(roc_auc_score(worst, [round(x, 12) for x in pulses]))
    over = settings.over_trees(scored, pooled=True).set_index(["setting", "signal"])
    each = scores.xs("norm", level="signal")["rank"].to_list()
    row = over.loc[("harm-lm", "norm")]
    assert (row["rank"], row["rank_ci_low"], row["rank_ci_high"]) == pytest.approx(t_interval(each))
    assert over.loc[(settings.ALL, "norm"), "rank"] == pytest.approx(np.mean(each))
    mean, low, high = t_interval(each)
    table = NUMBERS["signals_table"]("harm-lm", "harm-lm", "rank 1")
    (line,) = (line for line in table.splitlines() if line.startswith("| norm |"))
    counts = [cell.strip() for cell in line.split("|")[2:5]]
    assert counts == [str(int(x)) for x in (low > 0, low <= 0 <= high, high < 0)]
    assert f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" in line


def test_the_pulse_in_the_middle_starts_after_unit_0_and_leaves_units() -> None:
    pulses = pd.DataFrame({"onset": [0, 3, 6, 9], "length": 3, "left": [9, 6, 3, 0]})
    assert settings.onset_of([0, 1, 2], pulses) == 3
    assert settings.onset_of([4, 5, 6, 7], pulses) == 6  # 4 and 7 are as far from 5.5: the later
    assert settings.onset_of([9, 10, 11], pulses) == 6
    assert settings.onset_of([], pulses) is None


FALLING = ("harm-lm", "harm-lm-sgd")  # of the five trees, for the time that archives take


def test_harm_over_trunks_and_over_trees_by_own_code() -> None:
    """With 3 seeds in each tree: t intervals of 6 differences, and of the trees' means."""
    each: list[list[float]] = []
    for name in (*FALLING, "harm-lm-wsd"):
        found = harms(rows_of(name), "rank 1")
        each.append([found[18][seed] - found[9][seed] for seed in sorted(found[18])])
    names = "; ".join((*FALLING, "harm-lm-wsd"))
    for number, values in (
        ("harm_pooled", [x for three in each for x in three]),
        ("harm_over_trees", [sum(three) / 3 for three in each]),
    ):
        got = NUMBERS[number](names, "rank 1", 18, 9)
        assert got.n == len(values)
        assert (got.mean, got.low, got.high) == pytest.approx(t_interval(values))
        assert got.p == pytest.approx(float(stats.ttest_1samp(values, 0).pvalue))
    table = NUMBERS["pooled_table"](names, "rank 1", "18 - 9; 15 - 9")
    low, high = (f"{x:+.3f}" for x in t_interval([sum(t) / 3 for t in each])[1:])
    assert f"[{low}, {high}]" in table
    assert "n = 9" in table


def test_what_harm_is_of_and_its_p_among_all_pulses() -> None:
    rows = rows_of("harm-lm")
    ends = [rows["trunk", seed][-1]["metric"] for seed in (11000, 11001, 11002)]
    got = NUMBERS["trunk_ends"]("harm-lm")
    assert (got.mean, got.low, got.high) == pytest.approx(t_interval(ends))
    curve = tree(load_all(REFERENCE / "harm-lm.tar.xz"))[1]
    assert [*curve["without"]] == pytest.approx([sum(ends) / 3] * len(curve))
    arms = ("rank 1", "rank 1, no feedback")
    p = {
        (arm, onset): float(stats.ttest_1samp([*by_seed.values()], 0).pvalue)
        for arm in arms
        for onset, by_seed in harms(rows, arm).items()
    }
    order = sorted(p.values())
    family = len(order)  # pulses that change nothing have no p
    corrected = {
        pulse: max(min(1, (family - i) * x) for i, x in enumerate(order) if x <= own)
        for pulse, own in p.items()
    }
    found = NUMBERS["harm_among_all"]("harm-lm", "rank 1", 9)
    assert found.p_holm == pytest.approx(corrected["rank 1", 9])
    table = NUMBERS["onsets_table"]("; ".join(("harm-lm", f"harm-lm: {arms[1]}")), "0, 9, 18")
    head, _, *lines = ([c.strip() for c in x.split("|")[1:-1]] for x in table.splitlines())
    marks = set()
    for arm, line in zip(arms, lines, strict=True):
        for onset in (0, 9, 18):
            mean, low, high = t_interval([*harms(rows, arm)[onset].values()])
            stars = (low > 0 or high < 0) + (corrected[arm, onset] < 0.05)
            assert line[head.index(str(onset))] == f"{mean:+.3f}" + "*" * stars
            marks.add(stars)
    assert marks == {0, 1, 2}


def test_a_tree_or_a_pulse_counts_once(tmp_path: Path) -> None:
    """Seeds that were read twice would be twice as many."""
    settings.main((COSINE,), tmp_path / "once")
    settings.main((COSINE,), tmp_path / "twice", arm=("rank 1", "rank 1"))
    for name in ("settings-scores.csv", "settings-harm.csv", "settings.md"):
        once, twice = ((tmp_path / x / name).read_text() for x in ("once", "twice"))
        assert once == twice
    law.main((COSINE,), tmp_path / "law", arm=("rank 1", "rank 1"))
    pulses = pd.read_csv(tmp_path / "law" / "law-pulses.csv")
    assert not pulses.duplicated(["onset", "seed"]).any()
    (tmp_path / "other").mkdir()
    other = shutil.copy(REFERENCE / "harm-lm-wsd.tar.xz", tmp_path / "other" / COSINE.name)
    for command in (settings.main, law.main, lost_time.main):
        with pytest.raises(RecordError, match="another of the records is called harm-lm-cosine"):
            command((COSINE, Path(other)), tmp_path / "o")


def test_trees_without_scores_still_have_their_harm(tmp_path: Path) -> None:
    """Pulses of two onsets are not scored."""
    paths = settings.main((REFERENCE / "harm-smoke.tar.xz",), tmp_path, arm=("same",))
    harms = pd.read_csv(tmp_path / "settings-harm.csv")
    assert harms["harm"].notna().any()
    assert len(pd.read_csv(tmp_path / "settings-scores.csv")) == 0
    assert tmp_path / "settings.md" in paths


def test_panels_say_what_each_learning_rate_does() -> None:
    names = ("harm-lm-sgd", "harm-lm-cosine", "harm-lm-wsd", "harm-lm-constant")
    trunks = [trunk_of(name) for name in names]
    falls = ["rate falls in steps", "rate falls along a cosine", "rate falls at the end"]
    assert titles(trunks) == [
        f"SGD: {falls[0]}",
        f"AdamW: {falls[1]}",
        f"AdamW: {falls[2]}",
        "AdamW: rate stays constant",
    ]
    assert titles(trunks[2:]) == [
        "the learning rate falls",
        "the learning rate stays constant",
    ]
