"""The loop: train under a communication schedule, measure, record.

Reads top to bottom: ``run`` goes through the units (epochs, or so many steps), ``_unit`` through
one. It knows compressors,
policies and instruments by their protocols only; dense is a compressor, static is a policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from regimes.config import DENSE, Level, RunConfig
from regimes.errors import RegimesError
from regimes.instruments.panel import check_measured
from regimes.records import Record, RecordWriter, complete, load, read_header, unit_name
from regimes.training.build import Run, prepare
from regimes.training.clock import LOOP, Clock
from regimes.training.fingerprint import check_same_weights, fingerprint
from regimes.training.gradients import install
from regimes.training.losses import Losses
from regimes.training.numerics import explained
from regimes.training.plan import Minibatch, Plan, decide, minibatches
from regimes.training.quirks import resolve
from regimes.training.rounds import Rounds
from regimes.training.rows import sent
from regimes.training.state import open_record, save
from regimes.training.termination import GracefulShutdown, Terminated
from regimes.training.watchers import Reporter, Watchers


def run(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    reporters: Sequence[Reporter] = (),
) -> Record:
    """Run one configuration and leave its record in ``out``.

    Under torchrun every process calls this; alone, one process simulates all workers.

    Args:
        resume: continue the run in ``out`` from its newest whole checkpoint, bit for bit.
        reporters: told what happens; the training does not end because one of them raises.

    Raises:
        ConfigError, DataError, RecordError: before any training, one sentence.
        TrainingError: a non-finite loss or a lost process; the record is intact.
    """
    shutdown = GracefulShutdown()
    this = prepare(resolve(config))
    watchers = Watchers(reporters if this.world.rank == 0 else ())
    recorded = _recorded(this, watchers, Path(out), resume)
    with recorded as writer, shutdown as grace, explained():
        while not complete(this.header, this.rows):
            _advance(this, writer, watchers, Path(out), grace)
    shutdown.pass_on()
    return load(out)


@contextmanager
def _recorded(
    run: Run, watchers: Watchers, out: Path, resume: bool
) -> Iterator[RecordWriter | None]:
    """The record, open on process 0 while the run goes on; how the run ends is its last event."""
    writer, whole = None, False
    try:
        writer = open_record(run, out, resume)
        watchers.event_log = writer.event if writer else None
        watchers.start(read_header(out), run.rows)
        yield writer
        if writer:
            writer.event("end")
        watchers.stop("")
        run.world.barrier()
        whole = True
    except BaseException as error:
        why = str(error) if isinstance(error, RegimesError) else f"{type(error).__name__} {error}"
        watchers.stop(why)
        if writer:
            writer.event("stopped", why=why.strip())
        raise
    finally:
        if writer:
            writer.close()
        if not whole:
            run.world.abort()  # or leaving would wait for processes that do not come
        run.close()


def _advance(
    run: Run, writer: RecordWriter | None, watchers: Watchers, out: Path, grace: GracefulShutdown
) -> None:
    """One unit: trained, recorded, saved.

    Raises:
        Terminated: some process was asked to end.
        TrainingError: see ``_met``.
    """
    unit = len(run.rows)
    row, seconds, details = _unit(run, unit, watchers)
    asked, due, processes = _met(run, unit, grace, seconds)
    run.rows.append(row)
    if writer:
        writer.epoch(row, {**seconds, **processes}, details)
    ended = complete(run.header, run.rows)
    if due or ended or asked:
        save(run, out)
        run.saved = time.monotonic()
    watchers.epoch(row, seconds)
    if asked and not ended:
        name = unit_name(run.header)
        raise Terminated(f"ended by SIGTERM after {name} {unit}: continue with --resume")


def _met(
    run: Run, unit: int, grace: GracefulShutdown, seconds: dict[str, float]
) -> tuple[bool, bool, dict[str, Any]]:
    """What processes tell each other at the end of a unit: was one of them asked to end? By the
    clock of process 0, is a checkpoint due? And if there are several, where the time of each went.

    Raises:
        TrainingError: they do not hold the same weights.
    """
    alone = run.world.processes == 1
    found = None if alone else fingerprint(run.gradients.parameters)
    every, apart = run.config.checkpoint_every, run.config.checkpoint_seconds or 0
    due = (unit + 1) % every == 0 and time.monotonic() >= run.saved + apart
    own = [seconds.get(name, 0.0) for name in LOOP]
    told = run.world.gather_object((grace.asked, due, found, own))
    asked, dues, weights, each = zip(*told, strict=True)
    check_same_weights(weights, f"{unit_name(run.header)} {unit}")
    spent = {name: list(column) for name, column in zip(LOOP, zip(*each, strict=True), strict=True)}
    return any(asked), dues[0], {} if alone else {"processes": spent}


# -- one unit --------------------------------------------------------------------------------


def _unit(
    run: Run, unit: int, watchers: Watchers
) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Train one unit; returns its row of the record, where the time went, instruments' details."""
    plan, clock = decide(run, unit), Clock(run.device)
    if run.pruning is not None:
        run.pruning.begin(unit)
    train_loss, steps = _train(run, plan, clock, watchers)
    with clock("communicate"):
        run.world.broadcast(list(run.model.buffers()))
    exchanged = run.panel.steps > 0
    readings = run.panel.read(unit, clock, exchanged)
    with clock("evaluate"):
        where = run.device, run.batches.dtype, run.world
        test_loss, metric = run.task.evaluate(run.model, *where)
    first, stop = run.units.span(unit)
    row = {
        "epoch": unit,
        "unit": {"first": first, "stop": stop},
        "lr": run.learning_rate(first) * plan.scale,
        "next_lr": run.learning_rate(stop) * plan.scale,
        "batch_size": run.batch_size(plan.batch["level"]),
        "batch": plan.batch,
        "sync": plan.sync | ({"rounds": run.local.take_rounds()} if run.local else {}),
        "steps": steps,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "metric": metric,
        **_beside(run, clock, test_loss),
        **sent(run.world.meter.take(), plan.levels),
        "statistics": readings.layers,
        "model": readings.model,
        "weights": None,
    }
    if exchanged and not any(row["statistics"] for row in run.rows):
        check_measured(run.needs, readings)
    clock.settle()
    return row, dict(clock.seconds), readings.details


def _beside(run: Run, clock: Clock, test_loss: float) -> dict[str, Any]:
    """What the task says of the test loss besides its metric, and the loss and metric on the
    samples held out for validation, if there are any."""
    found: dict[str, Any] = dict(run.task.beside(test_loss))
    if run.config.data.validation_size is not None:
        with clock("evaluate"):
            where = run.device, run.batches.dtype, run.world
            loss, metric = run.task.validate(run.model, *where)
        found["validation"] = {"loss": loss, "metric": metric}
    return found


def _train(run: Run, plan: Plan, clock: Clock, watchers: Watchers) -> tuple[float, int]:
    """All steps of a unit; their mean loss and number."""
    values = [run.value(name) for name in plan.levels.names]
    steps, samples = minibatches(run, plan)
    losses = Losses(run, clock)
    for done, now in enumerate(samples, start=1):
        dense = now.at < run.config.start_compressing_after
        levels: list[Level] = [DENSE] * len(values) if dense else values
        if run.local is not None and run.local.begin(plan.sync["period"]):
            _step_alone(run, run.local, now, levels, losses)
        else:
            _step_together(run, now, levels, losses)
        watchers.step(plan.unit, done, steps)
    for mean, (rows, *when) in run.local.flush_losses() if run.local else ():
        losses.add(mean, rows, *when)
    losses.look()
    return losses.total / steps, steps


def _step_together(run: Run, now: Minibatch, levels: list[Level], losses: Losses) -> None:
    """A step of one model, along the gradients that workers have shared."""
    with run.numerics.training():
        updates, loss, rows = run.step.take(now.x, now.y, now.epoch, now.step, levels, losses.clock)
    losses.add(loss, rows, now.epoch, now.step)
    run.optimizer.lr = now.lr
    _apply(run, updates, now, losses.clock)


def _step_alone(
    run: Run, local: Rounds, now: Minibatch, levels: list[Level], losses: Losses
) -> None:
    """A step of each worker's own model, and the synchronisation that ends a round."""
    with run.numerics.training():
        local.step(now.x, now.y, now.epoch, now.step, now.lr, losses.clock)
    if local.over or now.last:
        for mean, (rows, *when) in local.synchronize(levels, losses.clock, run.panel):
            losses.add(mean, rows, *when)


def _apply(run: Run, updates: list[Tensor], now: Minibatch, clock: Clock) -> None:
    """One step of the optimiser along the shared updates, seen by the instruments first."""
    if run.deficit.active(now.epoch):
        updates = run.deficit.updates(updates, run.config.seed, now.epoch, now.step)
    run.panel.step(run.gradients.stack, updates, clock)
    with clock("compute"):
        install(run.gradients.parameters, updates)
        run.optimizer.step()
        if run.pruning is not None:
            run.pruning.keep()
