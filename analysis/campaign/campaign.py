"""The reference campaign: every grid behind figures, tables and findings, in order of value.

::

    regimes figure campaign --scale cpu --jobs 2       # about 4 hours on two cores
    regimes figure campaign --only smoke-controls      # one step of it
    regimes figure claims runs                         # what holds at this scale

Finished runs are skipped and broken ones resumed, so that the same command goes on where it was
stopped. ``--start data/reference`` begins with the committed records. Each step's records lie in a
folder of its own. ``campaign.jsonl`` has the code of each start: a commit, or it says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from regimes import presets
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError, RecordError, TrainingError, suggest_nearest
from regimes.presets.families import shorten_training
from regimes.records import load
from regimes.search import sweep

from ..tournament.yoked import ORDERS
from ..tournament.yoked import yoked as yoked_to
from . import begin
from .begin import unpack

Steps = tyro.conf.UseAppendAction[tuple[str, ...]]
Change = Callable[[RunConfig], RunConfig]
Cells = list[tuple[Path, RunConfig]]


@dataclass(frozen=True)
class Step:
    """A grid of the campaign.

    Attributes:
        grid: see `regimes presets`.
        seeds, first: how many, from which on.
        minutes: of one run, on one core or on a GPU; replaced by what is measured.
        schedules: which of them; none: all.
        yoked: the control experiment: runs that move what ACCORDION has sent to other times.
        name: of the folder, where it is not the grid's.
    """

    grid: str
    seeds: int = 5
    first: int = 2000
    minutes: float = 0.4
    schedules: tuple[str, ...] = ()
    yoked: bool = False
    name: str = ""

    @property
    def folder(self) -> str:
        return self.name or self.grid

    def cells(self, out: Path, change: Change) -> Cells:
        """The runs, as far as they are known: controls only of ACCORDION runs that are finished."""
        grid = presets.get_grid(self.grid)
        configs = {
            n: change(c) for n, c in grid.items() if not self.schedules or n in self.schedules
        }
        seeds = list(range(self.first, self.first + self.seeds))
        cells = sweep.list_cells(configs, seeds, out / self.folder)
        originals = [cell for cell in cells if cell[1].name == "accordion"] if self.yoked else []
        for folder, config in originals:
            if sweep.is_finished(folder, config):
                made = [yoked_to(load(folder), order) for order in ORDERS]
                cells += [(out / self.folder / c.name / folder.name, c) for c in made]
        return cells

    @property
    def count(self) -> int:
        """How many runs in all."""
        schedules = len(self.schedules or presets.get_grid(self.grid))
        return self.seeds * (schedules + (len(ORDERS) if self.yoked else 0))


THREE = ("low", "high", "accordion")
CPU = (
    Step("smoke", first=1000, minutes=0.06),
    Step("small", first=1000),
    Step("small", first=3000, schedules=THREE, yoked=True, name="small-controls"),
    Step("smoke", 8, 3000, 0.06, THREE, True, "smoke-controls"),
    Step("smoke-long", 8, 3000, 0.12, THREE, True, "smoke-long-controls"),
    Step("smoke-long", 8, minutes=0.12),
    Step("smoke-rules", 8, minutes=0.06),
    Step("small-quirks", first=3000),
    Step("smoke-quirks-topk", 16, minutes=0.1),
    Step("small-signals", first=1000, minutes=3),
    Step("smoke-signals", first=1000, minutes=0.8),
    Step("detection-smoke", 8, 7000, 0.6, ("signals",), name="detection-signals-smoke"),
    Step("small-overlap", 4, first=1000, minutes=1),
    Step("smoke-overlap", first=1000),
    Step("small-batch"),
    Step("small-adaqs"),
    Step("small-budget", minutes=0.8),
    Step("small-ladder"),
    Step("smoke-deficit", minutes=0.06),
    Step("smoke-quantise", minutes=0.1, schedules=("dense", *THREE)),
    Step("small-batch-own", 8, 3000),
    Step("small-own", 10, 3000, 0.3, name="tournament-small"),
    Step("small-overlap-own", 4, 3000, 1),
    Step("small-signals-own", first=3000, minutes=3),
    Step("smoke-resnet8", minutes=0.2),
    Step("smoke-full", minutes=0.2),
    Step("lstm-small", schedules=THREE, minutes=1.5),
    Step("small-joint"),
    Step("small-topk", schedules=THREE, minutes=0.5),
)
GPU = (
    Step("paper-table1-resnet18", 1, 0, 60),
    Step("paper-table1-vgg19bn", 1, 0, 60),
    Step("paper-figure2", 1, 0, 60),
    Step("paper-batch-cifar10", 1, 0, 60),
    Step("paper-budget", 1, 0, 120),
    Step("paper-adaqs", 1, 0, 60),
    Step("paper-ladder", 1, 0, 60),
    Step("paper-table3-resnet18", 1, 0, 60),
    Step("paper-figure3", 1, 0, 90),
    Step("paper-figure4a", 1, 0, 60),
    Step("paper-lstm", 1, 0, 30),
)
SCALES = {"cpu": CPU, "gpu": GPU}


class Remaining:
    """What remains, by the minutes that the steps were given, corrected by those they took."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.expected, self.taken = jobs, 0.0, 0.0

    def left(self, minutes: float) -> str:
        pace = self.taken / self.expected if self.expected else 1.0 / self.jobs
        rest = pace * minutes
        return f"{rest / 60:.1f} hours" if rest > 90 else f"{rest:.0f} minutes"


def run(
    steps: tuple[Step, ...], out: Path, jobs: int, change: Change, say: Callable[[str], None]
) -> list[str]:
    """Run what is missing of all steps; returns a sentence per failed run, and per step with other
    runs in its folder."""
    clock = Remaining(jobs)
    failures: list[str] = []
    missing: dict[Step, int] = {}
    for step in steps:
        try:
            missing[step] = step.count - sum(sweep.is_finished(*c) for c in step.cells(out, change))
        except RecordError as error:
            failures.append(f"{step.folder} left out: {error}")
            say(failures[-1])
    later = sum(n * step.minutes for step, n in missing.items())
    say(
        f"{sum(s.count for s in missing)} runs, {sum(missing.values())} missing: "
        f"{clock.left(later)} left"
    )
    for step, count in missing.items():
        for _ in range(1 + step.yoked):  # the controls are known when their originals are done
            todo = [c for c in step.cells(out, change) if not sweep.is_finished(*c)]
            todo = [c for c in todo if not any(str(c[0]) in f for f in failures)]
            count, later = count - len(todo), later - len(todo) * step.minutes
            failures += _run(todo, step, jobs, clock, later, say)
        later -= count * step.minutes  # the controls of originals that failed
    return failures


def _run(
    todo: Cells, step: Step, jobs: int, clock: Remaining, later: float, say: Callable[[str], None]
) -> list[str]:
    start, ended, before = time.monotonic(), 0, (clock.expected, clock.taken)

    def progress(folder: Path, error: str | None) -> None:
        nonlocal ended
        ended += 1
        clock.expected = before[0] + ended * step.minutes
        clock.taken = before[1] + (time.monotonic() - start) / 60
        rest = clock.left(later + (len(todo) - ended) * step.minutes)
        result = f"failed: {error}" if error else "done"
        say(
            f"{step.folder} [{ended}/{len(todo)}] {folder.parent.name}/{folder.name}: {result}, "
            f"{rest} left"
        )

    return sweep.ablate(todo, jobs, progress)


def changed(config: RunConfig, images: Path | None, share: float) -> RunConfig:
    """A run of the campaign with other images for CIFAR-10, or another length."""
    if images and config.data.name == "cifar10":
        config = replace(config, data=replace(config.data, name="folder", path=str(images)))
    return config if share == 1 else shorten_training(config, share)


def main(
    scale: Literal["cpu", "gpu"] = "cpu",
    only: Steps = (),
    out: Path = Path("runs"),
    start: Path | None = None,
    images: Path | None = None,
    share: float = 1.0,
    jobs: int = 1,
    allow_dirty: bool = False,
) -> None:
    """Run the grids of a scale, the most telling first, and print the time that remains.

    Args:
        scale: cpu: 18 k and 75 k parameters, 5 seeds or more; gpu: the paper's networks, one seed.
        only: this step; may be given several times.
        out: folder of all records.
        start: folder of archives to begin with, e.g. data/reference.
        images: CIFAR-10 as a folder or an archive of images, in place of torchvision's copy.
        share: of every run's epochs; decays, windows and intervals are scaled with it.
        jobs: runs at a time.
        allow_dirty: run although files of regimes/ are not as committed; it is written down.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, got {share}")
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    if images and not images.exists():
        raise ConfigError(f"--images: {images} does not exist")
    names = [step.folder for step in SCALES[scale]]
    for name in set(only) - set(names):
        raise ConfigError(f"no step {name!r} at scale {scale}: {suggest_nearest(name, names)}")
    line = begin.checked(allow_dirty)
    if start:
        unpack(start, out)
    begin.write_down(out, line | {"scale": scale, "only": list(only), "share": share})
    steps = tuple(step for step in SCALES[scale] if not only or step.folder in only)
    failures = run(
        steps,
        out,
        jobs,
        lambda config: changed(config, images, share),
        lambda words: print(words, flush=True),
    )
    if failures:
        raise TrainingError(f"{len(failures)} runs or steps failed; first: {failures[0]}")
