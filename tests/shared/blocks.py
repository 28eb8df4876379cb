"""The code blocks of a page of the documentation, and how they are run: in order, in one folder.

A comment before a block says what is not done with it:

- ``<!-- not run: reason -->``: never run; its commands are still parsed.
- ``<!-- slow: reason -->``: this block and all after it on the page run in the slow tests only.

A Python block with a ``title`` is a file of that name; the others share one namespace per page.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regimes.__main__ import main as regimes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|slow): (?P<reason>[^>]+) -->\n)?"
    r"^```(?P<language>\w*)(?P<title>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is where its code begins."""

    language: str
    code: str
    line: int
    mark: str = ""
    file: str = ""

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, joined where they go on, without comments."""
        joined = self.code.replace("\\\n", " ").splitlines()
        return [words for line in joined if (words := uncommented(line))]


def uncommented(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line).strip()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        file = re.search(r'title="([^"]+)"', match["title"])
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(
            Block(
                match["language"], match["code"], line, match["mark"] or "", file[1] if file else ""
            )
        )
    return found


def run(page: Path, chosen: Sequence[Block]) -> None:
    """Run blocks in the current folder."""
    namespace: dict[str, Any] = {"__name__": "page"}
    before = set(sys.modules)
    with imports_from_here():
        try:
            for block in chosen:
                if block.file:
                    Path(block.file).write_text(block.code, encoding="utf-8")
                elif block.language == "python":
                    code = "\n" * (block.line - 1) + block.code  # so that errors name the line
                    exec(compile(code, page.name, "exec"), namespace)
                else:
                    for line in block.commands:
                        command(shlex.split(line))
        finally:
            here = {Path(block.file).stem for block in chosen if block.file}
            for name in (set(sys.modules) - before) & here:
                del sys.modules[name]


@contextlib.contextmanager
def imports_from_here() -> Iterator[None]:
    sys.path.insert(0, "")
    sys.path_importer_cache.pop(str(Path.cwd()), None)
    try:
        yield
    finally:
        sys.path.remove("")


def command(words: list[str]) -> None:
    """``regimes ...``, ``python -m MODULE ...`` or ``python FILE ...`` in this process."""
    kept = sys.argv
    try:
        if words[0] == "regimes":
            sys.argv = words
            regimes()
        elif words[:2] == ["python", "-m"]:
            sys.argv = words[2:]
            with warnings.catch_warnings():  # an analysis that another one has imported already
                warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
                runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        elif words[0] == "python":
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            raise AssertionError(f"{shlex.join(words)}: mark the block as not run, with a reason")
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{shlex.join(words)} ended with {end.code}") from None
    finally:
        sys.argv = kept
