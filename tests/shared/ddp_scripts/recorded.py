"""Jobs under the hook that leave a record."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from ddp_scripts import cases
from ddp_scripts.cases import Case
from leveled import leveled
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import regimes
from regimes.base.config import RunConfig
from regimes.hook.ddp import Hook, RecordOptions

CASE = Case()
STEPS, UNITS = 3, 5


def parts(case: Case = CASE, **options: Any) -> dict[str, Any]:
    model = DistributedDataParallel(cases.build(case), **case.ddp)
    optimizer = cases.sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, STEPS * 3)  # per step
    policy = options.pop("policy", {"name": "accordion", "interval": 1, "eta": 0.2})
    hook = regimes.attach(
        model,
        optimizer,
        policy=policy,
        seed=7,
        compressor=leveled(case.compressor, dict(case.levels)),
        **options,
    )
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "hook": hook}


def step(found: dict[str, Any], number: int, rank: int, case: Case = CASE) -> None:
    cases.step_of(found["model"], found["optimizer"], case, number, rank)
    found["scheduler"].step()


def ends(found: dict[str, Any]) -> dict[str, Any]:
    hook: Hook = found["hook"]
    return {
        "weights": cases.weights(found["model"].module),
        "rows": hook.rows,
        "levels": hook.levels,
        "traffic": [hook.traffic.floats, hook.traffic.bytes],
        "owed": sum(x.residual.norm() for x in hook.reducer.states if x.residual is not None),
    }


def paces(rank: int, folder: Path, signal_name: str) -> dict[str, Any]:
    """The same training, its units ended in three ways, with a record and without."""
    found = {}
    for name in ("by hand", "every", "sampler", "no record"):
        sampler: Any = DistributedSampler(range(8))  # type: ignore[arg-type]
        every: Any = {"by hand": "epoch", "sampler": sampler}.get(name, STEPS)
        record = None if name == "no record" else folder / name
        job = parts(every=every, record=record, signal=signal_name)
        for unit in range(UNITS):
            sampler.set_epoch(unit)
            for number in range(STEPS):
                step(job, unit * STEPS + number, rank)
            if name == "by hand":
                job["hook"].epoch_end()
        job["hook"].close()
        found[name] = ends(job)
    return found


def logged(rank: int, folder: Path) -> None:
    """Values of steps, of a unit, after its end; a last unit that is shorter; seconds."""
    about = RecordOptions(
        folder / "run", name="mine", data="noise", batch_size=6, metric="accuracy", units=3
    )
    job = parts(every=STEPS, record=about)
    hook = job["hook"]
    for number in range(2 * STEPS + 2):
        step(job, number, rank)
        hook.log(train_loss=float(number), norm=torch.tensor(2.0))
        if number % STEPS == STEPS - 1:  # between the unit's last step and the next unit's first
            hook.log(
                test_loss=torch.tensor(0.5), accuracy=0.25 * (number // STEPS), bad=float("inf")
            )
    hook.close()


def resumed(rank: int, folder: Path, case: Case, stop: int) -> dict[str, Any]:
    """A whole job, and one that is cut after ``stop`` steps and goes on from its last state."""
    found = {}
    for name in ("whole", "cut"):
        job, state = parts(case, every=STEPS, record=folder / name), None
        number = 0
        while number < STEPS * UNITS:
            step(job, number, rank, case)
            job["hook"].log(train_loss=float(number))
            number += 1
            if name == "cut" and number == stop:
                state = copy.deepcopy({name: part.state_dict() for name, part in job.items()})
            if name == "cut" and state and number == stop + 4:  # four steps are lost
                number, saved, state = stop, state, None
                if job["hook"].recorder is not None:
                    job["hook"].recorder.close_files()  # as the end of a process does
                job = parts(case, every=STEPS, record=folder / name)
                for key, value in saved.items():
                    job[key].load_state_dict(value)
        job["hook"].close()
        found[name] = ends(job)
    return found


def grown(rank: int, folder: Path, units: list[int]) -> dict[str, list[Any]]:
    """The states, as bytes, after so many units of one step; what a load of the last one says where
    the record is elsewhere, has changed, and where it is right again."""
    policy = {"name": "static", "level": "high"}  # a residual at every unit
    job = parts(every=1, record=folder / "run", policy=policy)
    found: dict[str, list[Any]] = {"bytes": [], "said": []}
    for number in range(units[-1] + 1):
        if number in units:  # the last unit's row waits for the next step
            saved = job["hook"].state_dict(), job["hook"].full_state_dict()
            found["bytes"].append([packed(state) for state in saved])
        if number < units[-1]:
            step(job, number, rank)
    before = [*job["hook"].rows]  # to end the job adds the step under way
    job["hook"].close()
    states = [torch.load(io.BytesIO(x), weights_only=True) for x in found["bytes"][-1]]
    for place in ("moved", "changed", "whole"):
        torch.distributed.barrier()
        if rank == 0:
            spoil(folder, place)
        torch.distributed.barrier()
        for name, state in zip(("load_state_dict", "load_full_state_dict"), states, strict=True):
            again = parts(every=1, policy=policy)
            try:
                getattr(again["hook"], name)(state)
                found["said"].append(again["hook"].rows == before)
            except regimes.ConfigError as error:
                found["said"].append(str(error))
            del again
    return found


def packed(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def spoil(folder: Path, how: str) -> None:
    """Move the record, put it back with another first unit, or as it was."""
    if how == "moved":
        (folder / "run").rename(folder / "moved")
        return
    if how == "changed":
        (folder / "moved").rename(folder / "run")
    lines = folder / "run" / "epochs.jsonl"
    swapped = {"changed": (b'"steps":1', b'"steps":2'), "whole": (b'"steps":2', b'"steps":1')}
    lines.write_bytes(lines.read_bytes().replace(*swapped[how], 1))


def trained_like(rank: int, config: RunConfig, folder: Path) -> None:
    """The trainer's run (``jobs.smoke``) with a record of the hook's."""
    from ddp_scripts import jobs

    attach = jobs.attach
    hooks = []

    def recording(*args: Any, **options: Any) -> Hook:
        hooks.append(attach(*args, **options, record=folder))
        return hooks[0]

    jobs.attach = recording
    jobs.smoke(rank, config)
    hooks[0].close()


def let_go(rank: int, folder: Path) -> list[str]:
    """Two jobs, one after the other, in functions that nothing outlives; the second is closed. What
    each says."""
    return [_said(rank, folder / name, name == "closed") for name in ("let go", "closed")]


def _said(rank: int, folder: Path, closes: bool) -> str:
    with redirect_stderr(io.StringIO()) as said:
        _short(rank, folder, closes)
        gc.collect()
    return said.getvalue()


def _short(rank: int, folder: Path, closes: bool) -> None:
    job = parts(every=STEPS, record=folder, policy="accordion", summary=False)  # it has times
    for number in range(2 * STEPS + 2):
        step(job, number, rank)
        job["hook"].log(train_loss=float(number))
    if closes:
        job["hook"].close()


def killed(rank: int, folder: Path) -> None:
    """Both processes die in the middle of a unit."""
    job = parts(every=STEPS, record=folder / "run")
    for number in range(2 * STEPS + 2):
        step(job, number, rank)
    os.kill(os.getpid(), signal.SIGKILL)


def reported(rank: int, folder: Path, names: list[str]) -> None:
    """With reporters of these names."""
    job = parts(
        every=STEPS, record=RecordOptions(folder, reporters=tuple(names)), policy="accordion"
    )
    for number in range(3 * STEPS):
        step(job, number, rank)
    job["hook"].close()


def refused_reporter(rank: int, folder: Path, name: str) -> str:
    """What the first step says where a reporter cannot be made."""
    job = parts(every=STEPS, record=RecordOptions(folder, reporters=(name,)))
    try:
        step(job, 0, rank)
    except regimes.RecordError as error:
        return str(error)
    return ""
