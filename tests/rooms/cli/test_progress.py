"""What a person sees of a run: against numbers added up by hand, on consoles 80 columns wide."""

from __future__ import annotations

import io
import statistics
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plain
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from regimes.base.console import progress, units
from regimes.base.errors import RecordError
from regimes.cli import monitor as watch
from regimes.plotting import reporters
from regimes.plotting.text import _format_megabytes as format_megabytes
from regimes.plotting.text import describe_straggler
from regimes.records import RecordWriter, Sent, make_reporters

EPOCHS, STEPS, LOW = 12, 10, 2_400_000
NAMES = ("a", "bias", "b")
Recorder = Callable[[Path, int], RecordWriter]


def header(**changes: Any) -> dict[str, Any]:
    config = {
        "name": "accordion",
        "epochs": EPOCHS,
        "data": {"name": "cifar100"},
        "model": {"name": "resnet18-cifar100"},
        "levels": {"low": 4, "high": 1},
    }
    layers = [{"name": n, "shape": [2, 2], "compressed": n != "bias"} for n in NAMES]
    found = plain.header(
        config,
        world={"workers": 4, "processes": 2},
        steps_per_epoch=STEPS,
        per_step={"low": {"floats": LOW, "bytes": 0}},
        layers=layers,
    )
    return found | changes


def row(epoch: int) -> dict[str, Any]:
    return plain.row(epoch) | {
        "lr": 0.4,
        "next_lr": 0.4,
        "steps": STEPS,
        "train_loss": 1.2345,
        "test_loss": 12.3456,
        "metric": 0.5 + epoch / 100,
        "floats": 12_000_000 + epoch,
        "bytes": 1,
        "layers": {
            "level": ["low", "dense", "high"],
            "floats": [0] * 3,
            "bytes": [0] * 3,
            "why": [None] * 3,
        },
        "statistics": {"norm:update": [1.0, 1.0, 1.0]},
    }


@pytest.fixture
def record() -> Iterator[Recorder]:
    """Writes the first epochs of a run; the writer is open until the test closes it or ends."""
    writers = []

    def write(folder: Path, epochs: int) -> RecordWriter:
        writer = RecordWriter.create(folder, header())
        writers.append(writer)
        for epoch in range(epochs):
            writer.epoch(row(epoch), {"compute": 1.0, "evaluate": 0.25})
        if epochs == EPOCHS:
            writer.event("end")
        return writer

    yield write
    for writer in writers:
        writer.close()


def console() -> Console:
    return Console(width=80, height=24, record=True, file=io.StringIO(), force_terminal=True)


def shown(folder: Path) -> str:
    screen = console()
    watch.watch_runs(folder, once=True, console=screen)
    return screen.export_text()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (1_080_000, "1.08 M"),
        (999_700, "1.00 M"),
        (12_345, "12.3 k"),
        (2_418_440_000, "2.42 G"),
        (262.87e9, "263 G"),
        (1.43e12, "1.43 T"),
    ],
)
def test_human(count: float, text: str) -> None:
    assert units.format_quantity(count) == text


def test_live_table_fits_80_columns() -> None:
    screen = console()
    live = reporters.LiveTable(screen)
    live.start(header(), [row(e) for e in range(9)])
    for epoch in range(9, EPOCHS):
        for step in range(STEPS):
            live.step(epoch, step + 1, STEPS)
        live.epoch(row(epoch), {"compute": 20.0, "evaluate": 3.5})
    live.stop("")
    screen.export_text()  # forget the redraws
    screen.print(live.draw())
    text = screen.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "4 workers on 2 processes" in text
    assert f"{EPOCHS}/{EPOCHS}" in text
    assert f"{STEPS}/{STEPS}" in text
    sent = sum(12_000_000 + e for e in range(EPOCHS))
    last = next(line for line in text.splitlines() if line.split()[:1] == ["11"])
    ratio = f"{sent / (LOW * STEPS * EPOCHS):.2f}"
    expected = ["11", "0.4", "1.234", "12.346", "61.0", "144", "M", ratio, "1/2", "23.5"]
    assert last.split() == expected
    assert not any(line.split()[:1] == ["3"] for line in text.splitlines())  # the last eight only


def test_live_table_shows_why_it_stopped_and_a_run_without_low() -> None:
    screen = console()
    live = reporters.LiveTable(screen)
    live.start(header(per_step={"dense": {"floats": 1, "bytes": 4}}), [])
    live.epoch(row(0), {})
    live.stop("the loss is not finite")
    text = screen.export_text()
    assert "the loss is not finite" in text
    assert " - " in text


def test_plain_lines_one_per_epoch() -> None:
    stream = io.StringIO()
    plain = reporters.PlainLines(stream)
    plain.start(header(), [row(0)])
    plain.step(1, 1, STEPS)
    plain.epoch(row(1), {"compute": 1.5})
    plain.stop("interrupted")
    first, second, third = stream.getvalue().splitlines()
    assert first.endswith("12 epochs, the first 1 done before")
    assert second.startswith(
        "epoch 1  lr 0.4  train loss 1.234  test loss 12.346  acc % 51.0  floats"
    )
    assert "floats 24.0 M  of low 0.50  at low 1/2  s 1.5" in second
    assert third == "interrupted"


def test_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[tuple[str, int], float] = {}

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 1)

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written[name, epoch] = value

        def flush(self) -> None: ...

        close = flush

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (scalars,) = make_reporters(["tensorboard"], tmp_path)
    scalars.start(header(), [row(0)])
    scalars.step(1, 1, STEPS)
    scalars.epoch(row(1), {"compute": 2.0})
    scalars.stop("")
    assert written["accuracy", 1] == 0.51
    assert written["traffic/floats", 1] == 24_000_001
    assert written["traffic/share of layers at low", 1] == 0.5
    assert written["seconds/compute", 1] == 2.0


def test_reporters_for_a_terminal() -> None:
    assert isinstance(reporters.terminal_reporter(terminal=True), reporters.LiveTable)
    assert isinstance(reporters.terminal_reporter(terminal=False), reporters.PlainLines)


# -- from the record alone -------------------------------------------------------------------


def test_watch_a_finished_run(record: Recorder, tmp_path: Path) -> None:
    record(tmp_path, EPOCHS).close()
    text = shown(tmp_path)
    assert "12/12 epochs, finished" in text
    assert any(line.split()[-1:] == ["1.2"] for line in text.splitlines())  # seconds: 1 + 0.25
    assert max(map(len, text.splitlines())) <= 80


def test_watch_a_running_run_with_a_torn_line(record: Recorder, tmp_path: Path) -> None:
    writer = record(tmp_path, 3)
    with (tmp_path / "epochs.jsonl").open("ab") as file:
        file.write(b'{"epoch": 3, "lr"')
    text = shown(tmp_path)
    assert "3/12 epochs, running: about 0.2 min left" in text  # 9 x 1.25 s
    writer.close()  # as if the process had died: nobody holds the lock
    assert "3/12 epochs, broken off: no process writes to" in shown(tmp_path)


def test_watch_shows_why_a_run_stopped(record: Recorder, tmp_path: Path) -> None:
    writer = record(tmp_path, 2)
    writer.event("stopped", why="the loss of worker 2 is not finite")
    writer.close()
    assert "2/12 epochs, stopped: the loss of worker 2 is not finite" in shown(tmp_path)


def test_watch_names_the_process_that_the_others_wait_for(record: Recorder, tmp_path: Path) -> None:
    writer = record(tmp_path / "run", 2)
    for epoch, slow in ((2, 6.0), (3, 4.4)):
        spent = {"compute": [4.0, slow, 4.2], "compress": [0.1] * 3, "communicate": [2.0, 0.1, 2.0]}
        writer.epoch(row(epoch), {"compute": 4.0, "evaluate": 0.25, "processes": spent})
        text = " ".join(shown(tmp_path / "run").split())
        sentence = "process 1 has computed for 6.0 s in the last unit, the others for 4.1 s"
        assert (sentence in text) == (slow == 6.0)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6))
def test_the_others_are_all_but_the_slowest(spent: list[int]) -> None:
    """Their median is what it is held against."""
    slowest = spent.index(max(spent))
    others = statistics.median(value for i, value in enumerate(spent) if i != slowest)
    said = describe_straggler({"compute": [float(value) for value in spent]})
    if said:
        assert f"process {slowest} has computed for {spent[slowest]:.1f} s" in said
        assert f"the others for {others:.1f} s" in said
    else:
        assert spent[slowest] < 1.3 * others or spent[slowest] - others < 1


def test_watch_a_folder_of_runs(record: Recorder, tmp_path: Path) -> None:
    record(tmp_path / "low/seed-0", EPOCHS).close()
    record(tmp_path / "low/seed-1", 4).close()
    record(tmp_path / "high/seed-0", 0)
    stopped = record(tmp_path / "high/seed-1", 1)
    stopped.event("stopped", why="diverged")
    stopped.close()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/run.json").write_text("{")
    text = shown(tmp_path)
    line = {words[0]: words for words in map(str.split, text.splitlines()) if words}
    assert line["low/seed-0"][-6:] == ["12/12", "61.0", "144", "M", "0.50", "finished"]
    assert line["low/seed-1"][-2:] == ["broken", "off"]
    assert line["high/seed-0"][-5:] == ["0/12", "-", "-", "-", "starting"]
    assert line["high/seed-1"][-2:] == ["stopped:", "diverged"]
    (heads, low) = (words for words in text.splitlines() if "of low" in words or "144 M" in words)
    assert low.index("0.50") + len("0.50") == heads.index("of low") + len("of low")  # a number's
    assert "damaged" in text
    assert "5 runs: " in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_users_own_job_shows_megabytes_and_their_share_of_dense(tmp_path: Path) -> None:
    """By the header's dense step, or by what a row has counted: 10 steps of 1.2 MB in float32."""
    own = header(written_by="hook", units=None)
    own["per_step"]["dense"] = {"floats": 300_000, "bytes": 1_200_000}
    for name, counted, share in (("ddp", None, 0.25), ("fsdp", 4_000_000, 0.75)):
        for count in (1, 2):
            folder = tmp_path / f"{name}-{count}"
            writer = RecordWriter.create(folder, own)
            for epoch in range(count):
                one = row(epoch) | {"bytes": 3_000_000}
                if counted:
                    one["collectives"] = {**one["collectives"], "dense": {"scatter": counted}}
                writer.epoch(one, {"compute": 1.0})
            writer.close()
            text = shown(folder)
            (line,) = [x.split() for x in text.splitlines() if x.split()[:1] == [str(count - 1)]]
            assert line[-4:] == [f"{3 * count}", f"{share:.2f}", "1/2", "1.0"]
            assert "share of what" in text
            assert max(map(len, text.splitlines())) <= 80
    text = shown(tmp_path)
    (line,) = [x.split() for x in text.splitlines() if x.split()[:1] == ["fsdp-2"]]
    assert line[-4:-2] == ["6", "0.75"]


def test_finished_runs_give_way_in_a_low_window(record: Recorder, tmp_path: Path) -> None:
    for seed in range(20):
        record(tmp_path / f"low/seed-{seed:02}", EPOCHS if seed else 1).close()
    picture, going = watch._many(tmp_path, height=18)
    screen = console()
    screen.print(picture)
    text = screen.export_text()
    assert len(text.splitlines()) <= 18
    assert "low/seed-00" in text  # the one that needs attention stays
    assert "(10 finished ones not shown)" in text
    assert not going


def test_ctrl_c_ends_quietly(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = record(tmp_path, 2)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt
        writer.epoch(row(2), {"compute": 1.0})

    monkeypatch.setattr(watch.time, "sleep", sleep)
    screen = console()
    watch.watch_runs(tmp_path, console=screen)
    assert "3/12 epochs, running" in screen.export_text()  # it read the new line


def test_watch_ends_with_the_last_run_of_a_folder(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where no run goes on; else when none has begun for a while."""
    naps: list[float] = []
    monkeypatch.setattr(watch.time, "sleep", naps.append)
    record(tmp_path / "low/seed-0", EPOCHS).close()
    watch.watch_runs(tmp_path, console=console())
    assert not naps
    going = record(tmp_path / "low/seed-1", 2)

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            going.close()
        assert len(naps) < 200

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.watch_runs(tmp_path, console=console())
    assert len(naps) == 4 + watch.PATIENCE


def test_watch_prints_text_into_a_pipe(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as something has changed, and not in place."""
    writer, naps = record(tmp_path, EPOCHS - 1), iter(range(10))

    def sleep(seconds: float) -> None:
        if next(naps) == 4:
            writer.epoch(row(EPOCHS - 1), {"compute": 1.0})
            writer.event("end")

    monkeypatch.setattr(watch.time, "sleep", sleep)
    pipe = io.StringIO()
    watch.watch_runs(tmp_path, console=Console(width=80, file=pipe))
    said = pipe.getvalue()
    assert "\x1b" not in said
    assert (said.count("11/12 epochs, running"), said.count("12/12 epochs, finished")) == (1, 1)


def test_watch_waits_for_the_first_run(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that is made later; Ctrl-C ends the waiting as well."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            record(tmp_path / "later/run", EPOCHS).close()
        if len(naps) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    screen = console()
    watch.watch_runs(tmp_path / "later", console=screen)
    said = screen.export_text(clear=False)
    assert said.count("waiting for the first run in") == 1
    assert "which does not exist yet; Ctrl-C ends" in said
    assert "1 runs: " in said
    naps[:] = [1.0] * 4
    watch.watch_runs(tmp_path / "never", console=screen)


def test_watch_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run in or under"):
        watch.watch_runs(tmp_path, once=True)
    with tarfile.open(tmp_path / "empty.tar.xz", "w:xz"):
        pass
    with pytest.raises(RecordError, match="no run in or under"):
        watch.watch_runs(tmp_path / "empty.tar.xz")


@given(st.integers(10**6, 10**13))
@example(999_500_000)
def test_megabytes_have_three_digits_or_more(count: int) -> None:
    text = format_megabytes(Sent(bytes=count))
    assert "e" not in text
    assert float(text.replace(",", "")) * 1e6 == pytest.approx(count, rel=0.00501)


# -- work on many things -----------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("seconds", "terminal", "shown"), [(1.0, True, True), (0.1, True, False), (1.0, False, False)]
)
def test_a_bar_for_work_that_takes_longer(
    seconds: float, terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten things; a bar after two seconds, on a terminal only, which is gone at the end."""
    clock = 0.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Terminal(terminal))
    seen = []
    for thing in progress.track_progress([*range(10)], "reading runs"):
        seen.append(thing)
        clock += seconds
    assert seen == [*range(10)]
    assert ("reading runs" in screen.getvalue()) == shown
    assert (screen.getvalue() == "") == (not shown)
