"""Grids that packages offer, the study's among them (oracles: digests from before their first run,
files written here)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from regimes.base.config import RunConfig, to_dict
from regimes.presets import GRIDS, get_grid, get_preset
from regimes.records.earlier import with_fields_that_left
from regimes.search import sweep

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "analysis" / "grids"
DIGESTS = json.loads((Path(__file__).parent / "grids.json").read_text())
SINCE = {
    "vmap": False,
    "evaluate_every": 1,
    "evaluate_precision": "strict",
    "label_smoothing": 0.0,
}  # fields that are newer than the digests


def digest(cells: dict[str, RunConfig]) -> str:
    plain = [[name, with_fields_that_left(to_dict(cell))] for name, cell in cells.items()]
    for _, fields in plain:
        for name, usual in SINCE.items():  # a field that no grid sets changes no grid
            if fields[name] == usual:
                del fields[name]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_a_pre_registered_grid_is_as_it_was(path: Path) -> None:
    assert path.stem in GRIDS, "install the checkout again: its entry points have changed"
    assert digest(get_grid(path.stem)) == DIGESTS[path.stem]
    assert get_grid(str(path)) == get_grid(path.stem)
    sweep.check_configs(get_grid(path.stem).values())  # each of its runs can begin


def test_every_grid_and_preset_of_the_study_is_offered() -> None:
    presets = {path.stem for path in (FOLDER / "presets").glob("*.toml")}
    grids = {path.stem for path in FOLDER.glob("*.toml")}
    assert grids | {f"preset {name}" for name in presets} == {*DIGESTS}
    for name in presets:
        assert digest({"none": get_preset(name)}) == DIGESTS[f"preset {name}"], name


def python(code: str, folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that finds these folders before others, and no checkout's root."""
    first = [str(path) for path in paths]
    code = (
        "import sys\n"
        f"sys.path[:] = [*{first!r}, *(p for p in sys.path if p != {str(ROOT)!r})]\n{code}"
    )
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, check=False)


def test_the_toolkit_alone_has_its_own_presets_and_a_sentence_for_others(tmp_path: Path) -> None:
    """In a process that finds neither the study nor its metadata."""
    (tmp_path / "regimes").symlink_to(ROOT / "regimes")
    code = """
import importlib.metadata
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
from regimes.base.errors import ConfigError
from regimes.presets import GRIDS, get_grid, get_preset, list_groups
for name in GRIDS:
    get_grid(name)
assert get_preset("smoke") and get_grid("lm-small") and list_groups()
try:
    get_grid("tournament-smoke")
except ConfigError as error:
    print(error)
"""
    done = python(code, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("unknown grid 'tournament-smoke': ")


POINTS = """[regimes.grids]
mine = offering_grids
none = nowhere.to.be_found
"""


def test_a_package_offers_grids_and_presets(tmp_path: Path) -> None:
    """By its own names; the toolkit's stay, and a package that is not there is one warning."""
    (tmp_path / "regimes").symlink_to(ROOT / "regimes")
    folder = tmp_path / "offering_grids"
    (folder / "presets").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    words = 'group = "Theirs"\nabout = """\nOf two\nlines."""\n'
    (folder / "mine.toml").write_text(f'{words}base = "tiny"\n[schedules.a]\n')
    (folder / "smoke.toml").write_text("[schedules.only]\n")
    (folder / "presets/tiny.toml").write_text(f"{words}[base]\nepochs = 2\n")
    info = tmp_path / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    code = """
from regimes.presets import get_grid, get_preset, list_groups
assert get_preset("tiny").epochs == get_preset("mine/a").epochs == 2
assert len(get_grid("smoke")) > 5
print([(g.kind, g.about, g.rows) for g in list_groups(["theirs"])])
"""
    done = python(code, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = [("preset", "Theirs", [("tiny", "Of two lines.")])]
    kinds += [("grid", "Theirs", [("mine", "Of two lines.")])]
    assert done.stdout == f"{kinds}\n"
    assert "the grids of nowhere.to.be_found cannot be found" in done.stderr
    assert "Traceback" not in done.stderr
