"""Templates to pages: ``templates/NAME.md.jinja`` becomes ``docs/findings/NAME.md``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import jinja2

from .claims import FILTERS, check
from .sources import ROOT
from .store import Store

TEMPLATES = Path(__file__).with_name("templates")
DOCS = ROOT / "docs"
NUMBERS_FILE = DOCS / "findings" / "numbers.json"
SUMMARY = "findings"  # the page above the others


def names() -> list[str]:
    """Of all pages."""
    return sorted(path.name.removesuffix(".md.jinja") for path in TEMPLATES.glob("[a-z]*.jinja"))


def place(name: str) -> Path:
    """Where a page is written."""
    return DOCS / "findings.md" if name == SUMMARY else DOCS / "findings" / f"{name}.md"


def render(name: str, store: Store) -> str:
    """The Markdown of a page.

    Raises:
        ClaimError: a sentence says what its number does not.
        Missing: a number would have to be computed, and the store may not.
    """
    return _environment(store).get_template(f"{name}.md.jinja").render()


def _environment(store: Store) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(FILTERS)
    made.globals["check"] = check
    made.globals.update({key: functools.partial(store.get, key) for key in store.functions})
    return made


def write(store: Store, chosen: Iterable[str] | None = None) -> list[Path]:
    """Writes the pages that differ from their files, and the numbers of all; returns the paths."""
    texts = {place(name): render(name, store) for name in (chosen or names())}
    texts[NUMBERS_FILE] = store.text()
    NUMBERS_FILE.parent.mkdir(exist_ok=True)
    changed = [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    return changed
