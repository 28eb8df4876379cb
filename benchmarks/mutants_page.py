"""What `benchmarks.mutants` has found, as a page: counts, those alive and why, what is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

OUTSIDER = """\
When this page said 100 %, 36 more bugs, written by hand, were put in: the tests found 27 of them,
75 %. At that time the core left out `ddp`, `analysis`, `plotting` and most of `monitor` and `data`,
and the tests did not vary what these bugs need: histories whose numbers fall again, several
iterations without feedback, measurements in every second unit, several parameter groups. The core
is now all code that computes or decides, and such combinations have their own tests
(`test_compressor_options`, `test_sparse_measurements`, `test_signals`, `test_parameter_groups`)."""


BY_HAND = Path(__file__).with_name("mutants_by_hand.jsonl")
DRAWS = {  # of those: by number, up to which commit the lines had changed, and what was missed
    1: (
        "98fbba90",
        """\
Each of the others has a test now, which fails with the bug; `mutants_by_hand.jsonl` has
all, with the test that finds each. The missed ones are of three kinds: a branch that
good runs do not take (an address of IPv6, a terminal, another number of replicas), one
of several names or places of one value, and a function with tests whose one call has
none.""",
    ),
    2: (
        "2a3bb027",
        """\
These lines hold behaviour, not types or names of parameters alone, and the first draw did
not take them; about 4,000 lines of tests had been merged or left out in between. Run were
the test files that name the function or its callers, so others may find more at first.
Each of the missed ones has a test now, which fails with the bug. Most are of one kind: a
test runs the line, but only with input for which the bug changes nothing (two lost units
and not one, nine files and not three, a cycle without a warm-up, one ladder, parts of one
type), or it checks a sentence without the names and numbers in it.""",
    ),
}


def reasons(text: str) -> dict[str, str]:
    """What a report says of those alive, by key."""
    return dict(re.findall(r"^- `{3} (.+) `{3}: ((?:equivalent|accepted): .+)$", text, re.M))


def report(
    rows: list[dict[str, Any]], known: dict[str, str], log: Path, left_out: dict[str, str]
) -> str:
    """The page: how many were found, those alive and why, and what is left out."""
    alive = {row["mutant"]: row for row in rows if not row["found"]}
    parts = {
        "Not found": [
            f"- ``` {key} ```: not found by {row['tests']} tests"
            for key, row in sorted(alive.items())
            if key not in known
        ],
        "Not found, with a reason": [
            f"- ``` {key} ```: {known[key]}" for key in sorted(alive) if key in known
        ],
    }
    unexplained, explained = map(len, parts.values())
    found = len(rows) - len(alive)
    lines = [
        "# Which single-line bugs do the tests not see?",
        "",
        f"`python -m benchmarks.mutants` put {len(rows)} random bugs into the core, one at a time.",
        f"The tests find {found}. {explained} are not found for a stated reason, mostly because",
        f"the bug changes nothing, and {unexplained} without a reason: of those that should be",
        f"found, {found / max(found + unexplained, 1):.1%} are.",
    ]
    changed = len({json.loads(line)["mutant"] for line in log.read_text().splitlines()}) - len(rows)
    if changed:
        lines += ["", f"{changed} more bugs of the log were in lines that have changed since."]
    lines += ["", OUTSIDER, *by_hand(), *at_random(rows, known, log)]
    parts["What is left out"] = [f"- `{place}`: {why}" for place, why in left_out.items()]
    for title, bugs in parts.items():
        lines += ["", f"## {title}", "", *(bugs or ["None."])]
    return "\n".join(lines) + "\n"


def by_hand() -> list[str]:
    """A paragraph per draw of bugs that were written by hand for lines drawn at random: how many
    the tests found at first, and which kinds they missed."""
    rows = [*map(json.loads, BY_HAND.read_text().splitlines())]
    lines = []
    for draw, (end, missed) in DRAWS.items():
        here = [row for row in rows if row["draw"] == draw]
        counted = [row for row in here if not row["same"]]
        found = sum(row["first"] for row in counted)
        ends = binomtest(found, len(counted)).proportion_ci(method="wilson")
        lines += [
            "",
            f"{len(here)} bugs were written by hand, one for each of so many lines that were drawn",
            "at random (each file with the same chance) from those changed between 596b94b3 and",
            f"{end}. {len(here) - len(counted)} change no number. Of the other {len(counted)}",
            f"the tests of `make test` found {found} at first, {found / len(counted):.1%} "
            f"[{ends.low:.1%}, {ends.high:.1%}] (Wilson).",
            *missed.splitlines(),
        ]
    return lines


def at_random(rows: list[dict[str, Any]], known: dict[str, str], log: Path) -> list[str]:
    """A paragraph per draw of lines that were untouched: how many were found at first, and now."""
    first: dict[str, bool] = {}
    for row in map(json.loads, log.read_text().splitlines()):
        first.setdefault(row["mutant"], row["found"])
    lines = []
    for name in sorted({row["drawn"] for row in rows if "drawn" in row}):
        here = [row for row in rows if row.get("drawn") == name]
        counted = [row for row in here if row["found"] or row["mutant"] not in known]
        before = sum(first[row["mutant"]] for row in counted)
        now = sum(row["found"] for row in counted)
        lines += [
            "",
            f"Of the {len(rows)}, {len(here)} were drawn at random from lines that no bug "
            f"had touched (`--untouched --seed {name.split()[-1]}`).",
            f"{len(counted)} should be found. The tests found {before} of them at first, "
            f"{before / len(counted):.1%},",
            f"and find {now}, {now / len(counted):.1%}, since those alive have been given tests.",
            "The first number, not the second, says what another draw would find.",
        ]
    return lines
