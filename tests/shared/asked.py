"""What Python code asks of Regimes, read without running it: names, keywords and methods.

In the pages a variable ``hook`` is what `regimes.attach` returns, ``local`` what
`regimes.local_steps` returns.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import regimes

NAMES = {"regimes": regimes, "hook": regimes.Hook, "local": regimes.LocalSteps}


def missing(code: str) -> list[str]:
    """The names and keywords of Regimes in the code that do not exist."""
    found, names = [], {**NAMES}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regimes"):
            within = _submodules(node)
            known = {*_defined(node.module or ""), *within}
            found += [f"{node.module}.{x.name}" for x in node.names if x.name not in known]
            names |= {x.asname or x.name: within[x.name] for x in node.names if x.name in within}
        elif isinstance(node, ast.Attribute):
            owner = _resolved(node.value, names)
            if owner is not None and not _has(owner, node.attr):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and inspect.isroutine(
            called := _resolved(node.func, names)
        ):
            parameters = inspect.signature(called).parameters
            free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            found += [
                f"{ast.unparse(node.func)}({keyword.arg}=)"
                for keyword in node.keywords
                if keyword.arg and keyword.arg not in parameters and not free
            ]
    return found


def _submodules(node: ast.ImportFrom) -> dict[str, ModuleType]:
    """Those that it imports, as ``from regimes.plotting import canvas`` does."""
    paths = {x.name: f"{node.module}.{x.name}" for x in node.names if node.module != "regimes"}
    folder = importlib.util.find_spec(node.module or "")
    if folder is None or folder.submodule_search_locations is None:
        return {}
    return {
        name: importlib.import_module(path)
        for name, path in paths.items()
        if importlib.util.find_spec(path)
    }


def _resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """The module, class or function that an expression names; None for any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute) or (owner := _resolved(node.value, names)) is None:
        return None
    value = getattr(owner, node.attr, None)
    named = isinstance(value, ModuleType | type) or inspect.isroutine(value)
    return value if named else None


def _has(owner: Any, name: str) -> bool:
    """Also what an object gets in its class's code: ``self.name = ...``."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    own = [cls for cls in owner.__mro__ if cls.__module__.startswith("regimes")]
    return any(re.search(rf"\bself\.{name}\b.*=", inspect.getsource(cls)) for cls in own)


def _defined(module: str) -> set[str]:
    """The names of a module, without the packages that it imports."""
    if module == "regimes":
        return {*regimes.__all__}
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    imported = [x.asname or x.name for n in body if isinstance(n, ast.ImportFrom) for x in n.names]
    given = [n for a in body if isinstance(a, ast.Assign) for t in a.targets for n in ast.walk(t)]
    constants = [n.id for n in given if isinstance(n, ast.Name)]
    return {
        *imported,
        *constants,
        *(n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)),
    }
