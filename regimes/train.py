"""The loop: train under a communication schedule, measure, record.

Reads top to bottom: ``run`` goes through the epochs, ``_epoch`` through one. It knows compressors,
policies and instruments by their protocols only; dense is a compressor, static is a policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from regimes.clock import Clock
from regimes.config import DENSE, RunConfig
from regimes.errors import ConfigError, RegimesError, TrainingError
from regimes.grace import Grace, Terminated
from regimes.gradients import install
from regimes.history import batch_history, history
from regimes.instruments import PROVIDES
from regimes.instruments.base import Reading
from regimes.learning_rate import learning_rate
from regimes.policies import Decision
from regimes.quirks import resolve
from regimes.records import Record, Writer, complete, load, read_header
from regimes.resume import open_record, save
from regimes.setup import Parts, prepare
from regimes.watchers import Watchers


@runtime_checkable
class Reporter(Protocol):
    """Somebody who watches. Called on process 0 only; one that raises is left out (`watchers`)."""

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None: ...
    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None: ...
    def stop(self, message: str) -> None: ...


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
    config = resolve(config)
    out = Path(out)
    parts = prepare(config)
    world = parts.world
    writer, watchers = None, Watchers(reporters if world.rank == 0 else ())
    whole = False
    try:
        writer = open_record(parts, out, resume)
        watchers.diary = writer.event if writer else None
        watchers.start(read_header(out), parts.rows)
        with Grace() as grace:
            while not complete(parts.header, parts.rows):
                _advance(parts, writer, watchers, out, grace)
        if writer:
            writer.event("end")
        watchers.stop("")
        world.barrier()
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
            world.abort()
        parts.close()
    return load(out)


def _advance(p: Parts, writer: Writer | None, watchers: Watchers, out: Path, grace: Grace) -> None:
    """One epoch: trained, recorded, saved.

    Raises:
        Terminated: some process was asked to end.
    """
    epoch = len(p.rows)
    row, seconds, details = _epoch(p, epoch, watchers)
    p.rows.append(row)
    if writer:
        writer.epoch(row, seconds, details)
    ended, asked = complete(p.header, p.rows), any(p.world.gather_object(grace.asked))
    if (epoch + 1) % p.config.checkpoint_every == 0 or ended or asked:
        save(p, out)
    watchers.epoch(row, seconds)
    if asked and not ended:
        raise Terminated(f"ended by SIGTERM after epoch {epoch}: continue with --resume")


# -- one epoch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is decided before an epoch, from the epochs so far.

    Attributes:
        batch: as the record has it, see ``_batch``.
        decisions: of the compressed layers, by index.
        level: of all layers.
    """

    epoch: int
    batch: dict[str, Any]
    lr: float
    next_lr: float
    decisions: dict[int, Decision]
    level: list[str]


def _epoch(
    p: Parts, epoch: int, watchers: Watchers
) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Train one epoch; returns its row of the record, where the time went, instruments' details."""
    plan, clock = _plan(p, epoch), Clock(p.device)
    train_loss, steps = _train(p, plan, clock, watchers)
    with clock("communicate"):
        p.world.broadcast(list(p.model.buffers()))
    readings = _measure(p, epoch, clock)
    with clock("evaluate"):
        test_loss = metric = math.nan
        if p.world.rank == 0:
            test_loss, metric = p.task.evaluate(p.model, p.device, p.batches.dtype)
    row = {
        "epoch": epoch,
        "lr": plan.lr,
        "next_lr": plan.next_lr,
        "batch_size": p.batch_size(plan.batch["level"]),
        "batch": plan.batch,
        "steps": steps,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "metric": metric,
        **_traffic(p, plan),
        "statistics": {
            k: [_finite(x) for x in v] for r in readings.values() for k, v in r.layers.items()
        },
        "model": {k: _finite(v) for r in readings.values() for k, v in r.model.items()},
    }
    if epoch == 0:
        _check_needs(p, row)
    details = {name: r.detail for name, r in readings.items() if r.detail}
    return row, dict(clock.seconds), details


def _plan(p: Parts, epoch: int) -> Plan:
    batch, o = _batch(p, epoch), p.config.optimizer
    scale = batch["multiple"] if o.scale_with_batch else 1
    lr, next_lr = (learning_rate(o, e) * scale for e in (epoch, epoch + 1))
    past = history(p.rows, p.compressed, p.config.signal)
    names = [p.layers[i].name for i in p.compressed]
    decisions = dict(zip(p.compressed, p.policy.decide(past, names), strict=True))
    level = [decisions[i].level if i in decisions else DENSE for i in range(len(p.layers))]
    return Plan(epoch, batch, lr, next_lr, decisions, level)


def _train(p: Parts, plan: Plan, clock: Clock, watchers: Watchers) -> tuple[float, int]:
    """All steps of an epoch; their mean loss and number."""
    batches = p.batches.rebatched(p.batch_size(plan.batch["level"]))
    values = [p.value(name) for name in plan.level]
    for group in p.optimizer.param_groups:
        group["lr"] = plan.lr
    losses, steps, worse = 0.0, len(batches), p.deficit.active(plan.epoch)
    for step, (x, y) in enumerate(batches.epoch(plan.epoch, p.world.hosted)):
        updates, loss, own = p.exchange.step(x, y, plan.epoch, step, values, clock)
        if not math.isfinite(loss.item()):
            _not_finite(p, own, plan.epoch, step)
        losses += loss.item()
        if worse:
            updates = p.deficit.updates(updates, p.config.seed, plan.epoch, step)
        with clock("instruments"):
            for _, gauge in p.gauges.values():
                gauge.step(p.gradients.stack, updates)
        with clock("compute"):
            install(p.gradients.parameters, updates)
            p.optimizer.step()
        watchers.step(plan.epoch, step + 1, steps)
    return losses / steps, steps


def _measure(p: Parts, epoch: int, clock: Clock) -> dict[str, Reading]:
    """What the instruments read that are due after this epoch."""
    readings = {}
    for name, (every, gauge) in p.gauges.items():
        if epoch % every == 0:
            with clock("instruments" if name == "norms" else name):
                readings[name] = gauge.read(epoch)
    return readings


def _traffic(p: Parts, plan: Plan) -> dict[str, Any]:
    """What the epoch has sent, and each layer's level with its reason."""
    meter = p.world.meter.take()
    counted = [meter.layers[i] for i in range(len(p.layers))]
    return {
        "floats": sum(t.floats for t in counted),
        "bytes": sum(t.bytes for t in counted) + meter.layers[-1].bytes,
        "collectives": {"calls": meter.calls, "bytes": meter.sent},
        "layers": {
            "level": plan.level,
            "floats": [t.floats for t in counted],
            "bytes": [t.bytes for t in counted],
            "why": [d.why if (d := plan.decisions.get(i)) else None for i in range(len(counted))],
        },
    }


def _batch(p: Parts, epoch: int) -> dict[str, Any]:
    """The epoch's batch size, as the record has it: its level, why, and the multiple that it is of
    the configuration's ``batch_size``."""
    if p.batch_policy is None:
        return {"level": None, "why": None, "multiple": 1}
    past = batch_history(p.rows, p.config.signal)
    decision = p.batch_policy.decide(past, ["batch"])[0]
    multiple = p.batch_size(decision.level) // p.config.batch_size
    return {"level": decision.level, "why": decision.why, "multiple": multiple}


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN: None is a statistic that could not be formed."""
    return value if value is not None and math.isfinite(value) else None


def _check_needs(p: Parts, row: dict[str, Any]) -> None:
    """Instruments are read after epoch 0: does the policy now have what it needs?"""
    needs = [*p.policy.needs, *(p.batch_policy.needs if p.batch_policy else ())]
    for need in needs:
        if need != "norm" and need not in {*row["statistics"], *row["model"]}:
            raise ConfigError(
                f"the policy needs the statistic {need!r}, which the instrument "
                f"{PROVIDES[need.partition(':')[0]]!r} as configured does not measure: see its "
                "fields in [instruments]"
            )


def _not_finite(p: Parts, own: Tensor, epoch: int, step: int) -> None:
    """Every process comes here in the same step, because the mean loss has told them all."""
    bad = own + 0 * p.gradients.stack.sum(1)
    rows = bad.expand(p.world.local) if len(bad) == 1 else bad
    finite = p.world.gather([rows])[0].isfinite().tolist()
    culprits = ", ".join(str(w) for w, ok in enumerate(finite) if not ok)
    who = "the union of workers" if p.gradients.union and p.world.local > 1 else "worker"
    raise TrainingError(
        f"the loss or a gradient of {who} {culprits} is not finite in epoch {epoch}, step {step}: "
        "lower optimizer.lr or lengthen the warm-up; the record up to the last epoch is intact"
    )
