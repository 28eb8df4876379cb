"""The pages of benchmarks say what their committed numbers give (oracle: the module that writes
the page, or a count of the rows)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import race, race_report

HERE = Path(__file__).parents[3] / "benchmarks"


def numbers(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


def written(name: str) -> str:
    return (HERE / f"{name}.md").read_text()


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def raced() -> str:
    system = re.findall(r"share 2 cores \(.*; (.*?)\)\.", written("race"))[-1]
    return race_report.page({grid: race.read(grid) for grid in race.COURSES}, system)


PAGES: dict[str, Callable[[], str]] = {
    "curvature": lambda: module("curvature_report").markdown(numbers("curvature")),
    "clocks": lambda: module("clocks").report(module("clocks").all_losses()),
    "race": raced,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_committed_numbers(name: str) -> None:
    assert PAGES[name]() == written(name)


@pytest.mark.parametrize("name", ["speed", "speed-epyc"])
def test_the_page_of_speed_counts_the_committed_rows(name: str) -> None:
    rows = [row for case in numbers(name)["cases"].values() for row in case]
    goals = [row["verdict"] for row in rows if row["target"] is not None]
    text = written(name)
    assert f"**{goals.count('reached')} of {len(goals)} targets reached.**" in text
    assert len(re.findall(r"^- .*: missed by", text, re.M)) == len(goals) - goals.count("reached")
