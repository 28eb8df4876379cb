"""Templates to pages: ``templates/NAME.md.jinja`` becomes ``docs/findings/NAME.md``."""

from __future__ import annotations

import functools
import re
import textwrap
import traceback
from pathlib import Path

import jinja2

from . import sources
from .checks import FILTERS, ClaimError, check
from .sources import ROOT
from .store import Store

TEMPLATES = Path(__file__).with_name("templates")
DOCS = ROOT / "docs"
NUMBERS_FILE = DOCS / "findings" / "numbers.json"
WIDTH = 112  # letters of a line
BLOCK = re.compile(r"^```.*?^```$|(?:^[^\n]*\S[^\n]*(?:\n|\Z))+", re.DOTALL | re.MULTILINE)
# words that a line's end does not part
TOGETHER = re.compile(r"[+-]?[\d.]+ \[[^\]]+\]|\bn = \d+|\d [%±] ?\d*")
SUMMARY = "findings"  # the page above the others
NEEDS = {"cifar10": "cifar10-fast"}  # pages that are written once these records are committed


def names() -> list[str]:
    """The names of all pages whose records are there."""
    found = sorted(path.name.removesuffix(".md.jinja") for path in TEMPLATES.glob("[a-z]*.jinja"))
    return [name for name in found if name not in NEEDS or sources.digest(f"{NEEDS[name]}.tar.xz")]


def place(name: str) -> Path:
    """Where a page is written."""
    return DOCS / "findings.md" if name == SUMMARY else DOCS / "findings" / f"{name}.md"


def render(name: str, store: Store) -> str:
    """The Markdown of a page.

    Raises:
        ClaimError: a sentence says what its number does not.
        Missing: a number would have to be computed, and the store may not.
    """
    return wrapped(_environment(store).get_template(f"{name}.md.jinja").render())


def wrapped(text: str) -> str:
    """Paragraphs and list items filled to `WIDTH` letters, one empty line between blocks; tables,
    headings, pictures and blocks of code as they are."""
    return "\n\n".join(_filled(block.rstrip("\n")) for block in BLOCK.findall(text)) + "\n"


def _filled(block: str) -> str:
    if block.startswith("```"):
        return block
    if re.match(r"[|#!<]", block):
        return "\n".join(line.rstrip() for line in block.split("\n") if line.strip())
    items = re.split(r"\n(?=- )", block)
    filled = "\n".join(
        textwrap.fill(
            TOGETHER.sub(lambda found: found[0].replace(" ", "\0"), " ".join(item.split())),
            WIDTH,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )
    return filled.replace("\0", " ")


def _environment(store: Store) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(FILTERS)
    environment.globals |= {"check": check, "pages": names(), "picture": picture}
    environment.globals.update({key: functools.partial(store.get, key) for key in store.functions})
    return environment


def picture(file: str, shows: str) -> str:
    """A committed picture below ``data/reference``, for a page below ``docs/findings``; nothing
    where it is not there."""
    there = (sources.REFERENCE / file).exists()
    return f"![{shows}](../../data/reference/{file})" if there else ""


def write(store: Store) -> list[Path]:
    """Writes the pages that differ from their files, and the numbers of all; returns the paths.

    Raises:
        ClaimError: of all sentences that their numbers do not bear out, a line each. The numbers
            and the other pages are written.
    """
    texts, failed = {}, []
    for name in names():
        try:
            texts[place(name)] = render(name, store)
        except ClaimError as error:
            failed.append(f"{name}.md.jinja:{_line(error)}: {error}")
    texts[NUMBERS_FILE] = store.text(unused=bool(failed))
    NUMBERS_FILE.parent.mkdir(exist_ok=True)
    changed = [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    if failed:
        raise ClaimError("\n".join(failed))
    return changed


def _line(error: Exception) -> int:
    """The line of the template, which jinja puts into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename.endswith(".jinja")), 0)
