"""Commands of the study: their arguments, output files and errors.

A module's ``main`` reads records, prints tables and writes its files through `Files`::

    files = Files(records, out)
    files.figure("levels", level_map(load_all(records)))
    return files.print_paths()

``python -m analysis NAME WORDS`` runs it by `start`, ``regimes figure NAME WORDS`` by `call`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from regimes.base.console import stdout
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.base.inputs import track_inputs
from regimes.plotting.offered import draw_figure
from regimes.records import write_output

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from regimes.base.console.tables import Table
    from regimes.plotting.style import Drawing

# the example commands in a module's docstring
BLOCK = re.compile(r"^ {4}((?:regimes|python) .*?)(?:  +#.*)?$", re.MULTILINE)

SELECT = (
    "With --where FIELD=VALUE, e.g. --where optimizer.lr=0.4, only runs with that value are read. "
    "With --role ROLE=SCHEDULE, e.g. --role low=mine, a schedule of another name is drawn as low. "
    "Figures take --style paper, --width INCHES, --height INCHES, --panel NUMBER, "
    "--format png,svg,pdf and --plain."
)

Records = Annotated[Path, tyro.conf.arg(help="a folder of runs, or an archive of them")]
Several = Annotated[
    tuple[Path, ...],
    tyro.conf.Positional,
    tyro.conf.arg(help="folders of runs, or archives of them"),
]
Out = Annotated[Path | None, tyro.conf.arg(help="folder for the files; default figures/NAME")]

# -- output files ----------------------------------------------------------------------------


def name_of(records: Path) -> str:
    """The name of records: their folder's, or their archive's without ".tar.xz" or the like."""
    name = records.resolve().name
    return re.sub(r"(\.tar)?\.\w+$", "", name) if records.is_file() else name


def by_name(records: Sequence[Path], what: str = "records") -> dict[str, Path]:
    """Records by `name_of`: what is computed of each is told apart, and grouped, by that name.

    Args:
        what: they are called in the error.

    Raises:
        RecordError: two have the same name.
    """
    named: dict[str, Path] = {}
    for path in records:
        if named.setdefault(name_of(path), path) is not path:
            raise RecordError(f"{path}: another of the {what} is called {name_of(path)}, too")
    return named


class Files:
    """The output files of one command.

    Attributes:
        folder: where they are written.
        paths: those written so far.
    """

    def __init__(self, records: Path | str, out: Path | None = None) -> None:
        """Write to ``out``; default ``figures/NAME``. ``records`` is a path that ends in NAME, or
        NAME."""
        name = records if isinstance(records, str) else name_of(records)
        self.folder, self.paths = out or Path("figures", name), list[Path]()
        self._tables: list[Table] = []  # printed once all files are written

    def figure(self, name: str, drawn: Drawing | tuple[Figure, pd.DataFrame]) -> None:
        """A figure as PNG and SVG, and the numbers that it shows as CSV.

        Raises:
            RecordError: they cannot be written; so do `table` and `text`.
        """
        from regimes.plotting import style

        self.paths += style.save(drawn[0], self.folder / name, drawn[1])

    def table(self, name: str, rows: pd.DataFrame) -> None:
        """Rows in full precision, as NAME.csv."""
        self.text(f"{name}.csv", rows.to_csv(index=False, lineterminator="\n"))

    def text(self, name: str, words: str) -> None:
        """Words, as a file of that name."""
        path = self.folder / name
        write_output(path, words)
        self.paths.append(path)

    def page(self, name: str, about: str, *tables: Table) -> None:
        """Tables as Markdown in NAME.md below ``about``, each below its title; `print_paths` prints
        them."""
        self.show(*tables)
        parts = [about] if about else []
        for table in tables:
            parts += [f"{table.title}.", table.markdown()] if table.title else [table.markdown()]
        self.text(f"{name}.md", "\n\n".join(parts) + "\n")

    def show(self, *tables: Table) -> None:
        """Tables that `print_paths` prints."""
        self._tables += tables

    def compared(
        self, tables: tuple[pd.DataFrame, pd.DataFrame], about: str, prefix: str = ""
    ) -> None:
        """The two tables of `compare.table` as CSV, and rounded as Markdown; `print_paths` prints
        them.

        Args:
            about: the setting, in words.
        """
        from . import compare

        rows, pairs = tables
        self.show(*compare.as_text(rows, pairs)[: 2 if len(pairs) else 1])
        self.table(f"{prefix}table", rows)
        self.table(f"{prefix}differences", pairs)
        self.text(f"{prefix}table.md", compare.markdown(rows, pairs, about))

    def print_paths(self) -> list[Path]:
        """Print the tables, then the paths of the files that were written, and return these. A
        closed pipe or a full terminal cannot keep a file from being written."""
        console = stdout.make_console(highlight=False)
        for table in self._tables:
            console.print(table.drawn(), "")
        print(*self.paths, sep="\n")
        return self.paths


# -- start -----------------------------------------------------------------------------------


def call(
    main: Callable[..., Any], words: Sequence[str], program: str, says: str | None = None
) -> None:
    """Run ``main`` with its arguments from words.

    Args:
        says: how its help begins; default its docstring.

    Raises:
        ConfigError: ``main`` has a required argument, and none was given.
    """
    if not words and _needs(main):
        lines = BLOCK.findall(main.__globals__["__doc__"] or "")
        how = ", then ".join(f"`{line}`" for line in lines[:2])
        raise ConfigError(f"{program} needs records: {how}")
    about = says or (inspect.getdoc(main) or "").partition("Args:")[0].rstrip()
    with track_inputs():
        tyro.cli(
            main,
            prog=program,
            args=words,
            config=(tyro.conf.PositionalRequiredArgs, tyro.conf.DisallowNone),
            description=f"{about}\n\n{SELECT}",
        )


def _needs(main: Callable[..., Any]) -> bool:
    return any(p.default is p.empty for p in inspect.signature(main).parameters.values())


def start(main: Callable[..., Any], program: str = "", words: Sequence[str] | None = None) -> None:
    """Run ``main`` with its arguments from the command line. An error prints one sentence
    and ends with an exit code, as in `regimes`; a closed pipe ends with an exit code alone.

    Args:
        program: what help and errors call it; default the file that Python runs.
        words: default the command line's.
    """
    try:
        program = program or f"python {sys.argv[0]}"
        given = sys.argv[1:] if words is None else words
        draw_figure(lambda others: call(main, others, program), given)
        stdout.flush_stdout()
    except RegimesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if (code := stdout.exit_code_of(error)) is None:
            raise
        sys.exit(code)
