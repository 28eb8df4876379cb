"""The numbers in the prose of the findings: the paper's claims, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import fmean, stdev

import pytest
from findings import (
    REFERENCE,
    between,
    effect,
    floats,
    page_of,
    plain,
    records,
    says,
    signed,
    text,
    turned,
)

from analysis.claims import claims
from analysis.common import compare
from analysis.common.verdicts import verdict
from analysis.rates import collapse
from regimes.statistics import t_interval


def test_the_numbers_in_short_are_those_of_the_sections() -> None:
    """Each interval of the summary is in the page once more, maybe with its signs."""
    whole = page_of("findings.md")
    short = between("short")
    rest = whole.replace(short, "").replace("+", "")
    found = re.findall(r"-?[\d.]+ \[[^]]+, [^]]+\](?!\()", short.replace("+", ""))
    assert len(found) >= 9
    for numbers in found:
        assert numbers in " ".join(rest.split()), numbers


def test_figure_2_in_one_table() -> None:
    rows, _ = compare.table(records("small"))
    for row in rows.to_dict("records"):
        numbers = f"{row['accuracy']:.1f} ± {row['sd']:.1f} | {row['of_low']:.2f}"
        assert says(f"| `{row['schedule']}` | {numbers} |")


def test_the_same_runs_made_again() -> None:
    rows = between("again").splitlines()[2:]
    assert len(rows) == 6
    moved = []
    for row in rows:
        pair, before, again = (cell.strip() for cell in row.strip("|").split("|"))
        a, b = pair.split(" - ")
        old, new = (effect(source, a, b) for source in ("small-before", "small"))
        assert (before, again) == (signed(old), signed(new))
        assert old[1] <= new[0] <= old[2]
    ends = {
        source: {
            (run.name, run.seed): 100 * run.epochs["metric"].tail(3).mean()
            for run in records(source)
        }
        for source in ("small-before", "small")
    }
    old, new = ends.values()
    assert sum(old[key] == new[key] for key in old) == 1
    for name in {name for name, _ in old}:
        each = [new[key] - old[key] for key in old if key[0] == name]
        moved.append((abs(fmean(each)), name, t_interval(each)))
    largest = max(moved)
    assert says(f"by more than {largest[0]:.1f} points ({largest[1]}, {plain(largest[2])})")
    lost = [effect(source, "low", "high") for source in ends]
    assert lost[1][0] / lost[0][0] == pytest.approx(2 / 3, abs=0.05)


# -- where, or only how many -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "setting"),
    [
        ("smoke-controls", "digits, 24 epochs | 8"),
        ("smoke-long-controls", "digits, 48 epochs | 8"),
        ("small-controls", "CIFAR-10, 24 epochs | 5"),
    ],
)
def test_the_controls(source: str, setting: str) -> None:
    orders = ("first", "last", "random", "layers")
    cells = [signed(effect(source, "accordion", f"yoked {order}")) for order in orders]
    assert says(f"| {setting} | {floats(source, 'accordion')} | {' | '.join(cells)} |")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "source"),
    [
        ("digits, 24 epochs | `smoke-rules` | 8", "smoke-rules"),
        ("| `smoke-controls` | 8", "smoke-controls"),
        ("| both | 16", "smoke-rules + smoke-controls"),
        ("digits, 48 epochs | `smoke-long` | 8", "smoke-long"),
        ("| `smoke-long-controls` | 8", "smoke-long-controls"),
        ("| both | 16", "smoke-long + smoke-long-controls"),
        (
            "CIFAR-10, 24 epochs | `small-budget` and `small-controls` | 10",
            "small-budget + small-controls",
        ),
    ],
)
def test_the_blocks_of_seeds(row: str, source: str) -> None:
    found = effect(source, "accordion", "low")
    assert says(f"{row} | {signed(found)} | {verdict(*found[1:], 1.0)} |")


# -- ACCORDION's own parts -------------------------------------------------------------------

RULES, LONG = "smoke-rules", "smoke-long"
SENTENCES: dict[str, Callable[[], str]] = {
    "no decay rule": lambda: (
        f"({signed(effect(RULES, 'no decay rule', 'accordion'), 2)} in 24 "
        f"epochs, {signed(effect(LONG, 'no decay rule', 'accordion'), 2)} in 48) with less: "
        f"{floats(RULES, 'no decay rule')} and {floats(LONG, 'no decay rule')} of low's floats in "
        f"place of {floats(RULES, 'accordion')} and {floats(LONG, 'accordion')}"
    ),
    "interval 1": lambda: (
        f"in place of 3 loses {plain(effect(RULES, 'accordion', 'interval 1'))} points in 24 epochs"
    ),
    "high": lambda: (
        f"loses {plain(effect(RULES, 'low', 'high'))} points in 24 epochs and "
        f"{plain(effect(LONG, 'low', 'high'))} in 48"
    ),
    "early": lambda: f"alone loses {plain(effect(RULES, 'low', 'low-early'))} points",
    "early, long": lambda: (
        f"it is open: {signed(effect(LONG, 'low-early', 'low'))} against low, "
        f"at {floats(LONG, 'low-early')} of the floats"
    ),
    "resnet8": lambda: f"high loses {plain(effect('smoke-resnet8', 'low', 'high'))} points",
    "full": lambda: f"it is open: {plain(effect('smoke-full', 'low', 'high'))} (`smoke-full`",
    "lstm": lambda: "costs 0.10 [-0.11, +0.31] of perplexity",
    "blur 0": lambda: deficits("blur"),
    "labels 0": lambda: deficits("labels"),
}


def deficits(kind: str) -> str:
    names = {"blur": "blurred images", "labels": "wrong labels"}
    cells = [
        plain(effect("smoke-deficit", "none", f"{kind} {window}"))
        for window in ("0-5", "6-11", "12-17")
    ]
    return f"| {names[kind]} | {' | '.join(cells)} |"


@pytest.mark.slow
@pytest.mark.parametrize("key", SENTENCES)
def test_a_sentence_has_the_numbers_of_the_records(key: str) -> None:
    assert says(SENTENCES[key]()), SENTENCES[key]()


@pytest.mark.slow
def test_the_lstm_in_perplexity() -> None:
    mean, low, high = effect("lstm-small", "high", "low")
    assert f"{mean:.2f} [{low:+.2f}, {high:+.2f}]" == "0.10 [-0.11, +0.31]"


def test_how_many_runs_collapsed() -> None:
    rows = collapse.table(collapse.entries(records("smoke-quirks-topk"))).set_index("schedule")
    high = rows.loc["high"]
    ends = f"[{high['share_low']:.2f}, {high['share_high']:.2f}]"
    count, n = int(high["collapsed"]), int(high["n"])
    assert says(
        f"the mean of {effect('smoke-quirks-topk', 'low', 'high')[0]:.0f} points is made "
        f"of {count} runs of {n} that collapsed"
    )
    assert says(
        f"(a share of {high['share']:.2f} {ends}); the other {n - count} reach "
        f"{high['accuracy']:.1f} %"
    )


def test_what_the_quirks_do_to_topk() -> None:
    page = "explanation/differences.md"
    rows = collapse.table(collapse.entries(records("smoke-quirks-topk"))).set_index("schedule")
    for name in ("low", "accordion"):
        assert rows.loc[f"{name}, authors", "collapsed"] == rows.loc[name, "n"] == 16
    gain = effect("smoke-quirks-topk", "high, authors", "high")
    assert says(f"gains {plain(gain)} points", page)
    assert (rows.loc["high, authors", "collapsed"], rows.loc["high", "collapsed"]) == (0, 5)
    each = collapse.entries(records("smoke-quirks-topk")).groupby("name")["accuracy"]
    for name in ("low", "accordion", "high"):
        ours, theirs = (
            f"{each.get_group(n).mean():.1f} ± {each.get_group(n).std():.1f}"
            for n in (f"{name}, authors", name)
        )
        assert says(f"reaches {ours} % in place of {theirs}", page)


@pytest.mark.slow
def test_the_quirks_of_the_published_code() -> None:
    page = "explanation/differences.md"
    low, high, own = (
        effect("small-quirks", f"{n}, authors", n) for n in ("low", "high", "accordion")
    )
    for name, effect_ in (("low", low), ("ACCORDION", own), ("high", high)):
        assert says(f"{name} | loses {plain(turned(effect_))} points", page)
    theirs, ours = (floats("small-quirks", f"accordion{end}") for end in (", authors", ""))
    assert says(f"at {theirs} of low's floats in place of {ours}", page)


@pytest.mark.slow
def test_corrected_p_values() -> None:
    rows = claims.judge(REFERENCE)
    random = rows[rows["claim"].str.contains(r"random windows \(digits\)")].iloc[0]
    assert says(f"(p {random['p']:.2g}, then {random['p_holm']:.2g})")
    interval = rows[rows["claim"] == "24 epochs: interval 1 is as good as 3"].iloc[0]
    assert says(f"(p {interval['p']:.2g}, then {interval['p_holm']:.2g})")


def test_no_interval_is_written_the_wrong_way_round() -> None:
    for low, high in re.findall(r"\[([+-]?[\d.]+), ([+-]?[\d.]+)\]", text("findings.md")):
        assert float(low) <= float(high)


# -- tuned arms ------------------------------------------------------------------------------


def test_the_tuned_digits_have_the_scores_of_their_trials() -> None:
    trials = json.loads((REFERENCE / "smoke-tune.json").read_text())["trials"]
    for name in ("low", "high", "accordion"):
        scores = [[100 * x for x in t["scores"]] for t in trials if t["schedule"] == name]
        cells = " | ".join(f"{fmean(s):.1f} ± {stdev(s):.1f}" for s in scores)
        assert says(f"| {name} | {cells} |")


@pytest.mark.parametrize("pair", ["low - high", "accordion - low", "accordion - high"])
def test_the_tuned_digits_at_their_best_rates(pair: str) -> None:
    a, b = pair.split(" - ")
    assert says(f"| {pair} | {signed(effect('smoke-tuned', a, b))} |")
