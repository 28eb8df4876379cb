"""One run in this process, which torchrun may have started. No torch at import."""

from __future__ import annotations

from pathlib import Path

from regimes.collectives.launcher import launched
from regimes.config import RunConfig
from regimes.console import stdout
from regimes.monitor.terminal import reporters
from regimes.monitor.text import metric_text
from regimes.records import reporters as named
from regimes.training.idle_policy import inactivity_warnings


def train(config: RunConfig, out: Path, resume: bool, quiet: bool) -> None:
    """Train; resume where torchrun has started the process again. Process 0 says how it goes."""
    from regimes.training.loop import run

    restarted = launched().restarts > 0
    resume = resume or (restarted and (out / "run.json").exists())
    if quiet or launched().rank > 0:
        told = named(config.reporters, out) if launched().rank == 0 else ()
        run(config, out, resume=resume, reporters=told)
        return
    record = run(config, out, resume=resume, reporters=reporters(config, out))
    last, name = record.epochs.iloc[-1], record.header["metric"]
    unit = " %" if name == "accuracy" else ""
    stdout.try_print(
        f"{out}: {name} {metric_text(record.header, last['metric'])[1]}{unit}, "
        f"{last['total_floats'] / 1e6:.3f} M floats, {last['total_bytes'] / 1e6:.2f} MB "
        "sent by each worker"
    )
    for sentence in inactivity_warnings(record.header, record.rows):
        stdout.try_print(sentence)
