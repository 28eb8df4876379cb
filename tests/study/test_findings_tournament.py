"""The numbers in the prose of the findings: tournaments and events, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import functools
import json
from statistics import fmean

import pandas as pd
import pytest
from findings import (
    REFERENCE,
    against,
    between,
    effect,
    ends,
    plain,
    records,
    says,
    signed,
    tournament_of,
    turned,
)

from analysis.grids.names import PAPER
from analysis.tournament import events, tournament
from analysis.tournament.equal_floats import comparisons, moments
from regimes.config import to_dict
from regimes.presets import get_grid
from regimes.statistics import t_interval

# -- the tournament --------------------------------------------------------------------------


def test_the_tournament_of_digits() -> None:
    """In one test, because reading its 368 runs takes longest."""
    the_table_of_the_tournament()
    ranks_and_accordions_signal()
    no_policy_beats_floats_spent_without_looking()
    when_rank_4_is_taken_matters_little()


def the_table_of_the_tournament() -> None:
    each, shown = tournament_of("tournament-smoke")
    rows = tournament.table(each, shown)
    assert between("tournament") == tournament.arms_as_text(rows, shown).markdown() + "\n"
    spent = rows.set_index("arm")[[*tournament.NETWORKS]]
    assert (spent.idxmin() == "dense").to_list() == [True, False, True]
    assert spent[tournament.NETWORKS[1]]["rank 1"] / spent[tournament.NETWORKS[1]][
        "dense"
    ] == pytest.approx(2 / 3, abs=0.03)
    beyond = rows.set_index("arm")["bytes_of_dense"] - rows.set_index("arm")["floats_of_dense"]
    senders = {"l-greco", "l-greco accordion", "error-ladder", "gravac"}
    assert {*beyond[beyond > 0.01].index} == senders
    share = 100 * beyond[[*senders]]
    assert {f"{x:.0f}" for x in share} == {"17"}
    assert says("GraVAC do: 17 % of dense's bytes")
    rank_1 = each[each["name"] == "rank 1"].set_index("seed")["accuracy"]
    assert (each[each["name"] == "adaqs"].set_index("seed")["accuracy"] == rank_1).all()


def ranks_and_accordions_signal() -> None:
    for text_, a, b in [
        ("loses {} points against dense", "dense", "rank 1"),
        ("and {} against rank 4", "rank 4", "rank 1"),
    ]:
        assert says(text_.format(plain(effect("tournament-smoke", a, b))))
    lost = plain(effect("tournament-smoke", "dense", "rank 1"))
    assert says(f"rank 1 loses {lost} points in place of 1.5", "how-to/start.md")
    mean, low, high = effect("tournament-smoke", "accordion", "forced")
    spent = tournament.table(*tournament_of("tournament-smoke")).set_index("arm")["floats"]
    more = 100 * (spent["accordion"] / spent["forced"] - 1)
    assert says(
        f"Its signal adds {mean:.1f} [{low:.1f}, {high:+.1f}] to its forced parts, for "
        f"{more:.0f} % more floats"
    )


def no_policy_beats_floats_spent_without_looking() -> None:
    found = comparisons(*tournament_of("tournament-smoke"))
    known = found[found["n"] > 0]
    assert says(f"over all {len(known)} comparisons")
    first = known[known["control"] == "first"]
    assert len(first) == 8
    assert not (first["p_holm"] < 0.05).any()
    assert says(f"difference is {signed(ends(against(found, 'accordion', 'first')))}")
    (worse,) = (row for _, row in known.iterrows() if row["p_holm"] < 0.05)
    assert (worse["arm"], worse["control"]) == ("l-greco accordion", "coin")
    assert says(f"by {plain(turned(ends(worse)))} points against the coin (p {worse['p_holm']:.3f}")


def when_rank_4_is_taken_matters_little() -> None:
    found = moments(*tournament_of("tournament-smoke"))
    lost = [against(found, f"last {n}", "first") for n in (6, 12)]
    words = [plain(turned(ends(row))) for row in lost]
    assert says(f"loses {' and '.join(words)} against as much in the first")
    assert says(f"(p {' and '.join(f'{r.p:.2f}' for r in lost)}; 0.4 after correction")
    assert {round(row["p_holm"], 1) for row in lost} == {0.4}
    assert says(f"for {len(found)} comparisons")
    drawn = against(found, "coin 12", "last")
    assert says(f"by {plain(ends(drawn))}, also after it (p {drawn['p_holm']:.3f})")
    (left,) = (row for _, row in found.iterrows() if row["p_holm"] < 0.05)
    assert left.equals(drawn)


def test_the_tournament_at_one_rate_for_all() -> None:
    runs = records("tournament-smoke-shared")
    assert {run.config["optimizer"]["lr"] for run in runs} == {0.4}
    assert {run.seed for run in runs} == {*range(3000, 3008)}
    rows = between("shared").splitlines()[2:]
    assert len(rows) == 8
    for row in rows:
        pair, shared, own = (cell.strip() for cell in row.strip("|").split("|"))
        a, b = pair.split(" - ")
        assert shared == signed(effect("tournament-smoke-shared", a, b))
        assert own == signed(effect("tournament-smoke", a, b))


def test_within_a_wide_range_of_rates_all_arms_are_alike_on_validation_data() -> None:
    path = REFERENCE / "tournament-smoke-tune.json"
    scores: dict[float, list[float]] = {}
    for trial in json.loads(path.read_text())["trials"]:
        rate = float(trial["values"].split("=")[1])
        scores.setdefault(rate, []).append(100 * fmean(trial["scores"]))
    assert len(scores) == 9
    trials = json.loads(path.read_text())["trials"]
    at = {t["schedule"]: t["scores"] for t in trials if t["values"] == "optimizer.lr=0.4"}
    one, four = (f"{100 * fmean(at[name]):.1f}" for name in ("rank 1", "rank 4"))
    assert says(f"rank 1 has {one} % of the validation images and rank 4 {four} %")
    assert {len(found) for found in scores.values()} == {23}
    flat = [x for rate, found in scores.items() if rate <= 0.1 for x in found]
    assert says(f"{min(flat):.1f} to {max(flat):.1f} % at rates from {min(scores)} to 0.1")


# -- the tournament of images ----------------------------------------------------------------

SMALL = "tournament-small"


def test_the_tournament_of_images() -> None:
    each, shown = tournament_of(SMALL)
    assert {len(runs) for _, runs in each.groupby("name")} == {10}
    rows = tournament.table(each, shown)
    assert between(SMALL) == tournament.arms_as_text(rows, shown).markdown() + "\n"
    at = rows.set_index("arm")
    beyond = 100 * (at["bytes_of_dense"] - at["floats_of_dense"])
    assert {f"{beyond[arm]:.0f}" for arm in ("l-greco", "gravac")} == {"13"}
    assert says("L-GreCo and GraVAC send 13 % of dense's bytes besides")
    lines = []
    for a, b in ((a, b) for a in PAPER for b in PAPER):
        if (PAPER[a], PAPER[b]) in SHARED:
            one = signed(effect("small", PAPER[a], PAPER[b]))
            lines.append(f"| {a} - {b} | {one} | {signed(effect(SMALL, a, b))} |")
    assert between("small-shared").splitlines()[2:] == lines
    assert len(lines) == len(SHARED)


SHARED = {
    ("low", "high"),
    ("low-in-critical", "high"),
    ("dense", "high-in-critical"),
    ("dense", "low"),
    ("accordion", "low"),
    ("accordion", "high"),
}


def test_what_is_said_of_the_tournament_of_images() -> None:
    to_rank_4, to_dense = (plain(effect(SMALL, arm, "rank 1")) for arm in ("rank 4", "dense"))
    shared = plain(effect("small", "low", "high"))
    assert says(
        f"loses {to_rank_4} points to rank 4 and {to_dense} to dense, where the shared "
        f"rate says {shared}"
    )
    longer = [plain(effect(SMALL, arm, "rank 1 longer")) for arm in ("rank 4", "rank 1")]
    found = comparisons(*tournament_of(SMALL))
    row = against(found, "rank 1 longer", "static")
    tested = int((found["n"] > 0).sum())
    assert says(
        f"ends {longer[0]} below it (p {row['p']:.2g}; {row['p_holm']:.2g} after "
        f"correction over all {tested} comparisons) and {longer[1]} below itself"
    )
    assert says(f"ACCORDION has {plain(ends(against(found, 'accordion', 'static')))} against one")
    assert says(
        f"its training loss falls from {final_loss('rank 1')} to {final_loss('rank 1 longer')}"
    )
    assert found["p_holm"].min() > 0.05
    assert says(f"epochs have {plain(effect(SMALL, 'first 6', 'last 6'))} points more than the la")
    assert says(f"there are {plain(effect(SMALL, 'first 6', 'critical 8'))} fewer")
    pairs = [(a, b) for a in PAPER for b in PAPER if (PAPER[a], PAPER[b]) in SHARED]
    assert says(f"none above {max(effect(SMALL, *pair)[2] for pair in pairs):.1f} points agrees")


def final_loss(arm: str) -> str:
    runs = [run for run in records(SMALL) if run.name == arm]
    return f"{fmean(run.epochs['train_loss'].tail(3).mean() for run in runs):.2g}".ljust(4, "0")


def test_the_rates_of_the_tournament_of_images() -> None:
    path = REFERENCE / f"{SMALL}-tune.json"
    rates = tournament.table(*tournament_of(SMALL)).set_index("arm")["rate"]
    assert tournament.edges(path, rates) == ["rank 1", "last 6"]
    trials = json.loads(path.read_text(encoding="utf-8"))["trials"]
    for arm in ("rank 1", "last 6"):
        first, *others = (100 * fmean(t["scores"]) for t in trials if t["schedule"] == arm)
        assert max(first - other for other in others[:2]) < 0.9


BATCHES = (
    ("small-batch", "large-batch"),
    ("small-in-critical", "large-batch"),
    ("small-in-critical", "small-batch"),
    ("small-batch", "large-in-critical"),
    ("accordion-batch", "small-batch"),
    ("accordion-batch", "smith"),
)


def test_batch_sizes_at_one_rate_and_at_own_rates() -> None:
    lines = [
        f"| {a} - {b} | {signed(effect('small-batch', a, b))} "
        f"| {signed(effect('small-batch-own', a, b))} |"
        for a, b in BATCHES
    ]
    assert between("batch-shared").splitlines()[2:] == lines
    runs = records("small-batch-own")
    assert {run.seed for run in runs} == {*range(3000, 3008)}
    rates = pd.Series({run.name: run.config["optimizer"]["lr"] for run in runs})
    grid = get_grid("small-batch-own")
    assert rates.to_dict() == {name: cell.optimizer.lr for name, cell in grid.items()}
    assert not tournament.edges(REFERENCE / "small-batch-own-tune.json", rates)
    above = [effect("small-batch-own", name, "small-batch")[0] for name in rates.index]
    least, *_, most = sorted(above)[1:]
    assert says(f"of all arms with large ones are, by {least:.1f} to {most:.1f}")
    trials = json.loads((REFERENCE / "small-batch-own-tune.json").read_text("utf-8"))["trials"]
    scores = {
        trial["schedule"]: trial["scores"]
        for trial in trials
        if trial["values"] == f"optimizer.lr={rates[trial['schedule']]}"
    }
    pairs = zip(scores["small-batch"], scores["large-batch"], strict=True)
    reverse = plain(t_interval([100 * (small - large) for small, large in pairs]))
    assert says(f"say the reverse, +{reverse}")


def test_the_grids_at_own_rates_have_what_was_chosen() -> None:
    for source, grid in ((SMALL, "small-own"), ("small-batch-own", "small-batch-own")):
        cells = get_grid(grid)
        for run in records(source):
            if run.name in cells:
                assert run.config["optimizer"]["lr"] == cells[run.name].optimizer.lr
                assert run.config["optimizer"]["warmup_from"] == pytest.approx(
                    cells[run.name].optimizer.warmup_from
                )
                assert run.config["data"]["validation_size"] == 1000
                assert run.config["policy"] == to_dict(cells[run.name])["policy"]
    for name in ("small-overlap-own", "small-signals-own"):
        for schedule, cell in get_grid(name).items():
            arm = get_grid("small-own")["rank 4" if schedule == "low" else schedule]
            assert cell.optimizer == arm.optimizer
            assert cell.data == arm.data
            assert cell.levels["low"] == arm.levels["r4"]


# -- something happens in the middle ---------------------------------------------------------

SETTINGS = ("shift-smoke", "restarts-smoke", "ramp-smoke", "pruned-smoke")


@functools.cache
def held(source: str) -> pd.DataFrame:
    return comparisons(*tournament_of(source))


def lost(found: pd.DataFrame, arm: str, control: str) -> str:
    mean, low, high = ends(against(found, arm, control))
    return plain((-mean, -high, -low))


def test_the_events() -> None:
    """In one test, because reading its 700 runs takes longest."""
    the_table_of_events()
    what_is_said_of_who_knows_the_event()
    what_is_said_of_accordion_at_events()
    the_rates_of_events()


def the_table_of_events() -> None:
    found = {name: events.differences(list(records(name))) for name in SETTINGS}
    assert (
        between("events") == events.as_text(found, tournament_of(SETTINGS[0])[1]).markdown() + "\n"
    )
    for name in SETTINGS:
        assert {len(runs) for _, runs in tournament_of(name)[0].groupby("name")} == {8}
        fifty = pytest.approx(50, abs=2)
        assert held(name)["p"].notna().sum() == (21 if name == "pruned-smoke" else fifty)
        assert ((held(name)["ci_high"] - held(name)["ci_low"]) / 2).max() < 1.3


def what_is_said_of_who_knows_the_event() -> None:
    late = signed(effect("shift-smoke", "event 12", "first 12")).replace("+", "")
    row = against(held("shift-smoke"), "event 12", "first")
    p = f"(p {row['p']:.4f}; {row['p_holm']:.2f} after correction)"
    assert says(f"first 12 epochs loses {late} points to as much from the event on {p}")
    every = pd.concat([held(name).assign(setting=name) for name in SETTINGS])
    for control, count in (("static", 11), ("coin", 9)):
        known = every["arm"].str.startswith("event ") & (every["control"] == control)
        rows = [row for _, row in every[known].iterrows()]
        assert len(rows) == count
        assert max(row["ci_low"] for row in rows) <= 0
        assert max(row["ci_high"] for row in rows) < 1.2
        assert control == "coin" or sum(row["ci_high"] < 0 for row in rows) == 2
    above = held("ramp-smoke").query("control == 'event' and ci_low > 0")
    assert len(above) == 3
    ranks = [plain(effect(name, "rank 4", "rank 1")) for name in SETTINGS]
    assert says(f"differ by {ranks[1]} points ({ranks[0]} in the shift, {ranks[2]} in the ramp, ")
    least = held("pruned-smoke")["p_holm"].min()
    assert says(
        f"ranks 4 and 1 differ by {ranks[3]} points, and no policy, nor an arm that knows "
        f"the event, differs from a control (p at least {least:.2f} after"
    )
    same = plain(ends(against(held("shift-smoke"), "event 12", "static")))
    assert says(f"and one rank throughout is not shown to lose ({same}); nor with")
    dense = [run.epochs["metric"] for run in records("pruned-smoke") if run.name == "dense"]
    at = [f"{100 * sum(run[epoch] for run in dense) / len(dense):.1f} %" for epoch in (11, 12, 16)]
    assert says(f"dense falls from {at[0][:-2]} to {at[1]} in epoch 12 and has {at[2]} four later")


def what_is_said_of_accordion_at_events() -> None:
    every = pd.concat([held(name) for name in SETTINGS])
    assert not (
        (every["control"] == "static") & (every["difference"] > 0) & (every["p_holm"] < 0.05)
    ).any()
    rows = every[(every["control"] == "event") & every["arm"].isin(["accordion 1", "accordion 3"])]
    low, high = (f"{x:+.1f}" for x in (rows["difference"].min(), rows["difference"].max()))
    assert says(f"ACCORDION has between {low} and {high} points over")
    (only,) = (row for _, row in rows.iterrows() if row["p_holm"] < 0.05)
    assert says(f"of these the {signed(ends(only))} in the shift, with an interval of 3")
    assert only["arm"] == "accordion 3"
    more = plain(effect("shift-smoke", "accordion 3", "forced 3"))
    assert says(f"it has {more} more there than its forced parts (p 0.02, before correction)")
    tables = {name: tournament.table(*tournament_of(name)).set_index("arm") for name in SETTINGS}
    spent = {name: rows["floats"] for name, rows in tables.items()}
    assert says(
        f"for {spent['shift-smoke']['accordion 3'] / spent['shift-smoke']['forced 3']:.1f} "
        "times their floats"
    )
    ramp = held("ramp-smoke")
    assert says(f'beats "first" by {plain(ends(against(ramp, "accordion 1", "first")))}')
    assert says(f"has {signed(ends(against(ramp, 'accordion 1', 'static')))} against one rank")
    share = spent["ramp-smoke"]["forced 1"] / spent["ramp-smoke"]["accordion 1"]
    both = signed(effect("ramp-smoke", "accordion 1", "forced 1"))
    assert says(f"with {share:.2f} of its floats, differ from it by {both}")
    arms = tables["ramp-smoke"]
    fast, slow = arms[arms["rate"] >= 0.1], arms[arms["rate"].between(0.0125, 0.05)]
    assert (len(fast), len(slow)) == (11, 12)
    assert {*fast["rate"]} == {0.1, 0.2}
    assert {"rank 1", "first 6", "first 12", "event 6", "event 12"} < {*fast.index}
    means = [f"{rows['accuracy'].mean():.1f} %" for rows in (fast, slow)]
    assert says(f"reach {means[0]} on the mean, the twelve with 0.0125 to 0.05 {means[1]}")


def the_rates_of_events() -> None:
    far = {}
    for name in SETTINGS:
        rates = tournament.table(*tournament_of(name)).set_index("arm")["rate"]
        far[name] = tournament.edges(REFERENCE / f"{name}-tune.json", rates)
        trials = json.loads((REFERENCE / f"{name}-tune.json").read_text())["trials"]
        assert len({trial["values"] for trial in trials}) == 8
    assert far == {
        "shift-smoke": ["random 6"],
        "restarts-smoke": [],
        "ramp-smoke": ["forced 3"],
        "pruned-smoke": [],
    }
