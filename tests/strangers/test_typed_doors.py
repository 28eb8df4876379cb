"""What editors and type checkers know of the public names (oracles: mypy, pyright and Jedi, on
scripts as users write them; a line of `typed/mistakes.py` with a comment has a mistake)."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import regimes

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "typed").glob("*.py"))
FUNCTIONS = [name for name in regimes.__all__ if inspect.isfunction(getattr(regimes, name))]
STRICT = (  # what `mypy --strict` turns on for a module
    *("disallow_any_generics", "disallow_subclassing_any", "disallow_untyped_calls"),
    *("disallow_untyped_defs", "disallow_incomplete_defs", "disallow_untyped_decorators"),
    *("check_untyped_defs", "warn_return_any", "strict_equality", "extra_checks"),
)


def mistakes() -> set[tuple[str, int]]:
    return {
        (path.name, number)
        for path in SCRIPTS
        if path.stem == "mistakes"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "  # " in line
    }


def found_by_mypy(*options: str) -> tuple[set[tuple[str, int]], list[str], str]:
    """The places of errors, what the lines of ``reveal_type`` say, and all that mypy says."""
    api = pytest.importorskip("mypy.api", reason="needs the extra dev")
    said, refused, _ = api.run([*options])
    assert not refused
    parts = [line.split(":", 2) for line in said.splitlines() if line.count(":") >= 2]
    errors = {
        (Path(name).name, int(number)) for name, number, rest in parts if " error:" in f" {rest}"
    }
    return errors, [rest for *_, rest in parts if "Revealed type" in rest], said


def test_mypy_finds_each_mistake_and_no_other(tmp_path: Path) -> None:
    """With the package's own settings for the package, so that `make check` has left a cache."""
    names = tmp_path / "names.py"
    names.write_text(
        "import regimes\n" + "".join(f"reveal_type(regimes.{name})\n" for name in regimes.__all__)
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    del settings["files"]
    modules = [path.stem for path in (*SCRIPTS, names)]
    strict = dict.fromkeys(STRICT, True) | {"implicit_reexport": False}
    settings["overrides"] = [{"module": modules, "enable_error_code": ["misc"], **strict}]
    config = tmp_path / "pyproject.toml"
    config.write_text(tomli_w.dumps({"tool": {"mypy": settings}}))
    errors, revealed, said = found_by_mypy(
        "--config-file", str(config), *map(str, (*SCRIPTS, names))
    )
    assert errors == mistakes(), said
    assert len(revealed) == len(regimes.__all__), said
    assert not [line for line in revealed if line.endswith('"Any"')]


@pytest.mark.slow
def test_a_strict_user_sees_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    options = ("--strict", "--follow-imports", "silent", "--config-file", "")
    errors, _, said = found_by_mypy(*options, "--cache-dir", str(tmp_path), *map(str, SCRIPTS))
    assert errors == mistakes(), said


def test_pyright_finds_each_mistake_and_no_other() -> None:
    pytest.importorskip("pyright", reason="is installed by `make pyright`")
    words = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*words, *map(str, SCRIPTS)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    said = json.loads(done.stdout)["generalDiagnostics"]
    places = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in said}
    assert places == mistakes(), said


def test_no_argument_of_a_public_function_is_of_any_type() -> None:
    found = [
        f"{name}({parameter.name})"
        for name in FUNCTIONS
        for parameter in inspect.signature(getattr(regimes, name)).parameters.values()
        if parameter.annotation in ("Any", inspect.Parameter.empty)
    ]
    assert found == []


def test_harm_and_plan_pass_on_what_simulate_takes() -> None:
    from regimes.training.simulate import Training

    own = {"model", "train_data", "test_data", "out", "set", "reporters"}
    taken = {
        name: parameter.annotation
        for name, parameter in inspect.signature(regimes.simulate).parameters.items()
        if name not in own
    }
    passed = {name: hint.__forward_arg__ for name, hint in Training.__annotations__.items()}
    assert passed | {"metric": taken["metric"]} == taken
    assert passed["metric"].replace(" | str", "") == taken["metric"]


def test_an_editor_completes_names_and_shows_signatures() -> None:
    """Jedi reads the source alone, as an editor without a running Python does."""
    jedi = pytest.importorskip("jedi", reason="needs the extra notebooks")
    project = jedi.Project(ROOT)

    def written(text: str) -> Any:
        return jedi.Script(f"import regimes\nregimes.{text}", project=project)

    assert {*regimes.__all__} <= {one.name for one in written("").complete()}
    for name in FUNCTIONS:
        signatures = written(f"{name}(").get_signatures()  # several of one that is overloaded
        shown = {parameter.name for one in signatures for parameter in one.params}
        parameters = inspect.signature(getattr(regimes, name)).parameters.values()
        assert {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL} <= shown, name
