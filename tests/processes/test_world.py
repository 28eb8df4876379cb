"""Worlds: simulated == real processes; the meter; refusals. Real gloo groups over loopback."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group

from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives.agreement import digest
from regimes.collectives.call_guard import gather_bytes
from regimes.collectives.comm import Comm, signals
from regimes.collectives.connect import connect_world, leave_group
from regimes.collectives.group import on_group
from regimes.collectives.process_group import Group, default_group
from regimes.collectives.world import World

SHAPES = [(3, 4), (5,), (2, 2, 2)]


def tensors(workers: range) -> list[torch.Tensor]:
    def one(worker: int, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * worker + i)
        return torch.randn(SHAPES[i], generator=generator, dtype=torch.float64)

    return [torch.stack([one(w, i) for w in workers]) for i in range(len(SHAPES))]


def exchange(parts: list[torch.Tensor], comm: Comm) -> list[torch.Tensor]:
    """A mean of all, then a gathering of the one and a mean of the others."""
    means = comm.mean(parts)
    (everyone,) = comm.gather([(parts[1] * 3).to(torch.int16)], [{1: parts[1][0].numel()}])
    others = [0, 2]
    shares = [{i: parts[i][0].numel()} for i in others]
    again = comm.mean([parts[i] * means[i] for i in others], shares)
    found = {i: mean - means[i] for i, mean in zip(others, again, strict=True)}
    return [found[0], means[1] + everyone.double().sum(0), found[2]]


def work(world: World) -> dict[str, Any]:
    world.meter.dtype = torch.float64
    stacked = tensors(world.hosted)
    results = exchange(stacked, Comm(world, range(len(stacked))))
    rows = torch.tensor([[float(w)] for w in world.hosted], dtype=torch.float64)
    first = rows[:1].clone()
    several = [first, first.long() + 5, first.expand(2, 3).clone().T, first.long().bool()]
    world.broadcast(several)  # one collective for each of three types
    meter = world.meter.take_counts()
    return {
        "results": [r.tolist() for r in results],
        "gathered": world.all_gather([rows])[0].tolist(),
        "broadcast": [tensor.tolist() for tensor in several],
        "floats": [meter.layers[i].floats for i in range(3)],
        "bytes": [meter.layers[i].bytes for i in range(3)],
        "calls": meter.calls,
    }


def child(rank: int, count: int, workers: int) -> tuple[dict[str, Any], str]:
    """What it reports, and the sentence that refuses the last one's other data."""
    world = connect_world(workers, torch.device("cpu"), timeout=60)
    report, refusal = work(world), ""
    try:
        world.check_agreement(configuration="a", data="x" if rank < count - 1 else "y")
    except ConfigError as error:
        refusal = str(error)
    world.close()
    return report, refusal


@pytest.mark.parametrize(("workers", "count"), [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_processes_equal_simulation(workers: int, count: int) -> None:
    expected = work(World(workers))
    assert expected["broadcast"] == [[[0.0]], [[5]], [[0.0, 0.0]] * 3, [[False]]]
    assert expected["calls"]["broadcast"] == 3
    answers = group.run(child, count, count, workers, timeout=None)
    for report, refusal in answers:
        assert f"process {count - 1} has data = 'y', process 0 has data = 'x'" in refusal
        for key in ("gathered", "broadcast", "floats", "bytes", "calls"):
            assert report[key] == expected[key], key
        for mine, theirs in zip(report["results"], expected["results"], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=0)


def twice(rank: int, port: int, restarted: bool) -> list[float]:
    """Two worlds one after the other, process 0 late for the second, as torchrun's workers."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(int(restarted)),
    )
    found = []
    for late in (False, rank == 0):
        time.sleep(2 * late)
        world = connect_world(2, torch.device("cpu"), timeout=60)
        found.append(world.mean_over_workers([torch.tensor([[float(rank)]])])[0].item())
        world.close()
    return found


def test_a_second_run_in_the_same_processes_meets_apart_from_the_first() -> None:
    """The agent's store outlives both runs and a restart, and keeps the addresses of all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarted in (False, True):
        assert group.run(twice, 2, store.port, restarted) == [[0.5, 0.5], [0.5, 0.5]]


def on_a_users_group(rank: int) -> tuple[float, float, float, str]:
    """A mean; when this process came to the barrier and left it; what is said after the end."""
    world = on_group(default_group(), torch.device("cpu"), timeout=60)
    mean = world.mean_over_workers([torch.tensor([[float(rank)]])])[0].item()
    time.sleep(0.3 * rank)
    came = time.monotonic()
    world.barrier()
    left = time.monotonic()
    dist.destroy_process_group()
    with pytest.raises(TrainingError) as refused:
        world.barrier()
    return mean, came, left, str(refused.value)


def test_a_users_group_meets_at_a_barrier_and_its_end_is_told() -> None:
    answers = group.run(on_a_users_group, 2)
    assert [mean for mean, *_ in answers] == [0.5, 0.5]
    assert min(left for _, _, left, _ in answers) >= max(came for _, came, _, _ in answers)
    for *_, said in answers:
        assert said == "the process group has ended: train before dist.destroy_process_group()"


def on_groups_of_one(rank: int) -> list[list[int]]:
    """What is gathered in a group of this process alone."""
    mine = [dist.new_group([other]) for other in range(2)][rank]
    found = [torch.empty(2, dtype=torch.uint8)]
    gather_bytes(found, bytes([rank, 7]), Group((rank,), made=weakref.ref(mine))).wait()
    return [row.tolist() for row in found]


def test_what_is_gathered_is_that_of_the_group_itself() -> None:
    assert group.run(on_groups_of_one, 2) == [[[0, 7]], [[1, 7]]]


def test_only_an_end_that_would_wait_for_others_is_cut_short(tmp_path: Path) -> None:
    """gloo's does not wait: its group ends in order, once."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    leave_group(at_once=True)
    assert dist.is_initialized()
    leave_group()
    assert not dist.is_initialized()
    leave_group()


def test_means_against_plain_torch() -> None:
    world = World(4)
    stacked = tensors(world.hosted)
    for mean, tensor in zip(world.mean_over_workers(stacked), stacked, strict=True):
        torch.testing.assert_close(mean, tensor.mean(0))


@pytest.mark.parametrize(("workers", "processes"), [(4, 3), (2, 4), (0, 1)])
def test_workers_that_do_not_divide_are_refused(workers: int, processes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of the number of processes"):
        World(workers, processes=processes)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_names_the_first_that_holds_something_else(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [{"data": data, "code": "c"} for data in ("a", "a", "b")]
    world = World(3, processes=3, rank=rank)
    monkeypatch.setattr(
        world,
        "gather_object",
        lambda own: held if isinstance(own, dict) else [digest(facts) for facts in held],
    )
    with pytest.raises(ConfigError, match="process 2 has data = 'b', process 0 has data = 'a'"):
        world.check_agreement(**held[rank])
    held[2] = held[0]
    world.check_agreement(**held[rank])


def test_the_meter_counts_signals_as_bytes_only() -> None:
    world = World(2)
    comm = signals(world, [0])
    for _ in range(2):
        comm.mean([torch.ones(2, 3)])
    meter = world.meter.take_counts()
    assert meter.layers[0].floats == 0
    assert meter.layers[0].bytes == 2 * 3 * 4
    assert world.meter.take_counts().layers == {}
