"""The ``watch`` command: a run, or a folder of runs, followed from the record alone.

So it works from another terminal or machine, and for a run that ended long ago. No torch here; rich
is imported late.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.console.stdout import console as new_console
from regimes.console.stdout import escape_control
from regimes.console.tables import Table
from regimes.errors import RecordError
from regimes.monitor.text import (
    Row,
    cells,
    epoch_table,
    headline,
    logged_text,
    metric_text,
    not_said_text,
    straggler,
)
from regimes.records import (
    check_together,
    complete,
    ended,
    find,
    opened,
    progress,
    read_header,
    read_lines,
    units,
)
from regimes.training.idle_policy import inactivity_warnings

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    Show = Callable[[RenderableType], None]

BUSY = ("running", "starting")
BETWEEN = 60  # seconds in which the next run of a grid may begin


def watch(folder: Path, once: bool = False, console: Console | None = None) -> None:
    """Show a run, or a folder of runs, and follow it every second until it ends or Ctrl-C; where
    there is none yet, wait for the first. A terminal shows it in place; elsewhere it is printed
    again as often as it changes.

    Args:
        folder: or an archive of runs, which is shown once.
        once: print and return.

    Raises:
        RecordError: there is no run, and ``once`` is asked for.
    """
    folder, console = Path(folder), console or new_console()
    if folder.is_file():
        with opened(folder) as root:
            console.print(_many(root, None, called=str(folder))[0])
        return
    with contextlib.suppress(KeyboardInterrupt):
        _await(folder, once, console)
        live = console.is_terminal and not once
        with _in_place(console) if live else _as_text(console) as show:
            for picture in _pictures(folder, once, console.height if live else None):
                show(picture)


def _pictures(folder: Path, once: bool, height: int | None) -> Iterator[RenderableType]:
    """One a second until no run goes on; of a folder, also while the next run of a grid begins."""
    single = (folder / "run.json").exists()
    draw = _one if single else functools.partial(_many, height=height)
    patience = 1 if single else BETWEEN
    picture, going = draw(folder)
    yield picture
    idle = 0 if going else patience
    while not once and idle < patience:
        time.sleep(1)
        picture, going = draw(folder)
        idle = 0 if going else idle + 1
        yield picture


@contextlib.contextmanager
def _in_place(console: Console) -> Iterator[Show]:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield functools.partial(live.update, refresh=True)


@contextlib.contextmanager
def _as_text(console: Console) -> Iterator[Show]:
    last = ""

    def show(picture: RenderableType) -> None:
        nonlocal last
        with console.capture() as captured:
            console.print(picture)
        if captured.get() != last:
            console.print(picture)
        last = captured.get()

    yield show


def _await(folder: Path, once: bool, console: Console) -> None:
    """Until there is a run in or under the folder."""
    said = False
    while not ((folder / "run.json").exists() or find(folder)):
        if once:
            raise RecordError(f"no run in or under {folder}: expected a file run.json there")
        if not said:
            lacks = "" if folder.is_dir() else ", which does not exist yet"
            waits = f"waiting for the first run in {folder}{lacks}; Ctrl-C ends"
            console.print(waits, markup=False, soft_wrap=True)
        said = True
        time.sleep(1)


def state(folder: Path, header: Row, rows: Sequence[Row]) -> tuple[str, str]:
    """(finished, running, starting, stopped or broken off; more about it)."""
    events = _lines(folder / "events.jsonl")
    last = events[-1] if events else {"event": "none"}
    if complete(header, rows) and ended(events):
        return "finished", ""
    if last["event"] == "stopped":
        return "stopped", escape_control(last.get("why", ""))
    if in_use(folder):
        return ("running", "") if rows else ("starting", "")
    how = "" if header.get("written_by") == "hook" else "; continue with --resume"
    return "broken off", f"no process writes to {escape_control(str(folder))}{how}"


def in_use(folder: Path) -> bool:
    """Does a process hold the record's lock? Asked for the blink of an eye, and shared."""
    if not (folder / ".lock").is_file():  # nobody holds what is none; a pipe would be waited for
        return False
    try:
        import fcntl

        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except ImportError:  # Windows: written to within the last minutes?
        return time.time() - (folder / "events.jsonl").stat().st_mtime < 600
    except OSError:
        return True


def _lines(path: Path) -> list[Row]:
    """``read_lines``, read again only when the file has changed."""
    if not path.exists():
        return []
    status = path.stat()
    return _cached_lines(path, status.st_mtime_ns, status.st_size)


def _run(folder: Path) -> tuple[Row, list[Row]]:
    """(header, lines of ``epochs.jsonl``), which go together."""
    header, path = read_header(folder), folder / "epochs.jsonl"
    rows = _lines(path)
    check_together(header, rows, path)
    return header, rows


@functools.lru_cache(maxsize=4096)
def _cached_lines(path: Path, changed: int, size: int) -> list[Row]:
    return read_lines(path)


def _one(folder: Path) -> tuple[RenderableType, bool]:
    """(picture of one run, may it still change?)"""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid
    from rich.text import Text

    header, rows = _run(folder)
    what, more = state(folder, header, rows)
    spent = _lines(folder / "seconds.jsonl")
    each = [row.get("processes", {}) for row in spent]
    beside = ("epoch", "processes")
    clocks = {row["epoch"]: [v for k, v in row.items() if k not in beside] for row in spent}
    seconds = {epoch: sum(parts) for epoch, parts in clocks.items() if parts}
    wanted = units(header)
    recent = [seconds[row["epoch"]] for row in rows[-5:] if row["epoch"] in seconds]
    if what == "running" and recent and wanted is not None:
        left = sum(recent) / len(recent) * (wanted - len(rows))
        more = f"about {left / 60:.1f} min left"
    said = f"{progress(header, rows)}, {what}{': ' if more else ''}{more}"
    parts: list[RenderableType] = [Text(headline(header), "bold")]
    if wanted:
        bar = Grid.grid()
        bar.add_row(ProgressBar(wanted, len(rows), width=48))
        parts.append(bar)
    parts.append(Text(said, _colour(what)))
    if rows:
        parts.append(epoch_table(header, rows, seconds))
    if rows and (others := logged_text(rows[-1])):
        parts.append(Text(escape_control(f"logged: {others}")))
    if missing := not_said_text(header):
        parts.append(Text(missing, "dim"))
    if each and (waiting := straggler(each[-1])):
        parts.append(Text(waiting, "yellow"))
    if what == "finished":
        parts += [Text(sentence, "yellow") for sentence in inactivity_warnings(header, rows)]
    return Group(*parts), what in BUSY


def _colour(what: str) -> str:
    return {"finished": "green", "stopped": "bold red", "broken off": "bold red"}.get(what, "cyan")


def _many(folder: Path, height: int | None, called: str = "") -> tuple[RenderableType, bool]:
    """(one line per run under a folder, is one of them going?); the finished give way to fit."""
    from rich import box
    from rich.console import Group
    from rich.text import Text

    lines = [(path, *_line(path, folder)) for path in find(folder)]
    count = Counter(what for _, what, *_ in lines)
    metrics = " / ".join(dict.fromkeys(name for *_, name in lines if name)) or "metric"
    hidden = max(0, len(lines) - height + 8) if height else 0
    done = [path for path, what, *_ in lines if what == "finished"][:hidden]
    heads = ("run", "", "epochs", metrics, "floats", "of low", "state")
    shown = [entries for path, _, entries, _ in lines if path not in done]
    table = Table(heads, shown, texts=2, ends=1).drawn(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    said = ", ".join(f"{n} {what}" for what, n in count.items())
    more = f" ({len(done)} finished ones not shown)" if done else ""
    total = Text(f"{len(lines)} runs: {said}{more}")
    return Group(Text(escape_control(called or str(folder)), style="bold"), table, total), any(
        w in BUSY for w in count
    )


def _line(path: Path, folder: Path) -> tuple[str, list[RenderableType], str]:
    """(state, the cells of one run's line, what the metric is called)."""
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    name = str(path.relative_to(folder))
    try:
        header, rows = _run(path)
        what, more = state(path, header, rows)
    except RecordError as error:
        return "damaged", [name, *[""] * 5, Text(escape_control(str(error)), style="bold red")], ""
    wanted, text = units(header), cells(header, rows, None) if rows else {}
    known = [row["metric"] for row in rows if row["metric"] is not None]
    name_of_metric, metric = metric_text(header, known[-1] if known else None)
    figures = [metric, *(text.get(key, "-") for key in ("floats", "of low"))]
    said = Text(f"stopped: {more}" if what == "stopped" else what, _colour(what))
    bar = ProgressBar(wanted, len(rows), width=8) if wanted else ""
    done = f"{len(rows)}" if wanted is None else f"{len(rows)}/{wanted}"
    return what, [name, bar, done, *figures, said], name_of_metric
