"""Recorded CPU seconds of tests: they decide which further cases `make test` runs, and in which
order. The header of ``tests/durations.txt`` has the rule."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILE = TESTS / "durations.txt"
BUDGET = 20.0  # CPU seconds of `make test` for the cases of the file
WORTH_A_LINE = 0.25  # CPU seconds
CHEAP = 0.05  # CPU seconds of a test without a line
HEADER = f"""\
# CPU seconds of tests, children included, written by `make durations`; one below
# {WORTH_A_LINE} s has no line. Parametrised cases of this file run in `make test` from the cheapest
# on, until {BUDGET:.0f} s are spent; the others count as slow. A function that would have no case
# left keeps its cheapest. A test that is no case, or has no line, always runs. So do all cases of
# a function that is marked "whole", and of one at most half of whose cases have a line: they share
# what took the seconds, and whichever ran first would pay for it. Files run in the order of their
# seconds, the longest first.
"""


def read() -> dict[str, float]:
    """Seconds by the name of a test."""
    lines = [line.split(maxsplit=1) for line in FILE.read_text().splitlines() if line[0] != "#"]
    return {name: float(seconds) for seconds, name in lines}


def function_of(name: str) -> str:
    return name.partition("[")[0]


def cases_left_out(
    seconds: Mapping[str, float], collected: Iterable[str], budget: float = BUDGET
) -> set[str]:
    """The cases that `make test` does not run.

    Args:
        seconds: of all tests of the file.
        collected: names of tests, without those that are marked slow.
    """
    cases = defaultdict(list)
    for name in collected:
        cases[function_of(name)].append(name)
    shared = {
        function
        for function, names in cases.items()
        if 2 * len(seconds.keys() & {*names}) <= len(names)
    }
    spent, too_many = 0.0, set()
    for name in sorted(seconds, key=lambda name: (seconds[name], name)):
        if "[" in name and function_of(name) not in shared:
            spent += seconds[name]
            if spent > budget:
                too_many.add(name)
    for names in cases.values():
        if too_many.issuperset(names):
            too_many.discard(min(names, key=lambda name: (seconds[name], name)))
    return too_many


def seconds_of_files(seconds: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name in names:
        found[name.partition("::")[0]] += seconds.get(name, CHEAP)
    return found


def write(measured: Mapping[str, float]) -> None:
    """Put what a run has measured in the place of the lines of the same functions; a function
    that its file no longer defines loses its lines."""
    functions = {function_of(name) for name in measured}
    kept = {k: v for k, v in read().items() if function_of(k) not in functions and _is_there(k)}
    lines = [
        f"{seconds:.2f} {name}"
        for name, seconds in sorted((kept | dict(measured)).items())
        if seconds >= WORTH_A_LINE
    ]
    FILE.write_text(HEADER + "\n".join(lines) + "\n")


def _is_there(name: str) -> bool:
    file, _, rest = name.partition("::")
    path = TESTS.parent / file
    return path.exists() and f"def {function_of(rest).rpartition('::')[2]}(" in path.read_text()


def cpu_seconds() -> float:
    """CPU seconds of this process and its descendants so far."""
    times = os.times()
    return sum(times[:4]) + sum(map(_seconds_of, _children(os.getpid())))


def _children(process: int) -> list[int]:
    """Processes below one that are alive, where the system lists them (Linux)."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, thread.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return found


def _seconds_of(process: int) -> float:
    """One that is alive, its descendants, and its children that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(_seconds_of, _children(process)))
