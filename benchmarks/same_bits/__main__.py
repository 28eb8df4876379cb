"""``python -m benchmarks.same_bits [--quick] [--only PATTERN ...] [--keep FOLDER]``: train with the
code of a commit and with the present tree, and compare.

A rebuilt house must not change a number. What changes on purpose moves ``BASE``, or its fields are
listed in ``ON_PURPOSE`` with the reason. The exit code is 1 if a number differs that is not listed,
if a step launches more operators or collectives than the base's, or if it holds or takes more than
1.01 times its memory. On two idle cores of an Intel Xeon ``--quick`` took 17 s, and all cases
155 s where ``--keep`` had the results of the base.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

from benchmarks.same_bits.case import Case
from benchmarks.same_bits.cases import CASES
from benchmarks.same_bits.compare import compare
from benchmarks.trees import ROOT, unpack

PACKAGE = Path(__file__).parent
BASE = "51ddc4b8"  # the commit that the present tree is compared with
TABLES = ("trainer.py", "own.py", "exchanges.py")  # files whose tables are read case by case
ON_PURPOSE: dict[str, str] = {}  # field, dotted -> why it differs from the base


def unpack_with_cases(commit: str, place: Path) -> None:
    """The tree of a commit, with these cases in place of its own."""
    unpack(commit, place)
    there = place / PACKAGE.relative_to(ROOT)
    there.with_suffix(".py").unlink(missing_ok=True)
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(PACKAGE, there)


def write_text(place: Path) -> Path:
    """A walk over ten words in the files of WikiText-2; what is there already stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    words = ["cat", "dog", "bird", "the", "a", "saw", "heard", ".", ",", "and"]
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="partial-") as scratch:
        (made := Path(scratch, "text")).mkdir()
        for name, count in (("train", 100), ("valid", 25), ("test", 25)):
            lines = [
                " ".join(words[(7 * i + i * i * j + 3 * j) % 10] for j in range(7))
                for i in range(count)
            ]
            (made / f"wiki.{name}.tokens").write_text("\n".join(f" {x} " for x in lines) + "\n")
        with contextlib.suppress(OSError):  # it is there
            made.rename(place)
    return place


def start(tree: Path, names: list[str], out: Path, text: Path) -> subprocess.Popen[bytes]:
    """Train with the code of ``tree``; what it says goes to ``out``.log."""
    out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.same_bits.train", str(out), str(text), *names]
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=env, cwd=tree, stdout=log, stderr=log)


def common_key(commit: str) -> str:
    """What the kept results of all cases depend on: the commit, this machine's torch, and the code
    of the cases without the tables that list them."""
    full = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", commit], capture_output=True, check=True, text=True
    )
    parts = [full.stdout, metadata.version("torch")]
    for file in sorted(PACKAGE.glob("*.py")):
        if file.name not in ("__main__.py", "compare.py", "cases.py"):  # these train nothing
            module = ast.parse(file.read_text())
            if file.name in TABLES:
                module.body = [x for x in module.body if not _is_table(x)]
            parts.append(ast.dump(module))
    return "\n".join(parts)


def _is_table(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Dict | ast.List | ast.Set)


def kept(folder: Path, common: str, case: Case) -> Path:
    """Where the base's result of a case is kept."""
    fields = re.sub(r" at 0x[0-9a-f]+", "", repr(case))
    return folder / hashlib.sha256(f"{common}\n{fields}".encode()).hexdigest()[:16]


def keep(result: Path, place: Path) -> None:
    """Leave a copy of a result; one that is there already stays."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="partial-") as scratch:
        copy = shutil.copytree(result, Path(scratch, result.name))
        with contextlib.suppress(OSError):  # it is there
            copy.rename(place)


def wait(name: str, outs: Iterable[Path], jobs: Iterable[subprocess.Popen[bytes]]) -> None:
    """Until both trees have trained a case; SystemExit if one has ended before."""
    for out, job in zip(outs, jobs, strict=True):
        done = out / f"{name}.done"
        while not done.exists():
            if job.poll() is not None and not done.exists():
                raise SystemExit(f"{out.name}: {out.with_suffix('.log').read_text()[-2000:]}")
            time.sleep(0.1)


def chosen(patterns: list[str], quick: bool) -> list[str]:
    """Names of the cases that fit a shell pattern; SystemExit if a pattern fits none."""
    names = [case.name for case in CASES]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise SystemExit(f"--only {pattern}: no such case; there are {', '.join(names)}")
    return [
        case.name
        for case in CASES
        if (case.quick or not quick)
        and (not patterns or any(fnmatch(case.name, pattern) for pattern in patterns))
    ]


def main() -> None:
    """Train, compare, say what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[2].strip())
    parser.add_argument("--base", default=BASE, help="the commit to compare with")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="shell patterns")
    parser.add_argument("--quick", action="store_true", help="a case of each kind")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the base's results")
    given = parser.parse_args()
    names = chosen(given.only, given.quick)
    begin, bad, errors = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        place = Path(scratch)
        outs = place / "base", place / "present"
        unpack_with_cases(given.base, place / "tree")
        folder = given.keep.resolve() if given.keep else place
        text = write_text(folder / "text")  # records name its path
        common = common_key(given.base)
        stored = {case.name: kept(folder, common, case) for case in CASES}
        missing = [name for name in names if not stored[name].exists()]
        outs[0].mkdir()
        for name in {*names} - {*missing}:
            (outs[0] / name).symlink_to(stored[name])
            (outs[0] / f"{name}.done").touch()
        trees = place / "tree", ROOT
        jobs = [
            start(tree, todo, out, text)
            for tree, todo, out in zip(trees, (missing, names), outs, strict=True)
        ]
        try:
            for name in names:
                wait(name, outs, jobs)
                if name in missing and not (outs[0] / f"{name}.done").read_text():
                    keep(outs[0] / name, stored[name])
                same, words = compare(outs[0] / name, outs[1] / name, ON_PURPOSE)
                bad += not same
                print(f"{name:28} {words}", flush=True)
                errors += [(out / f"{name}.done").read_text() for out in outs]
        finally:
            for job in jobs:
                job.terminate()
                job.wait()
    for error in filter(None, errors):
        print(error)
    for field, why in ON_PURPOSE.items():
        print(f"on purpose: {field}: {why}")
    print(f"{len(names) - bad} of {len(names)} cases as expected, {time.monotonic() - begin:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
