"""The ``watch`` command: follows a run, or a folder of runs, by their records alone, so also from
another terminal or machine. No torch."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from regimes.base.console.stdout import escape_control
from regimes.base.console.stdout import make_console as new_console
from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.job.run_warnings import run_warnings
from regimes.plotting import text
from regimes.records import (
    Event,
    Header,
    Row,
    describe_uncompressed_layers,
    find_runs,
    first_unit,
    format_progress,
    has_ended,
    is_complete,
    number_of_units,
    read_header,
    read_rows,
    sum_sent,
    trunk_of,
    unpack_records,
)
from regimes.records.branches import check_row
from regimes.records.files import in_use
from regimes.records.lines import Growing, file_state
from regimes.records.schema import is_hooked

ACTIVE = ("running", "starting")
PATIENCE = 60  # seconds in which the next run of a grid may begin
COLOURS = {"finished": "green", "stopped": "bold red", "broken off": "bold red"}  # else cyan


def watch_runs(folder: Path, once: bool = False, console: Console | None = None) -> None:
    """Show a run, or a folder of runs, and follow it every second until it ends or Ctrl-C; wait for
    the first run. A terminal is redrawn in place; other outputs get a new print after each change.
    An archive is shown once.

    Args:
        once: print and return.

    Raises:
        RecordError: there is no run in an archive, or with ``once`` in a folder.
    """
    folder, console = Path(folder), console or new_console()
    if folder.is_file():
        with unpack_records(folder) as root:
            if not find_runs(root):
                raise _no_run(folder)
            console.print(_many(root, None, title=str(folder))[0])
        return
    with contextlib.suppress(KeyboardInterrupt):
        _wait_for_run(folder, once, console)
        if once or not console.is_terminal:
            last = ""
            for picture in _pictures(folder, once, None):
                with console.capture() as captured:
                    console.print(picture)
                if captured.get() != last:
                    console.print(picture)
                last = captured.get()
            return
        with Live(console=console, auto_refresh=False) as live:
            for picture in _pictures(folder, once, console.height):
                live.update(picture, refresh=True)


def _pictures(folder: Path, once: bool, height: int | None) -> Iterator[RenderableType]:
    """One a second until no run is active; of a folder, also while the next run may begin."""
    single = (folder / "run.json").exists()
    draw = _one if single else functools.partial(_many, height=height)
    patience = 1 if single else PATIENCE
    picture, active = draw(folder)
    yield picture
    idle = 0 if active else patience
    while not once and idle < patience:
        time.sleep(1)
        picture, active = draw(folder)
        idle = 0 if active else idle + 1
        yield picture


def _wait_for_run(folder: Path, once: bool, console: Console) -> None:
    announced = False
    while not ((folder / "run.json").exists() or find_runs(folder)):
        if once:
            raise _no_run(folder)
        if not announced:
            missing = "" if folder.is_dir() else ", which does not exist yet"
            message = f"waiting for the first run in {folder}{missing}; Ctrl-C ends"
            console.print(message, markup=False, soft_wrap=True)
        announced = True
        time.sleep(1)


def _no_run(place: Path) -> RecordError:
    return RecordError(f"no run in or under {place}: expected a file run.json there")


def describe_state(folder: Path, header: Header, rows: Sequence[Row]) -> tuple[str, str]:
    """Describe what a run does: (finished, running, starting, stopped or broken off; details)."""
    events = cast("list[Event]", _lines(folder / "events.jsonl"))
    if is_complete(header, rows) and has_ended(events):
        return "finished", ""
    if events and events[-1]["event"] == "stopped":
        return "stopped", escape_control(events[-1].get("why", ""))
    if in_use(folder):
        return ("running", "") if rows else ("starting", "")
    how = "" if header.get("written_by") == "hook" else "; continue with --resume"
    return "broken off", f"no process writes to {escape_control(str(folder))}{how}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """`read_lines`, but only the new lines are read."""
    return _growing(path).read()


@functools.lru_cache(maxsize=8192)
def _growing(path: Path) -> Growing:
    return Growing(path)


class _Run:
    """A run's header and rows; only what has changed is read and checked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.states = folder, ()
        self.header, self.rows = cast("Header", {}), list[Row]()

    def read(self) -> tuple[Header, list[Row]]:
        path, states = self.folder / "epochs.jsonl", self._states()
        if states == self.states:
            return self.header, self.rows
        if states[:-1] != self.states[:-1]:
            self.header, self.rows = read_header(self.folder), []
        self.states = ()
        own, at = cast("list[Row]", _lines(path)), first_unit(self.header)
        before = len(self.rows) - at
        if before > 0 and len(own) >= before and own[before - 1] is self.rows[-1]:
            for number, row in enumerate(own[before:], start=before + 1):
                check_row(path, number, self.header, row)
            self.rows += own[before:]
        else:
            self.rows = read_rows(self.folder, self.header, _lines)
        self.states = states
        return self.header, self.rows

    def _states(self) -> tuple[Any, ...]:
        """States of the files of its trunks, of its header and of its rows."""
        folders, trunk = [self.folder], trunk_of(self.folder) if self.header.get("trunk") else None
        while trunk is not None and trunk not in folders:
            folders.append(trunk)
            trunk = trunk_of(trunk)
        above = [file_state(f / n) for f in folders[1:] for n in ("run.json", "epochs.jsonl")]
        own = [file_state(self.folder / name) for name in ("run.json", "epochs.jsonl")]
        return *above, *own


@functools.lru_cache(maxsize=4096)
def _followed(folder: Path) -> _Run:
    return _Run(folder)


def _run(folder: Path) -> tuple[Header, list[Row]]:
    return _followed(folder).read()


def _one(folder: Path) -> tuple[RenderableType, bool]:
    """(picture of one run, may it still change?)"""
    header, rows = _run(folder)
    what, more = describe_state(folder, header, rows)
    lines, seconds = _lines(folder / "seconds.jsonl"), dict[int, float]()
    for line in lines[-2 * text.EPOCHS :]:  # may be one ahead of the rows
        if clocks := [x for name, x in line.items() if name not in ("epoch", "processes")]:
            seconds[line["epoch"]] = sum(clocks)
    wanted = number_of_units(header)
    recent = [seconds[row["epoch"]] for row in rows[-5:] if row["epoch"] in seconds]
    if what == "running" and recent and wanted is not None:
        left = sum(recent) / len(recent) * (wanted - len(rows))
        more = f"about {left / 60:.1f} min left"
    status = f"{format_progress(header, rows)}, {what}{': ' if more else ''}{more}"
    parts: list[RenderableType] = [Text(text.describe_run(header), "bold")]
    parts += [
        Text(escape_control(sentence), "dim") for sentence in describe_uncompressed_layers(header)
    ]
    if wanted:
        bar = Grid.grid()
        bar.add_row(ProgressBar(wanted, len(rows), width=48))
        parts.append(bar)
    parts.append(Text(status, COLOURS.get(what, "cyan")))
    if rows:
        parts.append(text.epoch_table(header, rows, seconds))
        if logged := text.logged_text(rows[-1]):
            parts.append(Text(escape_control(f"logged: {logged}")))
    if unknown := text.unknown_text(header):
        parts.append(Text(unknown, "dim"))
    if lines and (slow := text.describe_straggler(lines[-1].get("processes", {}))):
        parts.append(Text(slow, "yellow"))
    if what == "finished":
        parts += [Text(sentence, "yellow") for sentence in run_warnings(header, rows)]
    return Group(*parts), what in ACTIVE


def _many(folder: Path, height: int | None, title: str = "") -> tuple[RenderableType, bool]:
    """(one line per run under a folder, is one active?); finished runs are hidden to fit."""
    paths = find_runs(folder)
    own = all(_is_hooked(path) for path in paths)
    numbers = ("MB", "of dense") if own else ("floats", "of low")
    lines = [_line(path, folder, numbers) for path in paths]
    counts = Counter(what for what, *_ in lines)
    metrics = " / ".join(dict.fromkeys(name for *_, name in lines if name)) or "metric"
    excess = max(0, len(lines) - height + 8) if height else 0
    hidden = [entries for what, entries, _ in lines if what == "finished"][:excess]
    heads = ("run", "", "epochs", metrics, *numbers, "state")
    visible = [entries for _, entries, _ in lines if entries not in hidden]
    table = Table(heads, visible, texts=2, ends=1).drawn(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    total = f"{len(lines)} runs: {', '.join(f'{n} {what}' for what, n in counts.items())}"
    if hidden:
        total += f" ({len(hidden)} finished ones not shown)"
    name = Text(escape_control(title or str(folder)), style="bold")
    return Group(name, table, Text(total)), any(what in ACTIVE for what in counts)


def _is_hooked(path: Path) -> bool:
    with contextlib.suppress(RecordError):
        return is_hooked(_run(path)[0])
    return False


def _line(
    path: Path, folder: Path, columns: Sequence[str]
) -> tuple[str, list[RenderableType], str]:
    """(state, the cells of one run's line, the metric's name).

    Args:
        columns: which numbers of `text.format_row` it has beside the metric.
    """
    name = str(path.relative_to(folder))
    try:
        header, rows = _run(path)
        what, more = describe_state(path, header, rows)
    except RecordError as error:
        return "damaged", [name, *[""] * 5, Text(escape_control(str(error)), style="bold red")], ""
    wanted, texts = (
        number_of_units(header),
        text.format_row(header, rows[-1], None, sum_sent(rows)) if rows else {},
    )
    known = [row["metric"] for row in rows if row["metric"] is not None]
    metric_name, metric = text.metric_text(header, known[-1] if known else None)
    numbers = [metric, *(texts.get(key, "-") for key in columns)]
    status = Text(f"stopped: {more}" if what == "stopped" else what, COLOURS.get(what, "cyan"))
    bar = ProgressBar(wanted, len(rows), width=8) if wanted else ""
    done = f"{len(rows)}" if wanted is None else f"{len(rows)}/{wanted}"
    return what, [name, bar, done, *numbers, status], metric_name
