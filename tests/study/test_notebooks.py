"""The notebooks: each runs from a clean kernel, and what is committed is whole, quiet and portable.

The short ones run in every test run, the others with the slow tests; all of them offline.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from analysis.notebook.outputs import reasons, show
from analysis.paper.figure2 import figure2a
from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.records import Record, load_all

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STATEMENTS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.For, ast.While, ast.If, ast.Try, ast.With),
)
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
TRAINING = ("regimes.run(", "regimes.simulate(", "regimes.harm(", "regimes.plan(")
OURS = ("8-your-own-model", "11-your-own-harm", "12-your-own-plan")  # those that define something
ABSOLUTE = re.compile(r"(?<![\w./:<])/(?:[\w.-]+/)+[\w.-]+|\b[A-Z]:\\")


class Node(dict[str, Any]):
    """A table whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


@functools.cache
def read(path: Path) -> Any:
    """As `nbformat` reads it, whose import takes three seconds; it is asked in the slow tests."""
    return json.loads(path.read_text(encoding="utf-8"), object_hook=joined)


def joined(table: dict[str, Any]) -> Node:
    """With lines as one text: of a source, and of an output in each of its types."""
    texts = {key for key in table if key in ("source", "text") or "/" in key}
    found = {key: "".join(table[key]) for key in texts if isinstance(table[key], list)}
    return Node(table | found)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code(notebook) for output in cell.outputs]


def texts(notebook: Any) -> str:
    """What a reader of the outputs sees, without pictures."""
    found = []
    for output in outputs(notebook):
        shown = {**output.get("data", {}), "text": output.get("text", "")}
        found += [str(value) for kind, value in shown.items() if not kind.startswith("image/")]
    return "\n".join(found)


def complaints(notebook: Any) -> list[str]:
    """Errors, and whatever a cell wrote to stderr: a warning, say."""
    return [
        str(output)
        for output in outputs(notebook)
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.slow
@EACH
def test_a_notebook_runs_from_a_clean_kernel(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in code(notebook):
        cell.outputs = []
    before = path.read_bytes()
    place = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place).execute()
    assert complaints(notebook) == []
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) >= 1
    assert path.read_bytes() == before


@EACH
def test_a_notebook_is_committed_whole_with_quiet_and_portable_outputs(path: Path) -> None:
    notebook = read(path)
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run it top to bottom in a clean kernel"
    assert complaints(notebook) == []
    assert ABSOLUTE.findall(texts(notebook)) == []
    assert path.stat().st_size < 1_000_000
    question, first = notebook.cells[:2]
    assert "in-google-colab" in question.source
    assert first.source.startswith("import regimes\nfrom analysis import notebook\n")
    assert any("image/png" in output.get("data", {}) for output in first.outputs)


@EACH
def test_a_notebook_is_thin_trains_once_and_calls_what_is_there(path: Path) -> None:
    """Words between cells leave the numbers of runs to the records."""
    cells = read(path).cells
    sources = [cell.source for cell in code(read(path))]
    assert sum(any(call in source for call in TRAINING) for source in sources) == 1
    assert any(cell.source.startswith("## Live") for cell in cells)
    if path.stem not in OURS:
        nodes = [node for source in sources[1:] for node in ast.walk(ast.parse(source))]
        assert [ast.unparse(node) for node in nodes if isinstance(node, STATEMENTS)] == []
    assert list_lacking(sources) == []
    words = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert re.findall(r"\bn\s*=\s*\d", words) == []
    linked = re.findall(r"\]\((?!https:)([^)]+\.ipynb)\)", words)
    assert [name for name in linked if not (FOLDER / name).exists()] == []


def list_lacking(sources: list[str]) -> list[str]:
    """What cells need and is not there: names of modules, and methods of their own classes."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    names: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), names)
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id)
            if isinstance(module, types.ModuleType) and not hasattr(module, node.attr):
                found.append(ast.unparse(node))
        if isinstance(node, ast.ClassDef):
            own = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            for base in node.bases:
                made: Any = eval(ast.unparse(base), names)
                needed: frozenset[str] = getattr(made, "__abstractmethods__", frozenset())
                found += [f"{node.name}.{name}" for name in sorted(needed - own)]
    return found


def test_an_absolute_path_and_what_a_notebook_lacks_would_be_found() -> None:
    """And not a ratio or a closing tag."""
    assert ABSOLUTE.findall("saved to /home/me/runs/x") == ["/home/me/runs/x"]
    assert ABSOLUTE.findall("displacement / lr, s/epoch, 1/2, ../data/x, </td></tr>") == []
    assert list_lacking(["import regimes", "regimes.trane()"]) == ["regimes.trane"]
    mine = "import regimes\nclass Mine(regimes.Compressor):\n    def check(self): ..."
    assert list_lacking([mine]) == ["Mine.exchange", "Mine.traffic"]


# -- Colab -----------------------------------------------------------------------------------


class Shell:
    """Stands in for IPython's: notes what a cell asks of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def system(self, line: str) -> None:
        self.asked.append(line)

    def run_line_magic(self, name: str, line: str) -> None:
        self.asked.append(f"%{name} {line}")


def colab() -> str:
    """The cell that installs, which one page has for all notebooks."""
    page = FOLDER.parent / "docs" / "how-to" / "notebooks.md"
    (cell,) = re.findall(r"```python\n(import os\n.*?)```", page.read_text(), re.DOTALL)
    return str(cell)


@pytest.mark.parametrize("there", [True, False], ids=["in Colab", "elsewhere"])
def test_the_cell_of_the_page_installs_in_colab_and_does_nothing_elsewhere(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It clones the repository that the reader names, and no other."""
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    monkeypatch.setenv("REGIMES_REPOSITORY", "https://localhost/mine; rm x")
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    if there:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    shell = Shell()
    exec(colab(), {"get_ipython": lambda: shell})
    assert shell.asked == there * [
        "git clone --quiet --depth 1 -- 'https://localhost/mine; rm x' /content/regimes",
        "pip install --quiet /content/regimes",  # its wheel, from the clone
        "%cd -q /content/regimes/notebooks",
    ]
    assert sys.path[0] == ("/content/regimes" if there else before[0])
    shell = Shell()
    for given in (None, "") if there else ():
        monkeypatch.delenv("REGIMES_REPOSITORY", raising=False)
        if given is not None:
            monkeypatch.setenv("REGIMES_REPOSITORY", given)
        with pytest.raises(RuntimeError, match="set REGIMES_REPOSITORY to the repository"):
            exec(colab(), {"get_ipython": lambda: shell})
        assert shell.asked == []


# -- what they show with ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return load_all(FOLDER.parent / "data" / "reference" / "small.tar.xz")


def test_a_shown_figure_is_small_and_says_its_caption_to_those_who_cannot_see(
    runs: list[Record],
) -> None:
    picture = show(figure2a(runs))
    width, height = struct.unpack(">II", picture.data[16:24])  # of the PNG's header
    assert (width, height) == (864, 396)
    assert style.describe_setting(runs[0]).replace("\xa0", " ") in picture.alt.replace("\xa0", " ")


def test_reasons_are_those_that_the_record_gives(runs: list[Record]) -> None:
    run = next(run for run in runs if run.name == "accordion")
    rows = reasons(run, "features.3.weight")
    judged = rows[rows["rule"] == "norm change"].query("ratio != ''")
    assert len(judged) >= 3
    assert ((judged["ratio"] >= judged["threshold"]) == (judged["level"] == "low")).all()
    assert rows["level"].tolist() == [row["layers"]["level"][3] for row in run.rows]
    with pytest.raises(RecordError, match=r"no layer 'features\.3': did you mean 'features\.3\."):
        reasons(runs[0], "features.3")  # not an empty table: all levels were kept
