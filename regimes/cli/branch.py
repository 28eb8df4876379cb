"""The command that continues a run under another configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from regimes.base.config import BranchConfig
from regimes.base.console.metavars import LEFT_OUT, named
from regimes.cli.app import Settings, app, welcome_plug_ins
from regimes.cli.train import train


@app.command
def branch(
    record: Annotated[Path, tyro.conf.Positional, named("RUN")],
    at: int,
    out: Path,
    length: Annotated[int | None, LEFT_OUT] = None,
    skip: bool = False,
    set: Settings = (),
    processes: int = 1,
    quiet: bool = False,
) -> None:
    """Continue a run from the start of a unit under another configuration, in a folder of its own.
    Start the same command again to go on after a stop. Example: regimes branch runs/trunk --at 3
    --length 2 --set policy.level=high --out runs/pulse

    Args:
        record: folder of the run, the trunk. It needs the checkpoint before the unit: train it with
            --set checkpoint_keep=all, or =[3,6]. Unit 0 needs none.
        at: first unit of the branch.
        out: folder of the branch's record, with its own rows and the path to the trunk.
        length: number of units after which the trunk's configuration returns; default never.
        skip: leave these units out, as if the run had never had them; needs a length.
        set: change a field, e.g. --set policy.level=high.
        processes: number of local processes that share the workers.
        quiet: print nothing but errors.
    """
    from regimes.training.phases import branch_config

    welcome_plug_ins()
    config = branch_config(record, BranchConfig(at=at, length=length, skip=skip or None), set, out)
    resume = (out / "run.json").exists()
    train(config, out, processes, resume, quiet)
