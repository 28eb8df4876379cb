"""The commands that read records or the machine; `cost` of a preset times a few steps."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from regimes.base.console.metavars import LEFT_OUT, named
from regimes.base.errors import ConfigError
from regimes.cli.app import Conditions, Settings, app, welcome_plug_ins
from regimes.cost.options import JobOptions, changed_options
from regimes.presets import read_configuration


@app.command
def watch(
    folder: Annotated[Path, tyro.conf.Positional, named("FOLDER")],
    once: bool = False,
) -> None:
    """Follow a run, or a folder of runs, from the record alone; wait if there is none yet. Example:
    regimes watch runs/small

    Args:
        folder: folder of a run or of many runs.
        once: print the state and end.
    """
    from regimes.cli.monitor import watch_runs as follow

    follow(folder, once=once)


@app.command
def pack(
    folder: Annotated[Path, tyro.conf.Positional, named("FOLDER")],
    archive: Annotated[Path, tyro.conf.Positional, named("ARCHIVE")],
) -> None:
    """Write the records under a folder, without checkpoints, to one small .tar.xz. Example: regimes
    pack runs/small small.tar.xz

    Args:
        folder: folder of runs.
        archive: file to write; every command that reads a folder of runs also reads this file.
    """
    from regimes.records import pack_records as write

    print(f"{archive}: {write(folder, archive)} runs")


@app.command
def frame(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, named("FOLDER"), LEFT_OUT],
    out: Path,
    layers: bool = False,
    where: Conditions = (),
) -> None:
    """Write the epochs of all runs as one table. Example: regimes frame runs/small --out all.csv

    Args:
        folders: folders of runs, or archives of them.
        out: file to write, .csv or .parquet (which needs the package pyarrow).
        layers: write one row per run, epoch and layer, in place of one per run and epoch.
        where: read only runs with this value, e.g. --where optimizer.lr=0.4.
    """
    from regimes.records.frame import frame as joined
    from regimes.records.frame import write_frame

    table = joined(*folders, where=where, layers=layers)
    write_frame(table, out)
    print(f"{out}: {len(table)} rows")


@app.command
def detect(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, named("RUN"), LEFT_OUT],
    detectors: Annotated[tuple[str, ...], named("DETECTOR"), LEFT_OUT] = (),
    out: Annotated[Path | None, LEFT_OUT] = None,
    where: Conditions = (),
) -> None:
    """Replay detectors over recorded runs, without training: agreement, lead or lag, share of
    marked epochs, traffic, and what the signal costs. Example: regimes detect runs/small/low

    `regimes figure detectors RUN ...` draws the figure.

    Args:
        runs: runs, or folders of runs; several seeds give means and 95 % intervals.
        detectors: NAME or NAME:key=value,key=value, e.g. norm-change:interval=3,eta=0.4. Default:
            all with a recorded signal, and controls of equal length.
        out: folder for detectors.csv, pairs.csv and epochs.csv.
        where: read only runs with this value, e.g. --where optimizer.lr=0.4.
    """
    from regimes.policies.replay.detect import KNOWN, main, parse_rule
    from regimes.records import select_while_loading

    if any(parse_rule(text)["name"] not in KNOWN for text in detectors):
        welcome_plug_ins()
    with select_while_loading(where, print_notes=True):
        main(runs, detectors, out)


@app.command
def cost(
    what: Annotated[tuple[str, ...], tyro.conf.Positional, named("PRESET|RUN"), LEFT_OUT],
    network: Annotated[str, named("BANDWIDTH,LATENCY")] = "10Gbit/s,50us",
    workers: Annotated[int | None, LEFT_OUT] = None,
    algorithm: Annotated[Literal["ring", "gloo", "tree", "fastest"] | None, LEFT_OUT] = None,
    buckets: int = 1,
    set: Settings = (),
    csv: Annotated[Path | None, LEFT_OUT] = None,
    where: Conditions = (),
    job: tyro.conf.OmitArgPrefixes[JobOptions] = JobOptions(),  # noqa: B008
) -> None:
    """Predict seconds per epoch on a network for each level and policy, and the bandwidth below
    which compression saves time. Example: regimes cost runs/small --network 100Mbit/s,50us

    `regimes figure cost RUN ...` draws the curves over bandwidth and workers. With --model the
    command predicts the seconds of a step by each method for a job that has not been run, from the
    shapes of the model.

    Args:
        what: a preset, which is timed here for a few steps, or recorded runs. Leave it out with
            --model.
        network: bandwidth of each link and latency of a message.
        workers: number of workers, one per link; default the run's.
        algorithm: algorithm of the all-reduce. "fastest" takes ring or tree for each collective, as
            NCCL does. Default: ring, and with --model fastest.
        buckets: number of parts into which a step's traffic is cut, so that it overlaps with
            backward.
        set: change a field of the preset.
        csv: file for the numbers.
        where: read only recorded runs with this value, e.g. --where optimizer.lr=0.4.
    """
    if job.model is not None:
        given = {"what": what, "network": network, "workers": workers, "buckets": buckets}
        _predict_job(given | {"set": set, "where": where}, job, algorithm or "fastest", csv)
        return
    for name in changed_options(job, JobOptions()):
        raise ConfigError(f"--{name} describes a job that has not been run: give its --model too")
    from regimes.cost.network import Network
    from regimes.cost.predict import main
    from regimes.records import select_while_loading

    recorded = [Path(place).exists() and not place.endswith(".toml") for place in what]
    if not what or (len(what) > 1 and not all(recorded)):
        raise ConfigError("name one preset, or recorded runs: see regimes presets")
    if all(recorded) and set:
        raise ConfigError(f"--set {set[0]} changes a preset, and recorded runs are as they were")
    if where and not all(recorded):
        raise ConfigError(f"--where {where[0]} selects recorded runs, and {what[0]} is a preset")
    config = None
    if not all(recorded):
        welcome_plug_ins()
        config = read_configuration(what[0], set)
    link = Network.parse(network)
    with select_while_loading(where, print_notes=True):
        main(what, config, link, workers, algorithm=algorithm or "ring", buckets=buckets, csv=csv)


def _predict_job(given: dict[str, Any], job: JobOptions, algorithm: str, csv: Path | None) -> None:
    """`cost` of a job that has not been run; ``given`` has options that do not describe one: an
    error unless they have their defaults."""
    parameters = inspect.signature(cost).parameters
    for name, value in given.items():
        default = parameters[name].default
        if value != (() if default is inspect.Parameter.empty else default):
            raise ConfigError(
                f"{'a preset or records' if name == 'what' else f'--{name}'} and --model: a job "
                "that has not been run is described by --nodes, --gpus, --within, --between and "
                "--bucket-mb; see regimes cost --help"
            )
    from regimes.cost.from_model import main

    main(job, algorithm, csv)


@app.command
def report(
    records: Annotated[Path, tyro.conf.Positional, named("RECORD")],
    network: Annotated[str, named("BANDWIDTH,LATENCY")] = "10Gbit/s,50us",
    out: Path = Path("report.html"),
    where: Conditions = (),
    baseline: Annotated[str | None, named("SCHEDULE"), LEFT_OUT] = None,
) -> None:
    """Write one self-contained HTML page of a run or an ablation, to mail. Example: regimes report
    runs/small

    Args:
        records: a run, a folder of runs, or an archive of them.
        network: bandwidth of each link and latency of a message, for the predicted seconds.
        out: file to write.
        where: read only runs with this value, e.g. --where optimizer.lr=0.4.
        baseline: schedule that the others are compared with; default all pairs of up to six.
    """
    from regimes.cli.html_report import write_report

    write_report(records, network, out, baseline, where)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")


@app.command
def figure(
    name: Annotated[str | None, tyro.conf.Positional, named("NAME"), LEFT_OUT] = None,
    words: Annotated[tuple[str, ...], tyro.conf.Positional, named("WORD"), LEFT_OUT] = (),
) -> None:
    """List the figures and tables that can be made from records, or make one. Example: regimes
    figure 2 runs/small --out figures

    Args:
        name: name of a figure in the list that `regimes figure` prints.
        words: records and options; `regimes figure NAME --help` says which.
    """
    from regimes.plotting import offered

    if name is None:
        offered.print_figures()
    elif not offered.begin_figure(name, words):
        sys.exit(2)


@app.command
def doctor(
    records: Annotated[tuple[Path, ...], tyro.conf.Positional, named("RECORD"), LEFT_OUT] = (),
    links: Annotated[Path | None, LEFT_OUT] = None,
) -> None:
    """Check the installation, devices, backends and data sets; or check whether records are
    readable and unchanged. Under torchrun or srun, check whether all processes connect and are
    alike, and how fast their links are. Example: regimes doctor runs/small

    Args:
        records: runs, folders of runs or archives to check, in place of the machine.
        links: file to write, with the bandwidth and latency within and between the machines of a
            launched group; regimes cost --links reads it.
    """
    from regimes.cli.machine import check_records, group_report, print_report
    from regimes.collectives.launcher import read_launch

    alone = read_launch().count == 1
    if links and (records or alone):
        raise ConfigError(
            "--links measures the links between launched processes: torchrun ... -m regimes doctor "
            f"--links {links}"
        )
    if records:
        sys.exit(0 if check_records(records) else 2)
    good = print_report() if alone else group_report(links=links)
    sys.exit(0 if good else 1)
