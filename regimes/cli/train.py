"""The commands that train, and the list of presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from regimes import presets as _presets
from regimes.base.config import RunConfig, read_value, to_dict, to_toml
from regimes.base.console import stdout
from regimes.base.console.metavars import LEFT_OUT, named
from regimes.base.console.tables import Table
from regimes.base.console.units import metric_unit
from regimes.base.errors import require
from regimes.cli.app import Names, Settings, app, refuse_seed, welcome_plug_ins
from regimes.collectives.launcher import read_launch
from regimes.job.run_warnings import run_warnings
from regimes.plotting.reporters import terminal_reporter
from regimes.plotting.text import metric_text
from regimes.records import sibling_difference


@app.command
def run(
    preset: Annotated[str, tyro.conf.Positional, named("PRESET")],
    set: Settings = (),
    seed: Annotated[int | None, LEFT_OUT] = None,
    out: Annotated[Path | None, LEFT_OUT] = None,
    workers: Annotated[int | None, LEFT_OUT] = None,
    processes: int = 1,
    resume: bool = False,
    quiet: bool = False,
) -> None:
    """Train one configuration and leave its record in a folder. Example: regimes run smoke --set
    epochs=4

    Args:
        preset: a preset, GRID/SCHEDULE, or a .toml file; see `regimes presets`.
        set: change a field, e.g. --set policy.interval=4 --set levels.low=2.
        seed: seed of the run.
        out: folder of the record; default runs/NAME/seed-SEED.
        workers: number W of logical workers.
        processes: number P of local processes that share the workers; P divides W.
        resume: continue the run in the folder from its last checkpoint.
        quiet: print nothing but errors.
    """
    welcome_plug_ins()
    given = (("seed", seed), ("workers", workers))
    words = (*set, *(f"{name}={value}" for name, value in given if value is not None))
    config = _presets.read_configuration(preset, words)
    out = out or Path("runs", _name_output(preset), f"seed-{config.seed}")
    if (note := sibling_difference(to_dict(config), out)) and not quiet and read_launch().rank == 0:
        stdout.try_print(f"note: {note}")
    train(config, out, processes, resume, quiet)


def train(config: RunConfig, out: Path, processes: int, resume: bool, quiet: bool) -> None:
    """Train in this process, or on several of this machine; where torchrun has restarted this one,
    its run goes on. Process 0 prints the result."""
    from regimes.search.processes import spawn_processes
    from regimes.training import loop

    own = read_launch()
    if processes != 1 and own.count == 1:
        spawn_processes(config, out, processes, resume=resume, quiet=quiet)
        return
    resume = resume or (own.restarts > 0 and (out / "run.json").exists())
    if quiet or own.rank > 0:
        loop.run(config, out, resume=resume, reporters=())
        return
    record = loop.run(config, out, resume=resume, reporters=[terminal_reporter()])
    last, name = record.epochs.iloc[-1], record.header["metric"]
    unit = metric_unit(name)[1]
    stdout.try_print(
        f"{out}: {name} {metric_text(record.header, last['metric'])[1]}{unit}, "
        f"{last['total_floats'] / 1e6:.3f} M floats, {last['total_bytes'] / 1e6:.2f} MB "
        "sent by each worker"
    )
    for sentence in run_warnings(record.header, record.rows):
        stdout.try_print(sentence)


def _name_output(name: str) -> str:
    """The name of a preset, a grid or a TOML file in the folder of runs."""
    return Path(name).stem if name.endswith(".toml") else name


@app.command
def ablate(
    grid: Annotated[str, tyro.conf.Positional, named("GRID")],
    set: Settings = (),
    seeds: Annotated[int | None, LEFT_OUT] = None,
    first_seed: Annotated[int | None, LEFT_OUT] = None,
    schedules: Names = (),
    out: Annotated[Path | None, LEFT_OUT] = None,
    jobs: int = 1,
    executor: Annotated[Literal["slurm", "local"] | None, LEFT_OUT] = None,
    option: Settings = (),
) -> None:
    """Run every schedule of a grid with several seeds. Finished runs are skipped, and broken ones
    are resumed. Example: regimes ablate smoke --seeds 3 --jobs 2

    Args:
        grid: a grid, see `regimes presets`, or a .toml file with a base and schedules of your own.
        set: change a field in all runs.
        seeds: number of seeds; default what the file says, else 3.
        first_seed: first of the seeds; default 0.
        schedules: run only this schedule; may be given several times.
        out: folder of the records; default runs/GRID.
        jobs: number of runs at a time, each on its share of the cores.
        executor: submit every run as a job through submitit.
        option: parameter of submitit's executor, e.g. --option slurm_partition=gpu --option
            timeout_min=60.
    """
    from regimes.search import ablation

    welcome_plug_ins()
    refuse_seed(set)
    require(jobs >= 1, "--jobs", jobs, "at least 1")
    require(executor is not None or not option, "--option", option[:1], "--executor as well")
    for text in option:
        require("=" in text, "--option", text, "the form key=value")
    named = _presets.seeds_of(grid) if seeds is None else None
    expected = f"--seeds as well: {grid} names its seeds"
    require(not named or first_seed is None, "--first-seed", first_seed, expected)
    numbers = named or _presets.number_seeds(3 if seeds is None else seeds, first_seed or 0)
    cells = _presets.select_schedules(grid, schedules, set)
    options = {key: read_value(text) for key, _, text in (o.partition("=") for o in option)}
    ablation.run_ablation(
        cells, numbers, out or Path("runs", _name_output(grid)), jobs, executor, options
    )


@app.command
def tune(
    grid: Annotated[str, tyro.conf.Positional, named("GRID")],
    values: Settings = (),
    set: Settings = (),
    seeds: int = 2,
    first_seed: int = 1000,
    schedules: Names = (),
    halving: Annotated[int | None, LEFT_OUT] = None,
    budget: Annotated[float | None, LEFT_OUT] = None,
    out: Annotated[Path | None, LEFT_OUT] = None,
    jobs: int = 1,
) -> None:
    """Try values of any fields on every schedule of a grid alike, by validation data, and write the
    best as configurations: `regimes ablate OUT/chosen` runs them with other seeds. Example: regimes
    tune smoke --values optimizer.lr=0.1,0.2 --set data.validation_size=100

    Args:
        grid: a grid, see `regimes presets`, or a preset or GRID/SCHEDULE; a name that is both a
            grid and a preset means the grid.
        values: values of a field, e.g. --values optimizer.lr=0.1,0.2,0.4; all combinations are
            tried.
        set: change a field in all runs; data.validation_size is needed.
        seeds: number of seeds that choose.
        first_seed: first of the seeds.
        schedules: tune only this schedule; may be given several times.
        halving: train all for a part of the run, then repeatedly the best 1 in this many longer.
        budget: largest number of epochs, all runs together; a search that may need more is refused.
        out: folder of the records; default runs/tune/GRID.
        jobs: number of runs at a time, each on its share of the cores.
    """
    from regimes.search import tune as tuning

    welcome_plug_ins()
    refuse_seed(set)
    require(jobs >= 1, "--jobs", jobs, "at least 1")
    numbers = _presets.number_seeds(seeds, first_seed)
    cells = _presets.select_arms(grid, schedules, set)
    if grid in _presets.PRESETS and len(cells) > 1:
        stdout.try_print(
            f"{grid}: the grid with the schedules {', '.join(cells)}, and not the preset of "
            "that name; --schedules NAME tunes one"
        )
    folder = out or Path("runs", "tune", _name_output(grid))
    tuning.run_tuning(cells, values, numbers, folder, jobs, halving, budget)


@app.command
def presets(
    words: Annotated[tuple[str, ...], tyro.conf.Positional, named("WORD"), LEFT_OUT] = (),
) -> None:
    """List presets and grids, all or by words of their descriptions, or print one as TOML. Example:
    regimes presets topk gpu

    Args:
        words: a preset or GRID/SCHEDULE to print, or words to search for.
    """
    if len(words) == 1 and (words[0] in _presets.PRESETS or "/" in words[0]):
        print(to_toml(_presets.get_preset(words[0])), end="")
        return
    for kind, about, rows in _presets.list_groups(words):
        stdout.make_console().print(
            Table((kind, "command, what, how long"), rows, texts=2, title=about).drawn(), ""
        )
