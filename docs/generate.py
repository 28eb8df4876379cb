"""What the site adds to the pages as they are written (a hook of mkdocs, see ``mkdocs.yml``).

- ``<!-- reference: regimes.compression -->`` becomes the public modules of that room, from their
  docstrings: a module that is added, moved or removed needs no change here.
- ``<!-- options: policies -->`` becomes a table of the registered names and their fields.
- ``<!-- commands -->`` becomes the help of each subcommand.
- Examples in docstrings, ``>>> ...``, become blocks of code.
- A link to a file of the tree outside ``docs/`` leads to a copy below ``tree/``, so that the same
  link works in the tree and in the site.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import re
import tokenize
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
TREE = "tree/"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
MARK = re.compile(r"^<!-- (reference|options|commands)(?:: ([\w. ]+))? -->$", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n|$).*)*", re.MULTILINE)
REGISTRIES = {
    "compressors": "regimes.compression",
    "policies": "regimes.policies",
    "detectors": "regimes.detectors",
    "instruments": "regimes.instruments",
}


# -- reference -------------------------------------------------------------------------------


def modules(name: str) -> list[str]:
    """The public modules of a room, itself first; of ``regimes`` only those that are no room."""
    place = ROOT.joinpath(*name.split("."))
    if not place.is_dir():
        return [name]
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    files = sorted(place.glob("*.py")) if name == "regimes" else sorted(place.rglob("*.py"))
    found = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    plain = [parts for parts in found if not parts[-1].startswith("_")]
    if name == "regimes":  # a module that has a page of its own is a room
        plain = [parts for parts in plain if parts[-1] not in pages]
    return [name, *(".".join(parts) for parts in plain)]


def reference(names: str) -> str:
    """mkdocstrings' directives for some rooms; a package lends its docstring, not its imports."""
    found = []
    for room in names.split():
        for name in modules(room):
            found.append(f"::: {name}")
            if (ROOT.joinpath(*name.split(".")) / "__init__.py").exists():
                own = ", ".join(defined(ROOT.joinpath(*name.split(".")) / "__init__.py"))
                found.append(f"    options:\n      members: [{own}]")
    return "\n\n".join(found).replace("\n\n    options", "\n    options")


def defined(path: Path) -> list[str]:
    """Public functions and classes that a file defines itself."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in nodes if isinstance(n, kinds) and not n.name.startswith("_")]


# -- options ---------------------------------------------------------------------------------


def options(what: str) -> str:
    """A table of every name that a configuration may give, with its fields and defaults."""
    if what == "config":
        return configuration()
    if what == "names":
        return names()
    registry = importlib.import_module(REGISTRIES[what]).REGISTRY
    lines = ["| name | fields and their defaults | class |", "|---|---|---|"]
    for name in registry:
        cls = registry.find(name)
        path = f"{cls.__module__}.{cls.__name__}"
        fields = ", ".join(f"`{f} = {as_toml(v)}`" for f, v in defaults(cls)) or "none"
        lines.append(f"| `{name}` | {fields} | [`{cls.__name__}`][{path}] |")
    return "\n".join(lines)


def names() -> str:
    """Every public name of the package, and where it is defined."""
    import regimes

    lines = ["| name | defined in |", "|---|---|"]
    for name in regimes.__all__:
        home = getattr(regimes, name).__module__
        lines.append(f"| [`regimes.{name}`][{home}.{name}] | `{home}` |")
    return "\n".join(lines)


def defaults(cls: Any) -> Iterator[tuple[str, Any]]:
    """The fields that a configuration may set."""
    for field in dataclasses.fields(cls):
        if field.init:
            made = field.default_factory
            yield field.name, field.default if made is dataclasses.MISSING else made()


def as_toml(value: Any) -> str:
    """A default as TOML has it."""
    if value is dataclasses.MISSING:
        return "..."
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "unset"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def configuration() -> str:
    """Every key of a configuration, from the dataclasses and the comments beside their fields."""
    from regimes import config

    lines = ["| key | default | meaning |", "|---|---|---|"]
    tables = {
        "": config.RunConfig,
        "data.": config.DataConfig,
        "model.": config.ModelConfig,
        "optimizer.": config.OptimizerConfig,
        "budget.": config.Budget,
        "pruning.": config.PruningConfig,
    }
    for prefix, cls in tables.items():
        said = comments(cls) | attributes(cls)
        for name, value in defaults(cls):
            if not dataclasses.is_dataclass(value):
                meaning = said.get(name, "").replace("|", "\\|")
                lines.append(f"| `{prefix}{name}` | `{as_toml(value)}` | {meaning} |")
    return "\n".join(lines)


def comments(cls: type) -> dict[str, str]:
    """The comment on each field's line."""
    source = inspect.getsource(cls)
    found = {}
    for token in tokenize.tokenize(BytesIO(source.encode()).readline):
        if token.type == tokenize.COMMENT and (field := re.match(r"\s+(\w+):", token.line)):
            found[field[1]] = token.string.lstrip("# ").replace("``", "`")
    return found


def attributes(cls: type) -> dict[str, str]:
    """The lines under "Attributes:" of a docstring."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    parts = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()).replace("``", "`") for name, words in parts}


def commands(_: str = "") -> str:
    """Each subcommand: what it does, and its arguments."""
    files = [ROOT / "regimes" / "cli" / f"{name}.py" for name in ("train", "read")]
    found = []
    for node in [n for file in files for n in ast.parse(file.read_text(encoding="utf-8")).body]:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            words, _, arguments = (ast.get_docstring(node) or "").partition("\n\nArgs:\n")
            found.append(f"## regimes {node.name}\n\n{words}\n")
            positional = {
                a.arg for a in node.args.args if a.annotation and "Positional" in ast.unparse(a)
            }
            rows = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE)
            if rows:
                found.append("| argument | meaning |\n|---|---|")
            for name, meaning in rows:
                shown = name.upper() if name in positional else f"--{name.replace('_', '-')}"
                found[-1] += f"\n| `{shown}` | {' '.join(meaning.split())} |"
    return "\n\n".join(found)


MAKERS = {"reference": reference, "options": options, "commands": commands}


class Examples(griffe.Extension):
    """Fences around examples, so that they are shown as they are written."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that may have a docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```\n", obj.docstring.value)


# -- mkdocs ----------------------------------------------------------------------------------


def source(uri: str) -> Path:
    """The file that a page is made from."""
    return ROOT / uri.removeprefix(TREE) if uri.startswith(TREE) else ROOT / "docs" / uri


def outside(page: Path, link: str) -> str | None:
    """The place in the site of a linked file of the tree that is not in ``docs/``."""
    target = Path(os.path.normpath(page.parent / link))
    if not target.is_file() or not target.is_relative_to(ROOT) or inside(page, link):
        return None
    return TREE + target.relative_to(ROOT).as_posix()


def inside(page: Path, link: str) -> str | None:
    """The place in the site of a linked page of ``docs/``."""
    target, docs = Path(os.path.normpath(page.parent / link)), ROOT / "docs"
    return target.relative_to(docs).as_posix() if target.is_relative_to(docs) else None


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to, and what that links to."""
    from mkdocs.structure.files import File

    queue = [file.src_uri for file in files.documentation_pages()]
    for uri in queue:
        page = source(uri)
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            place = outside(page, link)
            if place and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(source(place))))
                if place.endswith(".md"):
                    queue.append(place)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Marks replaced, links turned to the copies."""
    uri = page.file.src_uri

    def turn(found: re.Match[str]) -> str:
        place = outside(source(uri), found[1]) or inside(source(uri), found[1])
        return os.path.relpath(place, Path(uri).parent).replace(os.sep, "/") if place else found[1]

    markdown = LINK.sub(turn, markdown)
    return MARK.sub(lambda found: MAKERS[found[1]](found[2] or ""), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce a literal block with two colons."""
    return html.replace("::</p>", ":</p>")
