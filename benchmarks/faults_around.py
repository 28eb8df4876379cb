"""Further faults for ``benchmarks.faults``: what happens around a training, and to commands.

Each takes the ``Bench`` and says what came of it and how many recorded epochs were lost, like those
of ``benchmarks.faults``.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from benchmarks.faults_bench import count_lost, lines_of
from benchmarks.trainers import Training, epochs_of, same
from regimes.base.config import to_toml
from regimes.cli.machine import judge_record

if TYPE_CHECKING:
    from benchmarks.faults_bench import Bench, Outcome

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def command(*words: str, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        [sys.executable, "-m", "regimes", *words],
        env=ENVIRONMENT,
        text=True,
        stderr=subprocess.PIPE,
        **options,
    )


# -- standard output, the clock --------------------------------------------------------------


def pipe_closed(bench: Bench) -> Outcome:
    """Who reads the progress leaves after some lines, or at once."""
    out, file = bench.folder(), bench.folder().with_suffix(".toml")
    file.write_text(to_toml(bench.config))
    run = command("run", str(file), "--out", str(out), stdout=subprocess.PIPE)
    assert run.stdout is not None
    for _ in range(bench.draw.randrange(4)):
        run.stdout.readline()
    run.stdout.close()
    code, said = run.wait(90), run.stderr.read() if run.stderr else ""
    told = "standard output" in said or any("output" in str(e) for e in _events(out))
    equal = code == 0 and same(out, bench.whole[1])
    return (
        "went on to the same bytes" + (", saying so" if told else "")
        if equal
        else f"code {code}: {said[-200:]!r}"
    ), 0


def _events(out: Path) -> list[dict[str, Any]]:
    from regimes.records import read_lines

    return read_lines(out / "events.jsonl")


@dataclass(frozen=True)
class Jump:
    """The wall clock of a process jumps by so many seconds before its ``step``-th forward pass."""

    rank: int
    step: int
    seconds: float

    def __call__(self, rank: int) -> None:
        if rank == self.rank:
            from benchmarks.trainers import _at

            _at(self.step, lambda loss: (self._jump(), loss)[1])

    def _jump(self) -> None:
        import datetime

        from regimes.records import writer

        real, by = time.time, self.seconds
        time.time = lambda: real() + by

        class Moved(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Moved:
                return cls.fromtimestamp(real() + by, tz)

        writer.datetime = type("module", (), {**vars(datetime), "datetime": Moved})  # type: ignore[assignment]


def clock_jumps(bench: Bench) -> Outcome:
    """By up to ten years, either way, on one of two processes."""
    out, years = bench.folder(), 3e7 * bench.draw.uniform(-10, 10)
    jump = Jump(bench.draw.randrange(2), bench.draw.randrange(1, 18), years)
    ends = Training([bench.config] * 2, out, spoil=jump).ends()
    equal = all(end.code == 0 for end in ends) and same(out, bench.whole[2])
    sound = judge_record(out)[0] == "whole"
    return (
        "went on to the same bytes, its record whole"
        if equal and sound
        else f"OTHERWISE: {ends}, {judge_record(out)}"
    ), 0


# -- checkpoints -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DiesWriting:
    """Process 0 is killed in its ``call``-th write of a checkpoint's file: before it, with a part
    of it written, or after it."""

    call: int
    share: float

    def __call__(self, rank: int) -> None:
        from regimes.training import checkpoint

        if rank:
            return
        original, calls = checkpoint.write_atomically, [0]

        def write(path: Path, content: bytes) -> None:
            calls[0] += 1
            if calls[0] == self.call:
                if self.share >= 1:
                    original(path, content)
                else:
                    Path(f"{path}.part").write_bytes(content[: int(self.share * len(content))])
                os.kill(os.getpid(), SIGKILL)
            original(path, content)

        checkpoint.write_atomically = write


def killed_writing(bench: Bench) -> Outcome:
    out, count = bench.folder(), bench.draw.choice([1, 2])
    dies = DiesWriting(bench.draw.randrange(1, 12), bench.draw.choice([0.0, 0.5, 0.99, 1.0]))
    ends = Training([bench.config] * count, out, spoil=dies).ends()
    if ends[0].code == 0:  # it writes fewer files
        return None
    return bench.continued(out, count, "ended at once")


# -- commands --------------------------------------------------------------------------------

ARMS = ("--schedules", "low", "--schedules", "high", "--seeds", "2")


def ablation_ended(bench: Bench) -> Outcome:
    """SIGTERM to an ablation of four runs on two processes; the same command continues it."""
    sets = [
        w
        for s in (
            "epochs=6",
            "data.train_size=120",
            "data.test_size=100",
            "optimizer.decay_epochs=[4]",
        )
        for w in ("--set", s)
    ]
    out = bench.folder()
    words = ["ablate", "smoke", *ARMS, "--jobs", "2", *sets, "--out", str(out)]
    run = command(*words, stdout=subprocess.PIPE)
    time.sleep(bench.draw.uniform(1, 12))
    if run.poll() is not None:
        return None
    run.send_signal(SIGTERM)
    said, code = "".join(run.communicate(timeout=90)), run.returncode
    if code == 0:
        return None
    before = {file.parent: lines_of(file.parent) for file in out.rglob("epochs.jsonl")}
    again = command(*words, stdout=subprocess.DEVNULL)
    ended = again.wait(180)
    lost = sum(count_lost(lines, lines_of(folder)) for folder, lines in before.items())
    whole = len(list(out.rglob("epochs.jsonl"))) == 4 and ended == 0
    told = "with its sentence" if re.search(r"SIGTERM|start the same", said) else f"{said[-99:]!r}"
    told = "while starting" if code == -SIGTERM and not before else told
    end = "continued to the end" if whole else f"NOT continued: {ended}"
    return f"code {code}, {told}, {end}", lost


def edited(bench: Bench) -> Outcome:
    """A digit of an earlier row is changed while the run resumes: before its record is read, or
    after."""
    out = bench.stopped()
    run = Training([bench.config], out)
    time.sleep(bench.draw.uniform(0, 0.6))
    was = _change_a_digit(out / "epochs.jsonl", bench.draw)
    end = run.ends()[0]
    if not was:
        return None
    what, more = judge_record(out)
    if end.code == 2:
        return "refused: " + ("naming the file" if "epochs.jsonl" in end.said else end.said), 0
    found = "doctor calls it edited" if what == "edited" else f"doctor says {what} {more}"
    if end.code == 0 and same(out, bench.whole[1]):
        return "ended with the same bytes, the edit overwritten", 0
    return f"ended with code {end.code}, {found}", 0


def _change_a_digit(file: Path, draw: random.Random) -> bool:
    """In place, in the first row; False if there is none."""
    with file.open("r+b") as opened:
        line = opened.readline()
        digits = [i for i, byte in enumerate(line) if chr(byte) in "12345678"]
        if not digits:
            return False
        place = draw.choice(digits)
        opened.seek(place)
        opened.write(bytes([line[place] + 1]))
    return True


HOOKS = """
import sys, torch, torch.distributed as dist, regimes
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
first, second, when = sys.argv[1], sys.argv[2], int(sys.argv[3])
models = [DDP(torch.nn.Linear(6, 6)) for _ in range(2)]
hooks = [regimes.attach(models[0], record=first)]
for step in range(8):
    if step == when:
        hooks.append(regimes.attach(models[1], record=second))
    for model, hook in zip(models, hooks):
        model(torch.randn(4, 6)).square().mean().backward()
        if step % 2:
            hook.epoch_end(lr=0.1)
for hook in hooks:
    hook.close()
dist.destroy_process_group()
"""


def two_hooks(bench: Bench) -> Outcome:
    """In one job, with records of their own or, wrongly, in one folder."""
    script, together = bench.folder().with_suffix(".py"), bench.draw.random() < 0.5
    script.write_text(HOOKS)
    first = bench.folder()
    second = first if together else bench.folder()
    when = bench.draw.randrange(0, 7)
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(first),
        str(second),
        str(when),
    ]
    run = subprocess.run(
        [sys.executable, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if not together:
        whole = [judge_record(place)[0] for place in (first, second)]
        good = run.returncode == 0 and whole == ["whole", "whole"]
        return ("two records, both whole" if good else f"code {run.returncode}, {whole}"), 0
    told = re.search(r"already holds a run|another run is writing", run.stderr)
    what = (
        "refused in a sentence"
        if told and run.returncode
        else (f"code {run.returncode}, {run.stderr[-200:]!r}")
    )
    return f"one folder for both: {what}", max(0, when // 2 - len(epochs_of(first)))
