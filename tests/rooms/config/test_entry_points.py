"""Entry points of installed packages, and of a checkout that is not installed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from regimes.config import entry_points
from regimes.config.registry import offered

FIELDS = ("name", "value", "group")


def plain(points: list[metadata.EntryPoint]) -> list[tuple[str, ...]]:
    return [tuple(getattr(point, field) for field in FIELDS) for point in points]


@pytest.mark.parametrize(
    "group", ["figures", "grids", "instruments", "tasks", "deficits", "models"]
)
def test_a_checkout_that_is_not_installed_offers_the_same(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = plain(entry_points.entry_points(f"regimes.{group}"))
    assert installed
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert plain(entry_points.entry_points(f"regimes.{group}")) == []  # it is installed
    monkeypatch.setattr(entry_points, "_installed", lambda: False)
    assert plain(entry_points.entry_points(f"regimes.{group}")) == installed
    assert offered(f"regimes.{group}") == {name: value for name, value, _ in installed}


@pytest.mark.parametrize(
    "text", ["", "[project]\nname = 'other'\nentry-points.g.x = 'y:z'", "no toml", None]
)
def test_a_folder_of_another_project_offers_nothing(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    if text is not None:
        file.write_text(text)
    assert entry_points._declared(file) == {}
