"""The loop: train under a communication schedule, measure, record.

Reads top to bottom: ``run`` goes through the epochs, ``_epoch`` through one. It knows compressors,
policies and instruments by their protocols only; dense is a compressor, static is a policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regimes.collectives.requests import NO_LAYER
from regimes.config import RunConfig
from regimes.errors import RegimesError, TrainingError
from regimes.instruments.panel import check_measured
from regimes.policies.controller import Levels, decide_batch
from regimes.records import Record, Writer, complete, load, read_header
from regimes.training.build import Run, prepare
from regimes.training.clock import Clock
from regimes.training.gradients import install
from regimes.training.learning_rate import learning_rate
from regimes.training.quirks import resolve
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
    this = prepare(resolve(config))
    watchers = Watchers(reporters if this.world.rank == 0 else ())
    with _recorded(this, watchers, Path(out), resume) as writer, GracefulShutdown() as grace:
        while not complete(this.header, this.rows):
            _advance(this, writer, watchers, Path(out), grace)
    return load(out)


@contextmanager
def _recorded(run: Run, watchers: Watchers, out: Path, resume: bool) -> Iterator[Writer | None]:
    """The record, open on process 0 while the run goes on; how the run ends is its last event."""
    writer, whole = None, False
    try:
        writer = open_record(run, out, resume)
        watchers.diary = writer.event if writer else None
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
    run: Run, writer: Writer | None, watchers: Watchers, out: Path, grace: GracefulShutdown
) -> None:
    """One epoch: trained, recorded, saved.

    Raises:
        Terminated: some process was asked to end.
    """
    epoch = len(run.rows)
    row, seconds, details = _epoch(run, epoch, watchers)
    run.rows.append(row)
    if writer:
        writer.epoch(row, seconds, details)
    ended, asked = complete(run.header, run.rows), any(run.world.gather_object(grace.asked))
    if (epoch + 1) % run.config.checkpoint_every == 0 or ended or asked:
        save(run, out)
    watchers.epoch(row, seconds)
    if asked and not ended:
        raise Terminated(f"ended by SIGTERM after epoch {epoch}: continue with --resume")


# -- one epoch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is decided before an epoch, from the epochs so far.

    Attributes:
        batch: as the record has it, see ``_batch``.
        levels: of all layers, with reasons.
    """

    epoch: int
    batch: dict[str, Any]
    lr: float
    next_lr: float
    levels: Levels


def _epoch(
    run: Run, epoch: int, watchers: Watchers
) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Train one epoch; returns its row of the record, where the time went, instruments' details."""
    plan, clock = _plan(run, epoch), Clock(run.device)
    train_loss, steps = _train(run, plan, clock, watchers)
    with clock("communicate"):
        run.world.broadcast(list(run.model.buffers()))
    readings = run.panel.read(epoch, clock)
    with clock("evaluate"):
        test_loss = metric = math.nan
        if run.world.rank == 0:
            test_loss, metric = run.task.evaluate(run.model, run.device, run.batches.dtype)
    row = {
        "epoch": epoch,
        "lr": plan.lr,
        "next_lr": plan.next_lr,
        "batch_size": run.batch_size(plan.batch["level"]),
        "batch": plan.batch,
        "steps": steps,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "metric": metric,
        **_beside(run, clock, test_loss),
        **_traffic(run, plan),
        "statistics": readings.layers,
        "model": readings.model,
    }
    if epoch == 0:
        check_measured(run.needs, readings)
    return row, dict(clock.seconds), readings.details


def _beside(run: Run, clock: Clock, test_loss: float) -> dict[str, Any]:
    """What the task says of the test loss besides its metric, and the loss and metric on the
    samples held out for validation, if there are any: NaN but on process 0."""
    found: dict[str, Any] = dict(run.task.beside(test_loss))
    if run.config.data.validation_size is not None:
        loss = metric = math.nan
        with clock("evaluate"):
            if run.world.rank == 0:
                loss, metric = run.task.validate(run.model, run.device, run.batches.dtype)
        found["validation"] = {"loss": loss, "metric": metric}
    return found


def _plan(run: Run, epoch: int) -> Plan:
    batch, o = _batch(run, epoch), run.config.optimizer
    scale = batch["multiple"] if o.scale_with_batch else 1
    lr, next_lr = (learning_rate(o, e) * scale for e in (epoch, epoch + 1))
    return Plan(epoch, batch, lr, next_lr, run.controller.decide(run.rows))


def _train(run: Run, plan: Plan, clock: Clock, watchers: Watchers) -> tuple[float, int]:
    """All steps of an epoch; their mean loss and number."""
    batches = run.batches.rebatched(run.batch_size(plan.batch["level"]))
    values = [run.value(name) for name in plan.levels.names]
    for group in run.optimizer.param_groups:
        group["lr"] = plan.lr
    losses, steps, worse = 0.0, len(batches), run.deficit.active(plan.epoch)
    for step, (x, y) in enumerate(batches.epoch(plan.epoch, run.world.hosted)):
        updates, loss, own = run.step.take(x, y, plan.epoch, step, values, clock)
        if not math.isfinite(loss.item()):
            _not_finite(run, own, plan.epoch, step)
        losses += loss.item()
        if worse:
            updates = run.deficit.updates(updates, run.config.seed, plan.epoch, step)
        with clock("instruments"):
            run.panel.step(run.gradients.stack, updates)
        with clock("compute"):
            install(run.gradients.parameters, updates)
            run.optimizer.step()
        watchers.step(plan.epoch, step + 1, steps)
    return losses / steps, steps


def _traffic(run: Run, plan: Plan) -> dict[str, Any]:
    """What the epoch has sent, and each layer's level with its reason."""
    meter = run.world.meter.take()
    counted = [meter.layers[i] for i in range(len(run.layers))]
    return {
        "floats": sum(t.floats for t in counted),
        "bytes": sum(t.bytes for t in counted) + meter.layers[NO_LAYER].bytes,
        "collectives": {"calls": meter.calls, "bytes": meter.sent},
        "layers": {
            "level": plan.levels.names,
            "floats": [t.floats for t in counted],
            "bytes": [t.bytes for t in counted],
            "why": plan.levels.why,
        },
    }


def _batch(run: Run, epoch: int) -> dict[str, Any]:
    """The epoch's batch size, as the record has it: its level, why, and the multiple that it is of
    the configuration's ``batch_size``."""
    if run.batch_policy is None:
        return {"level": None, "why": None, "multiple": 1}
    decision = decide_batch(run.batch_policy, run.rows, run.config.signal)
    multiple = run.batch_size(decision.level) // run.config.batch_size
    return {"level": decision.level, "why": decision.why, "multiple": multiple}


def _not_finite(run: Run, own: Tensor, epoch: int, step: int) -> None:
    """Every process comes here in the same step, because the mean loss has told them all."""
    bad = own + 0 * run.gradients.stack.sum(1)
    rows = bad.expand(run.world.local) if len(bad) == 1 else bad
    finite = run.world.gather([rows])[0].isfinite().tolist()
    culprits = ", ".join(str(w) for w, ok in enumerate(finite) if not ok)
    who = "the union of workers" if run.gradients.union and run.world.local > 1 else "worker"
    raise TrainingError(
        f"the loss or a gradient of {who} {culprits} is not finite in epoch {epoch}, step {step}: "
        "lower optimizer.lr or lengthen the warm-up; the record up to the last epoch is intact"
    )
