"""``python -m analysis NAME ...`` is ``python -m analysis.NAME ...``; alone, the list of names.

`offers` is the same for ``regimes figure``, with the paper's figures by their numbers.
"""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.errors import nearest

if TYPE_CHECKING:
    from regimes.plotting.offered import Offer


def commands() -> dict[str, str]:
    """The modules that can be run, and the first sentence of each."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def offers() -> dict[str, Offer]:
    """What ``regimes figure`` lists (`regimes.plotting.offered`)."""
    from regimes.plotting.offered import Offer

    from .figures import FIGURES

    found = {
        number: Offer(figure.shows, partial(_figure, number), figure.small + figure.paper)
        for number, figure in FIGURES.items()
    }
    others = {name: says for name, says in commands().items() if name != "figures"}
    return found | {name: Offer(says, partial(_module, name)) for name, says in others.items()}


def _figure(number: str, words: Sequence[str]) -> None:
    from . import command, figures

    command.call(figures.main, [number, *words], f"regimes figure {number}")


def _module(name: str, words: Sequence[str]) -> None:
    from . import command

    module = importlib.import_module(f".{name}", __package__)
    command.call(module.main, words, f"regimes figure {name}")


def main() -> None:
    known = commands()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("\n".join(f"{name:14} {words}" for name, words in known.items()))
        return
    name = sys.argv.pop(1)
    if name not in known:
        print(f"error: no analysis {name!r}: {nearest(name, known)}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
