"""Which tests call which functions, and pytest in forks of a process that has imported torch.

A test file is run once with Python's tracer; what is kept per test is its seconds and the functions
of `regimes` and `analysis` that it enters in this process. Real processes that a test starts are
not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter  # by name: a test may put another into the module
from typing import Any

ROOT = Path(__file__).parents[1]
Calls = dict[str, tuple[float, list[str]]]  # test -> seconds, "file:function" of what it calls


def import_what_is_heavy() -> None:
    import matplotlib.pyplot  # noqa: F401
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.linear_model  # noqa: F401
    import torch

    torch.set_num_threads(1)


class Watch:
    """A pytest plugin: the first failure; the tests that pass and, if wanted, what they call."""

    def __init__(self, root: Path, tracing: bool) -> None:
        self.root, self.tracing = f"{root}/", tracing
        self.failed, self.calls = "", Calls()
        self._names: dict[Any, str | None] = {}  # of code objects

    def pytest_runtest_logstart(self) -> None:
        self._began, self._seen = perf_counter(), set[str]()
        if self.tracing:
            threading.settrace(self._called)
            sys.settrace(self._called)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        elif report.passed and report.when == "call":
            seconds = perf_counter() - self._began
            self.calls[report.nodeid] = (round(seconds, 2), sorted(self._seen))

    def pytest_runtest_logfinish(self) -> None:
        sys.settrace(None)

    def _called(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if code not in self._names:
            file, _, inside = code.co_filename.partition(self.root)
            function = code.co_qualname.partition(".<locals>")[0]
            ours = inside.startswith(("regimes/", "analysis/")) and not file
            self._names[code] = f"{inside}:{function}" if ours else None
        if (name := self._names[code]) is not None:
            self._seen.add(name)


def forked(tree: Path, words: list[str], limit: float, tracing: bool = False) -> dict[str, Any]:
    """pytest with ``words`` in ``tree``: {"code", "failed", "calls"}; code -1 for being late."""
    answer = tree.parent / "answer.json"
    answer.unlink(missing_ok=True)
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            os.chdir(tree)
            quiet = os.open(tree.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
            os.environ["PYTHONPATH"] = str(tree)
            sys.dont_write_bytecode = not tracing  # what is written for a mutant is its alone
            import pytest

            watch = Watch(tree, tracing)
            words = ["-p", "no:cacheprovider", "--timeout", "120", *words]
            code = int(pytest.main(words, plugins=[watch]))
            answer.write_text(
                json.dumps({"code": code, "failed": watch.failed, "calls": watch.calls})
            )
        finally:
            os._exit(0)
    until = time.monotonic() + limit
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"code": -1, "failed": "(too long)", "calls": {}}
        time.sleep(0.02)
    died = {"code": -2, "failed": "(died)", "calls": {}}
    return json.loads(answer.read_text()) if answer.exists() else died


def test_file(tree: Path, name: str) -> str:
    """The file of tests of this name, relative to the tree: no two folders have the same name."""
    (path,) = (tree / "tests").rglob(f"test_{name}.py")
    return path.relative_to(tree).as_posix()


def who_calls_what(tree: Path, names: Sequence[str], kept: Path) -> Calls:
    """What each passing quick test calls; measured anew for files of tests that have changed."""
    known = json.loads(kept.read_text()) if kept.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    for file in (test_file(tree, name) for name in names):
        path = tree / file
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if known.get(path.name, {}).get("digest") != digest:
            began = time.monotonic()
            got = forked(tree, [file], 900, tracing=True)
            known[path.name] = {"digest": digest if got["code"] >= 0 else "", "calls": got["calls"]}
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(known))
            print(
                f"{path.name}: {len(got['calls'])} tests, {time.monotonic() - began:.0f} s, "
                f"{got['failed'] or 'all passed'}",
                flush=True,
            )
        found[path.name] = known[path.name]["calls"]
    return {test: calls for file in found.values() for test, calls in file.items()}
