"""The command that finds where in a training more may be compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from regimes.base.console import stdout
from regimes.base.console.metavars import LEFT_OUT, named
from regimes.cli.app import Changes, Patterns, Settings, app, welcome_plug_ins
from regimes.presets import read_configuration


@app.command
def harm(
    preset: Annotated[str, tyro.conf.Positional, named("PRESET")],
    pulse: Changes = (),
    minutes: Annotated[float | None, LEFT_OUT] = None,
    runs: Annotated[int | None, LEFT_OUT] = None,
    group: Patterns = (),
    margin: Annotated[float | None, LEFT_OUT] = None,
    deletion: bool = True,
    parts: int = 4,
    set: Settings = (),
    first_seed: int = 0,
    out: Annotated[Path | None, LEFT_OUT] = None,
    jobs: int = 1,
    quiet: bool = False,
) -> None:
    """Find the units of a training in which more may be compressed, within a budget, and write the
    rate ladder that sends about as few bytes. Start the same command again to go on. Example:
    regimes harm smoke --minutes 30

    Args:
        preset: a preset, GRID/SCHEDULE, or a .toml file; see `regimes presets`.
        pulse: change this in some units: a level (high, the default), no-feedback, period=8,
            batch=4, precision, deletion, or FIELD=VALUE; may be given several times.
        minutes: budget, default 10; a run that has begun is ended.
        runs: budget as a number of runs.
        group: change a level only in the layers of these patterns, e.g. "blocks.* head*"; if given
            several times, each is tried by itself.
        margin: call a phase safe if its harm is below this; default 1 point of accuracy, else 2 %
            of the metric, where that does not end close to 0.
        deletion: leave the same units out beside each pulse, too, which says what lost time costs.
        parts: number of windows that are tried first.
        set: change a field in all runs.
        first_seed: seed of the first trunk.
        out: folder of the records; default runs/harm/NAME.
        jobs: runs at a time, each on its share of the cores.
        quiet: print the answer alone.
    """
    from regimes.base.console.progress import show_spending
    from regimes.search.harms.harm import harm as search

    welcome_plug_ins()
    config = read_configuration(preset, set)
    stem = Path(preset).stem if preset.endswith(".toml") else preset
    folder = out or Path("runs", "harm", stem)
    with show_spending(
        "looking for harm", (lambda line: None) if quiet else stdout.try_print
    ) as show:
        found = search(
            config,
            pulse=pulse or "high",
            minutes=minutes,
            runs=runs,
            out=folder,
            jobs=jobs,
            margin=margin,
            groups=group,
            deletion=deletion,
            parts=parts,
            first_seed=first_seed,
            show=show,
        )
    paths = found.save()  # before anything is printed: the pipe may be closed
    print(found)
    for path in paths:
        if path.suffix in (".png", ".toml"):
            print(path)
