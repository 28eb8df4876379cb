"""``python -m analysis NAME ...`` runs a figure or table; without a name it lists them by room.

`offers` gives the same to ``regimes figure``, with the paper's figures by their numbers. A command
is a module of a room that has a function ``main``. Its name is the file's, or in `NAMES`; the
list then shows the file as well.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.base.errors import suggest_nearest

from .common.command import call, start

if TYPE_CHECKING:
    from regimes.plotting.offered import Offer

ROOMS = (
    *("paper", "lasso", "rates", "detection", "criticality", "tournament"),
    *("findings", "cost", "campaign"),
)
NAMES = {  # of commands that are not called like their files
    "equal_epochs": "equal-epochs",
    "error_per_float": "rivals",
    "figure18_20": "levels",
    "lost_time": "lost-time",
    "norm_hessian": "norm-hessian",
    "usable": "mechanism",
    "yoked": "controls",
}
MAIN = re.compile(r"^def main\(", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A module that can be run.

    Attributes:
        module: ROOM.FILE, in this package.
        summary: the first sentence of its docstring.
    """

    module: str
    summary: str

    @property
    def room(self) -> str:
        return self.module.partition(".")[0]

    @property
    def main(self) -> Callable[..., Any]:
        return importlib.import_module(f".{self.module}", __package__).main


def commands() -> dict[str, Command]:
    """All commands by name, in the order of `ROOMS`."""
    known = {}
    for room in ROOMS:
        for path in sorted((Path(__file__).parent / room).glob("[a-z]*.py")):
            source = path.read_text(encoding="utf-8")
            if MAIN.search(source):
                name = NAMES.get(path.stem, path.stem)
                known[name] = Command(f"{room}.{path.stem}", _first_line(source))
    return known


def headings() -> dict[str, str]:
    """What each room is about."""
    folder = Path(__file__).parent
    return {
        room: _first_line((folder / room / "__init__.py").read_text(encoding="utf-8"))
        for room in ROOMS
    }


def _first_line(source: str) -> str:
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def offers() -> dict[str, Offer]:
    """What ``regimes figure`` lists (`regimes.plotting.offered`)."""
    from regimes.plotting.needs import Needs
    from regimes.plotting.offered import Offer

    from .paper.figures import CHOOSING, FIGURES

    known, about = commands(), headings()
    figures = known.pop("figures")
    listed = {
        number: Offer(
            figure.shows,
            partial(_figure, figures, number),
            figure.grids,
            about["paper"],
            figure.needs,
        )
        for number, figure in FIGURES.items()
    }
    needs = {f.module: f.needs for f in FIGURES.values() if f.module not in CHOOSING}
    needs["agreement"] = Needs(("signals",), statistics=("norm", "eigenvalue"))
    for name, command in known.items():
        start, file = partial(_run, command, name), command.module.partition(".")[2]
        listed[name] = Offer(command.summary, start, (), about[command.room], needs.get(file))
    return listed


def _figure(figures: Command, number: str, words: Sequence[str]) -> None:
    from .paper.figures import FIGURES

    program = f"regimes figure {number}"
    call(partial(figures.main, number), words, program, FIGURES[number].shows)


def _run(command: Command, name: str, words: Sequence[str]) -> None:
    call(command.main, words, f"regimes figure {name}")


def _list() -> None:
    known = commands()
    for room, about in headings().items():
        print(about)
        for key, command in known.items():
            if command.room == room:
                file = command.module.partition(".")[2]
                shown = "" if file == key else f" [{file}.py]"
                print(f"  {key:14} {command.summary}{shown}")


def main() -> None:
    name, *words = sys.argv[1:] or [""]
    known = commands()
    if name in ("", "-h", "--help"):
        start(_list, "python -m analysis", ())
    elif name in known:
        start(known[name].main, f"python -m analysis {name}", words)
    else:
        print(f"error: no analysis {name!r}: {suggest_nearest(name, known)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
