"""Entry points of installed packages, and of a checkout, installed or not."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from regimes.base.config import entry_points

OTHER = metadata.EntryPoint("other", "mine:offers", "regimes.figures")
GROUPS = ["figures", "grids"]


def offered(group: str) -> dict[str, str]:
    return {point.name: point.value for point in entry_points.entry_points(group)}


def packages(*points: metadata.EntryPoint, owner: str = "mine") -> object:
    """Stands for the metadata of an installed package."""
    for point in points:
        vars(point)["dist"] = type("Package", (), {"name": owner})()
    return lambda path: metadata.EntryPoints(points)


@pytest.mark.parametrize("group", GROUPS)
def test_a_checkout_offers_its_own_installed_or_not(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: its pyproject.toml. Metadata may be of another checkout, or older."""
    declared = tomllib.loads((entry_points.CHECKOUT / "pyproject.toml").read_text())
    expected = declared["project"]["entry-points"][f"regimes.{group}"]
    assert expected
    old = metadata.EntryPoint("old", "analysis:Old", f"regimes.{group}")
    for found in (packages(), packages(old, owner="regimes")):
        monkeypatch.setattr(entry_points, "_of_packages", found)
        assert offered(f"regimes.{group}") == expected
        names = [point.name for point in entry_points.entry_points(f"regimes.{group}")]
        assert names == sorted(expected)


def test_other_packages_offer_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "_of_packages", packages(OTHER))
    assert offered("regimes.figures")["other"] == "mine:offers"
    assert {
        entry_points.find_owner(point) for point in entry_points.entry_points("regimes.figures")
    } == {
        "mine",
        "regimes",
    }
    monkeypatch.setattr(entry_points, "CHECKOUT", Path("nowhere"))  # an installation
    assert offered("regimes.figures") == {"other": "mine:offers"}


def test_the_wheel_says_the_same() -> None:
    """What hatchling writes into an installation is what the checkout reads."""
    builder = pytest.importorskip("hatchling.metadata.core", reason="needs the extra dev")
    root = str(entry_points.CHECKOUT)
    found = builder.ProjectMetadata(root, None).core.entry_points
    for group in GROUPS:
        assert found[f"regimes.{group}"] == offered(f"regimes.{group}")


@pytest.mark.parametrize(
    "text", ["", "[project]\nname = 'other'\nentry-points.g.x = 'y:z'", "no toml", None]
)
def test_a_folder_of_another_project_offers_nothing(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    if text is not None:
        file.write_text(text)
    assert entry_points._read_declared(file) == {}
