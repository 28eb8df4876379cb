"""What Python code asks of Regimes, read without running it: names, keywords and methods.

In the pages a variable ``hook`` is what `regimes.attach` returns, ``local`` what
`regimes.local_steps` returns.
"""

from __future__ import annotations

import ast
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
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regimes"):
            known = _defined(node.module or "")
            found += [f"{node.module}.{x.name}" for x in node.names if x.name not in known]
        elif isinstance(node, ast.Attribute):
            owner = _resolved(node.value)
            if owner is not None and not _has(owner, node.attr):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and inspect.isroutine(called := _resolved(node.func)):
            parameters = inspect.signature(called).parameters
            free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            found += [
                f"{ast.unparse(node.func)}({keyword.arg}=)"
                for keyword in node.keywords
                if keyword.arg and keyword.arg not in parameters and not free
            ]
    return found


def _resolved(node: ast.expr) -> Any:
    """The module, class or function that an expression names; None for any other."""
    if isinstance(node, ast.Name):
        return NAMES.get(node.id)
    if not isinstance(node, ast.Attribute) or (owner := _resolved(node.value)) is None:
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
    return {*imported, *(n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef))}
