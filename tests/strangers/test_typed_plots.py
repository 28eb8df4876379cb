"""A checker knows what a drawing has (oracle: mypy on a script of the pages' calls)."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = """
import matplotlib.axes
import pandas as pd
import regimes


def draw(ax: matplotlib.axes.Axes) -> None:
    drawing = regimes.plot("runs")
    files: list[str] = [path.name for path in drawing.save("mine")]
    numbers: pd.DataFrame = drawing.data
    drawing.savefig("mine.pdf")
    regimes.plot("runs", ax=ax).set_size_inches(3.0, 2.0)
    regimes.plot("runs", ax=ax).save("mine")  # not of a figure of one's own
    drawing.sav("mine")
"""


def test_mypy_knows_save_and_data(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api", reason="needs the extra dev")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    said, _, _ = api.run(["--config-file", str(root / "pyproject.toml"), str(script)])
    errors = [line.partition("error: ")[2] for line in said.splitlines() if "error: " in line]
    assert len(errors) == 2, said
    assert errors[0].startswith('"Figure" has no attribute "save"')
    assert errors[1].startswith('"Shown" has no attribute "sav"')
