"""README, CONTRIBUTING and docs: their code runs, their links lead somewhere, their site is whole.

Oracles: the code itself, the committed records, the command line's own signatures, a browser.
"""

from __future__ import annotations

import ast
import functools
import http.server
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import combinations
import pytest
from asked import missing
from blocks import PAGES, ROOT, Block, blocks, run

import regimes
from analysis.__main__ import commands
from analysis.findings.pages import NEEDS
from regimes import presets
from regimes.base.config import override
from regimes.cli.app import list_options
from regimes.plotting.offered import find_figures

DOCS = ROOT / "docs"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


def with_blocks(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(b.language in languages for b in blocks(page))]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# -- code blocks -----------------------------------------------------------------------------


def runnable(page: Path) -> list[Block]:
    found = [b for b in blocks(page) if b.language in ("python", "sh") or b.file]
    return [b for b in found if b.mark != "not run"]


def quick(page: Path) -> list[Block]:
    """What comes before the first block that is marked slow."""
    found = runnable(page)
    return found[: next((i for i, b in enumerate(found) if b.mark == "slow"), len(found))]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the committed records."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if quick(p)], ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, scratch: Path) -> None:
    run(page, quick(page))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if len(quick(p)) < len(runnable(p))], ids=name_of
)
def test_all_blocks_of_a_page_run(page: Path, scratch: Path) -> None:
    run(page, runnable(page))


@pytest.mark.parametrize("page", with_blocks("python"), ids=name_of)
def test_python_names_what_is_there(page: Path) -> None:
    """Of blocks that are run as well: their pages may be of the slow tests (`durations.txt`)."""
    for block in blocks(page):
        if block.language == "python":
            compile(block.code, page.name, "exec")
            assert missing(block.code) == [], f"{page.name}:{block.line}"


CHOSEN = {"policy", "compressor", "scatter", None}  # None: **options

DOORS = ("regimes.attach", "regimes.attach_replicas", "regimes.attach_shards")


def test_calls_of_attach_choose_what_is_sent() -> None:
    """Without a choice it warns, and sends 8 bits: no page shows that as the way to call it."""
    for page, block in ((p, b) for p in PAGES for b in blocks(p) if b.language == "python"):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in DOORS:
                given = {keyword.arg for keyword in node.keywords}
                assert given & CHOSEN, f"{page.name}:{block.line}: {ast.unparse(node)}"


def test_names_that_are_not_there_are_found() -> None:
    code = """
from regimes.integrations.lightning import RegimesCallback, Callback_
hook = regimes.attach(model, recrod="runs/mine", **bits)
hook.lgo(train_loss=loss)
hook.sharded_state(savde=folder)
regimes.local_steps(model, optimizer, policy=32).step()
regimes.atach
from regimes.plotting import canvas, canvass
canvas.options(width=3.3)
"""
    assert {*missing(code)} == {
        "regimes.integrations.lightning.Callback_",
        "regimes.attach(recrod=)",
        "hook.lgo",
        "hook.sharded_state(savde=)",
        "regimes.atach",
        "regimes.plotting.canvass",
        "canvas.options",
    }


OF_EVERY_FIGURE = {"where", "style", "width", "format", "plain", "needs", "role", "help"}


def arguments_of_figures() -> dict[str, set[str]]:
    """The options of each figure, read from its file: to import all would take seconds."""
    found = {}
    for name, command in commands().items():
        path = ROOT.joinpath("analysis", *command.module.split(".")).with_suffix(".py")
        (main,) = (
            node
            for node in ast.parse(text(path)).body
            if isinstance(node, ast.FunctionDef) and node.name == "main"
        )
        found[name] = {arg.arg for arg in (*main.args.args, *main.args.kwonlyargs)}
    return found


def commands_of(page: Path) -> list[str]:
    """The lines of its shell blocks, and the `regimes` commands within sentences."""
    shown = [line for b in blocks(page) if b.language == "sh" for line in b.commands]
    prose = re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)
    return [*shown, *(" ".join(said.split()) for said in re.findall(r"`(regimes [^`]+)`", prose))]


def test_commands_are_those_of_the_command_line() -> None:
    """Subcommands, options, presets, settings and modules, of the blocks that are not run too."""
    from regimes import cli

    figures = arguments_of_figures()
    lines = {line for page in PAGES for line in commands_of(page)}
    assert len(lines) > 100
    for line in sorted(lines):
        words = shlex.split(line)
        if "regimes" in words and words[0] not in ("pip", "make"):
            verb, *rest = words[words.index("regimes") + 1 :]
            if verb.isupper():  # the reader fills it in
                continue
            known = list_options(getattr(cli, verb))
            if verb == "figure" and rest:
                known = figures.get(rest[0], figures["figures"]) | OF_EVERY_FIGURE
            for option in (word for word in rest if word.startswith("--")):
                assert option[2:].partition("=")[0].replace("-", "_") in known, line
            if rest and not (rest[0].isupper() or rest[0].startswith("-") or "..." in rest[0]):
                check_names(verb, rest)
        for module in re.findall(r"-m analysis[. ](\w+)", line):
            assert module in figures, line


def test_no_comment_of_a_shell_block_hides_a_command() -> None:
    """Lines that were joined to fill a paragraph leave the first command and a long comment."""
    for page, block in ((p, b) for p in PAGES for b in blocks(p) if b.language == "sh"):
        for line in block.code.splitlines():
            _, _, comment = line.partition(" #")
            assert not re.search(r"(?<!`)\bregimes [a-z]+ [\w-]", comment), f"{page.name}: {line}"


@functools.cache
def figures_offered() -> set[str]:
    return {*find_figures()}


def check_names(verb: str, words: list[str]) -> None:
    """The preset or grid is there, and takes these settings, but those of a page's plug-ins."""
    sets = [b for a, b in itertools.pairwise(words) if a == "--set"]
    theirs = [x.partition("=")[0].partition(".")[0] for x in sets if re.search(r"\w:[A-Za-z]", x)]
    ours = [setting for setting in sets if re.split("[.=]", setting)[0] not in theirs]
    if verb == "run" and not words[0].endswith(".toml"):
        assert override(presets.get_preset(words[0]), ours)
    if verb == "figure":
        assert words[0] in figures_offered()
    if verb in ("tune", "ablate") and not re.search(r"/|\.toml$", words[0]):  # else of a page's own
        assert words[0] in presets.GRIDS or words[0] in presets.PRESETS
        if ours:
            assert override(next(iter(presets.get_grid(words[0]).values())), ours)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_has_a_reason(page: Path) -> None:
    """A mark stands right before a block, or it marks nothing."""
    marks = re.findall(r"^<!-- (?:not run|slow)\b", text(page), re.MULTILINE)
    assert len(marks) == sum(bool(block.mark) for block in blocks(page))


# -- links ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", DOCS / "reference/index.md"], ids=name_of
)
def test_the_order_of_imports_is_the_one_that_is_checked(page: Path) -> None:
    """Oracle: the layers of the import contract."""
    contracts = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    said = " ".join(re.findall(r"^> (.+)$", text(page), re.MULTILINE)).split(" → ")
    assert [set(re.findall(r"\w+", rooms)) for rooms in said] == [
        set(re.findall(r"\w+", rooms)) for rooms in layers if rooms != "__main__"
    ]


def test_the_tree_has_each_room() -> None:
    """Oracle: the folders."""
    tree = re.search(r"^regimes/\n((?:  .+\n)+)", text(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert tree
    lines = [re.split(r" {2,}", line.strip())[0] for line in tree[1].splitlines()]
    named = {name for line in lines for name in line.split(", ")}
    rooms = {path.parent.name for path in (ROOT / "regimes").glob("*/__init__.py")}
    assert rooms <= named
    assert all((ROOT / "regimes" / f"{name}.py").exists() for name in named - rooms)


def anchors(page: Path) -> set[str]:
    """What headings are called in a link."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_are_there(page: Path) -> None:
    """``compression/base.py`` stands for the file in ``regimes/``."""
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text(page)):
        if "NAME" not in path:
            assert (ROOT / path).exists() or (ROOT / "regimes" / path).exists(), path


ROWS = [line for line in text(ROOT / "CONTRIBUTING.md").splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("row", [row for row in ROWS if "`" in row], ids=lambda row: row[2:40])
def test_what_contributing_names_is_in_the_files_of_its_row(row: str) -> None:
    """Each word in backticks is a file, a folder, or a name in one of the row's files."""
    places, names = [], []
    for word in re.findall(r"`([^`]+)`", row):
        path = re.sub(r"/?\b(NAME|ROOM)\b.*", "", word)  # up to what the reader fills in
        found = [
            base / path for base in (ROOT, ROOT / "regimes") if path and (base / path).exists()
        ]
        places += found
        if "/" in word or found:
            assert found, word
        elif not word.startswith(("make ", "python ", "regimes ", "--")):
            names.append(word)
    sources = [text(place) for place in places if place.is_file()]
    folders = [path for place in places if place.is_dir() for path in place.glob("*.py")]
    sources += [path.read_text(encoding="utf-8") for path in folders]
    for name in names:
        *_, last = re.findall(r"[A-Za-z_]\w*", name.partition("(")[0])
        assert any(re.search(rf"\b{last}\b", source) for source in sources), name


@pytest.mark.parametrize("kind", ["compressors", "policies", "detectors", "instruments"])
def test_every_option_has_its_row(kind: str) -> None:
    """The hand-written tables name what is registered, no more and no less."""
    page = text(DOCS / "reference" / "options.md")
    part = re.search(rf"^## {kind.title()}\n(.*?)^<!-- options", page, re.MULTILINE | re.DOTALL)
    assert part
    named = {
        name
        for cell in re.findall(r"^\| (`.*?) \|", part[1], re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    }
    registry = importlib.import_module(generate().REGISTRIES[kind]).REGISTRY
    assert named == set(registry)


# -- the site --------------------------------------------------------------------------------


@functools.cache
def generate() -> ModuleType:
    """``docs/generate.py``, which is no package."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WAYS = {  # of the page: call and mode of the recorded answers
    "`run, sync_policy`": ("trainer", "local steps"),
    "`simulate`": ("trainer", "own objects"),
    "`attach, FSDP2`": ("attach", "FSDP2"),
    "`local_steps`": ("local_steps", "processes"),
    "`local_steps, FSDP2`": ("local_steps", "FSDP2"),
}


def test_the_reference_can_be_read_without_a_build() -> None:
    """Its tables stand in the pages, as ``docs/generate.py --fill`` writes them."""
    filled = [page for page in DOCS.rglob("*.md") if generate().FILLED.search(text(page))]
    assert len(filled) == 6
    for page in filled:
        assert generate().filled(text(page)) == text(page), page
    found = re.findall(r"^## regimes (\w+)$", text(DOCS / "reference/commands.md"), re.MULTILINE)
    assert sorted(found) == sorted({*regimes.cli.__all__} - {"app"})


def parts_of(names: str) -> list[str]:
    """A line is of several parts: compressor `dense`, `cast`; policy that reads `norm`."""
    parts = []
    for kind in names.split("; "):
        said = re.findall(r"`([^`]+)`", kind)
        parts += [kind.partition("`")[0] + name for name in said] or [kind]
    return [part.replace("signal = ", "signal ") for part in parts]


def test_the_page_says_what_was_recorded() -> None:
    """Oracle: as in ``tests/oracles/test_works_with.py``."""
    recorded = json.loads(text(ROOT / "tests/shared/combinations.json"))
    compared = set()
    for line in generate().works("parts").splitlines():
        names, _, said = line.removeprefix("- ").rpartition(": ")
        answer, *conditions = said.split("; not ")
        ways = set(re.findall(r"`[^`]+`", answer))
        for part, (column, (call, mode)) in itertools.product(parts_of(names), WAYS.items()):
            if part in recorded["parts"][call] and not conditions:
                works = (column in ways) == answer.startswith("in ")
                before = part in recorded["refused"][call][mode]
                changed = (call, mode, part) in combinations.CHANGED
                assert works == (before == changed), (part, column)
                compared.add((part, column))
    assert len(compared) >= 88


def test_every_public_module_is_in_the_reference_once() -> None:
    pages = "".join(map(text, (DOCS / "reference").glob("*.md")))
    rooms = [mark[2] for mark in generate().MARK.finditer(pages) if mark[1] == "reference"]
    shown = [name for room in " ".join(rooms).split() for name in generate().modules(room)]
    files = [p.relative_to(ROOT).with_suffix("").parts for p in (ROOT / "regimes").rglob("*.py")]
    public = {".".join(parts) for parts in files if not parts[-1].startswith("_")}
    packages = {".".join(parts[:-1]) for parts in files if parts[-1] == "__init__"}
    assert sorted(shown) == sorted(public | packages)


def test_every_page_is_in_the_navigation() -> None:
    sections = tomllib.loads(text(DOCS / "nav.toml"))["section"]
    shown = [page for section in sections for page in section["pages"]]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    later = {f"findings/{name}.md" for name in NEEDS}  # written once their records are committed
    assert sorted(shown) == sorted(pages - {"index.md"} | later)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; any warning of Sphinx is an error."""
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package, reason="needs the extra docs")
    pages, out = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("site")
    generate().write(pages)
    options = ["--fail-on-warning", "--quiet", "-c", str(DOCS), "-d", str(pages / ".doctrees")]
    words = [sys.executable, "-m", "sphinx", *options, str(pages), str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_public_name_is_in_the_site(site: Path) -> None:
    pages = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    for name in regimes.__all__:
        assert f'id="{getattr(regimes, name).__module__}.{name}"' in pages, name


@pytest.mark.slow
def test_no_page_names_a_script_style_or_picture_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
        r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
        r"""|url\(["']?((?:https?:)?//[^"')]+)"""
    )
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert loaded.findall(path.read_text()) == [], path


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("place", ["server", "folder"])
def test_a_browser_asks_for_nothing_from_outside(site: Path, served: str, place: str) -> None:
    """Every request of three pages, and of a search, from a server and from the folder itself."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs the browser chromium (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    start = served if place == "server" else f"{site.as_uri()}/"
    asked: list[str] = []
    with sync_playwright() as driver:
        args = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = driver.chromium.launch(executable_path=chromium, args=args)
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index.html", "tutorial.html", "reference/compression.html"):
            page.goto(start + name, wait_until="networkidle")
        page.locator("input.sidebar-search").fill("residual")
        page.locator("input.sidebar-search").press("Enter")
        page.wait_for_selector("ul.search li")
        browser.close()
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((start, "data:", "blob:"))] == []
