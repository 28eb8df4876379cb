"""The training loop: train under a communication schedule, measure, record.

Reads top to bottom: ``run`` goes through the units (epochs, or a number of steps), ``_train_unit``
through the steps of one; a step is ``_step_together``, or ``_step_alone`` where workers train by
themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from jaxtyping import Float
from torch import Tensor

from regimes.base.config import DENSE, AnyLevel, RunConfig
from regimes.base.config.arguments import check_arguments
from regimes.base.console.notebook import end_in_one_sentence
from regimes.base.errors import RegimesError, require
from regimes.base.fingerprint import fingerprint
from regimes.collectives.agreement import check_same_weights
from regimes.collectives.launcher import read_launch
from regimes.compression.exchange import Exchange, loss_with_flag
from regimes.data import Task
from regimes.instruments.panel import check_measured
from regimes.job.clock import LOOP, Clock
from regimes.job.job import UnitPlan
from regimes.job.reporters import Reporter, Reporters, default_reporters
from regimes.job.rows import traffic_columns, unit_columns
from regimes.job.termination import GracefulShutdown, Terminated
from regimes.records import (
    Record,
    RecordWriter,
    Row,
    is_complete,
    load,
    make_reporters,
    read_header,
    unit_name,
)
from regimes.records.extent import format_progress
from regimes.records.files import record_folder
from regimes.training.build import Run, prepare_run
from regimes.training.changes import rate_after
from regimes.training.checkpoint import is_asked
from regimes.training.gradients import Gradients, Reduced, set_gradients
from regimes.training.graphs import Graphs
from regimes.training.local_rounds import Rounds
from regimes.training.losses import Losses
from regimes.training.phases import Phase, branch_phases
from regimes.training.quirks import resolve_quirks
from regimes.training.state import open_record, remaining_phases, save_run
from regimes.training.torch_flags import explain_nondeterminism


@check_arguments()
def run(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool | Literal["auto"] = False,
    reporters: Sequence[Reporter] | None = None,
    task: Task | None = None,
) -> Record:
    """Trains one configuration and leaves its record in ``out``.

    Under torchrun every process calls this; a single process simulates all workers.

    >>> from regimes import get_preset, override
    >>> short = ["epochs=1", "data.train_size=100", "optimizer.decay_epochs=[]"]
    >>> record = run(override(get_preset("smoke"), short), "runs/first")
    >>> len(record.epochs)
    1

    Args:
        config: The configuration.
        out: The folder of the record.
        resume: Continue the run in ``out`` from its newest complete checkpoint, bit for bit. "auto"
            does so if there is one; a cell with "auto" can be run again after a stop, and after the
            end it returns the record.
        reporters: What is called as the run proceeds, beside those that the configuration names. An
            exception in one does not end the training. Default: one line of progress in a notebook,
            and none elsewhere.
        task: Model and data, in place of those that the configuration names.

    Returns:
        The record of the run.

    Raises:
        ConfigError, DataError, RecordError: in one sentence, before any training.
        TrainingError: a loss is not finite, or a process was lost. The record is intact.
    """
    out = record_folder(out)
    good = isinstance(resume, bool) or resume == "auto"
    require(good, "resume", resume, 'True, False or "auto"')
    resumed = has_epoch(out) if resume == "auto" else resume
    shown = default_reporters() if reporters is None else reporters
    named = make_reporters(config.reporters, out) if read_launch().rank == 0 else []
    reporters = [*shown, *named]
    with end_in_one_sentence(lambda: _describe_kept(out, resume == "auto")):
        if config.quirks != "none":
            config = resolve_quirks(config)
        phases = [Phase(config, config)]
        if config.branch is not None:
            phases = branch_phases(config, config.branch, out)
        for phase in remaining_phases(phases, out) if resumed else phases:
            resumed = _run_phase(phase, out, resumed, reporters, task)
    return load(out)


def _describe_kept(out: Path, again: bool) -> str:
    """What a stop has left of a run, and how it goes on.

    Args:
        again: by the same call.
    """
    if not has_epoch(out):
        return "nothing is kept, since no epoch had ended; run the cell again to begin anew"
    run, how = load(out), "" if again else ' with resume="auto"'
    kept = format_progress(run.header, run.rows, " of ")
    return f"{kept} are kept in {out}; run the cell again{how} to go on"


def has_epoch(out: Path) -> bool:
    """Answer whether there is a run to go on with. A record without an epoch, such as one that its
    first loss has stopped, is replaced."""
    rows = out / "epochs.jsonl"
    if not (out / "run.json").exists() or not rows.exists():
        return False
    with rows.open("rb") as file:
        return file.readline().endswith(b"\n")


def _run_phase(
    phase: Phase, out: Path, resume: bool, reporters: Sequence[Reporter], task: Task | None
) -> bool:
    """Train the units of one phase. Returns True, which is ``resume`` for the next one."""
    shutdown = GracefulShutdown()
    parts = prepare_run(phase.config, task)
    parts.phase = phase
    group = Reporters(reporters if parts.world.rank == 0 else ())
    recorded = _open_during_run(parts, group, out, resume)
    with recorded as writer, shutdown, explain_nondeterminism():
        while not is_complete(parts.header, parts.rows) and not phase.is_over(len(parts.rows)):
            _advance_unit(parts, writer, group, out, shutdown)
    shutdown.pass_on()
    return True


@contextmanager
def _open_during_run(
    run: Run, reporters: Reporters, out: Path, resume: bool
) -> Iterator[RecordWriter | None]:
    """The record, open on process 0 during the run; its last event says how the run ended."""
    writer, finished = None, False
    try:
        writer = open_record(run, out, resume)
        reporters.event_log = writer.event if writer else None
        # A resumed run may have other processes than its record's header, which keeps the first.
        reporters.start({**read_header(out), "world": run.header["world"]}, run.rows)
        yield writer
        if writer and is_complete(run.header, run.rows):  # not yet where another phase follows
            writer.event("end")
        reporters.stop("")
        run.world.barrier()
        finished = True
    except BaseException as error:
        why = str(error) if isinstance(error, RegimesError) else f"{type(error).__name__} {error}"
        reporters.stop(why)
        if writer:
            writer.event("stopped", why=why.strip())
        raise
    finally:
        if writer:
            writer.close()
        # The other processes may wait in a collective that this one never enters. Without the
        # abort, leaving the group would wait for them in turn.
        if not finished:
            run.world.abort()
        run.close()


def _advance_unit(
    run: Run, writer: RecordWriter | None, reporters: Reporters, out: Path, grace: GracefulShutdown
) -> None:
    """Train, record and save one unit.

    Raises:
        Terminated: a process was asked to end.
        TrainingError: the processes hold different weights.
    """
    unit = len(run.rows)
    row, seconds, details = _train_unit(run, unit, reporters)
    # before the row is written: a unit after which the weights differ must not be recorded
    stopping, due, processes = _end_of_unit_consensus(run, unit, grace, seconds)
    run.rows.append(row)
    if writer:
        writer.epoch(row, {**seconds, **processes}, details)
    ended = is_complete(run.header, run.rows)
    if due or ended or stopping or run.phase.is_over(len(run.rows)):
        save_run(run, out)
        run.saved = time.monotonic()
    reporters.epoch(row, seconds)
    if stopping and not ended:
        name = unit_name(run.header["config"])
        raise Terminated(f"ended by SIGTERM after {name} {unit}: continue with --resume")


def _end_of_unit_consensus(
    run: Run, unit: int, grace: GracefulShutdown, seconds: dict[str, float]
) -> tuple[bool, bool, dict[str, Any]]:
    """Exchange, in one collective, what decides on checkpoint and end: clocks differ, and SIGTERM
    may reach one process only, but all must enter the same collectives next.

    Returns:
        Whether a process was asked to end; whether a checkpoint is due, by the clock of process 0;
        and "processes": where the time of each went, if there are several.

    Raises:
        TrainingError: the processes hold different weights.
    """
    alone = run.world.processes == 1
    weights = None if alone else fingerprint(run.gradients.parameters)
    every, interval = run.config.checkpoint_every, run.config.checkpoint_seconds or 0
    due = (unit + 1) % every == 0 and time.monotonic() >= run.saved + interval
    due = due or is_asked(run.config.checkpoint_keep, unit + 1)
    own = [seconds.get(name, 0.0) for name in LOOP]
    gathered = run.world.gather_object((grace.asked, due, weights, own))
    stopping, dues, fingerprints, times = zip(*gathered, strict=True)
    name = unit_name(run.header["config"])
    check_same_weights(fingerprints, f"{name} {unit}")
    spent = dict(zip(LOOP, map(list, zip(*times, strict=True)), strict=True))
    return any(stopping), dues[0], {} if alone else {"processes": spent}


# -- one unit --------------------------------------------------------------------------------


def _train_unit(
    run: Run, unit: int, reporters: Reporters
) -> tuple[Row, dict[str, float], dict[str, Any]]:
    """Train one unit and measure the model after it: its row of the record, where the time went,
    and instruments' details."""
    plan, clock = run.decide_unit(), Clock(run.device)
    train_loss, steps = None, 0
    if not run.phase.left_out:
        train_loss, steps = _train_steps(run, plan, clock, reporters)
        with clock("communicate"):
            # running statistics of BatchNorm follow worker 0, as under DistributedDataParallel
            run.world.broadcast(list(run.model.buffers()))
    exchanged = run.panel.steps > 0
    readings = run.panel.read(unit, clock, exchanged)
    evaluation = _evaluate_unit(run, clock, unit)
    span, multiple = run.units.step_span(unit), plan.batch["multiple"]
    scale = run.rate_scale(multiple)
    row = unit_columns(
        unit,
        span,
        steps,
        (run.learning_rate(span[0]) * scale, rate_after(run, unit) * scale),
        run.batch_size * multiple,
        readings,
        batch=plan.batch,
        sync=plan.sync | ({"rounds": run.local.take_count()} if run.local else {}),
        train_loss=train_loss,
        **evaluation,
        **traffic_columns(run.world.take_meter(len(run.layers)), plan.levels),
    )
    if exchanged and not any(row["statistics"] for row in run.rows[run.phase.first :]):
        check_measured(run.plug_ins.policy_needs, readings)
    clock.read_events()
    return cast("Row", row), dict(clock.seconds), readings.details


def _evaluate_unit(run: Run, clock: Clock, unit: int) -> dict[str, Any]:
    """Columns of the record: loss and metric of the test set, what else the task derives from the
    loss, and both on the samples held out for validation, if there are any."""
    if (unit + 1) % run.config.evaluate_every and unit + 1 < len(run.units):
        return {"test_loss": None, "metric": None}
    where = run.device, run.batches.dtype, run.world.evaluators
    with clock("evaluate"), run.numerics.evaluation():
        loss, metric = run.task.evaluate(run.model, *where)
    columns: dict[str, Any] = {"test_loss": loss, "metric": metric}
    columns |= run.task.extra_metrics(loss)
    if run.config.data.validation_size is not None:
        with clock("evaluate"), run.numerics.evaluation():
            loss, metric = run.task.validate(run.model, *where)
        columns["validation"] = {"loss": loss, "metric": metric}
    return columns


def _train_steps(run: Run, plan: UnitPlan, clock: Clock, reporters: Reporters) -> tuple[float, int]:
    """All steps of a unit; their mean loss and number."""
    by_layer = [run.level_value(name) for name in plan.levels.names]
    multiple = plan.batch["multiple"]
    own = run.batches.rebatched(run.batch_size * multiple)
    losses = Losses(
        run.gradients,
        clock,
        lambda epoch, step: next(iter(own.epoch(epoch, [*run.world.hosted], step))),
    )
    steps, samples = minibatches(run, multiple)
    for done, batch in enumerate(samples, start=1):
        dense = batch.at < run.config.start_compressing_after
        levels: list[AnyLevel] = [DENSE] * len(by_layer) if dense else by_layer
        if run.local is not None and _begin_step(run, run.local, plan.sync["period"]):
            _step_alone(run, run.local, batch, levels, losses)
        else:
            _step_together(run, batch, levels, losses)
        reporters.step(len(run.rows), done, steps)
    if run.local is not None:
        # losses that no synchronisation has carried: a collective that only the record needs
        with clock("evaluate"):
            for loss in run.local.flush_losses():
                losses.add_step(*loss)
    losses.check_finite()
    return losses.total / steps, steps


# -- one step --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minibatch:
    """Holds one step's samples ``x [L, b, ...]``, ``y [L, b]`` of the hosted workers.

    Attributes:
        epoch, step: its place in the data.
        at: steps at the configuration's batch size since the run began.
        lr: the learning rate.
        last: no step of the run follows, or none of a unit after which a budget may end it.
    """

    epoch: int
    step: int
    at: int
    lr: float
    last: bool
    x: Tensor
    y: Tensor


def minibatches(run: Run, multiple: int) -> tuple[int, Iterator[Minibatch]]:
    """Return how many steps the next unit has, and what they train on.

    Args:
        multiple: of the configuration's batch size.
    """
    unit, batches = len(run.rows), run.batches.rebatched(run.batch_size * multiple)
    per_epoch, scale = run.units.per_epoch, run.rate_scale(multiple)
    # (epoch, first step, stop) in steps of this batch size; an epoch's last batch may be short
    parts = [
        (epoch, first // multiple, len(batches) if stop == per_epoch else -(-stop // multiple))
        for epoch, first, stop in run.units.epoch_spans(unit)
    ]
    count = sum(stop - first for _, first, stop in parts)
    may_end = unit == len(run.units) - 1 or run.config.budget is not None
    may_end |= run.phase.ends_local_steps(unit + 1)

    def generate() -> Iterator[Minibatch]:
        left = count
        for epoch, first, stop in parts:
            data = batches.epoch(epoch, run.world.hosted, first)
            for step, (x, y) in zip(range(first, stop), data, strict=False):
                at = epoch * per_epoch + step * multiple
                left -= 1
                lr = run.learning_rate(at) * scale
                yield Minibatch(epoch, step, at, lr, may_end and not left, x, y)

    return count, generate()


def _step_together(run: Run, batch: Minibatch, levels: list[AnyLevel], losses: Losses) -> None:
    """One step in which all workers move one model by the shared update."""
    epoch, step, clock = batch.epoch, batch.step, losses.clock
    run.reducer.rates = [batch.lr] * len(levels)
    with run.numerics.training():
        reduced = take_step(run.gradients, run.exchange, batch, levels, clock, run.graphs)
    # before the weights change: on the CPU a non-finite loss ends the run here
    losses.add_step(reduced.loss, reduced.losses, epoch, step)
    run.optimizer.lr = batch.lr
    updates = reduced.updates
    if run.plug_ins.deficit.active(epoch):
        updates = run.plug_ins.deficit.updates(updates, run.config.seed, epoch, step)
    run.panel.step(run.gradients.stack, updates, clock)
    with clock("compute"):
        set_gradients(run.gradients.parameters, updates, reduced.unused)
        run.optimizer.step()


def take_step(
    gradients: Gradients,
    exchange: Exchange,
    batch: Minibatch,
    levels: Sequence[AnyLevel],
    clock: Clock,
    graphs: Graphs | None = None,
) -> Reduced:
    """Take one step up to the shared updates: compute the gradients of the hosted workers, and
    exchange them.

    Several processes with more than one bucket overlap the two: a bucket leaves while the last
    backward pass of the step goes on. A single process exchanges the same buckets in the same order
    after backward. The numbers differ only in the order of additions over more than two processes.

    Args:
        graphs: replays both; None: they run as they are.
    """
    world = exchange.world
    world.take_marks()  # of collectives before this step, which its clock does not count
    exchange.begin_transfer(levels)
    with clock("compute"):
        compute = gradients.compute_gradients if graphs is None else graphs.compute_gradients
        losses = compute(batch.x, batch.y, batch.epoch, batch.step)
    finish = partial(_finish_step, gradients, exchange, losses)
    with clock.count_exchange(world):
        if graphs is None:
            return finish()
        return graphs.finish_step(levels, lambda: (exchange.begin_transfer(levels), finish())[1])


def _finish_step(
    gradients: Gradients, exchange: Exchange, losses: Float[Tensor, " rows"]
) -> Reduced:
    # also layers that backward has not reported, because this pass did not use them
    exchange.add_rows(dict(enumerate(gradients.layers)), gradients.unused_by_all())
    transfer = exchange.finish_transfer(losses, gradients.stack)
    exchange.settle_transfer()
    assert transfer.means is not None
    assert transfer.extra is not None
    updates = [transfer.updates[i] for i in range(len(gradients.layers))]
    return Reduced(updates, transfer.means, transfer.extra, transfer.unused or ())


def _begin_step(run: Run, rounds: Rounds, period: int) -> bool:
    """Whether workers take this step by themselves. A period of 1 is the ordinary step with shared
    gradients and one model for all workers, unless the configuration says otherwise
    (``outer.period_one``, or an outer optimiser that does more than average)."""
    if not rounds.is_between:  # a new period applies from the next round on
        outer = run.config.outer
        shares = period == 1 and outer.plain and outer.period_one == "gradients"
        if shares and rounds.replicas is not None:  # back to one model
            states = "average" if outer.states == "keep" else outer.states
            rounds.replicas.settle_states(states, run.world)
            rounds.replicas = run.gradients.replicas = None
        elif not shares and rounds.replicas is None:
            # Running statistics of the shared model follow worker 0: only process 0 has them.
            run.world.broadcast(list(run.model.buffers()))
            run.separate_workers().copy_state(run.optimizer)
    if rounds.is_local:
        rounds.begin_step(period)
    else:
        rounds.count += 1  # a shared step synchronises
    return rounds.is_local


def _step_alone(
    run: Run, rounds: Rounds, batch: Minibatch, levels: list[AnyLevel], losses: Losses
) -> None:
    """One step of each worker's own model, and the synchronisation that ends a round."""
    g, clock = run.gradients, losses.clock
    assert rounds.replicas is not None
    with run.numerics.training(), clock("compute"):
        own = loss_with_flag(
            g.compute_gradients(batch.x, batch.y, batch.epoch, batch.step), g.stack
        )
        for row, optimizer in enumerate(rounds.replicas.each_worker()):
            set_gradients(g.parameters, [layer[row] for layer in g.layers], g.unused[row])
            optimizer.lr = batch.lr
            optimizer.step()
    rounds.pending.append((own, batch.epoch, batch.step))
    rounds.rate += batch.lr
    if rounds.advance_step() or batch.last:
        for loss in rounds.synchronize(levels, run.panel, clock, last=batch.last):
            losses.add_step(*loss)
