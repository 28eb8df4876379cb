"""The command that plans a training on a link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from regimes.base.console import stdout
from regimes.base.console.metavars import LEFT_OUT, named
from regimes.cli.app import Settings, app, welcome_plug_ins
from regimes.presets import read_configuration


@app.command
def plan(
    preset: Annotated[str, tyro.conf.Positional, named("PRESET")],
    link: Annotated[str | None, named("BANDWIDTH,LATENCY"), LEFT_OUT] = None,
    links: Annotated[Path | None, LEFT_OUT] = None,
    seconds: Annotated[float | str | None, named("SECONDS"), LEFT_OUT] = None,
    curve: Annotated[Path | None, LEFT_OUT] = None,
    step: Annotated[str | None, named("SECONDS"), LEFT_OUT] = None,
    gpus: int = 1,
    methods: Annotated[tuple[str, ...] | None, named("METHOD"), LEFT_OUT] = None,
    probe: Settings = (),
    minutes: Annotated[float | None, LEFT_OUT] = None,
    runs: Annotated[int | None, LEFT_OUT] = None,
    set: Settings = (),
    out: Annotated[Path | None, LEFT_OUT] = None,
    jobs: int = 1,
    quiet: bool = False,
) -> None:
    """Find how many times as fast as dense each method trains on a link, and which to train with,
    from short runs within a budget. Start the same command again to go on. Example: regimes plan
    smoke --link 100Mbit/s,50us --seconds 20

    Args:
        preset: a preset, GRID/SCHEDULE, or a .toml file; see `regimes presets`.
        link: bandwidth and latency from a node to the others, e.g. 100Mbit/s,50us.
        links: file that torchrun ... -m regimes doctor --links FILE writes, in place of --link.
        seconds: time of the training on this link, e.g. 3600 or 1h; its schedule is stretched to
            what a method can do in it. Default as long as the configured training takes dense.
        curve: losses in the ends of earlier dense trainings, a CSV file of steps and losses, or a
            folder of records; the loss after the seconds is then said.
        step: seconds of one worker's step without communication, e.g. 0.4s; default timed here.
        gpus: number of devices in a node; each worker is one.
        methods: methods to compare, COMPRESSOR:LEVEL, and /PERIOD for local steps, e.g. powersgd:4
            dense/32; default some of each kind.
        probe: fields of a smaller model that stands for this one in the short runs, e.g.
            model.width=32.
        minutes: budget of all that is timed and trained, default 10.
        runs: budget as a number of short runs.
        set: change a field in all runs.
        out: folder of the records; default runs/plan/NAME.
        jobs: trainings at a time, each on its share of the cores.
        quiet: print the answer alone.
    """
    from regimes.base.config.toml import read_pairs
    from regimes.base.console.progress import show_spending
    from regimes.search.plans.plan import plan as search

    welcome_plug_ins()
    config = read_configuration(preset, set)
    stem = Path(preset).stem if preset.endswith(".toml") else preset
    with show_spending("planning", (lambda line: None) if quiet else stdout.try_print) as show:
        found = search(
            config,
            link=link,
            links=links,
            gpus=gpus,
            seconds=seconds,
            curve=curve,
            step=step,
            methods=methods,
            probe=dict(read_pairs(probe, "--probe")) or None,
            minutes=minutes,
            runs=runs,
            out=out or Path("runs", "plan", stem),
            jobs=jobs,
            show=show,
        )
    paths = found.save()  # before anything is printed: the pipe may be closed
    stdout.make_console(highlight=False).print(found.as_table().drawn())
    print(found.sentence())
    for path in paths:
        if path.suffix in (".png", ".toml"):
            print(path)
