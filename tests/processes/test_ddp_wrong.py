"""A job held wrong: one sentence soon, on every process that is concerned, and no long silence. In
different places are processes whose loaders differ in length, or that make different calls."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import regimes
from regimes.collectives import call_guard
from regimes.hook.ddp import hook as hooks
from regimes.records import read_lines

STEPS = 4
# at these levels no layer is sent whole, which would be said
LEVELS = {"levels": {"low": 2, "high": 1}, "summary": False}
attach = functools.partial(regimes.attach, **{"policy": "accordion", **LEVELS})


def wrapped(way: str = "ddp") -> tuple[Any, torch.optim.SGD, dict[str, Any]]:
    """A model, its optimiser, and arguments of ``attach``."""
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    given: dict[str, Any] = {}
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "shards":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        model, given = fully_shard(model, mesh=mesh), {"shards": mesh, "scatter": {"level": 8}}
    else:
        shape = (dist.get_world_size(), 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model, given = fully_shard(model, mesh=mesh["shard"]), {"replicas": mesh["replicate"]}
    if way != "shards":
        given |= {"policy": "accordion", **LEVELS}
    return model, torch.optim.SGD(model.parameters(), lr=0.1), given


def train(model: Any, optimizer: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()


def heard(action: Callable[[], Any]) -> dict[str, Any]:
    """Errors, warnings, and what is printed at the end, and after how long."""
    # clocks that are made for people go a hundred times faster here
    call_guard.SOON = call_guard.PATIENCE = 0.3  # type: ignore[misc]
    hooks.MANY_STEPS = 5  # type: ignore[misc]
    start, printed = time.monotonic(), io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*the earlier spelling goes with", FutureWarning)
        try:
            action()
            said = []
        except Exception as error:  # torch's, of the script's own collective, has several lines
            said = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    said += [f"{w.category.__name__}: {w.message}" for w in caught if "torch" not in w.filename]
    said += printed.getvalue().splitlines()
    return {"said": said, "seconds": time.monotonic() - start}


# -- in different places ---------------------------------------------------------------------------

LONGER, ALIKE = (6, 4), (4, 4)  # steps of each process before the call
PLACES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("all_reduce", LONGER, {}),
    ("all_reduce", (4, 6, 6), {}),
    ("all_gather_object", LONGER, {"every": 4}),  # a unit begins in the step that is missing
    ("close", LONGER, {}),
    ("close", LONGER, {"way": "replicas", "compare_weights": False}),
    ("close", LONGER, {"way": "shards"}),
    ("exit", LONGER, {}),
    ("exit", LONGER, {"way": "replicas"}),
    ("exit", LONGER, {"way": "shards"}),
    ("destroyed", LONGER, {}),
    ("epoch_end", ALIKE, {"every": "epoch"}),
    ("epoch_end", ALIKE, {"every": "epoch", "signal": "global"}),  # which sends something there
    ("load_state_dict", ALIKE, {}),
]
CALLS = {
    "all_reduce": "all_reduce() of the script",
    "all_gather_object": "all_gather_object() of the script",
    "close": "close()",
    "exit": "exit()",
    "destroyed": "exit()",
    "load_state_dict": "load_state_dict()",
}


def apart(rank: int, kind: str, lengths: tuple[int, ...], way: str = "ddp", **options: Any) -> None:
    model, optimizer, given = wrapped(way)
    given |= {"optimizer": optimizer, "every": 100, "timeout": 60.0, **options}
    hook = regimes.attach(model, **given)
    train(model, optimizer, lengths[rank])
    if kind == "close":
        hook.close()
    elif kind in ("exit", "destroyed"):
        if kind == "destroyed":
            dist.destroy_process_group()
        atexit._run_exitfuncs()
    elif kind == "all_gather_object":
        dist.all_gather_object([None] * len(lengths), rank)
    elif kind == "all_reduce":
        dist.all_reduce(torch.ones(()))
    else:
        if kind == "epoch_end" and rank == 0:
            hook.epoch_end()
        if kind == "load_state_dict" and rank == 0:
            hook.load_state_dict(hook.state_dict())
        train(model, optimizer)


OURS = ("ConfigError: ", "TrainingError: ")


def in_a_place(
    rank: int, kind: str, lengths: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    return heard(lambda: apart(rank, kind, lengths, **options))


@pytest.mark.parametrize(("kind", "lengths", "options"), PLACES)
def test_processes_in_different_places_hear_where(
    kind: str, lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    """The longer one names the other; of what all processes call the shorter one does as well."""
    found = group.run(in_a_place, len(lengths), kind, lengths, options)
    errors = [[x for x in one["said"] if x.startswith(OURS)] for one in found]
    short = 0 if lengths == ALIKE else lengths.index(4)
    call = CALLS.get(kind, "the end of" if "signal" in options else "the first step of")
    sentence = f"ConfigError: process {short} is in {call}"
    both = kind == "close" or lengths == ALIKE
    for rank, (said, one) in enumerate(zip(errors, found, strict=True)):
        assert one["seconds"] < 20
        if kind in ("exit", "destroyed") and rank == short:
            assert not said
            continue
        if kind == "exit" and options.get("way") == "shards" and "lost contact" in said[0]:
            continue  # torch may see that a process has gone before its post is read
        if both or rank == 1 - short or said:
            assert len(said) == 1, (rank, said)
            assert said[0].startswith(sentence), said
            assert "after 4 steps, but process " in said[0]
            assert "is in step 5" in said[0]


def even(rank: int) -> list[Any]:
    """Nothing where lengths are the same; the last one ends the group."""
    return [in_a_place(rank, kind, ALIKE, {"every": 2}) for kind in ("all_reduce", "close", "exit")]


def test_even_loaders_end_well() -> None:
    for results in group.run(even, 2):
        assert not [x for one in results for x in one["said"] if "Error" in x]


def joined(rank: int) -> None:
    """Uneven inputs in model.join()."""
    model, optimizer, given = wrapped()
    regimes.attach(model, **given)
    with model.join():
        train(model, optimizer, STEPS + rank)


def attached_alone(rank: int) -> None:
    if rank == 0:
        attach(wrapped()[0], timeout=1.5)
    else:
        wrapped()
    time.sleep(2)


ALONE = {
    "joined": ("ConfigError: the hook works inside backward() only: uneven inputs",) * 2,
    "attached_alone": ("TrainingError: process 0 has waited 2 s in attach() for process 1", ""),
}


def by_name(rank: int, name: str) -> dict[str, Any]:
    return heard(lambda: {"joined": joined, "attached_alone": attached_alone}[name](rank))


@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_is_alone_hears_why(name: str) -> None:
    for result, start in zip(group.run(by_name, 2, name), ALONE[name], strict=True):
        errors = [said for said in result["said"] if "Warning: " not in said]
        assert len(errors) == bool(start), result
        assert all(said.startswith(start) for said in errors), result
        assert result["seconds"] < 20


# -- on all processes ------------------------------------------------------------------------------


def job(steps: int = STEPS, ends: bool = True, hooked: bool = True, **options: Any) -> regimes.Hook:
    """Some steps in units of two, or of what is given; and its end."""
    model, optimizer, _ = wrapped()
    given = {"every": 2, "optimizer": optimizer} if hooked else {}
    hook = attach(model, **{**given, **options})
    train(model, optimizer, steps)
    if ends:
        hook.close()
    return hook


def in_a_file(folder: Path) -> None:
    (folder / "file").touch()
    job(record=folder / "file")


def in_another_job(folder: Path) -> None:
    """A record that another configuration has begun."""
    state = job(policy={"name": "static", "level": "low"}, record=folder / "other").state_dict()
    model, optimizer, _ = wrapped()
    given = {"policy": {"name": "static", "level": "high"}, "record": folder / "other"}
    hook = attach(model, optimizer, every=2, **given)
    hook.load_state_dict(state)
    train(model, optimizer)


def full_disk(folder: Path) -> None:
    """The record cannot be written any more; training goes on, and nothing is lost."""
    model, optimizer, _ = wrapped()
    hook = attach(model, optimizer, policy="static", every=2, record=folder / "full")
    blocked, first = folder / "full/epochs.jsonl", dist.get_rank() == 0
    for epoch in range(4):
        if first and epoch == 1:
            blocked.rename(folder / "aside")
            blocked.mkdir()
        if first and epoch == 3:
            blocked.rmdir()
            (folder / "aside").rename(blocked)
        train(model, optimizer)
    hook.close()
    for name in ("epochs.jsonl", "seconds.jsonl") if first else ():
        assert [row["epoch"] for row in read_lines(folder / "full" / name)] == list(range(8))


CHOSE = "regimes: policy: accordion chose 'low' for everything"
# what each says to process 0, and whether to process 1 as well
TOGETHER: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], bool]] = {
    "no epoch_end": (
        lambda _: job(7, hooked=False),
        (
            "UserWarning: 5 steps, and epoch_end() was not called: all levels are as they "
            "began (dense, low)",
            "regimes: 7 steps, and epoch_end() was not called",
        ),
        False,
    ),
    "a long interval": (
        lambda _: job(),
        ("regimes: policy: accordion compares every 10 units, and the run has 2", CHOSE),
        False,
    ),
    "a threshold that every epoch passes": (
        lambda _: job(every=1, policy={"name": "accordion", "interval": 1, "eta": 1e-9}),
        (CHOSE,),
        False,
    ),
    "a sampler without set_epoch": (
        lambda _: job(7, ends=False, every=DistributedSampler(range(8))),  # type: ignore[arg-type]
        ("UserWarning: 5 steps, and set_epoch() of the sampler has named no other",),
        False,
    ),
    "epoch_end beside every": (
        lambda _: job(ends=False).epoch_end(lr=0.1),
        ("ConfigError: epoch_end: this hook ends its units by itself",),
        True,
    ),
    "in a run": (
        lambda folder: [job(policy="static", record=folder / "again") for _ in range(2)],
        ("RecordError: FOLDER/again already holds a run: load the state of its hook",),
        True,
    ),
    "in a file": (in_a_file, ("RecordError: cannot write to FOLDER/file: ",), True),
    "in another job": (
        in_another_job,
        ("RecordError: FOLDER/other holds a run that differs in policy: continue it",),
        True,
    ),
    "full disk": (full_disk, ("UserWarning: cannot write FOLDER/full/epochs.jsonl: ",), False),
}


def all_of(rank: int, folder: Path) -> list[dict[str, Any]]:
    return [heard(lambda way=way: way(folder)) for way, _, _ in TOGETHER.values()]


def test_a_mistake_that_all_processes_share_is_reported(tmp_path: Path) -> None:
    for rank, found in enumerate(group.run(all_of, 2, tmp_path)):
        for (way, (_, starts, both)), result in zip(TOGETHER.items(), found, strict=True):
            said = [
                text.replace(str(tmp_path), "FOLDER")
                for text in result["said"]
                if "has waited 0 s in attach()" not in text  # a slow machine, and a short patience
            ]
            expected = starts if both or rank == 0 else ()
            assert len(said) == len(expected), (way, said)
            for text, start in zip(said, expected, strict=True):
                assert text.startswith(start), (way, text)
                assert "\n" not in text
            assert result["seconds"] < 20
