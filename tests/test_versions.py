"""Versions: the minima of pyproject.toml have what the code uses; constraints.txt pins the rest.

`make minima` runs tests with the minima themselves.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,]+\])?((?P<sign>[>=]=)(?P<version>[\w.]+))?")
Version = tuple[int, ...]
SINCE: dict[str, tuple[str, Version, str]] = {  # what the code uses: the version that brought it
    r"torch\.optim\.Muon\b": ("torch", (2, 9), "regimes"),
    r"\bfp32_precision\b": ("torch", (2, 9), "regimes"),
    r"\bset_custom_reduce_scatter\(": ("torch", (2, 9), "regimes"),
    r"\bexclude_categories=": ("hypothesis", (6, 88), "tests"),
}


class Stated(NamedTuple):
    """A direct dependency, as pyproject.toml states it."""

    name: str
    sign: str | None  # ">=" or "=="
    version: str | None


def numbers(version: str) -> Version:
    """The release of a version: 1.0.0a5 is 1.0.0."""
    release = re.match(r"\d+(\.\d+)*", version)
    assert release is not None, version
    return tuple(int(part) for part in release[0].split("."))


def stated() -> list[Stated]:
    """The direct dependencies, those of all extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    parts = [REQUIREMENT.match(line) for requirements in lists for line in requirements]
    assert all(parts)
    every = [Stated(part["name"], part["sign"], part["version"]) for part in parts if part]
    return [requirement for requirement in every if requirement.name != project["name"]]


def pinned() -> dict[str, str]:
    """Versions of constraints.txt; the highest where Pythons have different ones."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [
        re.fullmatch(r"([\w.-]+)==([\w.+!]+)( ; .+)?", line) for line in lines if line[0] != "#"
    ]
    assert all(pins), "constraints.txt pins exact versions"
    found: dict[str, str] = {}
    for name, version in sorted((pin[1], pin[2]) for pin in pins if pin):
        found[name] = max(version, found.get(name, version), key=numbers)
    return found


@pytest.mark.parametrize("requirement", stated(), ids=lambda requirement: requirement.name)
def test_the_pinned_version_is_admitted(requirement: Stated) -> None:
    assert requirement.version is not None, "states no minimum"
    version = pinned()[requirement.name.lower().replace("_", "-")]
    if requirement.sign == "==":
        assert version == requirement.version
    else:
        assert numbers(version) >= numbers(requirement.version)


@pytest.mark.parametrize("use", SINCE)
def test_the_stated_minimum_has_what_is_used(use: str) -> None:
    name, since, folder = SINCE[use]
    assert any(re.search(use, path.read_text()) for path in (ROOT / folder).rglob("*.py"))
    minima = [requirement.version for requirement in stated() if requirement.name == name]
    assert all(numbers(minimum or "0") >= since for minimum in minima)


def test_torchvision_is_that_of_torch() -> None:
    """Their minor versions differ by 15, for the minima as for the pins."""
    minima = {requirement.name: requirement.version or "" for requirement in stated()}
    for versions in (minima, pinned()):
        assert numbers(versions["torchvision"])[1] - numbers(versions["torch"])[1] == 15


def test_pins_fit_every_build_of_torch() -> None:
    """CPU or CUDA: no build's own version, no library that only one build needs."""
    assert "+" not in pinned()["torch"]
    assert [name for name in pinned() if name.startswith(("nvidia-", "cuda-", "triton"))] == []
