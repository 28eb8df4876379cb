"""The subcommands. Each is thin: parse, call, print. torch is imported when training starts."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.extras import SubcommandApp

from regimes import presets as _presets
from regimes.config import RunConfig, load_toml, override, read_value, to_toml
from regimes.console import stdout
from regimes.console.tables import Table
from regimes.errors import ConfigError, require


class _App(SubcommandApp):
    """`regimes figure NAME WORDS` leaves the words to the figure, options among them."""

    def cli(self, **kwargs: Any) -> Any:
        match sys.argv[1:]:
            case ["figure", name, *words] if not name.startswith("-"):
                return figure(name, tuple(words))
        return super().cli(**kwargs)


app = _App()
Settings = tyro.conf.UseAppendAction[tuple[str, ...]]


def _welcome_plug_ins() -> None:
    """Let a user's words name a class in the current folder (package.module:Class). Installed
    packages come first, and commands that only read never ask for this."""
    if "" not in sys.path:
        sys.path.append("")


def _configuration(preset: str, settings: tuple[str, ...]) -> RunConfig:
    _welcome_plug_ins()
    known = load_toml(preset) if preset.endswith(".toml") else _presets.get_preset(preset)
    return override(known, list(settings))


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
    from regimes.launch.processes import spawn
    from regimes.launch.single import train

    require(processes >= 1, "--processes", processes, "at least 1")
    config = _configuration(preset, set)
    config = replace(
        config,
        seed=config.seed if seed is None else seed,
        workers=config.workers if workers is None else workers,
    )
    stem = Path(preset).stem if preset.endswith(".toml") else preset
    out = out or Path("runs", stem, f"seed-{config.seed}")
    if processes == 1 or "WORLD_SIZE" in os.environ:
        train(config, out, resume, quiet)
        return
    multiple = f"a multiple of the number of processes, {processes}"
    require(config.workers % processes == 0, "workers", config.workers, multiple)
    spawn(config, out, processes, resume=resume, quiet=quiet)


@app.command
def ablate(
    grid: Annotated[str, tyro.conf.Positional],
    set: Settings = (),
    seeds: int = 3,
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
        grid: a grid; see `regimes presets`.
        set: change a field in all runs.
        seeds: how many seeds.
        first_seed: the first of them.
        schedules: only this one; may be given several times.
        out: folder of the records; default runs/GRID.
        jobs: runs at a time, each on its share of the cores.
        executor: submit every run as a job through submitit instead.
        option: of submitit's executor, e.g. --option slurm_partition=gpu --option timeout_min=60.
    """
    from regimes.launch import ablation

    _welcome_plug_ins()
    require(seeds >= 1, "--seeds", seeds, "at least 1")
    require(jobs >= 1, "--jobs", jobs, "at least 1")
    cells = _presets.select(grid, schedules, set)
    options = {key: read_value(text) for key, _, text in (o.partition("=") for o in option)}
    numbers = list(range(first_seed, first_seed + seeds))
    ablation.main(cells, numbers, out or Path("runs", grid), jobs, executor, options)


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
        grid: a grid or a preset; see `regimes presets`.
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

    _welcome_plug_ins()
    cells = (
        {grid: _configuration(grid, set)}
        if grid in _presets.PRESETS and not schedules
        else (_presets.select(grid, schedules, set))
    )
    numbers = list(range(first_seed, first_seed + seeds))
    tuning.main(cells, values, numbers, out or Path("runs", "tune", grid), jobs, halving, budget)


@app.command
def presets(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List presets and grids, or print one preset as TOML.

    Args:
        name: a preset, or GRID/SCHEDULE.
    """
    if name:
        print(to_toml(_presets.get_preset(name)), end="")
        return
    for title, known in (("preset", _presets.PRESETS), ("grid", _presets.GRIDS)):
        rows = [(key, " ".join((make.__doc__ or "").split())) for key, make in known.items()]
        stdout.console().print(Table((title, "command, what, how long"), rows, texts=2).drawn())


@app.command
def watch(folder: Annotated[Path, tyro.conf.Positional], once: bool = False) -> None:
    """Follow a run, or a folder of runs, from the record alone.

    Args:
        folder: of a run or of many.
        once: print the state and return.
    """
    from regimes.monitor.watch import watch as follow

    follow(folder, once=once)


@app.command
def pack(
    folder: Annotated[Path, tyro.conf.Positional], archive: Annotated[Path, tyro.conf.Positional]
) -> None:
    """Write the records under a folder, without checkpoints, to one small .tar.xz.

    Args:
        folder: of runs.
        archive: the file to write; every command that reads a folder of runs reads it too.
    """
    from regimes.records import pack as write

    print(f"{archive}: {write(folder, archive)} runs")


@app.command
def detect(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    detectors: tuple[str, ...] = (),
    out: Path | None = None,
) -> None:
    """Replay detectors over recorded runs, without training: agreement, lead or lag, share of
    epochs called critical, traffic, and what the signal costs.

    `regimes figure detectors RUN ...` draws the figure.

    Args:
        runs: runs, or folders of runs; several seeds give means and 95 % intervals.
        detectors: NAME or NAME:key=value,key=value, e.g. norm-change:interval=3,eta=0.4; default
            all whose signal was recorded, and controls of equal length.
        out: folder for detectors.csv, pairs.csv and epochs.csv.
    """
    from regimes.replay.detect import main
    from regimes.replay.spelling import KNOWN, parse

    if any(parse(text)["name"] not in KNOWN for text in detectors):
        _welcome_plug_ins()
    main(runs, detectors, out)


@app.command
def cost(
    what: Annotated[tuple[str, ...], tyro.conf.Positional],
    network: str = "10Gbit/s,50us",
    workers: int | None = None,
    algorithm: Literal["ring", "gloo", "tree"] = "ring",
    buckets: int = 1,
    set: Settings = (),
    csv: Path | None = None,
) -> None:
    """Predict seconds per epoch on a network for each level and policy, and the bandwidth below
    which compression pays.

    `regimes figure cost RUN ...` draws the curves over bandwidth and workers.

    Args:
        what: a preset, which is timed here for a few steps, or recorded runs.
        network: bandwidth of each link and latency of a message.
        workers: how many, one per link; default those of the run.
        algorithm: of the all-reduce.
        buckets: into how many parts a step's traffic is cut, so that it overlaps with backward.
        set: change a field of the preset.
        csv: file for the numbers.
    """
    from regimes.cost.network import Network
    from regimes.cost.predict import main

    recorded = [Path(place).exists() and not place.endswith(".toml") for place in what]
    if not what or (len(what) > 1 and not all(recorded)):
        raise ConfigError("name one preset, or recorded runs: see regimes presets")
    config = None if all(recorded) else _configuration(what[0], set)
    main(what, config, Network.parse(network), workers, algorithm=algorithm, buckets=buckets,
         csv=csv)  # fmt: skip


@app.command
def report(
    records: Annotated[Path, tyro.conf.Positional],
    network: str = "10Gbit/s,50us",
    out: Path = Path("report.html"),
) -> None:
    """Write one HTML page of a run or an ablation, with all that it shows inside, to mail.

    Args:
        records: a run, a folder of runs, or an archive of them.
        network: bandwidth of each link and latency of a message, for the predicted seconds.
        out: the file to write.
    """
    from regimes.report import write

    write(records, network, out)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


@app.command
def figure(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    words: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> None:
    """List the figures and tables that can be made from records, or make one:
    `regimes figure 2 runs/small --out figures`.

    Args:
        name: as the list has it.
        words: records and options; `regimes figure NAME --help` says which.
    """
    from regimes.plotting import offered

    if name is None:
        offered.show()
    else:
        offered.begin(name, words)


@app.command
def doctor() -> None:
    """What is installed, which devices and backends work, which data sets are found."""
    from regimes.monitor.doctor import report

    sys.exit(0 if report() else 1)
