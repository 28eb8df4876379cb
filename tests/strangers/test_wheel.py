"""The wheel: what is in it, and that it draws and reports without a checkout (oracle: a Python that
knows the wheel alone, in an empty folder)."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from archives import DRAWABLE
from blocks import PAGES, blocks

import regimes
from analysis.__main__ import commands
from analysis.paper.figures import FIGURES

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "data" / "reference"
ARCHIVES = {path.name.partition(".")[0]: path for path in sorted(REFERENCE.glob("*.tar.xz"))}
STAND_INS = {"14": "smoke-quirks-topk", "15": "smoke-quirks-topk", "deficit": "smoke-deficit"}
DRAWN = {  # from records of its grid, or where none are committed, of a similar one
    number: next(
        ARCHIVES[grid] for grid in (*figure.small, STAND_INS.get(number)) if grid in ARCHIVES
    )
    for number, figure in FIGURES.items()
}
OTHERS: dict[str, list[str]] = {  # the other commands; those of one run have it unpacked
    **{name: [archive] for name, archive in DRAWABLE.items() if name in commands()},
    **{name: [] for name in ("lasso", "paper_times", "published", "quadratic")},
    "claims": [str(REFERENCE), "--paper"],
    "detectors": ["unpacked/low"],
    "signals": ["unpacked/low/seed-1000"],
    "tables": ["small"],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs the extra dev")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("target")
    words = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
    return folder


@pytest.fixture
def command(target: Path, tmp_path: Path):
    """`regimes WORDS` with the wheel alone, in an empty folder."""
    env = {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "100"}

    def run(*words: str | Path, module: str = "regimes") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
            check=False,
        )

    return run


# -- what is in it ---------------------------------------------------------------------------


def test_it_holds_all_modules_and_data_and_claims_three_names(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"regimes", "analysis", "regimes_study.py"}
    for folder in ("regimes", "analysis"):
        files = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix not in (".pyc", "")
        }
        assert files - {"analysis/common/regimes_study.py"} <= {*names}
    data = {f"analysis/data/{path.name}" for path in (ROOT / "analysis/data").iterdir()}
    assert {"regimes/cli/html_report/page.html", "regimes/py.typed", *data} <= {*names}
    assert wheel.stat().st_size < 1_450_000


def test_its_metadata_say_whose_it_is_and_give_no_address(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(name).decode()
    for line in (
        "Author: The Regimes developers",
        "License-File: LICENSE",
        "Keywords: ",
        "Classifier: Typing :: Typed",
    ):
        assert f"\n{line}" in text
    assert "\nProject-URL:" not in text  # there is none yet, and a free one could be taken


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    assert wheel.name.startswith(f"regimes-{regimes.__version__}-")
    assert f"\nversion: {regimes.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) - (\S+)$", changes, re.MULTILINE)  # and its day
    assert newest is not None
    assert newest[1] == regimes.__version__
    assert f"\ndate-released: {newest[2]}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(("given", "asked"), [("", False), ("https://torch/cpu", True)])
def test_only_torch_and_torchvision_come_from_an_index_of_ones_own(given: str, asked: bool) -> None:
    words = ["make", "--always-make", "--dry-run", "demo", f"TORCH_INDEX={given}"]
    lines = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    found = [line for line in lines.splitlines() if "--index-url" in line]
    assert [line.partition("constraints.txt ")[2] for line in found] == (
        [f"--no-deps --index-url {given} torch torchvision"] if asked else []
    )


def test_an_editable_install_is_the_checkout(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs the extra dev")
    (path,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    archive = zipfile.ZipFile(path)
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {"_regimes.pth", "regimes_study.py"}
    assert Path(archive.read("_regimes.pth").decode().strip()) == ROOT


# -- what it does ----------------------------------------------------------------------------

OF_EXTRAS = ("accelerate", "lightning", "transformers")
IMPORT = """
import importlib, json, sys
failed = []
for line in json.load(open("imports.json")):
    try:
        exec(line)
    except ModuleNotFoundError as error:
        failed.append((error.name, line))
ours = [m for n, m in sys.modules.items() if n.partition(".")[0] in ("regimes", "analysis")]
print(json.dumps([failed, [getattr(m, "__file__", None) for m in ours]]))
"""


def imports_shown() -> list[str]:
    """Every import statement of the notebooks, and of the Python blocks of README and docs."""
    code = [block.code for page in PAGES for block in blocks(page) if block.language == "python"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            code += ["".join(cell["source"])] if cell["cell_type"] == "code" else []
    nodes = (node for one in code for node in ast.walk(ast.parse(one)))
    return sorted({ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)})


def test_all_imports_of_notebooks_and_pages_work_with_it(
    target: Path, command, tmp_path: Path
) -> None:
    lines = imports_shown()
    assert len(lines) > 50
    (tmp_path / "imports.json").write_text(json.dumps(lines))
    (tmp_path / "shown.py").write_text(IMPORT)
    done = command(module="shown")
    assert done.returncode == 0, done.stderr
    failed, files = json.loads(done.stdout.splitlines()[-1])
    own = {Path(block.file).stem for page in PAGES for block in blocks(page) if block.file}
    assert [line for name, line in failed if name not in {*OF_EXTRAS, *own}] == []
    assert all(Path(file).is_relative_to(target) for file in files)


OLD = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import regimes_study
    from regimes_study.common.compare import schedules
    from regimes_study import paper
    import regimes_study.paper.published as published
print(*(f"{w.category.__name__}: {w.message} {w.filename}" for w in caught))
import analysis, analysis.common.compare
assert (regimes_study, paper) == (analysis, analysis.paper)
assert schedules is analysis.common.compare.schedules
assert published is analysis.paper.published and len(published.runs()) > 16_000
"""


def test_its_name_of_0_4_warns_and_gives_the_same_modules(command, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(OLD)
    done = command(module="old")
    assert done.returncode == 0, done.stderr
    said = "DeprecationWarning: regimes_study is now analysis"
    assert done.stdout == f"{said} {tmp_path / 'old.py'}\n"


def test_it_is_the_wheel_that_runs(target: Path, command) -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['regimes', 'figure']\n"
        "try: runpy.run_module('regimes', run_name='__main__')\n"
        "finally: print(*{m.__file__ for n, m in sys.modules.items()"
        " if n.startswith('regimes') and m.__file__}, sep='\\n')"
    )
    (Path(target, "asked.py")).write_text(code)
    files = [line for line in command(module="asked").stdout.splitlines() if line.endswith(".py")]
    assert len(files) > 5
    assert all(Path(file).is_relative_to(target) for file in files)


HELP = """
import contextlib, io, json, sys
from analysis.__main__ import offers
from regimes.__main__ import main
failed = {}
commands = [[name] for name in COMMANDS]
for words in [*commands, *(["figure", name] for name in offers())]:
    sys.argv, said = ["regimes", *words, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        if not end.code and "usage" in said.getvalue():
            continue
    except Exception as error:
        said.write(repr(error))
    failed[" ".join(words)] = said.getvalue()
print(json.dumps([len(offers()), failed]))
"""


@pytest.mark.slow
def test_every_command_and_figure_explains_itself(command, tmp_path: Path) -> None:
    shown = command("--help").stdout
    names = re.search(r"\{([a-z,]+)\}", shown)
    assert names is not None
    (tmp_path / "asked.py").write_text(HELP.replace("COMMANDS", repr(names[1].split(","))))
    done = command(module="asked")
    assert done.returncode == 0, done.stderr
    count, failed = json.loads(done.stdout.splitlines()[-1])
    assert count > 40
    assert failed == {}


@pytest.mark.slow
def test_it_lists_figures_and_presets(command) -> None:
    listed = command("figure")
    assert listed.returncode == 0, listed.stderr
    first = {line.split(" ")[0] for line in listed.stdout.splitlines()}
    assert first >= {*FIGURES, *commands()} - {"figures"}
    presets = command("presets").stdout
    assert all(name in presets for name in ("paper-vgg19bn-cifar10", "tournament-smoke"))


@pytest.mark.slow
def test_it_trains_a_preset_of_the_study_with_its_instruments(command, tmp_path: Path) -> None:
    short = ["epochs=1", "data.train_size=64", "data.test_size=50", "instruments.moments.stride=1"]
    settings = [word for setting in short for word in ("--set", setting)]
    done = command("run", "tournament-smoke/rank 1", *settings, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert '"moments:mean-top1":' in (tmp_path / "run/epochs.jsonl").read_text()


@pytest.mark.slow
def test_it_draws_figure_2(command, tmp_path: Path) -> None:
    done = command("figure", "2", DRAWN["2"], "--out", "drawn")
    assert done.returncode == 0, done.stderr
    assert "accordion" in done.stdout
    names = {path.name for path in (tmp_path / "drawn/small").iterdir()}
    assert names >= {"figure2a.png", "figure2b.svg", "levels.csv", "table.md"}


@pytest.mark.slow
def test_it_writes_a_report(command, tmp_path: Path) -> None:
    done = command("report", ARCHIVES["lstm-small"])
    assert done.returncode == 0, done.stderr
    assert "regimes figure curves" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_without_records_a_sentence_says_which_and_how_to_make_them(command) -> None:
    asked = command("figure", "8")
    assert asked.returncode == 2
    assert asked.stderr == (
        "error: figure 8 needs records of the grid small-budget (or paper-budget): first `regimes "
        "ablate small-budget --seeds 5`, then `regimes figure 8 runs/small-budget`\n"
    )
    assert "did you mean 'curves'" in command("figure", "curvs").stderr


def test_every_command_of_the_study_is_tried_below() -> None:
    # a campaign trains for hours, provenance needs a checkout, predictions read several archives
    apart = {"figures", "campaign", "provenance", "predictions"}
    assert {*OTHERS, *apart} == {*commands()}


@pytest.mark.slow
@pytest.mark.parametrize("number", DRAWN)
def test_it_draws_every_figure(command, tmp_path: Path, number: str) -> None:
    done = command("figure", number, DRAWN[number])
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("figures/*/*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_it_runs_every_command(command, tmp_path: Path, name: str) -> None:
    words = [ARCHIVES.get(word, word) for word in OTHERS[name]]
    if name in ("detectors", "signals"):
        with tarfile.open(ARCHIVES["small-signals"]) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
    done = command("figure", name, *words)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("figures/**/*.csv")) or name in ("claims", "paper_times")
