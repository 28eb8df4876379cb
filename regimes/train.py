"""The loop: train under a communication schedule, measure, record.

Reads top to bottom: ``run`` goes through the epochs, ``_epoch`` through one. It knows compressors,
policies and instruments by their protocols only; dense is a compressor, static is a policy.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from regimes import data
from regimes.config import DENSE, RunConfig
from regimes.errors import ConfigError, RegimesError, TrainingError
from regimes.gradients import install
from regimes.instruments import PROVIDES
from regimes.learning_rate import learning_rate
from regimes.policies import history
from regimes.quirks import resolve
from regimes.records import Record, load, read_header
from regimes.resume import open_record, save
from regimes.setup import Parts, prepare


@runtime_checkable
class Reporter(Protocol):
    """Somebody who watches. Called on process 0 only."""

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

    Raises:
        ConfigError, DataError, RecordError: before any training, one sentence.
        TrainingError: a non-finite loss or a lost process; the record is intact.
    """
    config = resolve(config)
    out = Path(out)
    parts = prepare(config)
    world = parts.world
    writer, watchers = None, list(reporters) if world.rank == 0 else []
    try:
        writer = open_record(parts, out, resume)
        for watcher in watchers:
            watcher.start(read_header(out), parts.rows)
        for epoch in range(len(parts.rows), config.epochs):
            row, seconds, details = _epoch(parts, epoch, watchers)
            parts.rows.append(row)
            if writer:
                writer.epoch(row, seconds, details)
            if (epoch + 1) % config.checkpoint_every == 0 or epoch + 1 == config.epochs:
                save(parts, out)
            for watcher in watchers:
                watcher.epoch(row, seconds)
        if writer:
            writer.event("end")
        for watcher in watchers:
            watcher.stop("")
        world.barrier()
    except BaseException as error:
        why = str(error) if isinstance(error, RegimesError) else f"{type(error).__name__} {error}"
        for watcher in watchers:
            watcher.stop(why)
        if writer:
            writer.event("stopped", why=why.strip())
        raise
    finally:
        if writer:
            writer.close()
        world.close()
    return load(out)


# -- one epoch -------------------------------------------------------------------------------


class Clock:
    """Adds up where the time goes. On a GPU each switch is a sync point, so that it is true."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Book time that was spent within ``source`` on ``target`` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


def _epoch(
    p: Parts, epoch: int, watchers: Sequence[Reporter]
) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Train one epoch; returns its row of the record, where the time went, instruments' details."""
    o, clock = p.config.optimizer, Clock(p.device)
    lr = learning_rate(o, epoch)
    for group in p.optimizer.param_groups:
        group["lr"] = lr
    past = history(p.rows, p.compressed, p.config.signal)
    names = [p.layers[i].name for i in p.compressed]
    decisions = dict(zip(p.compressed, p.policy.decide(past, names), strict=True))
    level = [decisions[i].level if i in decisions else DENSE for i in range(len(p.layers))]
    values = [p.value(name) for name in level]
    losses, steps = 0.0, len(p.batches)
    for step, (x, y) in enumerate(p.batches.epoch(epoch, p.world.hosted)):
        with clock("compute"):
            own = p.gradients.compute(x, y, epoch, step)
        waited = p.world.seconds
        with clock("compress"):
            updates, loss = p.reducer.step(p.gradients.layers, values, own, p.gradients.stack)
        clock.move(p.world.seconds - waited, "compress", "communicate")
        if not math.isfinite(loss.item()):
            _not_finite(p, own, epoch, step)
        losses += loss.item()
        with clock("instruments"):
            for _, gauge in p.gauges.values():
                gauge.step(p.gradients.stack, updates)
        with clock("compute"):
            install(p.gradients.parameters, updates)
            p.optimizer.step()
        for watcher in watchers:
            watcher.step(epoch, step + 1, steps)
    with clock("communicate"):
        p.world.broadcast(list(p.model.buffers()))
    readings = {}
    for name, (every, gauge) in p.gauges.items():
        if epoch % every == 0:
            with clock("instruments" if name == "norms" else name):
                readings[name] = gauge.read(epoch)
    with clock("evaluate"):
        test_loss, metric = evaluate(p) if p.world.rank == 0 else (math.nan, math.nan)
    meter = p.world.meter.take()
    counted = [meter.layers[i] for i in range(len(p.layers))]
    row = {
        "epoch": epoch,
        "lr": lr,
        "next_lr": learning_rate(o, epoch + 1),
        "batch_size": p.config.batch_size,
        "steps": steps,
        "train_loss": losses / steps,
        "test_loss": test_loss,
        "metric": metric,
        "floats": sum(t.floats for t in counted),
        "bytes": sum(t.bytes for t in counted) + meter.layers[-1].bytes,
        "collectives": {"calls": meter.calls, "bytes": meter.sent},
        "layers": {
            "level": level,
            "floats": [t.floats for t in counted],
            "bytes": [t.bytes for t in counted],
            "why": [d.why if (d := decisions.get(i)) else None for i in range(len(p.layers))],
        },
        "statistics": {
            k: [_finite(x) for x in v] for r in readings.values() for k, v in r.layers.items()
        },
        "model": {k: _finite(v) for r in readings.values() for k, v in r.model.items()},
    }
    if epoch == 0:
        _check_needs(p, row)
    details = {name: r.detail for name, r in readings.items() if r.detail}
    return row, dict(clock.seconds), details


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN: None is a statistic that could not be formed."""
    return value if value is not None and math.isfinite(value) else None


def _check_needs(p: Parts, row: dict[str, Any]) -> None:
    """Instruments are read after epoch 0: does the policy now have what it needs?"""
    for need in p.policy.needs:
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
    culprits = [str(w) for w, ok in enumerate(finite) if not ok]
    who = "the workers' union" if p.gradients.union else f"worker {', '.join(culprits)}"
    raise TrainingError(
        f"the loss or a gradient of {who} is not finite in epoch {epoch}, step {step}: "
        "lower optimizer.lr or lengthen the warm-up; the record up to the last epoch is intact"
    )


@torch.no_grad()
def evaluate(p: Parts) -> tuple[float, float]:
    """(mean cross-entropy, accuracy) on the test set, with running BatchNorm statistics."""
    p.model.eval()
    loss = correct = count = 0.0
    for x, y in data.evaluation_batches(p.images, "test", 500, p.device, p.batches.dtype):
        logits = p.model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(1) == y).sum().item()
        count += len(y)
    return loss / count, correct / count
