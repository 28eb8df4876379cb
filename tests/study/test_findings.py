"""The pages of the findings (oracle: the committed records, computed again)."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from analysis.findings import checks, pages, sources
from analysis.findings import claims as paper
from analysis.findings.checks import ClaimError
from analysis.findings.numbers import NUMBERS
from analysis.findings.store import Missing, Store
from analysis.findings.values import Interval, decode, encode, mean_of
from benchmarks import race, race_report

ROOT = Path(__file__).parents[2]
KEPT = json.loads(pages.NUMBERS_FILE.read_text(encoding="utf-8"))
CHEAP = (
    "small.tar.xz",
    "lm-demo.tar.xz",
    "falling-lm-constant.tar.xz",
    "smoke-rivals.tar.xz",
    "smoke-rivals-more.tar.xz",
)


# -- the pages are those of the records ------------------------------------------------------


def test_the_numbers_are_those_of_the_committed_archives() -> None:
    """A record that changes is seen here without computing anything."""
    assert len(KEPT["files"]) > 60
    changed = [name for name, of in KEPT["files"].items() if sources.digest(name) != of]
    assert changed == [], "run `make pages`"


@pytest.fixture(scope="module")
def rendered() -> tuple[dict[str, str], str]:
    """All pages, of the numbers that are kept, and these as they are then. Every claim beside a
    number is checked on the way."""
    store = Store(NUMBERS, pages.NUMBERS_FILE, compute=False)
    return {name: pages.render(name, store) for name in pages.names()}, store.text()


def test_a_page_is_its_template_with_these_numbers(rendered: tuple[dict[str, str], str]) -> None:
    """And every number is of some page."""
    texts, numbers = rendered
    for name, text in texts.items():
        assert pages.place(name).read_text(encoding="utf-8") == text, f"{name}: run `make pages`"
    assert pages.NUMBERS_FILE.read_text(encoding="utf-8") == numbers, "run `make pages`"


def again(call: str) -> object:
    """What a call gives now; arguments that are numbers were numbers."""
    name, _, rest = call.removesuffix(")").partition("(")
    words = [word for word in rest.split(", ") if word]
    args: list[object] = [
        float(w) if re.fullmatch(r"\d+\.\d+", w) else int(w) if w.isdigit() else w for w in words
    ]
    return encode(NUMBERS[name](*args))


def test_numbers_of_small_archives_are_computed_again() -> None:
    """Of those whose arguments hold no comma, or which take a name as it is."""
    calls = [
        call
        for call, entry in KEPT["numbers"].items()
        if entry["files"] and {*entry["files"]} <= {*CHEAP}
        if not re.search(r"error|iterations|family", call)
    ]
    assert len(calls) > 35
    for call in calls:
        assert again(call) == KEPT["numbers"][call]["value"], call


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_number_is_computed_again() -> None:
    """But the quadratic's table, whose last digits differ between processors."""
    store = Store(NUMBERS, None)
    for name in pages.names():
        pages.render(name, store)
    now = {call: entry["value"] for call, entry in store.entries.items()}
    before = {call: entry["value"] for call, entry in KEPT["numbers"].items()}
    ours, theirs = (numbers.pop("quadratic_table()")["lines"] for numbers in (now, before))
    assert now == before
    for mine, other in zip(ours, theirs, strict=True):
        cells = zip(mine.split("|"), other.split("|"), strict=True)
        for place, (a, b) in enumerate(cells):
            at_the_edge = other.startswith("| 0.5 | rank 4 |") and place == 8  # the page says so
            near = 1.0 if at_the_edge else 0.05
            number = re.fullmatch(r" [\d.]+ ", b)
            assert float(a) == pytest.approx(float(b), near, 0.021) if number else a == b


@pytest.mark.slow
def test_the_claims_of_the_paper_are_what_the_records_say() -> None:
    text = (sources.REFERENCE / "claims.md").read_text(encoding="utf-8")
    assert text == paper.page(paper.judge(sources.REFERENCE))


# -- the page that is read -------------------------------------------------------------------


def test_an_interval_is_the_same_after_json_and_its_ends_are_not_written_alike() -> None:
    """Unless they are; an exponent may have no end."""
    endless = Interval(1.5, -math.inf, math.inf, n=2)
    assert endless.text(1, sign=True) == "+1.5 [-inf, +inf]"
    value = {"x": MORE, "y": [1.25, "a\nb", None, True], "z": endless}
    assert decode(json.loads(json.dumps(encode(value)))) == value
    for interval in (Interval(0.0083, 0.0054, 0.0112), Interval(0.0131, 0.0110, 0.0152)):
        for digits, significant in itertools.product(range(4), (False, True)):
            text = interval.text(max(1, digits), significant=significant)
            ((_, low, high),) = INTERVAL.findall(text)
            assert low != high
    assert Interval(0.87, 0.87, 0.87).text(2) == "0.87 [0.87, 0.87]"


# -- intervals in pages that are written by hand ---------------------------------------------

BY_HAND = [
    ROOT / "README.md",
    *(p for p in sorted(pages.DOCS.rglob("*.md")) if p not in {*map(pages.place, pages.names())}),
]
INTERVAL = re.compile(r"([+-]?[\d.]+) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]")
BESIDE = ("smoke-start", "lm-start", "small-quirks", "smoke-quirks-topk")  # of these pages alone


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every interval of the findings and of these pages' archives, rounded, without plus signs; and
    those of questions that are closed, which an earlier commit computed."""
    found = [decode(entry["value"]) for entry in KEPT["numbers"].values()]
    intervals = [x for x in found if isinstance(x, Interval)]
    intervals += [x for value in found if isinstance(value, dict) for x in value.values()]
    for source in BESIDE:
        arms = dict.fromkeys(run.name for run in sources.records(source))
        pairs = itertools.combinations(arms, 2)
        intervals += [NUMBERS["effect"](source, a, b) for a, b in pairs]
    kept = [x for x in intervals if isinstance(x, Interval)]
    lines = {name: race.read(name) for name in race.COURSES}
    raced = INTERVAL.findall(race_report.page({k: v for k, v in lines.items() if v}, ""))
    raced += INTERVAL.findall(pages.place("earlier").read_text(encoding="utf-8").replace("+", ""))
    return {f"{mean} [{low}, {high}]" for mean, low, high in raced} | {
        x.text(digits).replace("+", "").replace("-0.0 ", "0.0 ").replace("-0.0,", "0.0,")
        for one in kept
        for x in (one, -one)
        for digits in range(4)
    }


@pytest.mark.parametrize("page", BY_HAND, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_interval_on_a_page_is_one_of_the_records(page: Path, known: set[str]) -> None:
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```text\n.*?^```$", "", text, flags=re.S | re.M)  # what a command printed
    # what docs/generate.py has filled in, from cost/clocks.toml: `test_measured` has its oracle
    text = re.sub(r"^<!-- [\w-]+ -->\n.*?^<!-- end -->$", "", text, flags=re.S | re.M)
    text = " ".join(text.split())
    for mean, low, high in INTERVAL.findall(text):
        words = f"{mean} [{low}, {high}]".replace("+", "")
        words = re.sub(r"-(0\.0+)(?=[ ,\]])", r"\1", words)
        assert words in known, f"{page.name}: {words}"


# -- the parts -------------------------------------------------------------------------------

MORE = Interval(0.5, 0.2, 0.8, n=5, p=0.01, p_holm=0.04)
OPEN = Interval(0.1, -0.2, 0.4, n=5, p=0.4, p_holm=0.6)


def test_a_sentence_cannot_outlive_its_number() -> None:
    assert checks.above(MORE) is checks.significant(MORE) is MORE
    assert checks.below(-MORE) == -MORE
    assert checks.unresolved(OPEN) is checks.insignificant(OPEN) is OPEN
    for wrong in (checks.below, checks.unresolved, checks.insignificant):
        with pytest.raises(ClaimError, match=r"got 0\.500"):
            wrong(MORE)
    for wrong in (checks.above, checks.below, checks.significant):
        with pytest.raises(ClaimError, match="expected"):
            wrong(OPEN)
    for wrong in (checks.above, checks.below, checks.unresolved):  # nothing is known of one seed
        with pytest.raises(ClaimError):
            wrong(mean_of([1.0]))
    with pytest.raises(ClaimError, match="it is so"):
        checks.check(False, "it is so")


def test_another_number_makes_a_page_fail() -> None:
    store = Store(NUMBERS, pages.NUMBERS_FILE, compute=False)
    call = "effect(tournament-small, rank 4, rank 1)"  # "not shown", on two pages
    store.get("effect", "tournament-small", "rank 4", "rank 1")
    store.entries[call] = {"value": encode(MORE), "files": []}
    for name in ("findings", "high-compression"):
        with pytest.raises(ClaimError):
            pages.render(name, store)


def test_a_changed_archive_asks_for_its_numbers_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    path.write_text(
        json.dumps(
            {
                "files": {"small.tar.xz": sources.digest("small.tar.xz"), "lm-demo.tar.xz": "old"},
                "numbers": {
                    "a()": {"value": 1, "files": ["small.tar.xz"]},
                    "b()": {"value": 1, "files": ["lm-demo.tar.xz"]},
                },
            }
        )
    )
    store = Store({"a": lambda: 2, "b": lambda: 2}, path)
    assert (store.get("a"), store.get("b")) == (1, 2)
    with pytest.raises(Missing, match=r"b\(\) is not in"):
        Store({}, path, compute=False).get("b")


def test_a_new_archive_asks_for_the_numbers_of_all_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "REFERENCE", tmp_path)
    digest = sources.digest.__wrapped__  # without its cache
    (tmp_path / "a.tar.xz").touch()
    before = digest("*.tar.xz")
    assert digest("*.tar.xz") == before
    (tmp_path / "b.tar.xz").touch()
    assert digest("*.tar.xz") != before
    assert "*.tar.xz" in KEPT["numbers"]["all_run_count()"]["files"]


def test_a_number_of_the_markov_models_is_of_their_file() -> None:
    with sources.reading() as files:
        NUMBERS["markov_bits"]("harm-lm", 2)
    assert files == {"harm-lm.tar.xz", "markov.json"}


def test_paragraphs_are_filled_and_tables_are_not() -> None:
    text = "# A\n\n\n\nb\nc   d\n- e\n  f\n\n| g |\n|---|\n\n```sh\nh\n\n  i\n```\n"
    expected = "# A\n\nb c d\n- e f\n\n| g |\n|---|\n\n```sh\nh\n\n  i\n```\n"
    assert pages.wrapped(text) == expected
