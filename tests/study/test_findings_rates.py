"""The numbers in the prose of the findings: usable rates, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import functools
import math

import numpy as np
import pandas as pd
import pytest
from findings import between, records, says

from analysis.detection import deep_linear
from analysis.grids.names import LATE
from analysis.rates import edge, narrowing, usable
from regimes.plotting.metrics import named
from regimes.statistics import holm, p_value, t_interval

# -- usable rates ----------------------------------------------------------------------------


@functools.cache
def usable_ranges() -> pd.DataFrame:
    accuracy = named("accuracy")
    return usable.table(usable.entries(records("rates"), accuracy), accuracy)


def of_dense(arm: str, rule: int = 0) -> str:
    rows = usable_ranges()
    rows = rows[rows["rule"] == rows["rule"].unique()[rule]].set_index("arm")
    mean, low, high = (f"{rows.loc[arm, f'of_dense{end}']:.2g}" for end in ("", "_low", "_high"))
    return f"{mean} [{low}, {high}]"


def test_the_usable_rates() -> None:
    first = next(iter(usable.as_text(usable_ranges()).values()))
    assert between("rates") == first.markdown() + "\n"
    assert says(f"Rank 1's range ends at {of_dense('rank 1')} of dense's")
    rows = usable_ranges()
    rows = rows[rows["rule"] == rows["rule"].iloc[0]].set_index("arm")
    assert rows.loc[["rank 4", "rank 2", "TopK 1 %"], "of_dense"].min() > 0.9
    inside, outside = (f"{rows.loc[arm, 'largest']:.2f}" for arm in ("dense", "rank 1"))
    assert says(f"which ends at {inside}, and outside rank 1's, which ends at {outside}")
    assert says(f"ends where dense's does: {of_dense('rank 1, momentum 0')}")
    bare = [of_dense(f"rank 1, no feedback{m}") for m in ("", ", momentum 0.5", ", momentum 0")]
    assert says(f"at every momentum: {bare[0]}, {bare[1]} and {bare[2]} of dense's")
    assert says(f"rank 1's range ends at {of_dense('rank 1', rule=1)} of dense's, which is open")
    each = usable.entries(records("rates"), named("accuracy"))
    losses = each.groupby(["arm", "rate"])["train_loss"].mean()
    best = [f"{losses[arm].min():.2g}" for arm in ("rank 1", "dense")]
    assert says(f"rank 1 has a training loss of {best[0]}, dense of {best[1]}")


def test_the_usable_rates_of_adamw() -> None:
    bits = named("bits per byte")
    each = usable.entries(records("rates-lm"), bits)
    found = usable.table(each, bits)
    assert between("rates-lm") == next(iter(usable.as_text(found).values())).markdown() + "\n"
    rule = found["rule"].unique()
    own, loss = (found[found["rule"] == name].set_index("arm") for name in rule[:2])

    def share(rows: pd.DataFrame, arm: str) -> str:
        columns = ("of_dense", "of_dense_low", "of_dense_high")
        mean, low, high = (f"{rows.loc[arm, column]:.2g}" for column in columns)
        return f"{mean} [{low}, {high}]"

    assert says(
        f"rank 4's ends at {share(own, 'rank 4')} of dense's, rank 1's at "
        f"{share(own, 'rank 1')}, which"
    )
    assert says(f"rank 4's ends at {share(loss, 'rank 4')} of dense's, because")
    assert loss.loc["rank 1", "n"] == 0
    means = each.groupby(["arm", "rate"])[[bits.name, "train_loss"]].mean()
    best = means.groupby("arm").min()
    behind = best.loc["rank 4", "train_loss"] - best.loc["dense", "train_loss"]
    assert says(f"because it is behind by {behind:.2f} nats at its best")
    assert own["best"][["rank 1", "dense"]].to_list() == [0.0015, 0.006]
    at = means[bits.name]
    one, dense, bare = (at[arm] for arm in ("rank 1", "dense", "rank 1, no feedback"))
    assert says(
        f"rank 1 is {one[0.006] - dense[0.006]:.2f} bits behind dense, each at its best "
        f"{one.min() - dense.min():.2f}. Its best, {one.min():.2f}, is at the smallest"
    )
    assert says(
        f"three seeds of four, it has {one[0.003]:.2f}. Without feedback it has {bare.min():.2f}."
    )
    seeds = each[each["arm"] == "rank 1"].pivot(index="seed", columns="rate", values=bits.name)
    assert (seeds[0.003] < seeds[0.0015]).sum() == 3
    ranges = usable.ends(each, bits)
    never = ranges[(ranges["arm"] == "rank 1, no feedback") & (ranges["rule"] == rule[0])]
    assert np.isinf(never["largest"]).sum() == 1


def test_the_usable_rates_early_and_late() -> None:
    each = narrowing.losses(records("rates-when"))
    rows = narrowing.table(each)
    assert between("when") == narrowing.as_text(rows).markdown() + "\n"
    cells = [[row.strip() for row in line.split("|")] for line in between("when").splitlines()[2:]]
    ratios = {(cell[1], cell[2]): cell[6] for cell in cells}
    assert says(
        f"ends at {ratios['0.3', '2-7']} of dense's there, and at {ratios['0.3', '14-19']} "
        f"late; with a whole nat at {ratios['1', '2-7']} and {ratios['1', '14-19']}"
    )
    slow = each[each["rate"] <= 0.1]
    logs = np.log(slow["loss"] / slow["dense"]).groupby([slow["window"], slow["seed"]]).mean()
    early, late = (logs[f"epochs {name}"] for name in ("2-7", "14-19"))
    words = [
        [f"{math.exp(x):.{digits}f}" for x in t_interval(each_log.to_list())]
        for each_log, digits in ((early, 1), (late, 1), (early - late, 2))
    ]
    ours, theirs, ratio = (f"{mean} [{low}, {high}]" for mean, low, high in words)
    assert says(f"rank 1 has {ours} times dense's early and {theirs} times late, {ratio} of that")
    at = each[each["window"] == "epochs 2-7"]
    gaps = (at["loss"] - at["dense"]).groupby([at["rate"], at["seed"]]).mean().unstack()
    means = gaps.mean(axis=1)
    assert (means[means.index <= 0.2] > 0.1).all()
    rises = p_value((gaps.loc[0.2] - gaps.loc[0.00625]).to_list())
    assert says(
        f"by {means[0.00625]:.2f} nats at the smallest and {means[0.2]:.2f} at 0.2 (p {rises:.3f})"
    )


@functools.cache
def with_low_passes() -> pd.DataFrame:
    return usable.entries([*records("rates"), *records("rates-low-pass")], named("accuracy"))


def test_the_table_of_low_passes() -> None:
    rows = usable.table(with_low_passes(), named("accuracy"))
    arms = [f"{arm}{m}" for m in ("", ", momentum 0") for arm in ("dense", "rank 1", *LATE)]
    kept = rows[rows["arm"].isin(arms)].set_index("arm").loc[arms].reset_index()
    first = next(iter(usable.as_text(kept).values()))
    assert between("low-pass") == first.markdown() + "\n"


def ends_of(rank: int, rule: int = 0) -> tuple[str, float]:
    """The end of a rank's range, over its low-pass's, and p."""
    found = usable.ends(with_low_passes(), named("accuracy"))
    wide = found[found["rule"] == found["rule"].unique()[rule]].pivot(
        index="seed", columns="arm", values="largest"
    )
    logs = np.log(wide[f"rank {rank}"] / wide[f"low-pass as rank {rank}"]).to_list()
    mean, low, high = (f"{math.exp(x):{'.2g' if rule else '.2f'}}" for x in t_interval(logs))
    return f"{mean} [{low}, {high}]", p_value(logs)


def test_where_the_ranges_of_ranks_and_low_passes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    words, p = ends_of(1)
    assert says(f"at {words} of it, within 5 points (p {p:.3f}")
    assert says(f"not below theirs: {ends_of(4)[0]} and {ends_of(2)[0]}.")
    assert says(f"told apart: {ends_of(1, 1)[0]} and, with a whole nat, {ends_of(1, 2)[0]}")
    monkeypatch.setitem(usable.TOLERANCE, "accuracy", 10.0)
    assert says(f"within 10 points it is {ends_of(1)[0]}")


def test_the_losses_of_ranks_and_low_passes() -> None:
    each = with_low_passes()
    means = each.groupby(["arm", "rate"])["train_loss"].mean()
    best = {str(arm): f"{means[arm].min():.2g}" for arm in means.index.unique("arm")}
    late, ranks = (
        [best[f"{prefix}rank {rank}"] for rank in (4, 2, 1)] for prefix in ("low-pass as ", "")
    )
    assert says(
        f"have {late[0]}, {late[1]} and {late[2]} nats, the ranks {ranks[0]}, {ranks[1]} "
        f"and {ranks[2]}, dense {best['dense']}."
    )
    at = each.set_index(["arm", "rate", "seed"])["train_loss"]
    lost = []
    for rank in (4, 2, 1):
        ours, theirs = (
            at[arm][means[arm].idxmin()] for arm in (f"low-pass as rank {rank}", f"rank {rank}")
        )
        lost.append(t_interval((ours - theirs).to_list()))
    words = ["{:.2g} [{:.2g}, {:.2g}]".format(*x) for x in lost[:2]]
    assert says(
        f"differences are {words[0]}, {words[1]} and, open, "
        + "{:.3f} [{:.3f}, {:.3f}]".format(*lost[2])
    )
    three = [best[f"{arm}, momentum 0"] for arm in ("rank 1", "low-pass as rank 1", "dense")]
    assert says(f"{three[0]} of rank 1 against {three[1]} of its low-pass and {three[2]} of dense")
    firsts = [means[f"{arm}, momentum 0"].idxmin() for arm in ("rank 1", "dense")]
    assert firsts == [means["dense, momentum 0"].index.min()] * 2


def test_the_edge_of_stability() -> None:
    runs = records("rates-edge")
    warm = runs[0].config["optimizer"]["warmup_epochs"]
    rows = edge.table(edge.products(runs), warm)
    assert between("edge") == edge.as_text(rows).markdown() + "\n"
    cells = {
        (row["rate"], row["arm"]): f"{row['product']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        for row in rows.to_dict("records")
    }
    assert says(f"is below {edge.edge(0.9):.2f}, the *edge*")
    bare, late = "rank 1, no feedback", "low-pass as rank 1"
    assert says(f"{cells[0.1, bare]} at a rate of 0.1, where dense has {cells[0.1, 'dense']}")
    assert says(
        f"At its best rate, 0.025, it has {cells[0.025, bare]} and dense {cells[0.025, 'dense']}"
    )
    assert says(
        f"range, {cells[0.4, 'rank 1']} and {cells[0.4, late]} against dense's "
        f"{cells[0.4, 'dense']}"
    )
    at = rows.set_index(["rate", "arm"])
    for rate in (0.2, 0.4):
        assert at.loc[(0.1, bare), "low"] < at.loc[(rate, bare), "product"]
        assert at.loc[(rate, bare), "low"] < at.loc[(0.1, bare), "high"]


# -- ground truth ----------------------------------------------------------------------------


def test_deficits_of_a_deep_linear_network() -> None:
    harm = deep_linear.harms(records("deep-linear"))
    first, _ = deep_linear.as_text(harm, pd.DataFrame(columns=["detector"]))
    assert between("deep-linear") == first.markdown() + "\n"
    assert set(harm["n"]) == {4}
    rows = harm.set_index(["first", "stop"])
    worst = rows.loc[(0, 20_000)]
    assert says(f"leave {worst['harm']:,.0f} [{worst['ci_low']:,.0f}, {worst['ci_high']:,.0f}]")
    long, short = deep_linear.by_length(harm).values()
    assert (len(long), len(short)) == (5, 5)
    assert (long["ci_low"] > 1).all()
    assert not (rows.loc[[(0, 1_000), (0, 5_000), (0, 10_000)], "ci_low"] > 1).any()
    assert long["harm"].is_monotonic_increasing
    assert short["harm"].is_monotonic_increasing
    late = [rows.loc[window] for window in ((10_000, 30_000), (20_000, 40_000))]
    cells = [row[4] for row in first.rows if row[1] in ("30,000", "40,000")]
    assert says(
        f"on leave {cells[0]} and {cells[1]} times what they leave at the start (p "
        f"{late[0]['p_holm']:.3f} and {late[1]['p_holm']:.3f} after correction over eight)"
    )
    assert (harm["p_holm"] < 0.05).sum() == 2
    assert harm["p_holm"].notna().sum() == 8


def test_late_deficits_against_the_steps_that_follow_them() -> None:
    runs = records("deep-linear")
    plain = {
        run.seed: run.epochs["metric"].head(60).tail(3).mean() for run in runs if run.name == "none"
    }
    logs: dict[tuple[int, int], dict[int, float]] = {}
    for run in runs:
        if run.name != "none":
            ((first, stop),) = run.config["deficit"]["windows"]
            error = run.epochs["metric"].tail(3).mean() / plain[run.seed]
            logs.setdefault((stop - first, first), {})[run.seed] = math.log(error)
    later = {
        (length, first): [each[seed] - logs[length, 0][seed] for seed in each]
        for (length, first), each in logs.items()
        if first
    }
    cells = [
        "{:.2g} [{:.2g}, {:.2g}]".format(*map(math.exp, t_interval(later[20_000, at])))
        for at in (10_000, 20_000)
    ]
    assert says(f"the factors are {cells[0]} and {cells[1]}, not shown after correction")
    assert min(holm([p_value(each) for each in later.values()])) >= 0.05
    assert not any(t_interval(each)[2] < 0 for each in later.values())  # logarithms
