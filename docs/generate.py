"""Writes the Markdown of the site: ``python docs/generate.py build/docs``, before the builder runs.

``python docs/generate.py --fill`` writes the tables of the reference into the pages of the tree,
where they can be read without a build.

Each page of ``docs/`` is copied, with these changes:

- ``<!-- reference: regimes.compression -->`` becomes one heading and one ``automodule`` for each
  public module of that room: a module that is added, moved or removed needs no change here.
- ``<!-- options: policies -->`` becomes tables of the registered names and their fields.
- ``<!-- commands -->`` becomes the help of each subcommand.
- ``<!-- works: parts -->`` becomes a list of what works with what (`capabilities`).
- ``<!-- clocks -->`` becomes the table of measured clocks, from ``regimes/cost/clocks.toml``.
  The last four end at ``<!-- end -->``, and what stands between is replaced.
- A link to a file outside ``docs/`` leads to a copy below ``tree/``, so that the same link works
  in the tree and in the site.
- ``docs/nav.toml`` becomes the table of contents at the end of the first page.

Only ``reference``, ``navigation`` and ``captions`` write what is special to Sphinx.
"""

from __future__ import annotations

import argparse
import ast
import collections.abc
import dataclasses
import importlib
import inspect
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

ROOT = Path(__file__).parents[1]
TREE = "tree/"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
MARK = re.compile(r"^<!-- (reference): ([\w. ]+) -->$", re.MULTILINE)
FILLED = re.compile(
    r"^(?P<mark><!-- (?P<kind>options|commands|works|clocks)(?:: (?P<what>\w+))? -->)\n"
    r".*?^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
ROLE = re.compile(r"\{py:obj\}`(?:~([\w.]+)|([\w.]+) <[\w.]+>)`")  # what Sphinx alone can read
TITLED = re.compile(r'^```(\w+) title="([^"]+)"$', re.MULTILINE)
LANGUAGES = {
    ".py": "python",
    ".sh": "sh",
    ".yaml": "yaml",
    ".toml": "toml",
}  # shown, not downloaded
REFERENCE = re.compile(r"<!-- reference: (.+?) -->")
REGISTRIES = {
    "compressors": "regimes.compression",
    "policies": "regimes.policies",
    "detectors": "regimes.policies.detectors",
    "instruments": "regimes.instruments",
}


# -- reference -------------------------------------------------------------------------------


def modules(name: str) -> list[str]:
    """The public modules of a room, itself first, without those that another page shows."""
    place = ROOT.joinpath(*name.split("."))
    if not place.is_dir():
        return [name]
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md")]
    shown = [x for page in pages for line in REFERENCE.findall(page) for x in line.split()]
    apart = tuple(f"{x}." for x in shown if x.startswith(f"{name}."))
    files = [path.relative_to(ROOT).with_suffix("").parts for path in sorted(place.rglob("*.py"))]
    plain = [".".join(parts) for parts in files if not parts[-1].startswith("_")]
    return [name, *(module for module in plain if not f"{module}.".startswith(apart))]


def reference(names: str) -> str:
    """A heading and Sphinx's ``automodule`` for each module of some rooms.

    A package shows what it defines itself, not what it imports from its modules.
    """
    options = "   :members:\n   :ignore-module-all:\n"
    directive = f"## {{0}}\n\n```{{{{eval-rst}}}}\n.. automodule:: {{0}}\n{options}```"
    return "\n\n".join(directive.format(name) for room in names.split() for name in modules(room))


# -- options ---------------------------------------------------------------------------------


def options(what: str) -> str:
    """Every name that a configuration may give, and the fields of its class."""
    if what == "config":
        return configuration()
    if what == "retired":
        return retired()
    if what == "names":
        return names()
    registry = importlib.import_module(REGISTRIES[what]).REGISTRY
    fields = [
        (row, f"`{name}`") for name in registry for row in field_rows(registry.find(name), "")
    ]
    rows = [(", ".join(of), *row) for row, of in merged(fields).items()]
    classes = [(f"`{name}`", link_to(registry.find(name))) for name in registry]
    return "\n\n".join((table(("part", "class"), classes), table(("part", *FIELDS), rows)))


def link_to(cls: type) -> str:
    return f"{{py:obj}}`~{cls.__module__}.{cls.__name__}`"


def names() -> str:
    """Every public name of the package, by the module that defines it."""
    import regimes

    homes = merged((getattr(regimes, name).__module__, name) for name in regimes.__all__)
    return "\n".join(
        f"- `{home}`: " + ", ".join(f"{{py:obj}}`{name} <{home}.{name}>`" for name in names)
        for home, names in sorted(homes.items())
    )


def defaults(cls: Any) -> Iterator[tuple[str, Any]]:
    """The fields that a configuration may set; a compressor's level is an entry of its own."""
    for field in dataclasses.fields(cls):
        if field.init and field.name != getattr(cls, "level_word", None):
            made = field.default_factory
            yield field.name, field.default if made is dataclasses.MISSING else made()


def as_toml(value: Any) -> str:
    """A default as TOML has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "unset"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def retired() -> str:
    """Every key that has left the configuration, and what is in its place."""
    from regimes.base.config import RETIRED

    lines = ["| key | retired in | instead |", "|---|---|---|"]
    for key, field in RETIRED.items():
        lines.append(f"| `{key}` | {field.since} | {field.instead} |")
    return "\n".join(lines)


FIELDS = ("key", "type", "default", "meaning")


def configuration() -> str:
    """Every key of a configuration: type, default and meaning, from the dataclasses."""
    from regimes.base import config

    tables = {
        "": config.RunConfig,
        "data.": config.DataConfig,
        "model.": config.ModelConfig,
        "optimizer.": config.OptimizerConfig,
        "outer.": config.OuterConfig,
        "budget.": config.Budget,
        "branch.": config.BranchConfig,
    }
    found = []
    for prefix, cls in tables.items():
        head = f"### `{prefix}`" if prefix else "### The run"
        found += [head, table(FIELDS, field_rows(cls, prefix))]
    return "\n\n".join(found)


def field_rows(cls: type, prefix: str) -> list[tuple[str, ...]]:
    """(key, type, default, meaning) of each field that a configuration may set."""
    hints, meanings = hints_of(cls), attributes(cls)
    found = []
    for name, value in defaults(cls):
        kind = "table" if dataclasses.is_dataclass(value) else in_words(hints[name])
        default = default_in_words(value)
        cells = (f"`{prefix}{name}`", kind, default, meanings.get(name, ""))
        found.append(tuple(cell.replace("|", "\\|") for cell in cells))
    return found


def default_in_words(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "unset"
    return "" if dataclasses.is_dataclass(value) else f"`{as_toml(value)}`"


def hints_of(cls: type) -> dict[str, Any]:
    """The annotation of each field, with its bounds."""
    return typing.get_type_hints(cls, include_extras=True)


WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "table"}
LONG = 8  # of more values than this a list does not help


def in_words(hint: Any) -> str:
    """A type as a reader of TOML knows it. What may be left out says so by its default.

    A bound stands behind its type: ``Count`` is "integer, at least 1".
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        base, text = in_words(args[0]), args[1].text
        plain = re.sub(r"^(a (positive |whole )?number|a share)\b", "", text).strip(" ,")
        positive = "positive " if text.startswith("a positive") else ""
        comma = "" if plain.startswith("of ") else ","
        return f"{positive}{base}{comma} {plain}" if plain else f"{positive}{base}"
    if origin is Literal:
        return "text" if len(args) > LONG else ", ".join(f"`{as_toml(value)}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(arg) for arg in args if arg is not types.NoneType)
    if origin in (tuple, list, collections.abc.Sequence):
        return f"list of: {in_words(args[0])}" if args and args[0] is not Any else "list"
    if origin in (dict, collections.abc.Mapping) or hint is dict:
        return "table"
    return WORDS.get(hint, "table" if dataclasses.is_dataclass(hint) else "text")


def attributes(cls: type) -> dict[str, str]:
    """The lines under "Attributes:" of a docstring, and of those of its bases."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for name, words in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE):
            found[name] = " ".join(words.split()).replace("``", "`")
    return found


def commands(_: str = "") -> str:
    """Each subcommand: what it does, and its arguments."""
    files = sorted((ROOT / "regimes" / "cli").glob("*.py"))
    nodes = [n for file in files for n in ast.parse(file.read_text(encoding="utf-8")).body]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    found = []
    for node in sorted(functions, key=lambda function: function.name):
        if "app.command" in map(ast.unparse, node.decorator_list):
            words, _, arguments = (ast.get_docstring(node) or "").partition("\n\nArgs:\n")
            found.append(f"## regimes {node.name}\n\n{words}\n")
            positional = {
                a.arg for a in node.args.args if a.annotation and "Positional" in ast.unparse(a)
            }
            rows = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE)
            for name, meaning in rows:
                shown = name.upper() if name in positional else f"--{name.replace('_', '-')}"
                found[-1] += f"\n- `{shown}`: {' '.join(meaning.split())}"
    return "\n\n".join(part.strip("\n") for part in found)


# -- what works with what --------------------------------------------------------------------


def works(what: str) -> str:
    """Lists from `regimes.base.capabilities`: "parts", with the ways to train in which each works;
    "modes", what each lacks; "capabilities", what each means. Equal answers are one line."""
    from regimes.base.capabilities import CONDITIONS, MEANING, WAYS, find_missing

    if what == "capabilities":
        return "\n".join(f"- `{name}`: {meaning}" for name, meaning in MEANING.items())
    named = {mode.name: mode for modes in WAYS.values() for mode in modes}
    named |= {mode.name: mode for mode in CONDITIONS}
    if what == "modes":
        lacks = merged((tuple(mode.lacks), mode.name) for mode in named.values() if mode.lacks)
        return "\n".join(
            f"- {', '.join(modes)}: {', '.join(f'`{need}`' for need in needs)}"
            for needs, modes in lacks.items()
        )
    answers = []
    for name, (needs, calls) in all_parts().items():
        works = [
            way
            for way, modes in WAYS.items()
            if way.split(",")[0] in calls and find_missing(needs, modes) is None
        ]
        but = [mode.name for mode in CONDITIONS if find_missing(needs, [mode]) is not None]
        answers.append((where([*WAYS], works) + "".join(f"; not {name}" for name in but), name))
    return "\n".join(f"- {by_kind(names)}: {said}" for said, names in merged(answers).items())


def where(ways: list[str], works: list[str]) -> str:
    """In which of all ways a part works, said by those where it does not if they are fewer."""
    fails = [way for way in ways if way not in works]
    if not fails:
        return "everywhere"
    word, named = ("in", works) if len(works) <= len(fails) else ("not in", fails)
    return f"{word} {', '.join(f'`{way}`' for way in named)}"


def merged(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """The names of each key, in the order in which they come."""
    found: dict[Any, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return found


def by_kind(names: list[str]) -> str:
    """Parts of one answer, the kind of each said once: compressor `dense`, `cast`; `compile`."""
    kinds = merged((name.partition("`")[0], name) for name in names)
    return "; ".join(
        kind + ", ".join(name.removeprefix(kind) for name in of) if "`" in of[0] else kind
        for kind, of in kinds.items()
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def clocks(_: str = "") -> str:
    """Every measured clock of a method, with what it was measured on."""
    from regimes.cost.advice import NAMES
    from regimes.cost.clocks import read_clocks

    rows = [
        (
            f"`{method}`",
            str(clock),
            f"{clock.setting.name}, {clock.setting.parameters:,} parameters",
            NAMES[clock.setting.optimizer],
            f"{clock.setting.steps:,}",
            str(clock.setting.n),
        )
        for method, measured in read_clocks().items()
        for clock in measured
    ]
    return table(
        ("method", "clock [95 % interval]", "measured on", "optimiser", "steps", "n"), rows
    )


TRAINER = ("run", "run --processes", "simulate")
EVERYWHERE = (*TRAINER, "attach", "local_steps")
EXAMPLES = ("compressor.residual=update", "dtype=bfloat16", "data.augment=true", "model.width=4")


def all_parts() -> dict[str, tuple[frozenset[str], tuple[str, ...]]]:
    """By part: what it needs, and the calls that can ask for it."""
    from regimes.base.capabilities import (
        CAPTURED_EXCHANGES,
        OWN_COLLECTIVES,
        PROBE,
        declared_needs,
    )
    from regimes.base.config import OuterConfig, RunConfig, override
    from regimes.compression.needs import compressor_needs
    from regimes.data import deficits
    from regimes.instruments import REGISTRY
    from regimes.instruments.needs import needs_of, signal_needs, statistic_needs
    from regimes.job.probe import OF_EXCHANGE
    from regimes.training.plug_ins import FIELDS, PlugIns, outer_parts

    def asked(config: RunConfig) -> frozenset[str]:
        return frozenset().union(*(p.needs for p in PlugIns.from_config(config).parts()))

    usual, parts = RunConfig(), {}
    for name, needs in compressor_needs().items():
        parts[f"compressor `{name}`"] = needs, EVERYWHERE
    for name, needs in statistic_needs().items():
        parts[f"policy that reads `{name}`"] = needs, EVERYWHERE
    parts["policy that reads the training loss"] = frozenset({OWN_COLLECTIVES}), EVERYWHERE
    for name, needs in signal_needs().items():
        parts[f"`signal = {name}`"] = needs, (*TRAINER, "attach")
    for name in REGISTRY:
        if name != "norms":  # its readings are the signals
            needs = needs_of(REGISTRY.load(name))
            known = name in OF_EXCHANGE
            calls = ("attach",) * (known or PROBE in needs) + ("local_steps",) * known
            parts[f"instrument `{name}`"] = needs, TRAINER + calls
    for name in deficits.REGISTRY:
        parts[f"deficit `{name}`"] = declared_needs(deficits.REGISTRY.load(name)()), TRAINER
    for field, (needs, _) in FIELDS.items():
        if field != "sync_policy":  # a column
            parts[f"`{field}`"] = needs, TRAINER
    for setting in EXAMPLES:
        needs = asked(override(usual, [setting])) - asked(usual)
        calls = EVERYWHERE if setting.startswith("compressor") else TRAINER
        parts[f"`{setting.replace('=', ' = ')}`"] = needs, calls
    for part in outer_parts(OuterConfig(states="average", delay=1)):
        parts[f"`{part.field}`"] = frozenset(part.needs), (*TRAINER, "local_steps")
    parts["`scaler`"] = frozenset(), ("attach",)
    parts["`attach(..., graphs=2)`"] = frozenset({CAPTURED_EXCHANGES}), ("attach",)
    return parts


MAKERS = {
    "reference": reference,
    "options": options,
    "commands": commands,
    "works": works,
    "clocks": clocks,
}


# -- pages -----------------------------------------------------------------------------------


def navigation() -> str:
    """The table of contents: one hidden ``toctree`` for each section of ``nav.toml``."""
    trees = []
    for section in tomllib.loads((ROOT / "docs/nav.toml").read_text(encoding="utf-8"))["section"]:
        # a page of the findings is written once its records are committed
        pages = {x: title for x, title in section["pages"].items() if source(x).exists()}
        entries = "\n".join(f"{title} <{page}>" for page, title in pages.items())
        caption = f":caption: {section['title']}\n" if "title" in section else ""
        trees.append(f"```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```")
    return "\n\n".join(trees)


def captions(markdown: str) -> str:
    """A fence with a title becomes a code block with a caption."""
    return TITLED.sub(r"```{code-block} \1\n:caption: \2\n", markdown)


def source(name: str) -> Path:
    """The file that a page is made from."""
    return ROOT / name.removeprefix(TREE) if name.startswith(TREE) else ROOT / "docs" / name


def place(page: Path, link: str) -> str | None:
    """Where the site has the file that a page links to; None for what is not in the tree."""
    target = Path(os.path.normpath(page.parent / link))
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    return TREE + target.relative_to(ROOT).as_posix() if target.is_file() else None


def turned(name: str, markdown: str) -> tuple[str, list[str]]:
    """A page whose links lead to the copies, and the copies that it needs."""
    copies = []

    def turn(link: re.Match[str]) -> str:
        there = place(source(name), link[1])
        if there is None:
            return link[1]
        if there.startswith(TREE):
            copies.append(there)
        if Path(there).suffix in LANGUAGES:
            there += ".md"
        return os.path.relpath(there, Path(name).parent).replace(os.sep, "/")

    return LINK.sub(turn, markdown), copies


def rendered(name: str) -> tuple[str, list[str]]:
    """The Markdown of a page with its marks replaced, and the copies that it needs."""
    markdown = source(name).read_text(encoding="utf-8")
    if language := LANGUAGES.get(Path(name).suffix):
        title = name.removeprefix(TREE)
        return f"---\norphan: true\n---\n# {title}\n\n````{language}\n{markdown}````\n", []
    markdown, copies = turned(name, markdown)
    markdown = FILLED.sub(lambda mark: MAKERS[mark["kind"]](mark["what"] or ""), markdown)
    markdown = captions(MARK.sub(lambda mark: MAKERS[mark[1]](mark[2]), markdown))
    if name.startswith(TREE):
        markdown = f"---\norphan: true\n---\n{markdown}"
    return markdown + (f"\n{navigation()}\n" if name == "index.md" else ""), copies


def filled(markdown: str) -> str:
    """A page of the tree with its tables as they are now."""

    def fill(mark: re.Match[str]) -> str:
        made = MAKERS[mark["kind"]](mark["what"] or "")
        plain = ROLE.sub(lambda role: f"`{role[1] or role[2]}`", made)
        return f"{mark['mark']}\n\n{plain}\n\n<!-- end -->"

    return FILLED.sub(fill, markdown)


def write(out: Path) -> None:
    """Write all pages, and the files that they show or link to, into a folder.

    An unchanged file is not written again, so that the builder reads only what is new.
    """
    docs = ROOT / "docs"
    names = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))]
    names += [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.png"))]
    written = set()
    for name in names:  # grows: a page may need copies, which may need copies
        if name in written:
            continue
        written.add(name)
        if Path(name).suffix in (".md", *LANGUAGES):
            markdown, copies = rendered(name)
            path = out / (name if name.endswith(".md") else f"{name}.md")
            names.extend(copies)
            content = markdown.encode()
        else:
            path, content = out / name, source(name).read_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def fill() -> None:
    """Write the tables into the pages of the tree."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        markdown = path.read_text(encoding="utf-8")
        if (now := filled(markdown)) != markdown:
            path.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build" / "docs")
    parser.add_argument("--fill", action="store_true", help="write the tables into the pages")
    chosen = parser.parse_args()
    if chosen.fill:
        fill()
    else:
        write(chosen.out)
