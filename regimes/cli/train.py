"""The commands that train, and the list of presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from regimes import presets as _presets
from regimes.cli.app import Settings, app, read_configuration, refuse_seed, welcome_plug_ins
from regimes.collectives.launcher import read_launch
from regimes.config import read_value, to_dict, to_toml
from regimes.console import stdout
from regimes.console.tables import Table
from regimes.errors import require
from regimes.records import sibling_difference


@app.command
def run(
    preset: Annotated[str, tyro.conf.Positional],
    set: Settings = (),
    seed: int | None = None,
    out: Path | None = None,
    workers: int | None = None,
    processes: int = 1,
    resume: bool = False,
    quiet: bool = False,
) -> None:
    """Train one configuration and leave its record in a folder.

    Args:
        preset: a preset, GRID/SCHEDULE, or a .toml file; see `regimes presets`.
        set: change a field, e.g. --set policy.interval=4 --set levels.low=2.
        seed: the run's seed.
        out: folder of the record; default runs/NAME/seed-SEED.
        workers: logical workers W.
        processes: local processes P that share the workers (P divides W).
        resume: continue the run in the folder from its last checkpoint.
        quiet: print nothing but errors.
    """
    from regimes.launch.processes import spawn_processes, train_process

    given = (("seed", seed), ("workers", workers))
    config = read_configuration(preset, (*set, *(f"{k}={x}" for k, x in given if x is not None)))
    out = out or Path("runs", _name_output(preset), f"seed-{config.seed}")
    if (note := sibling_difference(to_dict(config), out)) and not quiet and read_launch().rank == 0:
        stdout.try_print(f"note: {note}")
    if read_launch().count > 1 or processes == 1:
        train_process(config, out, resume, quiet)
    else:
        spawn_processes(config, out, processes, resume=resume, quiet=quiet)


def _name_output(name: str) -> str:
    """The name of a preset, a grid or a TOML file in the folder of runs."""
    return Path(name).stem if name.endswith(".toml") else name


@app.command
def ablate(
    grid: Annotated[str, tyro.conf.Positional],
    set: Settings = (),
    seeds: int | None = None,
    first_seed: int = 0,
    schedules: Settings = (),
    out: Path | None = None,
    jobs: int = 1,
    executor: Literal["slurm", "local"] | None = None,
    option: Settings = (),
) -> None:
    """Run every schedule of a grid with several seeds; finished runs are skipped, broken ones
    resumed.

    Args:
        grid: a grid, see `regimes presets`, or a .toml file with a base and schedules of your own.
        set: change a field in all runs.
        seeds: how many seeds; default what the file says, else 3.
        first_seed: the first of them.
        schedules: only this one; may be given several times.
        out: folder of the records; default runs/GRID.
        jobs: runs at a time, each on its share of the cores.
        executor: submit every run as a job through submitit instead.
        option: of submitit's executor, e.g. --option slurm_partition=gpu --option timeout_min=60.
    """
    from regimes.launch import ablation

    welcome_plug_ins()
    refuse_seed(set)
    require(jobs >= 1, "--jobs", jobs, "at least 1")
    require(executor is not None or not option, "--option", option[:1], "--executor as well")
    for text in option:
        require("=" in text, "--option", text, "the form key=value")
    named = _presets.seeds_of(grid) if seeds is None else None
    numbers = named or _presets.number_seeds(3 if seeds is None else seeds, first_seed)
    cells = _presets.select_schedules(grid, schedules, set)
    options = {key: read_value(text) for key, _, text in (o.partition("=") for o in option)}
    ablation.run_ablation(
        cells, numbers, out or Path("runs", _name_output(grid)), jobs, executor, options
    )


@app.command
def tune(
    grid: Annotated[str, tyro.conf.Positional],
    values: Settings = (),
    set: Settings = (),
    seeds: int = 2,
    first_seed: int = 1000,
    schedules: Settings = (),
    halving: int | None = None,
    budget: float | None = None,
    out: Path | None = None,
    jobs: int = 1,
) -> None:
    """Try values of any fields on every schedule of a grid alike, by validation data, and write
    what is best as configurations: `regimes ablate OUT/chosen` runs them with other seeds.

    Args:
        grid: a grid, see `regimes presets`, or one preset or GRID/SCHEDULE; where a grid and a
            preset have one name, the grid.
        values: of a field, e.g. --values optimizer.lr=0.1,0.2,0.4; all combinations are tried.
        set: change a field in all runs; data.validation_size is needed.
        seeds: how many seeds choose.
        first_seed: the first of them.
        schedules: only this one; may be given several times.
        halving: train all for a share of the run, and each time the best 1 in so many longer.
        budget: the most epochs of training, all runs together; more is refused.
        out: folder of the records; default runs/tune/GRID.
        jobs: runs at a time, each on its share of the cores.
    """
    from regimes.launch import tune as tuning

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
def presets(words: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """List presets and grids, all or by words of their descriptions; print one as TOML.

    Args:
        words: a preset, or GRID/SCHEDULE; or words to search for, e.g. topk gpu.
    """
    if len(words) == 1 and (words[0] in _presets.PRESETS or "/" in words[0]):
        print(to_toml(_presets.get_preset(words[0])), end="")
        return
    for kind, about, rows in _presets.list_groups(words):
        stdout.make_console().print(
            Table((kind, "command, what, how long"), rows, texts=2, title=about).drawn(), ""
        )
