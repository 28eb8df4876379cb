"""A user's own training loop: a small network, its batches, and the steps of a case."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.same_bits import attached, states
from benchmarks.same_bits.case import BATCH, Case, Place
from benchmarks.same_bits.meter import Meter
from benchmarks.same_bits.processes import PATIENCE

RATES = {"sgd": 0.05, "adamw": 0.01, "muon": 0.01}


class Net(nn.Module):
    """A convolution, BatchNorm, two linear layers with one weight, a frozen one, a side branch for
    a third of the steps; its last layer has five rows, which no number of shards divides."""

    def __init__(self, norm: bool, side: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.inner = nn.Linear(4 * 16, 24)
        self.left, self.right = nn.Linear(24, 24), nn.Linear(24, 24)
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.side = nn.Linear(24, 24) if side else None
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.inner(torch.tanh(self.norm(self.conv(x))).flatten(1)))
        x = self.right(torch.tanh(self.left(x))) + self.frozen(x)
        if self.side is not None and step % 3 == 1:
            x = x + self.side(torch.tanh(x))
        return self.head(x)


def batch(step: int, part: int, worker: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a worker."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + part)
    x = torch.randn(BATCH, 2, 4, 4, generator=generator)
    return x, torch.randint(5, (BATCH,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Loop(Case):
    """Steps of a loop in which a hook or local steps take part: the subclasses say which.

    Attributes:
        options: of ``attach`` or ``local_steps``.
        changes: of them in the second stage.
        ends: the step before which each stage ends.
        optimizer: "sgd", "adamw" or "muon" with AdamW beside it.
        side: the side branch is used at times.
        accumulate: backward passes of a step.
        bad: a step in which process 1 has a loss of NaN.
        clip: the largest norm of a gradient.
        norm: the network has BatchNorm.
        dtype: of the parameters.
        autocast: forward passes run in bfloat16.
        scaled: a GradScaler scales the loss, and skips steps that are not finite.
    """

    counts: tuple[int, ...] = (2,)
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = (9,)
    optimizer: str = "sgd"
    side: bool = False
    accumulate: int = 1
    bad: int | None = None
    clip: float | None = None
    norm: bool = True
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    scaled: bool = False

    def rate(self, step: int) -> float:
        """It falls to a tenth in the end, which is a decay."""
        return RATES[self.optimizer] * (0.1 if step >= 6 else 1.0)

    # -- what a subclass says ------------------------------------------------------------------

    def wrap(self, net: nn.Module) -> Any:
        """The model that is called."""
        return net

    def start(self, model: Any, optimizers: list[Any], options: dict[str, Any]) -> Any:
        """The hook or the local steps."""
        raise NotImplementedError

    def after(self, job: Any, step: int, loss: Tensor) -> None:
        """What the loop does after each step of the optimiser."""

    def worker(self, rank: int) -> tuple[int, slice]:
        """Which worker this process is, and which samples of its batch are here."""
        return rank, slice(0, BATCH)

    def last_backward(self, model: Any, last: bool) -> Any:
        """A context for a backward pass: gradients are exchanged in the last one of a step."""
        return contextlib.nullcontext()

    def save(self, at: Place, model: Any, optimizers: list[Any], job: Any) -> None:
        """Leave what the next stage continues: each process its own."""
        state = {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "job": job.state_dict(),
        }
        torch.save(state, at.folder / f"state-{at.rank}.pt")

    def load(self, at: Place, model: Any, optimizers: list[Any], job: Any) -> None:
        """The inverse."""
        state = torch.load(at.folder / f"state-{at.rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        job.load_state_dict(state["job"])

    # -- one stage -----------------------------------------------------------------------------

    def train(self, at: Place) -> None:
        with joined(at.rank, self.counts[at.stage]):
            self._train(at)

    def _train(self, at: Place) -> None:
        # before any thread begins, whose operators it counts
        meter = Meter(*self.counted) if self.is_last(at) else None
        torch.manual_seed(at.rank)  # processes start apart
        net = Net(self.norm, self.side).to(self.dtype)
        model = self.wrap(net)
        optimizers = self._optimizers(net)
        options = dict(self.options) | (dict(self.changes) if at.stage else {})
        if (name := options.pop("record", None)) is not None:
            options["record"] = attached.record(at.folder / name)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=self.scaled)
        if self.scaled:
            options["scaler"] = scaler
        job = self.start(model, optimizers, options)
        first = self.ends[at.stage - 1] if at.stage else 0
        if at.stage:
            self.load(at, model, optimizers, job)
        for step in range(first, self.ends[at.stage]):
            loss = self._step(at, model, optimizers, scaler, step)
            self.after(job, step, loss)
            if meter is not None:
                meter.step()
        if meter is None:
            self.save(at, model, optimizers, job)
            job.close()
            return
        state = {"model": model.state_dict(), "optimizer": [o.state_dict() for o in optimizers]}
        states.write(at.folder, at.rank, {**state, **states.of_job(job.state_dict())})
        job.close()
        rows = "".join(json.dumps(row, default=repr) + "\n" for row in job.rows)
        (at.folder / f"rows-{at.rank}.jsonl").write_text(rows)
        after = {"model": model.state_dict()}  # local steps synchronise once more
        states.write(at.folder, f"{at.rank}-closed", after)
        if at.rank == 0:
            meter.write(at.folder)

    def _step(self, at: Place, model: Any, optimizers: list[Any], scaler: Any, step: int) -> Tensor:
        worker, rows = self.worker(at.rank)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = self.rate(step)
            optimizer.zero_grad()
        for part in range(self.accumulate):
            x, y = batch(step, part, worker)
            with self.last_backward(model, part == self.accumulate - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    answer = model(x[rows].to(self.dtype), step)
                loss = F.cross_entropy(answer.float(), y[rows]) / self.accumulate
                if step == self.bad and at.rank == 1:
                    loss = loss * torch.nan
                scaler.scale(loss).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        if step != self.bad or self.scaled:  # all processes skip it, as a scaler does by itself
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    def _optimizers(self, net: nn.Module) -> list[Any]:
        trained = [p for p in net.parameters() if p.requires_grad]
        rate = RATES[self.optimizer]
        if self.optimizer == "sgd":
            return [torch.optim.SGD(trained, rate, momentum=0.9, weight_decay=1e-3)]
        if self.optimizer == "adamw":
            return [torch.optim.AdamW(trained, rate)]
        hidden = [p for p in trained if p.ndim == 2]
        rest = [p for p in trained if p.ndim != 2]
        return [torch.optim.Muon(hidden, rate), torch.optim.AdamW(rest, rate)]


@contextlib.contextmanager
def joined(rank: int, count: int) -> Iterator[None]:
    """A group of gloo processes; the last to leave it is not left alone."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    limit = datetime.timedelta(seconds=PATIENCE)
    place = os.environ["SAME_BITS_MEET"]
    dist.init_process_group("gloo", place, limit, world_size=count, rank=rank)
    yield
    dist.barrier()
    dist.destroy_process_group()
