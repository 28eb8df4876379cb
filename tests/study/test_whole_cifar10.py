"""ACCORDION on all of CIFAR-10 (oracle: the archive's lines, read without Regimes, and scipy)."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import scipy.stats
from archives import REFERENCE, Rows, rows_of

from analysis.findings.numbers import differences
from analysis.paper import figure3

WHOLE = "cifar10-resnet20"
ARMS = ("accordion", "rank 1")
AT_ITS_RATE = "rank 1 at 0.4"  # rank 4's; one seed


def end(rows: Rows) -> float:
    """Mean of the tests after the last three epochs, in %."""
    return 100 * fmean([row["metric"] for row in rows[-3:] if row["metric"] is not None])


def by_seed(arm: str) -> dict[int, Rows]:
    return {seed: rows for (name, seed), rows in sorted(rows_of(WHOLE).items()) if name == arm}


def test_every_run_is_whole_and_all_arms_have_the_same_seeds() -> None:
    assert {len(rows) for rows in rows_of(WHOLE).values()} == {30}
    assert [*by_seed(AT_ITS_RATE)] == [*by_seed("rank 4")][:1]
    assert all([*by_seed(arm)] == [*by_seed("rank 4")] for arm in ARMS)


@pytest.mark.parametrize("arm", ARMS)
def test_a_difference_is_that_of_the_rows(arm: str) -> None:
    ours, theirs = by_seed(arm), by_seed("rank 4")
    gaps = [end(ours[seed]) - end(theirs[seed]) for seed in theirs]
    interval = scipy.stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
    found = differences.effect(WHOLE, arm, "rank 4")
    assert found.n == len(gaps) == 3
    expected = (fmean(gaps), interval.low, interval.high)
    assert (found.mean, found.low, found.high) == pytest.approx(expected, rel=1e-9)


def test_the_difference_of_one_seed_has_no_interval() -> None:
    ((seed, rows),) = by_seed(AT_ITS_RATE).items()
    (found,) = differences.effect_by_seed(WHOLE, AT_ITS_RATE, "rank 4")
    assert found == pytest.approx(end(rows) - end(by_seed("rank 4")[seed]), rel=1e-9)
    assert differences.last_value(WHOLE, AT_ITS_RATE).n == 1


@pytest.mark.parametrize("arm", [*ARMS, AT_ITS_RATE])
def test_floats_are_a_share_by_seed(arm: str) -> None:
    sent = {
        name: {seed: sum(row["floats"] for row in rows) for seed, rows in by_seed(name).items()}
        for name in (arm, "rank 4")
    }
    shares = [sent[arm][seed] / sent["rank 4"][seed] for seed in sent[arm]]
    assert differences.floats_of(WHOLE, arm, "rank 4") == pytest.approx(fmean(shares), rel=1e-9)


def test_figure_3_finds_low_compression_under_its_name_in_a_tournament(tmp_path: Path) -> None:
    drawn = figure3.main(REFERENCE / f"{WHOLE}.tar.xz", tmp_path / "low")
    own = figure3.main(REFERENCE / f"{WHOLE}.tar.xz", tmp_path / "own", "rank 4")
    tables = [[path.read_text() for path in made if path.suffix == ".csv"] for made in (drawn, own)]
    assert len(tables[0]) == 3
    assert tables[0] == tables[1]
