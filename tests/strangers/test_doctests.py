"""Every ``>>>`` in a docstring of the package, run (oracle: what stands below it).

Docstrings are read from the source, because the shape checks of the tests wrap functions, and
``doctest`` leaves out what another module seems to have defined.
"""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARSER = doctest.DocTestParser()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def examples(path: Path) -> list[doctest.DocTest]:
    """One test per docstring that has an example."""
    found: list[doctest.DocTest] = []
    source = path.read_text(encoding="utf-8")
    if ">>>" not in source:  # most files: parsing them all takes a second on each worker
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ">>>" in (words := ast.get_docstring(node) or ""):
            name = getattr(node, "name", path.stem)
            found.append(PARSER.get_doctest(words, {}, name, str(path), node.body[0].lineno - 1))
    return found


FILES = [path for path in sorted((ROOT / "regimes").rglob("*.py")) if examples(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_examples_in_docstrings_say_what_is(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder with the committed records, where an example may train."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for example in examples(path):
        example.globs = dict(vars(module))
        said: list[str] = []
        doctest.DocTestRunner().run(example, out=said.append)
        assert said == [], "".join(said)


def test_there_are_examples() -> None:
    """The search above finds some, in rooms that it should."""
    assert {"toml.py", "layers.py", "agreement.py", "change.py"} <= {p.name for p in FILES}


CALLED_FIRST = (
    *("run", "simulate", "branch", "attach", "local_steps", "check_compressor"),
    *("load", "load_all", "frame", "summary", "compare", "plot"),
    *("get_preset", "get_grid", "override"),
)


@pytest.mark.parametrize("name", CALLED_FIRST)
def test_the_names_that_users_call_first_have_an_example(name: str) -> None:
    import regimes

    assert ">>> " in (getattr(regimes, name).__doc__ or "")
