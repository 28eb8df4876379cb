"""A hook held wrong, in many ways: each gives what its process has heard, and after how long."""

from __future__ import annotations

import contextlib
import functools
import io
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from ddp_scripts import cases
from ddp_scripts.cases import Case
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import regimes
from regimes.base.errors import RegimesError
from regimes.collectives import call_guard
from regimes.compression.powersgd import PowerSGD
from regimes.hook.ddp import hook as hooks
from regimes.records import read_lines

CASE = Case()
STEPS = 4

# at these levels no layer is sent whole, which would be said
attach = functools.partial(regimes.attach, summary=False, levels={"low": 2, "high": 1})


def heard(rank: int, name: str, folder: Path | None = None) -> dict[str, Any]:
    """What a way says: errors, warnings, and what is printed at the end."""
    # clocks that are made for people go a hundred times faster here
    call_guard.SOON = call_guard.PATIENCE = 0.3  # type: ignore[misc]
    hooks.MANY_STEPS = 5  # type: ignore[misc]
    start, printed = time.monotonic(), io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*the earlier spelling goes with", FutureWarning)
        try:
            WAYS[name](rank, folder)
            said = []
        except RegimesError as error:
            said = [f"{type(error).__name__}: {error}"]
    said += [f"{w.category.__name__}: {w.message}" for w in caught if "torch" not in w.filename]
    said += printed.getvalue().splitlines()
    return {"said": said, "seconds": time.monotonic() - start}


def wrapped() -> tuple[DistributedDataParallel, torch.optim.SGD]:
    model = DistributedDataParallel(cases.build(CASE))
    return model, cases.sgd(model)


def train(model: Any, optimizer: Any, rank: int, first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        cases.step_of(model, optimizer, CASE, step, rank)


def forgotten(rank: int, folder: Any) -> None:
    """No epoch_end in many steps, nor at the end."""
    model, optimizer = wrapped()
    hook = attach(model, policy="accordion")
    train(model, optimizer, rank, 0, 7)
    hook.close()


def one_rank(which: int, signal: str) -> Callable[[int, Any], None]:
    """epoch_end under ``if rank == which``; all signals but "update" send something there."""

    def way(rank: int, folder: Any) -> None:
        model, optimizer = wrapped()
        hook = attach(model, policy="accordion", signal=signal)
        for epoch in range(2):
            train(model, optimizer, rank, STEPS * epoch)
            if rank == which:
                hook.epoch_end(lr=0.1)

    return way


def uneven(rank: int, folder: Any) -> None:
    """One process has a batch more."""
    model, optimizer = wrapped()
    hook = attach(model, policy="accordion")
    for epoch in range(2):
        train(model, optimizer, rank, STEPS * epoch, STEPS + rank)
        hook.epoch_end(lr=0.1)


def joined(rank: int, folder: Any) -> None:
    """Uneven inputs in model.join()."""
    model, optimizer = wrapped()
    hook = attach(model, policy="accordion")
    with model.join():
        train(model, optimizer, rank, 0, STEPS + rank)
        hook.epoch_end(lr=0.1)


def attached_alone(rank: int, folder: Any) -> None:
    """attach under ``if rank == 0``."""
    model, _ = wrapped()
    if rank == 0:
        attach(model, policy="accordion", timeout=1.5)
    time.sleep(2)


def other_units(rank: int, folder: Any) -> None:
    """Processes that count other units."""
    model, optimizer = wrapped()
    attach(model, optimizer, policy="accordion", every=2 + rank)
    train(model, optimizer, rank)


def loaded_alone(rank: int, folder: Any) -> None:
    """One process loads a state in the middle, the other goes on."""
    model, optimizer = wrapped()
    hook = attach(model, policy="accordion")
    train(model, optimizer, rank)
    if rank == 0:
        hook.load_state_dict(hook.state_dict())
    train(model, optimizer, rank)


def long_interval(rank: int, folder: Any) -> None:
    """ACCORDION's ten epochs in a job of two."""
    model, optimizer = wrapped()
    hook = attach(model, optimizer, policy="accordion", every=2)
    train(model, optimizer, rank)
    hook.close()


def never_changes(rank: int, folder: Any) -> None:
    """A threshold that every epoch passes."""
    model, optimizer = wrapped()
    policy = {"name": "accordion", "interval": 1, "eta": 1e-9}
    hook = attach(model, optimizer, policy=policy, every=1)
    train(model, optimizer, rank)
    hook.close()


def silent_sampler(rank: int, folder: Any) -> None:
    """every=sampler without set_epoch."""
    model, optimizer = wrapped()
    sampler: Any = DistributedSampler(range(8))  # type: ignore[arg-type]
    attach(model, optimizer, policy="accordion", every=sampler)
    train(model, optimizer, rank, 0, 7)


def end_of_epoch_twice(rank: int, folder: Any) -> None:
    """epoch_end beside every."""
    model, optimizer = wrapped()
    hook = attach(model, optimizer, policy="accordion", every=2)
    train(model, optimizer, rank)
    hook.epoch_end(lr=0.1)


def no_rate(rank: int, folder: Any) -> None:
    """epoch_end() without a rate or an optimiser."""
    model, optimizer = wrapped()
    hook = attach(model, policy="accordion")
    train(model, optimizer, rank)
    hook.epoch_end()


def attached(**options: Any) -> Callable[[int, Any], None]:
    """A bad argument of attach."""

    def way(rank: int, folder: Any) -> None:
        attach(wrapped()[0], **options)

    return way


def of_another_kind(make: Callable[[], nn.Module]) -> Callable[[int, Any], None]:
    """A model that is none of DDP's."""

    def way(rank: int, folder: Any) -> None:
        attach(make(), policy="accordion")

    return way


def foreign_optimizer(rank: int, folder: Any) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    attach(wrapped()[0], other, policy="accordion", every=2)


def logged_text(rank: int, folder: Any) -> None:
    model, _ = wrapped()
    attach(model, policy="accordion", record=folder / "text").log(accuracy="good")


def in_a_run(rank: int, folder: Any) -> None:
    """A record where one is already, without the state that goes with it."""
    for _ in range(2):
        model, optimizer = wrapped()
        hook = attach(model, optimizer, policy="static", every=2, record=folder / "again")
        train(model, optimizer, rank)
        hook.close()


def in_a_file(rank: int, folder: Any) -> None:
    model, optimizer = wrapped()
    (folder / "file").touch()
    attach(model, optimizer, policy="accordion", every=2, record=folder / "file")
    train(model, optimizer, rank)


def in_another_job(rank: int, folder: Any) -> None:
    """A record that another configuration has begun."""
    state = None
    for level in ("low", "high"):
        model, optimizer = wrapped()
        policy = {"name": "static", "level": level}
        hook = attach(model, optimizer, policy=policy, every=2, record=folder / "other")
        if state:
            hook.load_state_dict(state)
        train(model, optimizer, rank)
        state = hook.state_dict()
        hook.close()


def full_disk(rank: int, folder: Any) -> None:
    """The record cannot be written any more; training goes on, and nothing is lost."""
    model, optimizer = wrapped()
    hook = attach(model, optimizer, policy="static", every=2, record=folder / "full")
    for epoch in range(4):
        blocked = folder / "full" / "epochs.jsonl"
        if rank == 0 and epoch == 1:
            blocked.rename(folder / "aside")
            blocked.mkdir()
        if rank == 0 and epoch == 3:
            blocked.rmdir()
            (folder / "aside").rename(blocked)
        train(model, optimizer, rank, STEPS * epoch)
    hook.close()
    if rank == 0:
        for name in ("epochs.jsonl", "seconds.jsonl"):
            rows = read_lines(folder / "full" / name)
            assert [row["epoch"] for row in rows] == list(range(8))


class Nameless(PowerSGD):
    """A compressor that says nothing of levels."""

    usual: ClassVar[Mapping[str, Any]] = {}


def sharded() -> nn.Module:
    return fully_shard(nn.Linear(4, 4))  # type: ignore[return-value]


WAYS: dict[str, Callable[[int, Any], None]] = {
    "forgotten": forgotten,
    "one rank": one_rank(0, "update"),
    "one rank that talks": one_rank(1, "global"),
    "uneven": uneven,
    "joined": joined,
    "attached alone": attached_alone,
    "other units": other_units,
    "loaded alone": loaded_alone,
    "long interval": long_interval,
    "never changes": never_changes,
    "silent sampler": silent_sampler,
    "epoch_end beside every": end_of_epoch_twice,
    "no rate": no_rate,
    "every without optimiser": attached(every=2),
    "every of nothing": attached(every=0),
    "foreign optimiser": foreign_optimizer,
    "record of no folder": attached(record=""),
    "no levels": attached(compressor=Nameless(), levels=None),
    "logged text": logged_text,
    "in a run": in_a_run,
    "in a file": in_a_file,
    "in another job": in_another_job,
    "full disk": full_disk,
    "FSDP2": of_another_kind(sharded),
    "DataParallel": of_another_kind(lambda: nn.DataParallel(nn.Linear(4, 4))),
    "compiled": of_another_kind(
        lambda: torch.compile(DistributedDataParallel(nn.Linear(4, 4)), backend="eager")  # type: ignore[arg-type, return-value]
    ),
}


def all_of(rank: int, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Several ways, one after the other, of those that leave the group whole."""
    return [heard(rank, name, folder) for name in names]
