"""Ways through the code by "go to definition", asked of jedi.

A way is written as functions, with their file; below each, what it calls, and where that leads.
"""

from __future__ import annotations

import ast
from pathlib import Path

import jedi  # type: ignore[import-untyped]

import regimes

HOME = Path(regimes.__file__).parent


def hops(way: str) -> list[str]:
    """Each call of a way: "file function call: file function"."""
    found, caller = [], ""
    for line in way.splitlines():
        if line.startswith(" "):
            found.append(f"{caller} {line.strip()}")
        elif line:
            caller = line
    return found


def check_hop(hop: str) -> None:
    """Assert that the definition of what is called is found where the way says, and there alone or
    by the same name elsewhere."""
    file, caller, call, target, callee = hop.split()
    path = HOME / file
    names = [x for x in ast.walk(function_at(path, caller)) if isinstance(x, ast.expr)]
    here = next(x for x in names if ast.unparse(x) == call.removesuffix(":"))
    assert here.end_lineno is not None
    assert here.end_col_offset is not None
    script = jedi.Script(path=path, project=jedi.Project(HOME.parent))
    found = script.goto(here.end_lineno, here.end_col_offset - 1, follow_imports=True)
    module = target.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert (HOME / target, f"regimes.{module}.{callee}") in [
        (x.module_path, x.full_name) for x in found
    ]
    assert {x.name for x in found} == {callee.rpartition(".")[2]}


def function_at(path: Path, name: str) -> ast.AST:
    """The definition with this qualified name."""
    node: ast.AST = ast.parse(path.read_text("utf-8"))
    for part in name.split("."):
        node = next(x for x in ast.iter_child_nodes(node) if getattr(x, "name", None) == part)
    return node
