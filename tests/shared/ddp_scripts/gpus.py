"""Processes with a pretended GPU each, and gloo in the place of NCCL."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pretended
import pytest
import torch
import torch.distributed as dist
from ddp_scripts import cases
from ddp_scripts.cases import Case
from ddp_scripts.group import launch
from gpu_steps import Steps, waiting
from runs import wait
from torch import Tensor
from torch.futures import Future

import regimes
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.collectives import connect, devices, group, lost_processes, process_group, processes
from regimes.collectives.layers import Layer
from regimes.compression import make_compressor
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import QuantisedScatter
from regimes.hook.ddp import source
from regimes.hook.ddp.loss_scale import LossScale
from regimes.hook.ddp.steps import HookSteps
from regimes.hook.fsdp import own_hooks
from regimes.hook.fsdp.collectives import ModuleSteps
from regimes.hook.fsdp.groups import FlatLayout, ParameterGroup
from regimes.hook.fsdp.reductions import QuantisedReduction
from regimes.hook.fsdp.replicas import ShardedGradients
from regimes.training import loop

ERRORS = {"nccl": dist.DistBackendError("NCCL timeout"), "memory": torch.OutOfMemoryError("full")}


def trained(
    rank: int, config: RunConfig, count: int, out: Path, fails: str | None = None
) -> dict[str, Any]:
    """A run of the trainer: what was called in which order, what travelled from where, its error.

    Args:
        fails: a key of ERRORS, or "never": how the third all-reduce ends. One of NCCL fails when
            its end is asked for, not when the stream waits for it.
    """
    launch(rank, count, out.parent / "meet")
    with pretended.gpu(count) as diary, pytest.MonkeyPatch.context() as patch:
        calls = diary.calls
        _gloo_for_nccl(patch, calls)
        places = {
            name: _spied(patch, name) for name in ("all_reduce", process_group.GATHER, "broadcast")
        }
        if fails is not None:
            _failing(patch, fails, calls)
        heard = ""
        try:
            regimes.run(config, out)
        except RuntimeError as error:
            heard = f"{type(error).__name__}: {error}"
        except regimes.base.errors.TrainingError as error:
            heard = str(error)
        return {"calls": [*calls], "places": places, "heard": heard}


def counted(rank: int, config: RunConfig, out: Path, put: bool) -> dict[str, int]:
    """Waits, copies and collectives of the last step of a run on two GPUs.

    Args:
        put: put a wait into the thread that reduces buckets.
    """
    launch(rank, 2, out.parent / "meet")
    with pretended.gpu(2) as diary, pytest.MonkeyPatch.context() as patch:
        _gloo_for_nccl(patch, diary.calls)
        if put:
            leave = Exchange._exchange_complete
            patch.setattr(Exchange, "_exchange_complete", lambda *a: (waiting(), leave(*a))[1])
        made, original = [0], processes.ProcessWorld._wait_for

        def wait(world: Any, collective: Any, *args: Any, **options: Any) -> None:
            made[0] += any(pretended.on_gpu(x) for x in args if isinstance(x, Tensor))
            original(world, collective, *args, **options)

        patch.setattr(processes.ProcessWorld, "_wait_for", wait)
        steps = Steps(diary)
        seen, step = [], steps.step
        steps.step = lambda *_: (step(), seen.append(made[0]))
        regimes.run(config, out, reporters=[steps])
        counts = steps.counts if rank == 0 else None
    if counts is None:  # reporters are the first process's
        return {"collectives": 1, "waits": int(put), "copies": 0}
    return {"collectives": seen[-1] - seen[-2], "waits": counts.waits, "copies": counts.copies}


def on_both(rank: int, config: RunConfig, folder: Path) -> dict[str, Any]:
    """One run on CPUs and one on GPUs, in folders of these names."""
    dist.destroy_process_group()
    launch(rank, 2, folder / "meet-cpu")
    regimes.run(replace(config, device="cpu"), folder / "cpu")
    launch(rank, 2, folder / "meet-gpu")
    with pretended.gpu(2) as diary, pytest.MonkeyPatch.context() as patch:
        _gloo_for_nccl(patch, diary.calls)
        regimes.run(config, folder / "gpu")
        return {"calls": [*diary.calls]}


def chosen(rank: int, gpus: tuple[str | None, ...], meet: str) -> dict[str, Any]:
    """The backend on which processes agree that see these GPUs, by their identity, as the first
    one each (as Slurm shows them); what is warned of."""
    launch(rank, len(gpus), meet, LOCAL_WORLD_SIZE="1")
    with pretended.gpu() as diary, pytest.MonkeyPatch.context() as patch:
        _gloo_for_nccl(patch, diary.calls)
        seen = Mock(uuid=gpus[rank])
        patch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
        patch.setattr(torch.cuda, "is_available", lambda: gpus[rank] is not None)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                world = connect.connect_world(len(gpus), devices.pick_device("auto"), timeout=20)
            except ConfigError as error:
                return {"refused": str(error)}
        backend = next(call.split()[1] for call in diary.calls if call.startswith("init"))
        world.close()
    return {
        "backend": backend,
        "heard": [str(w.message) for w in heard],
        "device": str(world.device),
    }


def hook(rank: int, case: Case) -> dict[str, Any]:
    """The same training through the hook on the CPU and on a GPU, as far as DDP can pretend: its
    own C++ believes in a CPU, so futures are such."""
    plain = cases.trained(rank, case)
    with pretended.gpu(2) as diary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "Future", lambda devices: Future())
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:gloo")
        found = cases.trained(rank, replace(case, device=f"cuda:{rank}"))
        found["weights"] = {k: v.cpu() for k, v in found["weights"].items()}
        places = {str(r.device) for r in found["residuals"].values() if r is not None}
        same = all(torch.equal(v, plain["weights"][k]) for k, v in found["weights"].items())
        return {
            "same": same,
            "rows": [*map(_without_flags, found["rows"])] == [*map(_without_flags, plain["rows"])],
            "places": [*places],
            "streams": [*diary.streams],
        }


def _without_flags(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the bytes of means. On a GPU they have one number more for each bucket, whether
    its gradients were finite; on a CPU the updates show it."""
    sent = row["collectives"]
    others = {kind: count for kind, count in sent["bytes"].items() if kind != "mean"}
    return row | {"bytes": None, "collectives": sent | {"bytes": others}}


def attached(rank: int, kind: str, put: bool) -> list[int]:
    """Launches, waits, copies and memory of the last step of a user's own loop, on GPUs that
    talk over NCCL.

    Args:
        kind: "hook", "local steps", "shards", or "islands": of two shards, on four processes.
        put: put a wait into the reduction of a bucket, or of a module.
    """
    with nccl(rank) as (diary, patch):
        patch.setattr(dist, process_group.SCATTER, _scatter)  # gloo's own copies to the host
        if put:
            for owner, name in ((Reducer, "reduce"), (QuantisedReduction, "reduce_module")):
                reduce = partial(_after_a_wait, getattr(owner, name))
                patch.setattr(owner, name, lambda *a, reduce=reduce: reduce(*a))
        step = {
            "hook": _hook_step,
            "local steps": _local_step,
            "shards": _shards_step,
            "islands": _islands_step,
        }[kind]
        parts = diary.ops, diary.waits, diary.copies, diary.memory
        counts = [[part.total() for part in parts] for _ in step(rank)]
        return [b - a for a, b in zip(*counts[-2:], strict=True)]


@contextlib.contextmanager
def nccl(rank: int) -> Iterator[tuple[pretended.Diary, pytest.MonkeyPatch]]:
    """GPUs that talk over NCCL, as far as a user's own loop can pretend."""
    with pretended.gpu(4) as diary, pytest.MonkeyPatch.context() as patch:
        torch.cuda.set_device(f"cuda:{rank}")
        patch.setattr(source, "Future", lambda devices: Future())
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        new_group = dist.new_group

        def new(ranks: object, timeout: object, backend: str, **options: Any) -> Any:
            return new_group(ranks, timeout, _gloo(backend), **options)

        patch.setattr(dist, "new_group", new)
        yield diary, patch


def _after_a_wait(reduce: Any, *args: Any) -> Any:
    waiting()
    return reduce(*args)


def _scatter(mine: Tensor, whole: Tensor, group: Any, async_op: bool) -> Any:
    work = dist.all_reduce(whole, group=group, async_op=async_op)
    work.wait()
    mine.copy_(whole.view(-1, len(mine))[dist.get_rank(group)])
    return work


def _hook_step(rank: int) -> Iterator[None]:
    case = Case(device=f"cuda:{rank}", ddp={"bucket_cap_mb": 0.004})
    model, _, optimizer = cases.wrap(case)
    for step in range(4):
        x, y = (t.to(case.device) for t in cases.batch(step, 0, rank))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, True), y)
        yield
        loss.backward()
        optimizer.step()
        yield


def _local_step(rank: int) -> Iterator[None]:
    network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)).to(f"cuda:{rank}")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    local = regimes.local_steps(network, optimizer, policy=2, every=100)
    x = torch.randn(5, 6).to(f"cuda:{rank}")
    for _ in range(4):  # the last one is exchanged
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()
        yield
        local.step()
        yield


def _islands_step(rank: int) -> Iterator[None]:
    """Gradients as FSDP2 would leave them: its own C++ cannot pretend."""
    device = torch.device("cuda", rank)
    across, inside = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    groups = [
        [dist.new_group(ranks, None, "gloo") for ranks in pairs] for pairs in (across, inside)
    ]
    mine = groups[0][rank % 2], groups[1][rank // 2]
    world = group.on_mesh(*mine, device, 20.0)
    ours = ShardedGradients.__new__(ShardedGradients)
    ours.names, ours._world, ours.device = ["a", "b"], world, device
    ours.bucket_bytes, ours.missing, ours.idle = 100, {}, set()
    ours.local = [torch.randn(4, 6).to(device) for _ in ours.names]
    ours.parameters = dict(zip(ours.names, ours.local, strict=True))
    layers = world.local_layers([Layer(name, (8, 6)) for name in ours.names])
    reducer = Reducer(make_compressor({"name": "powersgd"}), layers, world, seed=0)
    steps = HookSteps(ours, reducer, (), loss_scale=LossScale())
    steps.levels = [2, 2]
    for step in range(4):
        gradients = {i: torch.randn(1, 4, 6).to(device) for i in range(2)}
        yield
        ours.missing = {1: gradients[1]} if step == 3 else {}
        steps.begin_step()
        steps.add_gradients(gradients)
        steps.finish_step()
        steps.settle_step()
        yield
    assert ours.idle == {1}


def _shards_step(rank: int) -> Iterator[None]:
    """4 bits at random; modules' gradients as FSDP2 would pass them: its own C++ cannot pretend."""
    device, everyone = torch.device("cuda", rank), dist.group.WORLD
    layouts = [FlatLayout(((8, 6), (6,)), (0, 0), 2)] * 2
    layers = [x.make_layer(name) for name, x in zip("ab", layouts, strict=True)]
    world = group.on_group(everyone, device, 20.0, tensor=(everyone, [1.0] * len(layers)))
    reducer = Reducer(QuantisedScatter(), layers, world, seed=0)
    module = Mock(
        spec=ParameterGroup,
        gradient_scale=lambda dtype, shards: 1.0,
        arriving=[],
        own=Mock(mesh_info=None),
    )
    reductions = [QuantisedReduction(i, module, x, reducer) for i, x in enumerate(layouts)]
    model = Mock(layouts=layouts, device=device, make_reductions=lambda reducer: reductions)
    model.members = [[torch.nn.Parameter(torch.zeros(4, 6, device=device))] for _ in layers]
    steps, after = ModuleSteps(model, reducer, (), loss_scale=LossScale()), list[Any]()
    steps.levels = [4] * len(layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_hooks, "after_backward", after.append)
        for _ in range(4):
            flats = [torch.randn(2 * x.owned_size).to(device) for x in layouts]
            outputs = [flat.new_empty(len(flat) // 2) for flat in flats]
            yield
            for place, (output, flat) in enumerate(zip(outputs, flats, strict=True)):
                steps.reduce_scatter(place, output, flat, dist.ReduceOp.AVG, Mock())
            after.pop()()
            after.pop()()
            yield


def _gloo_for_nccl(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    begin, end = dist.init_process_group, dist.destroy_process_group
    asked: list[str] = []

    def init(backend: str, device_id: object = None, **options: Any) -> None:
        waits = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        calls.append(f"init {backend} {device_id} {waits}")
        asked.append(backend)
        begin(_gloo(backend), **options)

    def leave(how: str) -> None:
        calls.append(how)
        asked.clear()
        end()

    if dist.is_initialized():  # the group that these processes were started with
        end()
    patch.setattr(dist, "init_process_group", init)
    patch.setattr(dist, "get_backend_config", lambda group=None: asked[-1])
    patch.setattr(dist, "destroy_process_group", lambda: leave("destroy"))
    patch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: leave("abort"))


def _gloo(backend: str) -> str:
    return "cuda:gloo" if backend == "nccl" else backend.replace("nccl", "gloo")


def _spied(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Where the tensors of a collective are, each place once."""
    original, places = getattr(dist, name), []

    def collective(*args: Any, **options: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor) and str(tensor.device) not in places:
                places.append(str(tensor.device))
        return original(*args, **options)

    collective.__name__ = name
    patch.setattr(dist, name, collective)
    return places


class Stuck:
    """A collective that does not end before its communicator is aborted, and the event after it."""

    def wait(self, patience: timedelta | None = None) -> None:
        """The stream waits, not the host."""

    def is_completed(self) -> bool:
        return False


class Failed(Stuck):
    def wait(self, patience: timedelta | None = None) -> None:
        if patience is not None:
            raise ERRORS["nccl"]

    def is_completed(self) -> bool:
        return True


def _failing(patch: pytest.MonkeyPatch, how: str, calls: list[str]) -> None:
    """From the third all-reduce on: a communicator that has failed stays so."""
    marked, count = processes.ProcessWorld._record_event, [0]

    def failing(name: str) -> Any:
        original = getattr(dist, name)

        def collective(*args: Any, **options: Any) -> Any:
            count[0] += name == "all_reduce"
            if count[0] < 3:
                return original(*args, **options)
            if how == "memory":
                raise ERRORS["memory"]
            return Failed() if how == "nccl" else Stuck()

        collective.__name__ = name
        return collective

    def mark(world: processes.ProcessWorld) -> Any:
        event = marked(world)
        if how == "never" and count[0] >= 3:
            event.query = lambda: False
        return event

    for name in ("all_reduce", process_group.GATHER, "broadcast"):
        patch.setattr(dist, name, failing(name))
    patch.setattr(processes.ProcessWorld, "_record_event", mark)
    patch.setattr(lost_processes, "abort_nccl", lambda groups: calls.append("communicator aborted"))
    if how != "memory":  # then the host, too, stands still when it reads the weights
        read = loop.fingerprint
        until = partial(wait, lambda: "communicator aborted" in calls, 20)
        patch.setattr(loop, "fingerprint", lambda weights: (until(), read(weights))[1])


def mixed(rank: int, call: str) -> str:
    """What a process hears in a group whose first process alone has a GPU."""
    with pretended.gpu():
        device = pretended.CPU if rank else pretended.GPU
        try:
            group.on_group(dist.group.WORLD, device, 20.0, call)
        except ConfigError as error:
            return str(error)
    return ""


def hooked(rank: int) -> dict[str, Any]:
    """The communicator of the hook next to a user's own NCCL group."""
    made: list[str] = []
    new_group, patch = dist.new_group, pytest.MonkeyPatch()

    def new(ranks: object, timeout: object, backend: str, **options: Any) -> Any:
        made.extend([backend, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")])
        return new_group(ranks, timeout, _gloo(backend), **options)

    with patch.context() as p:
        p.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        p.setattr(dist, "new_group", new)
        ours = group.on_group(dist.group.WORLD, pretended.GPU, 20.0)
    with pretended.gpu():
        gathered = ours.gather_object(rank)
    return {
        "gathered": gathered,
        "made": made,
        "after": "TORCH_NCCL_ASYNC_ERROR_HANDLING" in os.environ,
    }
