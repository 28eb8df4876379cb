"""The numbers in the prose of the findings: detectors, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import pandas as pd
import pytest
from findings import (
    REFERENCE,
    Numbers,
    against,
    between,
    effect,
    ends,
    plain,
    records,
    says,
    signed,
    tournament_of,
)

from analysis.detection import agreement, unforced
from analysis.detection.unforced import RELATIVE, Change
from analysis.paper import figure3
from analysis.tournament import tournament
from analysis.tournament.equal_floats import comparisons
from regimes.replay.detect import bench
from regimes.statistics import t_interval

# -- norm against Hessian --------------------------------------------------------------------

SIGNALS, TOP, FIRST = "detection-signals-smoke", unforced.REFERENCE, unforced.FIRST


def agreed(
    a: str,
    b: str,
    source: str = SIGNALS,
    schedule: str = "signals",
    change: Change = RELATIVE,
) -> Numbers:
    chosen = [run for run in records(source) if run.name == schedule]
    rows = unforced.pairs(unforced.scored(chosen, change))
    return t_interval(rows[(rows["a"] == a) & (rows["b"] == b)]["kappa"].to_list())


def test_the_table_of_detectors() -> None:
    runs = records(SIGNALS)
    tables = unforced.scored(runs)
    rows, others = unforced.over_seeds(unforced.pairs(tables)), unforced.other_runs(tables, TOP)
    table = agreement.as_text(rows, others, unforced.costs(runs), TOP)
    assert between("agreement") == table.markdown() + "\n"
    called = unforced.calls(tables[runs[0].seed])
    assert says(f"Each detector calls the {called['norm'].sum()} of the {len(called)} epochs")
    assert {run.config["optimizer"]["lr"] for run in runs} == {0.025}


def test_what_is_said_of_detectors() -> None:
    runs, whole = records(SIGNALS), Change(absolute=True)
    tables = unforced.scored(runs)
    apart = unforced.other_runs(tables, TOP)["with"]
    far = unforced.other_runs(unforced.scored(runs, whole), TOP)["with"]
    norm = signed(agreed("norm", TOP), 2)
    assert says(f"they agree by {norm}, in different runs by {apart['norm']:+.2f}")
    norm, first = (signed(agreed(a, b, change=whole), 2) for a, b in (("norm", TOP), (TOP, FIRST)))
    assert says(
        f"kappa is {norm}, and {far['norm']:+.2f} in different runs, where the first "
        f"epochs, which read nothing, reach {first}"
    )
    sharp, longer, changes = (
        signed(agreed(TOP, "sharpness", change=change), 2).replace("+", "")
        for change in (RELATIVE, Change(back=3), whole)
    )
    assert says(
        f"{sharp} in the same run, {apart['sharpness']:.2f} in different ones. Over three "
        f"epochs in place of one it is {longer}; by absolute changes {changes}"
    )
    spent, own = unforced.costs(runs), unforced.other_runs(tables, TOP)["itself"]
    assert spent["sharpness"] / spent[TOP] == pytest.approx(1 / 5, abs=0.02)
    calls = [f"{own[name]:.2f}" for name in (TOP, "norm", "norm x rate")]
    assert says(f"agree by {calls[0]}, the norm's by {calls[1]}; times the rate by {calls[2]}")
    called = pd.concat(map(unforced.calls, tables.values()))
    before = called[called.index < 12].sum() / called.sum()
    assert before[TOP] > 0.75
    assert before["norm"] < 0.25
    text_ = "detection-signals-lm"
    pairs_ = [("norm", TOP), (TOP, "sharpness"), (TOP, FIRST)]
    norm, sharp, first = (signed(agreed(a, b, text_), 2) for a, b in pairs_)
    apart = unforced.other_runs(unforced.scored(records(text_)), TOP)["with"]
    assert says(
        f"agrees with it by {norm}, {apart['norm']:+.2f} in different runs, critical "
        f"sharpness by {sharp} and {apart['sharpness']:+.2f}, and best the first units, by "
        f"{first}"
    )
    images = [
        signed(agreed(a, b, source, "low"), 2)
        for source in ("small-signals", "small-signals-own")
        for a, b in (("norm", TOP), (TOP, FIRST))
    ]
    assert says(
        f"agree by {images[0]}, the first epochs and the eigenvalue by {images[1]}; at the "
        f"rate chosen for rank 4 (`small-signals-own`, 0.05, n = 5) by {images[2]} and "
        f"{images[3]}."
    )


def test_detectors_live() -> None:
    each, shown = tournament_of("detection-smoke")
    assert {len(runs) for _, runs in each.groupby("name")} == {8}
    assert each["name"].nunique() == 18
    found = comparisons(each, shown)
    table = tournament.differences_as_text(found, shown)
    assert between("live") == table.markdown() + "\n"
    assert not (found["p_holm"] < 0.05).any()
    norm, top = (signed(ends(against(found, name, "static"))) for name in ("norm", "eigenvalue"))
    assert says(f"for 152 %: {norm} and {top} points against one rank throughout")
    assert says(f"Sharpness has {signed(ends(against(found, 'sharpness', 'static')))}.")
    assert says(f"differ by {plain(effect('detection-smoke', 'rank 4', 'rank 1'))} points here")
    assert says(f"ranks 4 and 2 by {plain(effect('detection-smoke', 'rank 4', 'rank 2'))},")
    rates = tournament.table(each, shown).set_index("arm")["rate"]
    assert rates["rank 1"] == 0.1
    assert tournament.edges(REFERENCE / "detection-smoke-tune.json", rates) == ["Fisher"]


@pytest.mark.slow
def test_what_is_said_of_the_papers_rules() -> None:
    found = bench([run for run in records("small-signals") if run.name == "low"])
    kappas = found.pairs[found.pairs["a"] == "norm-change"].groupby(["b", "granularity"])["kappa"]
    words = []
    for other, granularity in (("fisher-change", "epoch"), ("trace-cusum", "epoch x layer")):
        mean, low, _ = t_interval(kappas.get_group((other, granularity)).to_list())
        words.append(f"{mean:.2f} ± {mean - low:.2f}")
    assert says(
        f"Fisher trace: kappa {words[0]} with the norm. CUSUM on the layer-wise trace: {words[1]}."
    )
    same = kappas.get_group(("eigenvalue-change", "epoch"))
    assert {f"{kappa:.2f}" for kappa in same} == {"0.73"}
    spent = 100 * found.detectors.groupby("detector")["share_of_training"].mean()
    assert says(f"The norm costs {spent['norm-change']:.1f} % of the training time")
    assert says(f"every epoch, costs {spent['eigenvalue-change']:.0f} %.")
    _, kept = figure3.agreement([*records("small-signals-own")], 3, 0.5)
    a, b = "gradient norm", "eigenvalue, running statistics"
    row = kept[(kept["a"] == a) & (kept["b"] == b)].iloc[0]
    words = plain((row["kappa"], row["kappa_low"], row["kappa_high"]), 2)
    assert says(f"13 to 15, or earlier: kappa {words}.")
