"""Which single-line bugs do the tests not see?

``python -m benchmarks.mutants [--number N] [--seed S] [--untouched] [--only PATH] [--part I N]
[--budget SECONDS] [--again]``
puts bugs into the core, one at a time, in a copy of the tree, and runs the tests that call the
function concerned, quick ones first, until one fails. The log is continued; ``--again`` tries once
more what lived without a reason. ``--untouched`` draws lines at random, each with the same chance,
from those that no bug of the log outside this draw has changed, and one bug of each.
``benchmarks/mutants.md`` counts everything in the log that still is in the code, and lists those
alive; a reason written there behind one ("equivalent: ..." or "accepted: ...") is kept. Which tests
call what is measured first, for 20 minutes, and kept in ``runs``; again for files of tests that
have changed. Needs ``os.fork``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.calls import Calls, forked, import_what_is_heavy, test_file, who_calls_what
from benchmarks.mutants_page import reasons, report
from benchmarks.mutators import Mutant, mutants

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "mutants.md"
CALLS = ROOT / "runs" / "mutants.called.json"
CORE = ("regimes", "analysis")  # all that computes or decides, so without
LEFT_OUT = {
    "regimes/__init__.py": "lists of names",
    "regimes/__main__.py": "the words of commands; what they call is in",
    "regimes/cli": "the words of commands; what they call is in",
    "regimes/base/console": "how text is laid out",
    "regimes/integrations": "their tests need packages that `make test` lacks",
    "regimes/plotting/looks.py": "colours and names",
    "regimes/plotting/style.py": "fonts, margins and captions",
    **{
        f"regimes/presets/{name}.py": "values that were chosen; what makes grids of them is in"
        for name in ("cpu", "language")
    },
    "regimes/cli/html_report/pictures.py": "how a page's pictures are laid out",
    "analysis/__main__.py": "the words of commands; what they call is in",
    "analysis/common/command.py": "the words of commands; what they call is in",
    "analysis/notebook/explorer.py": "a notebook's widgets",
    "analysis/paper/figures.py": "lists of names",
    "analysis/rates/usable_figure.py": "how a figure is laid out",
    "analysis/notebook/outputs.py": "how a notebook's output is laid out",
    "analysis/findings/sentences.py": "sentences and what each is read from",
    "analysis/tournament/tournament_figure.py": "how a figure is laid out",
    "analysis/common/names.py": "names",
}
OTHERS = {  # of test_NAME.py: pages and packages, which look at the core from afar
    "docs",
    "doctests",
    "fuzz",
    "house",
    "integrations",
    "notebooks",
    "readme",
    "versions",
    "wheel",
}
REAL = {  # start processes, whose calls are not seen
    "regimes/collectives/": (
        "exchange",
        "world",
        "launchers",
        "fingerprint",
        "own_loop",
        "call_guard",
        "ddp_faults",
        "ddp_wrong",
    ),
    "regimes/compression/": ("compressor_options",),
    "regimes/instruments/hessian/": ("curvature", "sharpness"),
    "regimes/hook/fsdp/": ("fsdp_collectives", "fsdp_jobs"),
    "regimes/hook/ddp/": (
        "ddp",
        "ddp_record",
        "ddp_state",
        "ddp_wrong",
        "hsdp",
        "parameter_groups",
    ),
    "regimes/job/job.py": ("mesh",),
    "regimes/hook/local/": ("own_loop",),
    "regimes/cli/machine.py": ("group_doctor",),
    "regimes/training/gradients.py": ("exchange",),
    "regimes/training/losses.py": ("exchange",),
    "regimes/training/local_rounds.py": ("local_steps",),
    "regimes/training/loop.py": ("reporters", "faults", "ends"),
    "regimes/training/termination.py": ("faults", "ends"),
}


def oracles() -> list[str]:
    """The names of the files of tests that are asked."""
    found = (path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted(set(found) - OTHERS)


def copy_tree(place: Path) -> Path:
    """The checkout as it is, without what git ignores."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listed, text=True).split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def chosen(mutant: Mutant, calls: Calls, budget: float) -> list[str]:
    """The tests for a mutant: tests that call its function, then others of their files (their
    fixtures may), the quickest first, as many as the budget has room for."""
    wanted = f"{mutant.file}:"
    whole = wanted + mutant.function
    direct = {t for t, (_, names) in calls.items() if whole in names}
    if not direct or not mutant.function:
        direct = {t for t, (_, names) in calls.items() if any(n.startswith(wanted) for n in names)}
    files = {test.partition("::")[0] for test in direct}
    real = {
        test_file(ROOT, name)
        for place, names in REAL.items()
        if mutant.file.startswith(place)
        for name in names
    }
    direct |= {test for test in calls if test.partition("::")[0] in real}
    near = [test for test in calls if test.partition("::")[0] in files | real]
    near.sort(key=lambda test: (test not in direct, calls[test][0]))
    spent, picked = 0.0, defaultdict[str, list[str]](list)
    for test in near:
        spent += calls[test][0]
        if spent > budget and picked:
            break
        picked[test.partition("::")[0]].append(test)
    by_cost = sorted(picked.values(), key=lambda tests: sum(calls[test][0] for test in tests))
    return [test for tests in by_cost for test in tests]


# -- mutants, one at a time ----------------------------------------------------------------------


def core() -> list[tuple[str, list[Mutant]]]:
    """The files of the core, and all mutants of each."""
    paths = sorted(path for place in CORE for path in (ROOT / place).rglob("*.py"))
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    return [
        (file, mutants(file, path.read_text()))
        for file, path in zip(files, paths, strict=True)
        if not any(file == place or file.startswith(f"{place}/") for place in LEFT_OUT)
    ]


def spread(seed: int) -> list[Mutant]:
    """All mutants of the core, in an order that spreads the first so many over its files, in
    proportion."""
    placed = []
    for file, all_of_it in core():
        draw = random.Random(f"{seed} {file}")
        draw.shuffle(all_of_it)
        offset = draw.random()
        placed += [((i + offset) / len(all_of_it), m) for i, m in enumerate(all_of_it)]
    placed.sort(key=lambda pair: pair[0])
    return [mutant for _, mutant in placed]


def untouched(seed: int, touched: set[str]) -> list[Mutant]:
    """One mutant of each line that no mutant has ``touched``, in the order of a draw by seed."""
    lines = defaultdict[str, list[Mutant]](list)
    for _, all_of_it in core():
        for mutant in all_of_it:
            lines[mutant.place].append(mutant)
    draw = random.Random(f"{seed} untouched")
    order = sorted(lines.keys() - touched)
    draw.shuffle(order)
    return [draw.choice(lines[place]) for place in order]


def tried(mutant: Mutant, tree: Path, calls: Calls, budget: float) -> dict[str, Any]:
    """A row of the log."""
    tests, path, began = chosen(mutant, calls, budget), tree / mutant.file, time.monotonic()
    before = path.read_text()
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()  # its time may be the mutant's to the second
    path.write_text(mutant.applied(before))
    try:
        got = forked(tree, ["-x", *tests], 4 * budget) if tests else {"code": 0, "failed": ""}
    finally:
        path.write_text(before)
    by = got["failed"] or ("(import)" if got["code"] else "")
    return {
        "mutant": mutant.key,
        "line": mutant.line,
        "found": got["code"] != 0,
        "by": by,
        "tests": len(tests),
        "seconds": round(time.monotonic() - began, 1),
    }


def logged(log: Path) -> dict[str, dict[str, Any]]:
    """The last row of each mutant."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {row["mutant"]: row for row in map(json.loads, lines)}


def main() -> None:
    """Try, log, write the report; exit code 1 if one lives without a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--untouched", action="store_true", help="draw lines that no bug of the log has changed"
    )
    parser.add_argument("--only", default="", metavar="PATH", help="regimes/ROOM or a file of it")
    parser.add_argument(
        "--part",
        nargs=2,
        type=int,
        default=(1, 1),
        metavar=("I", "N"),
        help="only each N-th, from the I-th on: for several cores",
    )
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests per bug")
    parser.add_argument(
        "--again", action="store_true", help="try once more what lived without a reason"
    )
    parser.add_argument("--log", type=Path, default=REPORT.with_suffix(".jsonl"))
    asked = parser.parse_args()
    done = logged(asked.log)
    known = reasons(REPORT.read_text() if REPORT.exists() else "")
    import_what_is_heavy()
    every, drawn = spread(asked.seed), f"untouched {asked.seed}" if asked.untouched else ""
    order = every
    if drawn:
        earlier = {row["mutant"] for row in done.values() if row.get("drawn") != drawn}
        order = untouched(asked.seed, {m.place for m in every if m.key in earlier})
    todo = [m for m in order if m.file.startswith(asked.only)][: asked.number]
    part, parts = asked.part
    todo = todo[part - 1 :: parts]
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        tree = copy_tree(Path(scratch, "tree"))
        calls = who_calls_what(tree, oracles(), CALLS)
        for mutant in todo:
            old = done.get(mutant.key)
            if old is None or (asked.again and not old["found"] and mutant.key not in known):
                row = tried(mutant, tree, calls, asked.budget)
                row |= {"drawn": drawn} if drawn else {}
                with asked.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
                word = f"found by {row['by']}" if row["found"] else f"ALIVE, {row['tests']} tests"
                print(f"{row['seconds']:6.1f} s  {mutant.key}: {word}", flush=True)
    done = logged(asked.log)
    rows = [done[mutant.key] for mutant in every if mutant.key in done]
    REPORT.write_text(report(rows, known, asked.log, LEFT_OUT))
    sys.exit(any(not row["found"] and row["mutant"] not in known for row in rows))


if __name__ == "__main__":
    main()
