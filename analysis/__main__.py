"""``python -m analysis NAME ...`` is ``python -m analysis.NAME ...``; alone, the list of names."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

from regimes.errors import nearest


def commands() -> dict[str, str]:
    """The modules that can be run, and the first sentence of each."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main() -> None:
    known = commands()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("\n".join(f"{name:14} {words}" for name, words in known.items()))
        return
    name = sys.argv.pop(1)
    if name not in known:
        print(f"error: no analysis {name!r}: {nearest(name, known)}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module(f"analysis.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
